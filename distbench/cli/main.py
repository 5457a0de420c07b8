"""The group of commands: arguments to calls, `UserError` to one sentence and exit code 2; commands are imported when
used.

Commands are imported when they are asked for: `--help` and `list` must not pay for what they do not use.
"""

import contextlib
import errno
import hashlib
import importlib
import os
import socket
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import click

from distbench.cli.defaults import defaults_for
from distbench.cli.options import refuse_with, refuse_without, scenario_names, width_option
from distbench.cli.output import say, say_lines
from distbench.processes.signals import stopped_as_interrupt
from distbench.spec.errors import UserError
from distbench.spec.safe_text import cut
from distbench.version import __version__

# Options under names that they had before: they work, stand in no help, and say in one line what to write instead.

# Command to an option's old name, and the words that mean the same now; a value follows as it did.
OLD_NAMES: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("ab",): {"--budget": ("--max-time",)},
    ("baseline", "list"): {"--out": ("--runs",)},
    ("doctor",): {"--json": ("--format", "json")},
    ("list",): {"--json": ("--format", "json")},
    ("report",): {"--out": ("--runs",)},
    # An abbreviation of torchrun's --print-completion since torch 2.14.
    ("run",): {"--print": ("--dry-run",)},
}


def under_new_names(words: Sequence[str]) -> list[str]:
    """A command line's words, command first, with old names of options replaced and each one told of.

    What stands after `--` belongs to another command.
    """
    renamed = next((names for command, names in OLD_NAMES.items() if tuple(words[: len(command)]) == command), {})
    end = words.index("--") if "--" in words else len(words)
    found: list[str] = []
    for word in words[:end]:
        old, equals, value = word.partition("=")
        new = renamed.get(old, (old,))
        if old in renamed:
            say(f"distbench: {old} is called {' '.join(new)} now", err=True)
        found += [*new[:-1], f"{new[-1]}{equals}{value}"]
    return [*found, *words[end:]]


# `distbench --help`: commands by what one wants to do, each with its whole sentence.

# A command that stands in no section is listed under OTHER with the first sentence of its help.
SECTIONS = {
    "Measure": {
        "run": "Measure scenarios: collectives, redistributions, training steps.",
        "ab": "Launch two git revisions in turn, until it shows which is slower.",
        "calibrate": "Measure this machine: a profile to plan by, and a hardware file.",
    },
    "Read": {
        "report": "Show measured runs: tables, a page, plots, traced paths.",
        "history": "Show cases over launches, and where their level changed.",
        "export": "Write runs in another tool's format.",
    },
    "Compare": {
        "compare": "Show two runs side by side, and what that can tell.",
        "gate": "Say whether a candidate is slower than a baseline, for CI.",
        "baseline": "Save, list and show stored baselines.",
    },
    "Plan": {
        "list": "List the shipped scenarios; with a name, tell one in full.",
        "check": "Say whether plans can work on a mesh of any size, without ranks.",
        "plan": "Show how each planner would redistribute a tensor, and the best.",
        "simulate": "Predict a step's time and memory on hardware that is not here.",
        "sweep": "Say which plan to use on so many devices, predicted or measured.",
        "signature": "Write what scenarios communicate, exactly, for git.",
    },
    "Machine": {
        "doctor": "Say what this machine can run, and which defaults hold here.",
        "clean": "Delete old runs, after asking.",
    },
}
OTHER = "More"


class WholeSentences(click.Group):
    """A group whose help gives each command's first sentence, however long."""

    def sections(self) -> dict[str, dict[str, str]]:
        """Heading to command to its sentence."""
        return {"Commands": {name: first_sentence(command) for name, command in self.commands.items()}}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections; sentences that are too long for a line are wrapped."""
        sections = self.sections()
        # One width for all, so that sentences stand below each other.
        width = max((len(name) for commands in sections.values() for name in commands), default=0)
        for heading, commands in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), sentence) for name, sentence in commands.items()])


class Sections(WholeSentences):
    """The command line's own group."""

    def sections(self) -> dict[str, dict[str, str]]:
        """SECTIONS, without what is not there, and with what they lack."""
        known = {name for commands in SECTIONS.values() for name in commands}
        found = {
            heading: {name: sentence for name, sentence in commands.items() if name in self.commands}
            for heading, commands in SECTIONS.items()
        }
        more = {name: first_sentence(self.commands[name]) for name in self.commands if name not in known}
        return {heading: commands for heading, commands in (*found.items(), (OTHER, more)) if commands}


def first_sentence(command: click.Command) -> str:
    """The first sentence of a command's help."""
    words = " ".join((command.help or "").partition("\n\n")[0].split())
    return words.partition(". ")[0].rstrip(".") + "."


# What all ranks of a launch would say alike, said by one of each host: eight times the same sentence hides it.

# How long who said it stays, so that ranks that start or fail a little later find out.
STAYS_S = 1.0


