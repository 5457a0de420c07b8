"""The group of commands: each is imported when it is used, and a `UserError` is one sentence and exit code 2."""

import importlib
from collections import UserDict
from collections.abc import Sequence
from typing import Any

import click

from distbench.cli.defaults import defaults_for
from distbench.cli.output import say, say_once
from distbench.processes.signals import stopped_as_interrupt
from distbench.spec.errors import INTERRUPTED, USER_ERROR, UserError
from distbench.spec.printable_text import cut
from distbench.version import __version__

# Options under names that they had before: they work, and one line says what to write instead. No help shows them.
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
    new_words: list[str] = []
    for word in words[:end]:
        old, equals, value = word.partition("=")
        new = renamed.get(old, (old,))
        if old in renamed:
            say(f"distbench: {old} is called {' '.join(new)} now", err=True)
        new_words += [*new[:-1], f"{new[-1]}{equals}{value}"]
    return [*new_words, *words[end:]]


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
        # One width for all sections, so that all sentences begin in the same column.
        width = max((len(name) for commands in sections.values() for name in commands), default=0)
        for heading, commands in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), sentence) for name, sentence in commands.items()])


def first_sentence(command: click.Command) -> str:
    """The first sentence of a command's help."""
    words = " ".join((command.help or "").partition("\n\n")[0].split())
    return words.partition(". ")[0].rstrip(".") + "."


# Each is in the file of its name in cli/.
_MEASURING = ("run", "ab", "calibrate")
_READING = ("report", "history", "export", "compare", "gate", "baseline")
_PLANNING = ("list", "check", "plan", "signature", "simulate", "sweep")
IN_FILES = (*_MEASURING, *_READING, *_PLANNING, "doctor", "clean")


class CommandFiles(UserDict[str, Any]):
    """The commands by name, each imported when it is first used: `--help` must not pay for any of them."""

    def __getitem__(self, name: str) -> click.Command:
        if self.data[name] is None:
            module = importlib.import_module(f"distbench.cli.{name}")
            self.data[name] = getattr(module, "list_command" if name == "list" else name)
        command: click.Command = self.data[name]
        return command


class Commands(WholeSentences):
    """The command line's own group: turns the one error a user can fix into its message and exit code 2."""

    def sections(self) -> dict[str, dict[str, str]]:
        """SECTIONS without the commands that this group lacks, and OTHER with the commands that SECTIONS lacks."""
        sections = {
            heading: {name: sentence for name, sentence in commands.items() if name in self.commands}
            for heading, commands in SECTIONS.items()
        }
        in_sections = {name for commands in SECTIONS.values() for name in commands}
        sections[OTHER] = {
            name: first_sentence(self.commands[name]) for name in self.commands if name not in in_sections
        }
        return {heading: commands for heading, commands in sections.items() if commands}

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command with the project's own defaults."""
        try:
            with stopped_as_interrupt():
                ctx.default_map = dict(defaults_for(self).of_commands)
                return super().invoke(ctx)
        except UserError as error:
            say_once(f"distbench: {cut(str(error))}")
            ctx.exit(USER_ERROR)
        except KeyboardInterrupt:
            say("distbench: interrupted", err=True)
            ctx.exit(INTERRUPTED)
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
    commands=CommandFiles(dict.fromkeys(IN_FILES)),
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
