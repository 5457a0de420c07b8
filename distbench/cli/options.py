"""Shared parts of commands: options and arguments, their refusal, output files, and printing."""

import contextlib
import errno
import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import click
from click.core import ParameterSource

from distbench.spec.errors import UserError, nearest
from distbench.spec.file_io import write_whole, writing
from distbench.spec.plugins import plugin_names
from distbench.spec.printable_text import printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from distbench.records.foreign_numbers import NumberColumns
    from distbench.statistics.verdicts import Options

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
MONTH_S = 30 * 86_400.0  # the longest duration of a command
MAX_LAUNCHES = 100_000
MESH_HELP = "Mesh, such as dp_shard=2,tp=2."
# Each format has a function in judge/gate_text.py and in judge/communication_signature.py.
FORMS = ("table", "markdown", "json", "junit", "github", "badge")
# Seconds for which a process reserves a sentence that it printed, for ranks that start or fail a little later.
STAYS_S = 1.0


class FiniteRange(click.FloatRange):
    """A finite number within bounds. click.FloatRange accepts nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raise click.BadParameter if the text is not a number or is out of bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class PluginChoice(click.Choice[str]):
    """Names of distbench and of installed plug-ins. Plug-ins are searched only to validate or complete a value."""

    def __init__(self, group: str, names: Iterable[str]) -> None:
        super().__init__(tuple(names))
        self._group = group

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name. Raise click.BadParameter if no package provides the name."""
        return value if value in self.choices else str(self._all().convert(value, param, ctx))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Return the names that begin with `incomplete`."""
        return self._all().shell_complete(ctx, param, incomplete)

    def _all(self) -> click.Choice[str]:
        return click.Choice(tuple(dict.fromkeys((*self.choices, *plugin_names(self._group)))))


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 only
    """A time such as 900ms, 30s, 5m, 2h or 30d, converted to seconds. The unit of a bare number is seconds.

    Args:
        least_s: the shortest valid duration in seconds.
        most_s: the longest valid duration in seconds.
    """

    name = "duration"
    UNITS_S: ClassVar = {"": 1, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

    def __init__(self, least_s: float = 1.0, most_s: float = MONTH_S) -> None:
        self.least_s, self.most_s = least_s, most_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds. Raise click.BadParameter if the text is not a duration or is out of bounds."""
        parts = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?([a-z]*)", str(value).strip().lower())
        if parts is None or parts[2] not in self.UNITS_S:
            self.fail(f"{value!r} is not a duration; give seconds, or a number with ms, s, m, h, d or w: 30s, 5m, 2h.")
        seconds = float(parts[1]) * self.UNITS_S[parts[2]]
        if seconds < self.least_s:
            self.fail(f"{value} is too short; give at least {self.least_s:g} s.")
        if seconds > self.most_s:
            self.fail(f"{value} is too long; give at most {self.most_s / 86_400:g} d.")
        return seconds


def option(*names: str, default: Any = None, **of_click: Any) -> Any:
    """Declare a field of a dataclass as an option. `of_click` are keywords of `click.option`."""
    return field(default=default, metadata={"names": names, **of_click})


