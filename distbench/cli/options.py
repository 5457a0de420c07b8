"""Shared parts of commands: options and arguments, their refusal, output files, and printing."""

import contextlib
import errno
import functools
import glob
import hashlib
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from distbench.spec.errors import UserError
from distbench.spec.file_io import write_whole
from distbench.spec.plugins import plugin_names
from distbench.spec.printable_text import printable

if TYPE_CHECKING:
    from distbench.records.foreign_numbers import NumberColumns

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
MONTH_S = 30 * 86_400.0  # the longest duration of a command
MAX_LAUNCHES = 100_000
MESH_HELP = "Mesh, such as dp_shard=2,tp=2."
# Each has a function in judge/gate_text.py and in judge/communication_signature.py.
FORMS = ("table", "markdown", "json", "junit", "github")
# Seconds for which a process keeps the name of a sentence that it printed, for ranks that start or fail a little later.
STAYS_S = 1.0


class FiniteRange(click.FloatRange):
    """A number within bounds; nan and inf, which pass every comparison with a limit, are rejected."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; click.BadParameter where the text is not a number, or out of bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class PluginChoice(click.Choice[str]):
    """Names of distbench and of installed plug-ins, which are looked for only when a value is given or completed."""

    def __init__(self, group: str, names: Iterable[str]) -> None:
        super().__init__(tuple(names))
        self._group = group

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name; click.BadParameter where no package provides it."""
        return value if value in self.choices else str(self._all().convert(value, param, ctx))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Return the names that begin with a text."""
        return self._all().shell_complete(ctx, param, incomplete)

    def _all(self) -> click.Choice[str]:
        return click.Choice(tuple(dict.fromkeys((*self.choices, *plugin_names(self._group)))))


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 only
    """A time such as 30s, 5m, 2h or 30d, converted to seconds; a bare number is seconds.

    Args:
        least_s: the smallest duration that is valid.
        most_s: the largest.
    """

    name = "duration"
    UNITS_S: ClassVar = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

    def __init__(self, least_s: float = 1.0, most_s: float = MONTH_S) -> None:
        self.least_s, self.most_s = least_s, most_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds; click.BadParameter for a text that is not a duration, or is out of bounds."""
        parts = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?([a-z]*)", str(value).strip().lower())
        if parts is None or parts[2] not in self.UNITS_S:
            self.fail(f"{value!r} is not a duration; give seconds, or a number with s, m, h, d or w: 30s, 5m, 2h.")
        seconds = float(parts[1]) * self.UNITS_S[parts[2]]
        if seconds < self.least_s:
            self.fail(f"{value} is too short; give at least {self.least_s:g} s.")
        if seconds > self.most_s:
            self.fail(f"{value} is too long; give at most {self.most_s / 86_400:g} d.")
        return seconds


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
            of_click = {"default": option_field.default, **option_field.metadata}
            decorated = click.option(*of_click.pop("names"), option_field.name, **of_click)(decorated)
        return cast(F, decorated)

    return decorate


