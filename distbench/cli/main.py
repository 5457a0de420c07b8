"""The group of commands, which are imported at the first use, and the defaults of options in [tool.distbench].

A `UserError` is one sentence and exit code 2.
"""

import importlib
import inspect
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from distbench.cli.options import color_option, say, say_once
from distbench.processes.signals import stopped_as_interrupt
from distbench.spec.errors import INTERRUPTED, USER_ERROR, UserError, nearest
from distbench.spec.printable_text import cut
from distbench.version import __version__

# Old names of options, which are hidden in help texts and work for one release: command, or () for every command, to
# old name, to new words.
OLD_NAMES: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    (): {"--out": ("--results",), "--runs": ("--results",)},
    ("ab",): {"--budget": ("--max-time",)},
    ("tune",): {"--budget": ("--max-time",), "--resume": ("--reuse",)},
    # An abbreviation of torchrun's --print-completion since torch 2.14.
    ("run",): {"--print": ("--dry-run",)},
}
# Old names of commands, which work for one release.
OLD_COMMANDS = {"plan": "redistribute", "sweep": "tune"}
# Old options of gate to the new command.
OLD_MODES = {
    ("--signature", "--update"): ("signature", "update"),
    ("--signature",): ("signature", "check"),
    ("--self-test",): ("self-test",),
}
# `distbench signature SCENARIO` is signature write SCENARIO.
SIGNATURE_WORDS = ("write", "check", "update", "-h", "--help")
# Commands that abbreviate another command with options.
SHORT = {"preflight": ("run", "links", "--fail-on-outlier"), "trace": ("run", "--trace-paths", "--show-paths")}
SHORT_HELP = {
    "preflight": """Check nodes for slow ranks and links before a job.

    This command is short for `distbench run links --fail-on-outlier`. The options are the options of run,
    without a SCENARIO.

    Exit code: 0 nothing is slow, 1 a rank, host or link is slow or loses packets, 3 unknown.

    \b
    Examples:
      distbench preflight --nodes 2
      distbench preflight --against last --verdict-out verdict
    """,
    "trace": """Measure steps and show their collectives.

    This command is short for `distbench run --trace-paths`, followed by `distbench report --paths`. The options
    are the options of run.

    \b
    Example:
      distbench trace llama_2d --quick
    """,
}
# Commands whose function in cli/ has another name.
FUNCTIONS = {
    "list": "list_command",
    "self-test": "self_test",
    "preflight": "run",
    "trace": "run",
}
# `distbench --help`: heading to command to (file in cli/, sentence).
SECTIONS = {
    "Measure": {
        "run": ("run", "Measure scenarios: collectives, redistributions, training steps."),
        "ab": ("ab", "Alternate launches of two git revisions until the verdict is decided."),
        "trace": ("run", "Measure steps and show their collectives: run --trace-paths, then report --paths."),
        "calibrate": ("calibrate", "Measure this machine, for planning and simulation."),
    },
    "Read": {
        "report": ("report", "Show measured runs: tables, a page, plots, traced paths."),
        "history": ("history", "Show each case's times over launches and commits, and detect changes."),
        "site": ("report", "Write static pages over all runs: trends per case, regressions first."),
        "export": ("report", "Write runs in another tool's format."),
    },
    "Compare": {
        "compare": ("compare", "Show two runs side by side, case by case."),
        "gate": ("gate", "Fail if a candidate is slower than a baseline, for CI."),
        "signature": ("signature", "Write, check and update signatures: the exact communication of steps, for git."),
        "baseline": ("gate", "Save, list and show stored baselines."),
        "self-test": ("gate", "Measure the error rates of gate on this machine."),
    },
    "Plan": {
        "list": ("list", "List the shipped scenarios by question, or describe one scenario."),
        "check": ("check", "Check whether plans can work on a mesh of any size, without ranks."),
        "simulate": ("simulate", "Predict the time and memory of a step on other hardware."),
        "tune": ("tune", "Recommend a parallelism plan for N devices, predicted or measured."),
        "redistribute": ("redistribute", "Compare the planners for one redistribution."),
    },
    "Machine": {
        "preflight": ("run", "Check nodes for slow ranks and links. Exit code: 0 ok, 1 slow, 3 unknown."),
        "watch": ("watch", "Show ranks that arrive last, from files of Flight Recorder or NCCL Inspector."),
        "doctor": ("doctor", "Check this machine: devices, backends, torch."),
        "clean": ("clean", "Delete old runs after a confirmation."),
    },
}


