"""Options and arguments that commands share: dataclasses of options, --mesh, --width, numbers, files, completion."""

import functools
import glob
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from distbench.spec.errors import UserError
from distbench.spec.file_io import write_whole

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
MONTH_S = 30 * 86_400.0  # nobody waits longer for a command
MAX_LAUNCHES = 100_000


class FiniteRange(click.FloatRange):
    """A number within bounds; nan and inf, which every comparison with a limit would let through, are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; click.BadParameter where it is none, or out of bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def option(*names: str, default: Any = None, **of_click: Any) -> Any:
    """Declare a field of a dataclass as an option; `of_click` are keywords of `click.option`."""
    return field(default=default, metadata={"names": names, **of_click})


def options_of(kind: type, argument: str, *names: str) -> Callable[[F], F]:
    """Give a command the options that a dataclass declares, and hand it one object of that class.

    Args:
        kind: a dataclass whose fields are made by `option`.
        argument: the keyword argument of the command that takes the object.
        names: the fields that are options of this command; none for all. The others keep their defaults.
    """
    chosen = [option_field for option_field in fields(kind) if not names or option_field.name in names]

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def call(*arguments: Any, **values: Any) -> Any:
            values[argument] = kind(**{option_field.name: values.pop(option_field.name) for option_field in chosen})
            return command(*arguments, **values)

        decorated: Any = call
        for option_field in reversed(chosen):
            of_click = dict(option_field.metadata)
            decorated = click.option(
                *of_click.pop("names"), option_field.name, default=option_field.default, **of_click
            )(decorated)
        return cast(F, decorated)

    return decorate


def format_option(*forms: str) -> Callable[[F], F]:
    """Add --format, whose first form is the default; the command is handed it as `form`."""
    return click.option(
        "--format", "form", type=click.Choice(forms), default=forms[0], help=f"What to print. [{forms[0]}]"
    )


def mesh_option(description: str) -> Callable[[F], F]:
    """Add --mesh; the command is handed mesh dim name to size, or None."""

    def parse(ctx: click.Context, param: click.Parameter, text: str | None) -> dict[str, int] | None:
        from distbench.spec import parse_mesh

        return None if text is None else parse_mesh(text)

    return click.option("--mesh", metavar="DIM=N,...", callback=parse, help=description)


def _ask(ctx: click.Context, param: click.Parameter, width: int | None) -> None:
    from distbench.show.terminal import ask_width

    ask_width(width)


def width_option(command: F) -> F:
    """Add the option, which the command itself is not given."""
    return click.option(
        "--width",
        type=click.IntRange(60, 200),
        metavar="N",
        expose_value=False,
        callback=_ask,
        help="Characters of a line. [the terminal's; 120 in a file]",
    )(command)


# Options that were given and would have no effect are refused before anything is read or measured.


def given() -> dict[str, str]:
    """The parameters that the command line gives, by name, as it writes them.

    Without defaults of [tool.distbench], and without --width, which any output may need.
    """
    ctx = click.get_current_context()
    return {
        str(parameter.name): max(parameter.opts, key=len)
        if isinstance(parameter, click.Option)
        else parameter.make_metavar(ctx)
        for parameter in ctx.command.params
        if ctx.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE and parameter.name != "width"
    }


def refuse_with(mode: str, *parameters: str) -> None:
    """UserError where one of the parameters is given, which `mode` ignores."""
    for option in _given_of(parameters):
        raise UserError(f"{option} does not go with {mode}, which ignores it; leave one of them out")


def refuse_without(needed: str, *parameters: str) -> None:
    """UserError where one of the parameters is given, which has no effect without `needed`."""
    for option in _given_of(parameters):
        raise UserError(f"{option} has no effect without {needed}; add {needed}, or leave {option} out")


def _given_of(parameters: tuple[str, ...]) -> list[str]:
    return [option for name, option in given().items() if name in parameters]


def scenario_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shipped scenarios that begin so, each with its line; files where none does, for those of one's own."""
    from distbench.spec import list_entries

    entries = [entry for entry in list_entries() if entry.name.startswith(incomplete)]
    items = [CompletionItem(entry.name, help=entry.summary) for entry in entries]
    return items or [CompletionItem(incomplete, type="file")]


def expanded(paths: Sequence[str]) -> list[Path]:
    """Patterns that a shell has not expanded; what exists is taken by its name. A pattern must match something."""
    files: list[Path] = []
    for text in paths:
        if Path(text).exists() or not glob.has_magic(text):
            files.append(Path(text))
            continue
        matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not matches:
            raise UserError(f"pattern {text!r} matches no file; give run files or a folder of them")
        files += [Path(match) for match in matches]
    return files


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written before something is measured for it; nothing is left where none was."""
    if not path.resolve().parent.is_dir():
        missing = f"there is no folder {path.parent}; make it, or give another file"
        raise UserError(f"{option} {path} cannot be written: {missing}")
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written ({error.strerror}); give another file") from error
    if is_new:
        path.unlink()


def make_folder(path: Path, option: str) -> None:
    """Make a folder that may be there already, or raise a UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path} is no folder and cannot be made: {error.strerror}; give another") from error


def write(path: Path, text: str, mode: str = "w") -> None:
    """Write a text, or append it with mode "a"; a UserError where the file cannot be written."""
    try:
        if mode == "w":
            write_whole(path, text)
            return
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give another file") from error


def new_folder(kind: str, out: Path | None = None) -> Path:
    """`out`, or a folder of this moment below results/; it need not exist yet, and holds no file.

    Raises:
        UserError: `out` is no folder, or holds files.
    """
    folder = out or Path("results") / kind / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is no folder; give another, or one that is not there yet")
    # Empty folders are what a launch that could not work leaves behind.
    if any(path.is_file() for path in folder.rglob("*")):
        raise UserError(f"--out {folder} is not empty; give a new folder, so that only these launches are compared")
    return folder