class FormatOption(click.Option):
    """`--format FORM`, of which `--json` is a short form."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Add both spellings."""
        super().add_to_parser(parser, ctx)
        parser.add_option(self, opts=["--json"], dest=self.name, action="store_const", const="json", nargs=0)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Show both spellings."""
        record = super().get_help_record(ctx)
        return record and (f"{record[0]}, --json", record[1])


def format_option(*forms: str) -> Callable[[F], F]:
    """Add --format, whose first form is the default; the command is handed it as `form`."""
    return click.option(
        "--format",
        "form",
        cls=FormatOption,
        type=click.Choice(forms),
        default=forms[0],
        help=f"What to print. [{forms[0]}]",
    )


def results_option(command: F) -> F:
    """Add --results to a command that only reads runs; the command is handed the folder as `out`."""
    return click.option(
        "--results",
        "out",
        type=PATH,
        metavar="DIR",
        default=Path("results"),
        help="Results folder. Names of runs (last, @LABEL, a commit) are looked up there. [results]",
    )(command)


def cases_option(command: F) -> F:
    """Add -k; the command is handed the expression as `chosen`, "" for every case."""
    return click.option(
        "-k", "chosen", default="", metavar="EXPR", help='Only cases whose id matches, such as -k "greedy and not f32".'
    )(command)


def set_option(command: F) -> F:
    """Add --set; the command is handed the texts as `choices`."""
    return click.option(
        "--set", "choices", multiple=True, metavar="NAME=VALUE", help="Set an axis or parameter; A,B tries each."
    )(command)


def quick_option(description: str) -> Callable[[F], F]:
    """Add --quick; `description` follows its first sentence."""
    return click.option("--quick", is_flag=True, help=f"Quick sizes. {description}".rstrip())


def dry_run_option(description: str) -> Callable[[F], F]:
    """Add --dry-run; `description` follows its first sentence."""
    return click.option("--dry-run", is_flag=True, help=f"Start and delete nothing. {description}".rstrip())


def mesh_option(description: str) -> Callable[[F], F]:
    """Add --mesh; `description` follows its first sentence. The command is handed mesh dim name to size, or None."""

    def parse(ctx: click.Context, param: click.Parameter, text: str | None) -> dict[str, int] | None:
        from distbench.spec import parse_mesh

        return None if text is None else parse_mesh(text)

    return click.option("--mesh", metavar="DIM=N,...", callback=parse, help=f"{MESH_HELP} {description}")


def assume_option(command: F) -> F:
    """Add `--assume` of simulations."""
    return click.option(
        "--assume",
        multiple=True,
        metavar="MODULES=VALUE",
        help="What modules choose ('uniform', a file of loads), or a number that they read.",
    )(command)


def width_option(command: F) -> F:
    """Add --width, which the command itself is not given."""

    def set_width(ctx: click.Context, param: click.Parameter, width: int | None) -> None:
        from distbench.show.terminal import ask_width

        ask_width(width)

    return click.option(
        "--width",
        type=click.IntRange(60, 200),
        metavar="N",
        expose_value=False,
        callback=set_width,
        help="Characters per line. [the terminal's; 120 in a file]",
    )(command)


def color_option(hidden: bool = True) -> click.Option:
    """Return --color: an option of `distbench`, and hidden of every command."""
    from distbench.show.color import CHOICES, choose_color

    return click.Option(
        ["--color"],
        type=click.Choice(CHOICES),
        default=None if hidden else CHOICES[0],
        expose_value=False,
        hidden=hidden,
        callback=lambda ctx, parameter, choice: choose_color(choice) if choice else None,
        help="Colour of verdicts. [auto: on a terminal, unless NO_COLOR is set]",
    )


def verbose_option(command: F) -> F:
    """Add --verbose, which the command itself is not given."""

    def set_verbose(ctx: click.Context, param: click.Parameter, verbose: bool) -> None:
        from distbench.show.terminal import show_notes

        show_notes(verbose)

    return click.option(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=set_verbose, help="Show all warnings and notes."
    )(command)


def quiet_option(command: F) -> F:
    """Add -q to a command that shows progress and prints a result; the command is handed it as `quiet`."""
    return click.option("-q", "--quiet", is_flag=True, help="Print errors only; with --json also the result.")(command)


def progress_lines(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line of progress on standard error, or with --quiet nothing."""
    return lambda line: None if quiet else say(line, err=True)


def scenario_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the shipped scenarios, each with its summary; files where none begins so."""
    from distbench.spec import list_entries

    entries = [entry for entry in list_entries() if entry.name.startswith(incomplete)]
    items = [CompletionItem(entry.name, help=entry.summary) for entry in entries]
    return items or [CompletionItem(incomplete, type="file")]


# Options that were given and would have no effect are rejected before anything is read or measured.


def given() -> dict[str, str]:
    """Return the parameters that the command line gives, by name, as it writes them.

    Without defaults of [tool.distbench], and without options that any output may need.
    """
    ctx = click.get_current_context()
    return {
        str(parameter.name): max(parameter.opts, key=len)
        if isinstance(parameter, click.Option)
        else parameter.make_metavar(ctx)
        for parameter in ctx.command.params
        if ctx.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        and parameter.name not in ("width", "color", "verbose")
    }


def refuse_with(mode: str, *parameters: str) -> None:
    """Raise UserError if one of the parameters is given, which `mode` ignores."""
    for name, word in given().items():
        if name in parameters:
            raise UserError(f"{word} does not go with {mode}; leave one of them out")


def refuse_without(needed: str, *parameters: str) -> None:
    """Raise UserError if one of the parameters is given, which has no effect without `needed`."""
    for name, word in given().items():
        if name in parameters:
            raise UserError(f"{word} has no effect without {needed}; add {needed}, or leave {word} out")


# Files.


def expanded(paths: Sequence[str]) -> list[Path]:
    """Expand patterns that a shell has not; a path that exists is taken by its name. A pattern must match a file."""
    files: list[Path] = []
    for text in paths:
        is_pattern = glob.has_magic(text) and not Path(text).exists()
        matches = sorted(glob.glob(text, recursive=True)) if is_pattern else [text]  # noqa: PTH207 - also absolute ones
        if not matches:
            raise UserError(f"pattern {text!r} matches no file; give run files or a folder of them")
        files += map(Path, matches)
    return files


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written before something is measured for it; no new file is left."""
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
        raise UserError(
            f"{option} {path} is not a folder and cannot be made: {error.strerror}; give another"
        ) from error


def write(path: Path, content: str | bytes, mode: str = "w") -> None:
    """Write a text or bytes, or append a text with mode "a". Raise UserError if the file cannot be written."""
    try:
        if mode == "w":
            write_whole(path, content)
        else:
            with path.open(mode, encoding="utf-8") as file:
                file.write(str(content))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give another file") from error


def new_folder(kind: str, out: Path | None = None) -> Path:
    """Return `out`, or a folder of this moment below results/; it need not exist yet, and holds no file.

    Raises:
        UserError: `out` is a file, or holds files.
    """
    folder = out or Path("results") / kind / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--results {folder} is not a folder; give another, or a new one")
    # Empty folders are what a launch that could not work leaves behind.
    if any(path.is_file() for path in folder.rglob("*")):
        raise UserError(f"--results {folder} is not empty; give a new folder, so that only these launches are compared")
    return folder


