"""Defaults of options that a project keeps in its pyproject.toml, under [tool.distbench]. The command line wins.

A key at the top is for every command that has such an option; one in [tool.distbench.COMMAND] for that command alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from distbench.spec.errors import UserError, nearest

FILE, TABLE = "pyproject.toml", "tool.distbench"
MAX_BYTES = 1 << 20
# What must be said each time: it deletes, or replaces what is kept.
NEVER = {"help", "version", "yes", "update"}
# ab makes a new folder each time, within the results.
NOT_COMMON = {"ab": {"out"}, "sweep": {"budget", "resume"}}
Words = tuple[str, ...]


@dataclass(frozen=True)
class Defaults:
    """What a project has written down.

    Args:
        file: its pyproject.toml; None where there is none with such a table.
        given: key to value, as written; the table of one command is a mapping.
        of_commands: command to parameter to value, as click's `default_map` has it.
    """

    file: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    of_commands: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For a person: `out = results`, and `gate.tolerance = 10%` of a command's table."""
        return [f"{name} = {value}" for name, value in _flat(self.given)]


def _flat(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in given.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", text) for key, text in _flat(value))
        else:
            yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def defaults_for(group: click.Group) -> Defaults:
    """The defaults that hold in the current folder.

    They are those of the nearest pyproject.toml that has the table, from that folder up to the git root. Paths in it
    are meant from where it lies.

    Raises:
        UserError: it is no TOML, or has a key that is no option, or a value that the option does not take.
    """
    for parent in _up_to_root(Path.cwd()):
        if (table := _table_of(parent / FILE)) is not None:
            return Defaults(parent / FILE, table, _of_commands(group, table, parent / FILE))
    return Defaults()


def _up_to_root(folder: Path) -> Iterator[Path]:
    """Outside of a repository the folder alone: further up it would be somebody else's project."""
    folders = [folder, *folder.parents]
    root = next((number for number, parent in enumerate(folders) if (parent / ".git").exists()), 0)
    yield from folders[: root + 1]


def _table_of(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    from distbench.spec.file_io import read_text

    text = read_text(path, "file", MAX_BYTES)
    if "distbench" not in text:
        return None
    import tomllib

    try:
        tools = tomllib.loads(text).get("tool")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no TOML: {error}; mend that line") from error
    table = tools.get("distbench") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UserError(f"{path}: {TABLE} is no table; write [{TABLE}], and below it one default a line")
    return table


def _of_commands(group: click.Group, given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    commands = dict(_leaves(group))
    defaults: dict[str, Any] = {}
    for key, value in sorted(given.items(), key=lambda item: isinstance(item[1], dict)):
        if not isinstance(value, dict):
            _put(defaults, commands, key, value, path, TABLE)
            # What one command writes the others read.
            if key == "out" and "runs" not in given:
                _put(defaults, commands, "runs", value, path, TABLE)
            continue
        own_commands = {words: command for words, command in commands.items() if words[0] == key}
        if not own_commands:
            raise UserError(f"{path}: [{TABLE}.{key}] is no command ({nearest(key, group.commands)})")
        for name, default in value.items():
            _put(defaults, own_commands, name, default, path, f"{TABLE}.{key}")
    return defaults


def _leaves(group: click.Group, before: Words = ()) -> Iterator[tuple[Words, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _leaves(command, (*before, name))
        else:
            yield (*before, name), command


def _put(
    defaults: dict[str, Any], commands: Mapping[Words, click.Command], key: str, value: Any, path: Path, table: str
) -> None:
    """One default into the map of each command that has the option."""
    is_common = table == TABLE
    options = {
        words: (command, option)
        for words, command in commands.items()
        if not (is_common and key in NOT_COMMON.get(words[0], ()))
        for option in command.params
        if key.replace("_", "-") in names_of(option)
    }
    if not options:
        option_names = {name for command in commands.values() for option in command.params for name in names_of(option)}
        groups = {words[0] for words in commands} if is_common else set()
        raise UserError(f"{path}: {key!r} in [{table}] is no option ({nearest(key, option_names | groups)})")
    for words, (command, option) in options.items():
        node = defaults
        for word in words:
            node = node.setdefault(word, {})
        try:
            node[str(option.name)] = _fitting(command, option, value, path.parent)
        except (click.BadParameter, ValueError) as error:
            why = error.message if isinstance(error, click.BadParameter) else str(error)
            raise UserError(f"{path}: {key} in [{table}] cannot be used: {why.rstrip('.')}") from error


def names_of(parameter: click.Parameter) -> set[str]:
    """What a default of it is called: its long names without dashes; none for what takes no default."""
    names = {name.removeprefix("--") for name in parameter.opts if name.startswith("--")}
    return set() if names & NEVER or not isinstance(parameter, click.Option) else names


def _fitting(command: click.Command, option: click.Parameter, value: Any, folder: Path) -> Any:
    """The value as the option takes it. Raises click.BadParameter, or ValueError where its type is another."""
    if isinstance(option, click.Option) and option.is_flag:
        expected, fits = "true or false", isinstance(value, bool)
    elif getattr(option, "multiple", False):
        value = [value] if isinstance(value, str) else value
        expected = "a text, or a list of texts"
        fits = isinstance(value, list) and all(isinstance(text, str) for text in value)
    elif option.type.name.startswith(("integer", "float")):
        expected, fits = "a number", isinstance(value, int | float) and not isinstance(value, bool)
    else:
        expected, fits = "a text", isinstance(value, str)
    if not fits:
        raise ValueError(f"{value!r} is not {expected}")
    if isinstance(option.type, click.Path) and folder != Path.cwd():
        value = str(folder / value)
    option.type_cast_value(click.Context(command), value)
    return value