def options_of(kind: type, argument: str, *names: str) -> Callable[[F], F]:
    """Add the options that a dataclass declares to a command, which gets one object of the dataclass.

    Args:
        kind: a dataclass whose fields are made by `option`.
        argument: the keyword argument of the command for the object.
        names: the fields that are options of this command (default: all). Other fields have their defaults.
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
    """`--format FORM`, with `--json` as a short form of `--format json`."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Add both spellings."""
        super().add_to_parser(parser, ctx)
        parser.add_option(self, opts=["--json"], dest=self.name, action="store_const", const="json", nargs=0)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Show both spellings."""
        record = super().get_help_record(ctx)
        return record and (f"{record[0]}, --json", record[1])


def format_option(*forms: str) -> Callable[[F], F]:
    """Add --format as the argument `form`. The first form is the default."""
    return click.option(
        "--format",
        "form",
        cls=FormatOption,
        type=click.Choice(forms),
        default=forms[0],
        help=f"What to print. [{forms[0]}]",
    )


def results_option(
    description: str = "Names of runs (last, @LABEL, a commit) refer to this folder.",
) -> Callable[[F], F]:
    """Add --results as the argument `out`. `description` follows the first sentence of the help."""
    default, text = Path("results"), f"{f'Results folder. {description}'.rstrip()} [results]"
    return click.option("--results", "out", type=PATH, metavar="DIR", default=default, help=text)


# -k as the argument `chosen`, an expression or "" for every case.
cases_option = click.option(
    "-k", "chosen", default="", metavar="EXPR", help='Select cases by id, such as -k "greedy and not f32".'
)
# --set as the argument `choices`, a tuple of NAME=VALUE.
set_option = click.option(
    "--set", "choices", multiple=True, metavar="NAME=VALUE", help="Set an axis or parameter. A,B sets several values."
)
assume_option = click.option(
    "--assume",
    multiple=True,
    metavar="MODULES=VALUE",
    help="Assumed choices of modules, such as expert loads: 'uniform', a file of loads, or a number.",
)
label_option = click.option(
    "--label", default="", metavar="TEXT", help="Label of the runs. Use distbench report @TEXT to show the runs."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only errors; with --json also the result.")


def quick_option(description: str) -> Callable[[F], F]:
    """Add --quick. `description` follows the first sentence of the help."""
    return click.option("--quick", is_flag=True, help=f"Quick sizes. {description}".rstrip())


def dry_run_option(description: str) -> Callable[[F], F]:
    """Add --dry-run. `description` follows the first sentence of the help."""
    return click.option("--dry-run", is_flag=True, help=f"Start and delete nothing. {description}".rstrip())


def mesh_option(description: str) -> Callable[[F], F]:
    """Add --mesh as the argument `mesh`, from mesh dim to size, or None. `description` follows the first sentence."""

    def parse(ctx: click.Context, param: click.Parameter, text: str | None) -> dict[str, int] | None:
        from distbench.spec import parse_mesh

        return None if text is None else parse_mesh(text)

    return click.option("--mesh", metavar="DIM=N,...", callback=parse, help=f"{MESH_HELP} {description}")


def width_option(command: F) -> F:
    """Add --width, which is not an argument of the command."""

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
    """Return --color: a visible option of `distbench`, and a hidden option of every command."""
    from distbench.show.color import CHOICES, choose_color

    return click.Option(
        ["--color"],
        type=click.Choice(CHOICES),
        default=None if hidden else CHOICES[0],
        expose_value=False,
        hidden=hidden,
        callback=lambda ctx, parameter, choice: choose_color(choice) if choice else None,
        help="Colour verdicts. [auto: on a terminal, unless NO_COLOR is set]",
    )


def verbose_option(command: F) -> F:
    """Add --verbose, which is not an argument of the command."""

    def set_verbose(ctx: click.Context, param: click.Parameter, verbose: bool) -> None:
        from distbench.show.terminal import show_notes

        show_notes(verbose)

    return click.option(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=set_verbose, help="Show all warnings and notes."
    )(command)


def progress_lines(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line of progress on standard error, or prints nothing if `quiet`."""
    return lambda line: None if quiet else say(line, err=True)


def scenario_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Complete names of shipped scenarios, with summaries; without a match, complete files."""
    from click.shell_completion import CompletionItem

    from distbench.spec import list_entries

    entries = [entry for entry in list_entries() if entry.name.startswith(incomplete)]
    items = [CompletionItem(entry.name, help=entry.summary) for entry in entries]
    return items or [CompletionItem(incomplete, type="file")]


# Options that were given and would have no effect are rejected before anything is read or measured.


def given() -> dict[str, str]:
    """Return the parameters on the command line, from name to the word for messages.

    Defaults of [tool.distbench] and options that suit any output are left out.
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
    """Raise UserError if the command line has one of the parameters, because `mode` ignores them."""
    for name, word in given().items():
        if name in parameters:
            raise UserError(f"{word} cannot be combined with {mode}; leave one of them out")


def refuse_without(needed: str, *parameters: str) -> None:
    """Raise UserError if the command line has one of the parameters, because they have no effect without `needed`."""
    for name, word in given().items():
        if name in parameters:
            raise UserError(f"{word} has no effect without {needed}; add {needed}, or leave {word} out")


# Files.


def expanded(paths: Sequence[str]) -> list[Path]:
    """Expand patterns that the shell did not expand, except names of existing paths. Raise UserError without a
    match."""
    import glob

    files: list[Path] = []
    for text in paths:
        is_pattern = glob.has_magic(text) and not Path(text).exists()
        matches = sorted(glob.glob(text, recursive=True)) if is_pattern else [text]  # noqa: PTH207 - also absolute ones
        if not matches:
            raise UserError(f"pattern {text!r} matches no file; give run files or a folder of them")
        files += map(Path, matches)
    return files