def under_new_names(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with present names for old names, and print a warning per old name.

    Words after `--` belong to another command.
    """
    if words[:1] in (["plan"], ["redistribute"]):
        _refuse_scenario(words)
    if words and (new_command := OLD_COMMANDS.get(words[0])):
        say(f"warning: {words[0]} is an old name. Use {new_command}.", err=True)
        words = [new_command, *words[1:]]
    words = _of_former_gate(words)
    if words[:1] == ["signature"] and len(words) > 1 and words[1] not in SIGNATURE_WORDS:
        words = ["signature", "write", *words[1:]]
    is_preflight = words[:1] == ["preflight"] and "--help" not in words
    if words and words[0] in SHORT and "--help" not in words:
        words = [*SHORT[words[0]], *words[1:]]
    commands = [command for command in OLD_NAMES if tuple(words[: len(command)]) == command]
    renamed = {old: new for command in commands for old, new in OLD_NAMES[command].items()}
    end = words.index("--") if "--" in words else len(words)
    new_words: list[str] = []
    for word in words[:end]:
        old, equals, value = word.partition("=")
        new = renamed.get(old, (old,))
        if old in renamed:
            say(f"warning: {old} is an old name. Use {' '.join(new)}.", err=True)
        new_words += [*new[:-1], f"{new[-1]}{equals}{value}"]
    if is_preflight:
        _refuse_more_than_links(new_words)
    return [*new_words, *words[end:]]


def _of_former_gate(words: Sequence[str]) -> list[str]:
    """Return `signature check A B` for `gate --signature A B`, with a warning; the same applies to all OLD_MODES."""
    options = words[: words.index("--")] if "--" in words else words
    for old, command in OLD_MODES.items() if words[:1] == ["gate"] else ():
        if {*old} <= {*options}:
            say(f"warning: gate {' '.join(old)} is an old name. Use {' '.join(command)}.", err=True)
            return [*command, *(word for word in options[1:] if word not in old), *words[len(options) :]]
    return [*words]


def _refuse_more_than_links(words: Sequence[str]) -> None:
    """Refuse `distbench preflight SCENARIO`, because the verdict is on links."""
    run = main.commands["run"]
    context = click.Context(run, ignore_unknown_options=True, resilient_parsing=True)
    _, *others = run.make_parser(context).parse_args([*words[1:]])[0]["scenarios"]
    if names := [word for word in others if not word.startswith("-")]:
        raise UserError(
            f"preflight measures only links and rejects the scenario {names[0]}. Use distbench run {names[0]}"
        )


def _refuse_scenario(words: Sequence[str]) -> None:
    """Refuse `distbench redistribute SCENARIO`, because a scenario needs a parallelism plan, not a redistribution."""
    from distbench.spec import list_entries

    name = words[1] if len(words) > 1 else ""
    if ".py" in name or name in {entry.name for entry in list_entries() if name}:
        raise UserError(
            f"{name} is a scenario. Use distbench tune {name} to find the best plan, or distbench check "
            f"{name} to test the plan"
        )


class WholeSentences(click.Group):
    """A group whose help shows the whole first sentence of each command."""

    def sections(self) -> dict[str, dict[str, str]]:
        """Return the sentence of each command, by heading and command."""
        texts = {name: " ".join(str(command.help).split()) for name, command in self.commands.items()}
        return {"Commands": {name: text.partition(". ")[0].rstrip(".") + "." for name, text in texts.items()}}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections with all sentences in one column."""
        sections = self.sections()
        width = max(len(name) for commands in sections.values() for name in commands)
        for heading, commands in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), sentence) for name, sentence in commands.items()])


class CommandFiles(UserDict[str, Any]):
    """The commands by name. A command's file is imported at the first use, so that `--help` is fast."""

    def __getitem__(self, name: str) -> click.Command:
        if isinstance(file := self.data[name], str):
            self.data[name] = getattr(importlib.import_module(f"distbench.cli.{file}"), FUNCTIONS.get(name, name))
            # run, trace and preflight share one command.
            command = self.data[name]
            if name in SHORT_HELP:
                command = self.data[name] = copy(command)
                command.help = inspect.cleandoc(SHORT_HELP[name])
                command.params = [each for each in command.params if name == "trace" or isinstance(each, click.Option)]
            for leaf in (command, *getattr(command, "commands", {}).values()):
                if all(parameter.name != "color" for parameter in leaf.params):
                    leaf.params.append(color_option())
        loaded: click.Command = self.data[name]
        return loaded