# Printing.


def say_lines(lines: Iterable[str], indent: str = "    ") -> None:
    """Print sentences within the width of the screen, broken at spaces; columns are kept only where all lines fit."""
    from distbench.show.terminal import width_here, wrap

    all_lines, width = list(lines), width_here()
    if max(map(len, all_lines), default=0) > width:
        all_lines = [part for line in all_lines for part in wrap(re.sub(r"(?<=\S) {2,}", "  ", line), width, indent)]
    say("\n".join(all_lines))


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print lines without characters that a terminal or a CI system would obey; severities and verdicts in colour.

    Data and Markdown (`--format`) have no colour. Errors in writing to standard error (`err`) are ignored.
    """
    from distbench.show.color import colored, uses_color

    text = printable(_for_screen(text) if err else text)
    context = click.get_current_context(silent=True)
    form = "table" if err or context is None else context.params.get("form", "table")
    if form == "table" and uses_color(sys.stderr if err else sys.stdout):
        text = colored(text)
    with contextlib.suppress(*([OSError] if err else [])):
        click.echo(text, err=err, nl=nl, color=True)


def _for_screen(text: str) -> str:
    """Sentences broken at spaces where standard error is a terminal; in a log each keeps its line."""
    from distbench.show.terminal import width_of, wrap

    width = width_of(sys.stderr)
    if width is None or max(map(len, text.split("\n"))) <= width:
        return text
    return "\n".join(part for line in text.split("\n") for part in wrap(line, width, "  "))


def say_once(text: str) -> None:
    """Print a sentence on standard error, unless another rank of this launch on this host has just printed it.

    The rank that prints it holds a name, an abstract socket of Linux, which goes with the process. Elsewhere every rank
    prints it.
    """
    from distbench.launch.rendezvous import joined_ranks

    try:
        joined = joined_ranks(os.environ)
    except UserError:
        joined = None
    if joined is None or joined.world_size == 1:
        say(text, err=True)
        return
    launch_text = f"{joined.launch or joined.address} {text}"
    with socket.socket(socket.AF_UNIX) as name_socket:
        try:
            name_socket.bind(f"\0distbench-{hashlib.sha256(launch_text.encode()).hexdigest()[:32]}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                say(text, err=True)
            return
        say(text, err=True)
        # A signal that ends this process now loses nothing.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(STAYS_S)


@dataclass(frozen=True)
class ColumnOptions:
    """Which numbers are judged of files that distbench did not write."""

    launch_column: str | None = option("--launch", metavar="COLUMN", help="Table: the launch. [a file is one launch]")
    case_column: str | None = option("--case", metavar="COLUMN,...", help="Table: the case, such as op,size.")
    value_column: str | None = option("--value", metavar="COLUMN", help="Table: the numbers; tool: its metric.")
    better: str | None = option("--better", type=click.Choice(("lower", "higher")), help="Better numbers. [lower]")
    pair_column: str | None = option(
        "--pair", metavar="COLUMN", help="Table: equal on both sides of a pair; 'file': files of the same name."
    )
    unit: str | None = option("--unit", metavar="UNIT", help="Table: unit, or its column. [of the column's name]")

    def columns(self) -> "NumberColumns":
        """The columns of the files."""
        from distbench.records.foreign_numbers import NumberColumns

        return NumberColumns(*(getattr(self, each.name) for each in fields(self)))


@dataclass(frozen=True)
class OutputOptions:
    """In which forms a verdict is printed and written."""

    form: str = option(
        "--format", default="table", cls=FormatOption, type=click.Choice(FORMS), help="What to print. [table]"
    )
    write_to: tuple[str, ...] = option(
        "--write", default=(), multiple=True, metavar="FORMAT=FILE", help="Also write this format to a file."
    )
    github: bool = option(
        "--github",
        default=False,
        is_flag=True,
        help="Also print annotations, and append Markdown to the step summary.",
    )

    def files(self) -> list[tuple[str, Path]]:
        """Parse `["junit=gate.xml"]` to forms and files. Raise UserError for a text that is not FORMAT=FILE."""
        files = []
        for text in self.write_to:
            form, equals, path = text.partition("=")
            if not equals or form not in FORMS or not path:
                raise UserError(f"--write {text!r} is not FORMAT=FILE with a format of {', '.join(FORMS)}")
            files.append((form, Path(path)))
        return files

    def show(self, render: Callable[[str], str], quiet: bool = False) -> None:
        """Print and write the text that `render` returns for each chosen form; with `quiet` no table is printed."""
        files = self.files()
        forms = [] if quiet and self.form == "table" else [self.form]
        for form in (*forms, *(["github"] if self.github and self.form != "github" else [])):
            # Annotations are commands to GitHub; no other form may hold any.
            (click.echo if form == "github" else say)(render(form))
        for form, path in files:
            write(path, render(form) + "\n")
        if self.github and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
            write(Path(summary), render("markdown") + "\n", "a")