def check_writable(path: Path, option: str) -> None:
    """Raise UserError if a file cannot be written. No new file is created."""
    if not path.resolve().parent.is_dir():
        missing = f"the folder {path.parent} does not exist; create the folder, or give another file"
        raise UserError(f"{option} {path} cannot be written: {missing}")
    is_new = not path.exists()
    with writing(f"{option} {path}"):
        path.open("a").close()
    if is_new:
        path.unlink()


def make_folder(path: Path, option: str) -> None:
    """Create a folder, which may exist already. Raise UserError if the folder cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be created: {error.strerror}; give another folder") from error


def write(path: Path, content: str | bytes, mode: str = "w") -> None:
    """Write a text or bytes, or append a text with mode "a". Raise UserError if the file cannot be written."""
    with writing(str(path)):
        if mode == "w":
            write_whole(path, content)
        else:
            with path.open(mode, encoding="utf-8") as file:
                file.write(str(content))


def check_new_folder(folder: Path, option: str) -> None:
    """Raise UserError if a path is a file, or a folder that is not empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{option} {folder} is not a new folder; give a new folder with {option}")


def write_folder(folder: Path, option: str, files: Iterable[tuple[str, bytes]]) -> tuple[int, int]:
    """Write (name, content) of files to a new folder, which does not exist before all files are written.

    Returns:
        The number of files and of bytes.

    Raises:
        UserError: the folder is not new or cannot be written.
    """
    check_new_folder(folder, option)
    target, sizes = folder.resolve(), []
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with writing(f"{option} {folder}", "folder"):
            for name, content in files:
                path = unfinished / name
                path.parent.mkdir(parents=True, exist_ok=True)
                sizes.append(path.write_bytes(content))
            unfinished.replace(target)
    finally:
        import shutil

        shutil.rmtree(unfinished, ignore_errors=True)
    return len(sizes), sum(sizes)


def new_folder(kind: str, out: Path | None = None) -> Path:
    """Return `out`, or a folder below results/ named by the current time. The folder has no files and may not exist
    yet.

    Raises:
        UserError: `out` is a file, or a folder with files.
    """
    folder = out or Path("results") / kind / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--results {folder} is not a folder; give a new folder")
    # A failed launch leaves empty folders behind.
    if any(path.is_file() for path in folder.rglob("*")):
        raise UserError(f"--results {folder} is not empty; give a new folder, so that only these launches are compared")
    return folder


# Printing.


def say_lines(lines: Iterable[str], indent: str = "    ") -> None:
    """Print lines, wrapped at spaces to the width of the screen. Columns are preserved only if all lines fit."""
    from distbench.show.terminal import width_here, wrap

    all_lines, width = list(lines), width_here()
    if max(map(len, all_lines), default=0) > width:
        all_lines = [part for line in all_lines for part in wrap(re.sub(r"(?<=\S) {2,}", "  ", line), width, indent)]
    say("\n".join(all_lines))


def say_files(files: Iterable[Path], form: str) -> None:
    """Print the written baselines."""
    paths = [str(file) for file in files]
    text = "\n".join(f"baseline: {path}" for path in paths) or "The baseline is up to date."
    say(json.dumps({"files": paths}, indent=1) if form == "json" else text)


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print lines without control characters of terminals and CI systems, with severities and verdicts in colour.

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
    """Lines wrapped at spaces if standard error is a terminal; unchanged in a log."""
    from distbench.show.terminal import width_of, wrap

    width = width_of(sys.stderr)
    if width is None or max(map(len, text.split("\n"))) <= width:
        return text
    return "\n".join(part for line in text.split("\n") for part in wrap(line, width, "  "))


def say_once(text: str) -> None:
    """Print a sentence on standard error, unless another rank of this launch on this host just printed the sentence.

    The printing rank binds an abstract socket of Linux, which closes with the process. On other systems every rank
    prints.
    """
    from distbench.launch.rendezvous import joined_ranks

    try:
        joined = joined_ranks(os.environ)
    except UserError:
        joined = None
    if joined is None or joined.world_size == 1:
        say(text, err=True)
        return
    import hashlib
    import socket

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
    """Options for the judged numbers in files of other tools."""

    launch_column: str | None = option(
        "--launch", metavar="COLUMN", help="Column with the launch. [a file is one launch]"
    )
    case_column: str | None = option("--case", metavar="COLUMN,...", help="Columns with the case, such as op,size.")
    value_column: str | None = option("--value", metavar="COLUMN", help="Column of numbers, or metric of the tool.")
    better: str | None = option("--better", type=click.Choice(("lower", "higher")), help="Better numbers. [lower]")
    pair_column: str | None = option(
        "--pair", metavar="COLUMN", help="Column with the pair, or 'file' for pairs of files of the same name."
    )
    unit: str | None = option("--unit", metavar="UNIT", help="Unit, or column with the unit. [of the column's name]")

    def columns(self) -> "NumberColumns":
        """The columns of the files."""
        from distbench.records.foreign_numbers import NumberColumns

        return NumberColumns(*(getattr(self, each.name) for each in fields(self)))