class Commands(WholeSentences):
    """The command line's group, which prints the message of a `UserError` and exits with 2."""

    def sections(self) -> dict[str, dict[str, str]]:
        """Return the sentence of each command from SECTIONS."""
        return {
            heading: {name: sentence for name, (_, sentence) in commands.items()}
            for heading, commands in SECTIONS.items()
        }

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command with the project's defaults."""
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
            # click would exit with 1, which means a regression in gate.
            ctx.exit(141)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command and its words, with present names of options."""
        return super().resolve_command(ctx, under_new_names(args))


@click.group(
    cls=Commands,
    commands=CommandFiles({name: file for commands in SECTIONS.values() for name, (file, _) in commands.items()}),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="distbench")
def main() -> None:
    """Measure the cost of parallelism plans for distributed PyTorch on this hardware.

    \b
    Example:
      distbench run llama_2d --quick
      distbench report

    Defaults of options are in pyproject.toml under [tool.distbench].
    """


main.params.append(color_option(hidden=False))


# Defaults of options in a project's pyproject.toml: keys of [tool.distbench] apply to every command with such an
# option, keys of [tool.distbench.COMMAND] to one command, and keys of [tool.distbench.suite.NAME] to `run @NAME`. The
# command line overrides defaults.

_TABLE, SUITE, _MAX_BYTES = "tool.distbench", "suite", 1 << 20
# Options that have no defaults.
_NEVER = {"help", "version", "yes"}
# ab and tune have separate folders in the results folder.
NOT_COMMON = {"ab": {"results"}, "tune": {"results"}}
_Leaves = Mapping[tuple[str, ...], click.Command]


@dataclass(frozen=True)
class Suite:
    """A [tool.distbench.suite.NAME], for `distbench run @NAME`.

    Args:
        scenarios: names, files or file::name.
        options: `default_map` of click for `run`, from parameter to value.
    """

    scenarios: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Defaults:
    """A project's defaults.

    Args:
        file: the pyproject.toml, or None if no file has the table.
        given: contents of the table, key to value. The table of a command is a mapping.
        of_commands: `default_map` of click, from command to parameter to value.
        suites: name to suite.
    """

    file: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    of_commands: Mapping[str, Any] = field(default_factory=dict)
    suites: Mapping[str, Suite] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return lines such as `out = results`, and `gate.tolerance = 10%` from a command's table."""
        return list(_lines(self.given))