def say_once(text: str) -> None:
    """Say it on standard error, unless another rank of this launch on this host has just said the same.

    Who says it holds a name, an abstract socket of Linux, which goes with the process; elsewhere every rank says it.
    """
    from distbench.launch.rendezvous import joined_ranks
    from distbench.spec import UserError

    try:
        joined = joined_ranks(os.environ)
    except UserError:
        joined = None
    if joined is None or joined.world_size == 1:
        return say(text, err=True)
    what = f"{joined.launch or joined.address} {text}"
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(f"\0distbench-{hashlib.sha256(what.encode()).hexdigest()[:32]}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            return say(text, err=True)
        say(text, err=True)
        # Whatever ends this process now, it has said what there is to say.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(STAYS_S)
    return None


# Each is in the file of its name in cli/.
_MEASURING = ("run", "ab", "calibrate")
_READING = ("report", "history", "export", "compare", "gate", "baseline")
_PLANNING = ("check", "plan", "signature", "simulate", "sweep")
IN_FILES = (*_MEASURING, *_READING, *_PLANNING, "clean")


class CommandFiles(MutableMapping[str, click.Command]):
    """The commands by name; those of IN_FILES are imported when they are asked for."""

    def __init__(self) -> None:
        self._known: dict[str, click.Command | None] = dict.fromkeys(IN_FILES)

    def __getitem__(self, name: str) -> click.Command:
        found = self._known[name]
        if found is None:
            found = self._known[name] = getattr(importlib.import_module(f"distbench.cli.{name}"), name)
        return found

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._known[name] = command

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Commands(Sections):
    """Turns the one error a user can fix into its message and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command with the project's own defaults."""
        try:
            with stopped_as_interrupt():
                ctx.default_map = dict(defaults_for(self).of_commands)
                return super().invoke(ctx)
        except UserError as error:
            say_once(f"distbench: {cut(str(error))}")
            ctx.exit(2)
        except KeyboardInterrupt:
            say("distbench: interrupted", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            # click would end with 1, which is the gate's word for a regression.
            ctx.exit(141)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command and its words, with options under their present names."""
        return super().resolve_command(ctx, under_new_names(args))


@click.group(
    cls=Commands,
    commands=CommandFiles(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="distbench")
def main() -> None:
    """Benchmark distributed PyTorch: what a parallelism plan costs on this hardware, and which part of it costs that.

    \b
    Example:
      distbench run llama_2d --quick
      distbench report

    Defaults of options stand in pyproject.toml under [tool.distbench].
    """


@main.command("list")
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO...]", shell_complete=scenario_names)
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", help="What to print. [table]")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("results"), help="Where runs were written.")
@width_option
def list_command(scenarios: tuple[str, ...], form: str, runs: Path) -> None:
    """List the shipped scenarios: mesh, tags and what each measures.

    A SCENARIO, as `run` takes it, is told in full: its axes and their values, its parameters, what it measures, and how
    long it took here the last time.

    \b
    Examples:
      distbench list
      distbench list cp_attention
    """
    from distbench.spec import find, list_entries

    if not scenarios:
        refuse_without("a SCENARIO", "runs")
    if form == "json":
        refuse_with("--format json", "runs")
    entries = [entry for target in scenarios for entry in find(target)] if scenarios else list_entries()
    if form == "json":
        fields = ("name", "mesh", "tags", "axes", "params", "summary")
        _print_json([{name: getattr(entry, name) for name in fields} | {"file": str(entry.file)} for entry in entries])
        return
    if scenarios:
        from distbench.cli.list import lines_of

        say("\n\n".join("\n".join(lines_of(entry, runs)) for entry in entries))
        return
    from distbench.cli.list import scenario_table

    say(scenario_table(entries))


def _print_json(value: Any) -> None:
    import json

    click.echo(json.dumps(value, indent=1))


@main.command()
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO...]", shell_complete=scenario_names)
@click.option("--deep", is_flag=True, help="Also try a traced step, simulated steps and each planner, in about 10 s.")
@click.option("--paths", is_flag=True, help="Have two methods watch each scenario's step, and compare what they see.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", help="What to print. [table]")
@width_option
def doctor(scenarios: tuple[str, ...], deep: bool, paths: bool, form: str) -> None:
    """Say what this machine can run: devices, backends, torch, and each torch internal that distbench leans on.

    It also shows the defaults that a pyproject.toml here gives in [tool.distbench].

    With --deep, also try what depends on torch's behaviour: a traced step, simulated steps, each planner. The exit
    code is 1 where one of them does not work with this torch.

    With --paths, check instead what run --trace-paths relies on, for the SCENARIOs or all shipped ones.

    \b
    Examples:
      distbench doctor
      distbench doctor --deep
      distbench doctor --paths llama_2d
    """
    from distbench.cli.doctor import agreement, examine, lines_of, lines_of_agreement

    if scenarios and not paths:
        raise UserError(f"doctor looks at scenarios with --paths only: distbench doctor --paths {' '.join(scenarios)}")
    if deep and paths:
        raise UserError("doctor takes --deep or --paths, not both; --paths checks run --trace-paths on more scenarios")
    found = agreement(scenarios) if paths else examine(deep)
    defaults = defaults_for(main)
    if form == "json":
        here = {"file": str(defaults.file), "values": defaults.given} if defaults.file else None
        _print_json(found if paths else {**found, "defaults": here})
    else:
        say_lines(lines_of_agreement(found) if paths else lines_of(found), " " * 8)
        if defaults.file and not paths:
            say_lines([f"\ndefaults of {defaults.file}:", *(f"  {line}" for line in defaults.lines())], " " * 8)
    broken = any(check.get("deep") and not check["ok"] for check in found.get("checks", ()))
    sys.exit(0 if found["usable"] and not broken else 1)
