"""Arguments to calls, `UserError` to a message and an exit code; nothing else happens here.

Commands are imported when they are asked for: `--help` and `list` must not pay for what they do not use.
"""

import importlib
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import click

from distbench.commands.completion import scenario_names
from distbench.commands.defaults import defaults_for
from distbench.commands.help_sections import Sections
from distbench.commands.old_names import under_new_names
from distbench.commands.say import say, say_lines
from distbench.commands.say_once import say_once
from distbench.commands.width import width_option
from distbench.commands.without_effect import refuse_with, refuse_without
from distbench.spec.errors import UserError
from distbench.spec.printable import cut
from distbench.spec.signals import stopped_as_interrupt
from distbench.version import __version__

# Each is in the file of its name in commands/.
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
            found = self._known[name] = getattr(importlib.import_module(f"distbench.commands.{name}"), name)
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
        from distbench.commands.scenario_text import lines_of

        say("\n\n".join("\n".join(lines_of(entry, runs)) for entry in entries))
        return
    from distbench.commands.scenario_table import scenario_table

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
    from distbench.doctor import agreement, examine, lines_of, lines_of_agreement

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