@dataclass(frozen=True)
class OutputOptions:
    """Formats in which a verdict is printed and written."""

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
        """Return formats and files, parsed from texts such as "junit=gate.xml". Raise UserError for other texts."""
        files = []
        for text in self.write_to:
            form, equals, path = text.partition("=")
            if not equals or form not in FORMS or not path:
                raise UserError(f"--write {text!r} is not FORMAT=FILE with a format of {', '.join(FORMS)}")
            files.append((form, Path(path)))
        return files

    def show(self, render: Callable[[str], str], quiet: bool = False) -> None:
        """Print and write the text of `render` for each chosen format. With `quiet`, no table is printed."""
        files = self.files()
        forms = [] if quiet and self.form == "table" else [self.form]
        for form in (*forms, *(["github"] if self.github and self.form != "github" else [])):
            # Annotations are commands to GitHub. Other formats must not contain such commands.
            (click.echo if form == "github" else say)(render(form))
        for form, path in files:
            write(path, render(form) + "\n")
        if self.github and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
            write(Path(summary), render("markdown") + "\n", "a")


@dataclass(frozen=True)
class VerdictOptions:
    """Options of a comparison. `gate` has all options, `ab` and `compare` have a subset."""

    tolerance: tuple[str, ...] = option(
        "--tolerance",
        default=(),
        multiple=True,
        metavar="[METRIC=]X",
        help="Largest slowdown that passes: 5%, 0.05, p10=3%. [5%]",
    )
    floor_us: float = option(
        "--floor-us", default=0.0, type=FiniteRange(0, MONTH_S * 1e6), metavar="US", help="Ignore smaller differences."
    )
    alpha: float = option(
        "--alpha",
        default=0.05,
        type=FiniteRange(0, 0.5, min_open=True),
        metavar="P",
        help="Probability of a false alarm per comparison, over all cases. [0.05]",
    )
    min_launches: int = option(
        "--min-launches",
        default=5,
        type=click.IntRange(2, MAX_LAUNCHES),
        show_default=True,
        help="Minimum number of launches per side for a verdict.",
    )
    dedicated: bool = option(
        "--dedicated",
        default=False,
        is_flag=True,
        help="Fail even without alternation. Use this on machines that no other program uses.",
    )
    allow_different: tuple[str, ...] = option(
        "--allow-different", default=(), multiple=True, metavar="FIELD", help="Compare even if this field differs."
    )
    strict: bool = option("--strict", default=False, is_flag=True, help="Exit with 3 if a case is inconclusive.")

    def terms(self) -> "Options":
        """Return the options of the comparison. Raise UserError if a tolerance or a field is not valid."""
        from distbench.judge.paired_launches import check_allowed
        from distbench.statistics.verdicts import Options

        return Options(
            tolerances=tolerances_of(self.tolerance),
            allowed=check_allowed(self.allow_different),
            floor_s=self.floor_us * 1e-6,
            alpha=self.alpha,
            min_launches=self.min_launches,
            dedicated=self.dedicated,
        )


def tolerances_of(texts: Iterable[str]) -> dict[str, float]:
    """Map each metric to a share, from `["5%", "p10=0.03"]`; a text without a metric applies to all other metrics.

    Raises:
        UserError: a metric is unknown, or a text is not a share.
    """
    from distbench.statistics.verdicts import METRICS, TOLERANCE

    common, by_metric = TOLERANCE, {}
    for text in texts:
        metric, equals, value = text.rpartition("=")
        if not equals:
            common = share_of(value)
        elif metric in METRICS:
            by_metric[metric] = share_of(value)
        else:
            raise UserError(f"--tolerance {text!r}: {metric!r} is not a metric ({nearest(metric, METRICS)})")
    return {metric: by_metric.get(metric, common) for metric in METRICS}


def share_of(text: str) -> float:
    """Convert `5%` and `0.05` to 0.05.

    Raises:
        UserError: the text is not a number, or is negative, or is a bare number of 1 or more, which is ambiguous.
    """
    number, is_percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if is_percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < (100 if is_percent else 1):
        raise UserError(f"--tolerance {text!r} is not a share; write 5% or 0.05 (150% for one and a half)")
    return value