def _lines(given: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{before}{name}.")
        else:
            yield f"{before}{name} = {', '.join(map(str, value)) if isinstance(value, list) else value}"


def defaults_for(group: click.Group) -> Defaults:
    """Return the defaults for the current folder.

    The nearest pyproject.toml with the table is used, from the current folder up to the git root. Outside of a
    repository, only the current folder is searched. Paths are relative to the folder of the pyproject.toml.

    Raises:
        UserError: the file is not valid TOML, or has an unknown option or an invalid value.
    """
    folders = [Path.cwd(), *Path.cwd().parents]
    root = next((number for number, folder in enumerate(folders) if (folder / ".git").exists()), 0)
    for file in (folder / "pyproject.toml" for folder in folders[: root + 1]):
        if (table := _table_of(file)) is not None:
            given = {key: value for key, value in table.items() if key != SUITE}
            suites = _suites(group, table.get(SUITE, {}), file)
            return Defaults(file, table, _of_commands(group, given, file), suites)
    return Defaults()


def suite_of(group: click.Group, name: str) -> Suite:
    """Return a suite by its name from the nearest pyproject.toml. Raise UserError if the suite does not exist."""
    defaults = defaults_for(group)
    if name not in defaults.suites:
        how = f"write [{_TABLE}.{SUITE}.{name or 'NAME'}] with scenarios = [...] into pyproject.toml"
        others = f"use {', '.join(f'@{other}' for other in defaults.suites)}" if defaults.suites else how
        raise UserError(f"@{name} is not a suite; {others}")
    return defaults.suites[name]


def _suites(group: click.Group, given: Any, path: Path) -> dict[str, Suite]:
    suites = {}
    for name, content in given.items() if isinstance(given, dict) else [("NAME", given)]:
        table = f"{_TABLE}.{SUITE}.{name}"
        scenarios = content.get("scenarios") if isinstance(content, dict) else None
        if not isinstance(scenarios, list) or not scenarios or not all(isinstance(text, str) for text in scenarios):
            raise UserError(f'{path}: [{table}] needs a list of scenarios, such as scenarios = ["llama_2d"]')
        options: dict[str, Any] = {}
        for key in content.keys() - {"scenarios"}:
            _put(options, {("run",): group.commands["run"]}, new_key(key, path), content[key], path, table)
        is_here = path.parent == Path.cwd()
        targets = (text if is_here or ".py" not in text else str(path.parent / text) for text in scenarios)
        suites[name] = Suite(tuple(targets), options.get("run", {}))
    return suites


def _table_of(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    from distbench.spec.file_io import read_text

    text = read_text(path, "file", _MAX_BYTES)
    if "distbench" not in text:
        return None
    import tomllib

    try:
        tools = tomllib.loads(text).get("tool")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}; correct that line") from error
    table = tools.get("distbench") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UserError(f"{path}: {_TABLE} is not a table; write [{_TABLE}] and one default per line below")
    return table


def _of_commands(group: click.Group, given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    commands = dict(_leaves(group))
    defaults: dict[str, Any] = {}
    for given_key, value in sorted(given.items(), key=lambda item: isinstance(item[1], dict)):
        key = new_key(given_key, path)
        if isinstance(value, dict):
            command_name = OLD_COMMANDS.get(key, key)
            own_commands = {words: command for words, command in commands.items() if words[0] == command_name}
            if not own_commands:
                raise UserError(
                    f"{path}: {key!r} in [{_TABLE}.{key}] is not a command ({nearest(key, group.commands)})"
                )
            for name, default in value.items():
                _put(defaults, own_commands, new_key(name, path), default, path, f"{_TABLE}.{key}")
        else:
            _put(defaults, commands, key, value, path, _TABLE)
    return defaults


def new_key(name: str, where: Path | str) -> str:
    """Return the present name of a default or keyword, and print a warning if `name` is an old name."""
    new = OLD_NAMES[()].get(f"--{name}", (f"--{name}",))[0].removeprefix("--")
    if new != name:
        say_once(f"warning: {where}: {name} is an old name. Use {new}.")
    return new


def _leaves(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _leaves(command, (*before, name))
        else:
            yield (*before, name), command


def _put(defaults: dict[str, Any], commands: _Leaves, key: str, value: Any, path: Path, table: str) -> None:
    """Add one default to the map of each command that has the option."""
    is_common = table == _TABLE
    options = [
        (words, command, option)
        for words, command in commands.items()
        if not (is_common and key in NOT_COMMON.get(words[0], ()))
        for option in command.params
        if key.replace("_", "-") in _names_of(option)
    ]
    if not options:
        names = {name for command in commands.values() for option in command.params for name in _names_of(option)}
        names |= {words[0] for words in commands} if is_common else set()
        raise UserError(f"{path}: {key!r} in [{table}] is not an option ({nearest(key, names)})")
    for words, command, option in options:
        node = defaults
        for word in words:
            node = node.setdefault(word, {})
        try:
            node[str(option.name)] = _fitting(command, option, value, path.parent)
        except (click.BadParameter, ValueError) as error:
            why = error.message if isinstance(error, click.BadParameter) else str(error)
            raise UserError(f"{path}: {key} in [{table}] cannot be used: {why.rstrip('.')}") from error


def _names_of(parameter: click.Parameter) -> set[str]:
    """The long names without dashes, or no name for a parameter without a default."""
    names = {name.removeprefix("--") for name in parameter.opts if name.startswith("--")}
    return set() if names & _NEVER or not isinstance(parameter, click.Option) else names


def _fitting(command: click.Command, option: click.Parameter, value: Any, folder: Path) -> Any:
    """The value in the form of the option. Raise click.BadParameter or ValueError if the value is not valid."""
    if isinstance(option, click.Option) and option.is_flag:
        expected, fits = "true or false", isinstance(value, bool)
    elif getattr(option, "multiple", False):
        value = [value] if isinstance(value, str) else value
        expected = "a string, or a list of strings"
        fits = isinstance(value, list) and all(isinstance(text, str) for text in value)
    elif option.type.name == "duration":
        expected, fits = "a duration such as 30s", isinstance(value, int | float | str) and not isinstance(value, bool)
    elif option.type.name.startswith(("integer", "float")):
        expected, fits = "a number", isinstance(value, int | float) and not isinstance(value, bool)
    else:
        expected, fits = "a string", isinstance(value, str)
    if not fits:
        raise ValueError(f"{value!r} is not {expected}")
    if isinstance(option.type, click.Path) and folder != Path.cwd():
        value = str(folder / value)
    option.type_cast_value(click.Context(command), value)
    return value
