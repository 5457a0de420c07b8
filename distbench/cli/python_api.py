"""The commands for Python and notebooks: `run`, `load` and `compare`, with the commands' options as keywords.

Each call runs the command, so that options, defaults of [tool.distbench], messages and results are the same.
"""

import contextlib
import inspect
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distbench.cli import compare as compare_command
from distbench.cli import report as report_command
from distbench.cli import run as run_command
from distbench.cli.main import defaults_for, main, new_key
from distbench.cli.options import VerdictOptions
from distbench.spec.errors import INTERRUPTED, UserError

if TYPE_CHECKING:
    import pandas as pd

    from distbench.judge.compare_runs import SideBySide
    from distbench.records.run_file import Run


class TextResult:
    """A text that is printed on a terminal, and shown as tables in a notebook.

    Args:
        render: function from the format, "table" or "markdown", to the text.
    """

    def __init__(self, render: Callable[[str], str]) -> None:
        self._render = render
        self._text = render("table")

    @cached_property
    def markdown(self) -> str:
        """The text as GitHub Markdown."""
        return self._render("markdown")

    def __repr__(self) -> str:
        return self._text

    def html(self) -> str:
        """Return HTML tables, styled by the notebook."""
        from markdown_it import MarkdownIt

        return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(self.markdown))

    def _repr_html_(self) -> str:
        return self.html()


class Report(TextResult):
    """The report on some runs, which is printed as text, and shown as tables in a notebook."""


class ComparedRuns(TextResult):
    """The comparison of two sides.

    Args:
        frame: one row per case; its columns are in docs/run-file.md.
    """

    def __init__(self, comparison: "SideBySide") -> None:
        super().__init__(lambda form: compare_command.text_of(comparison, form))
        self.frame: pd.DataFrame = comparison.frame


class Runs(Sequence["Runs"]):
    """Measured or loaded runs, one per scenario and launch. An item is also a Runs object.

    Args:
        paths: their run files.
        exit_code: 0 if every case is ok or skipped, else 1.
    """

    def __init__(self, paths: Iterable[Path], exit_code: int = 0) -> None:
        self.paths = [Path(path) for path in paths]
        self.exit_code = exit_code

    @cached_property
    def _read(self) -> "list[Run]":
        from distbench.records.results_folder import collect

        return collect(tuple(self.paths), None)[0]

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """One row per case, with all columns of docs/run-file.md."""
        from distbench.records.dataframe import frame_of

        return frame_of(self._read)

    @property
    def scenarios(self) -> list[str]:
        """The scenario of each run."""
        return [run.scenario for run in self._read]

    def report(self, **options: Any) -> Report:
        """Return the report on these runs. `options` are options of `distbench report`, such as
        `page="report.html"`."""
        words = [str(path) for path in self.paths]
        command = report_command.report
        files = {name for option in command.params if isinstance(option.type, click.Path) for name in _keywords(option)}
        without_files = {name: value for name, value in options.items() if name not in files}

        def render(form: str) -> str:
            """Return the report's text. Only the first call writes files and prints warnings."""
            is_first = form == "table"
            with (
                contextlib.redirect_stdout(io.StringIO()) as printed,
                contextlib.nullcontext() if is_first else contextlib.redirect_stderr(io.StringIO()),
            ):
                _called(command, words, {**(options if is_first else without_files), "format": form})
            return printed.getvalue().rstrip("\n")

        return Report(render)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: Any) -> "Runs":
        """One run by its number or scenario, or a slice."""
        if isinstance(key, str):
            chosen = [run.path for run in self._read if run.scenario == key]
            if not chosen:
                raise KeyError(f"no run of {key!r}; use one of {', '.join(self.scenarios)}")
        else:
            chosen = self.paths[key] if isinstance(key, slice) else [self.paths[key]]
        return Runs(chosen, self.exit_code)

    def __repr__(self) -> str:
        return f"Runs({', '.join(map(str, self.paths))})"

    def _repr_html_(self) -> str:
        return self.report().html()


def run(*scenarios: str, **options: Any) -> Runs:
    """Measure scenarios as `distbench run` does.

    Args:
        scenarios: names, files, or file::name.
        options: options of `distbench run` by their long names with `_` for `-`, such as `quick=True`, `mesh={"tp":
        2}`, `set={"hidden": [1024, 4096]}`, `budget="30s"`, `results="results"`.

    Raises:
        UserError: the caller can fix the error, for which `distbench run` exits with 2.
        KeyboardInterrupt: the run was interrupted. The run files contain the finished cases.
    """
    exit_code, context = _called(run_command.run, scenarios, options)
    ending = run_command.ending_of(context)
    paths = [Path(path) for path in ending.run_files if Path(path).exists()]
    if exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if exit_code not in (0, 1):
        raise UserError(ending.message or f"distbench run ended with {exit_code}")
    return Runs(paths, exit_code)


def load(*paths: str | Path) -> Runs:
    """Return runs from run files and folders of run files.

    Raises:
        UserError: no path is given, or a path cannot be read.
    """
    from distbench.records.results_folder import collect

    if not paths:
        raise UserError("load needs a run file or a folder of run files, such as results")
    return Runs(run.path for run in collect(tuple(map(Path, paths)), None)[0])


def compare(a: "Side", b: "Side", **options: Any) -> ComparedRuns:
    """Compare two sides as `distbench compare` does.

    Args:
        a: the baseline, as a run file or folder, a sequence of paths, or Runs. b: the candidate.
        options: options of `distbench compare` by their long names with `_` for `-`.

    Raises:
        UserError: a path cannot be read, or the sides have no comparable case.
    """
    words = [*map(str, _paths_of(a)), "vs", *map(str, _paths_of(b))]
    from distbench.records.results_folder import named_runs

    params = _context(compare_command.compare, words, options).params
    left, right = (named_runs(_paths_of(side), params["out"]) for side in (a, b))
    verdict = VerdictOptions(min_launches=params["min_launches"], allow_different=params["allow_different"])
    return ComparedRuns(compare_command.compared(left, right, verdict, params["chosen"]))


Side = str | Path | Runs | Sequence[str | Path]


def _paths_of(side: Side) -> list[Path]:
    if isinstance(side, Runs):
        return side.paths
    return [Path(side)] if isinstance(side, str | Path) else [Path(path) for path in side]


def _called(command: click.Command, words: Sequence[str], options: Mapping[str, Any]) -> tuple[int, click.Context]:
    """Run a command; return its exit code and its context, with the command's results in `meta`."""
    context = _context(command, words, options)
    try:
        with context:
            command.invoke(context)
    except (SystemExit, click.exceptions.Exit) as ended:
        code = ended.exit_code if isinstance(ended, click.exceptions.Exit) else ended.code
        return (code if isinstance(code, int) else 0), context
    return 0, context


def _context(command: click.Command, words: Sequence[str], options: Mapping[str, Any]) -> click.Context:
    """The context with words and options, which are parsed and checked as on the command line."""
    name = str(command.name)
    argv = [*_option_words(command, options), "--", *words]
    try:
        return command.make_context(name, argv, default_map=defaults_for(main).of_commands.get(name))
    except click.UsageError as error:
        raise UserError(f"{name}: {error.format_message()}") from error


def _option_words(command: click.Command, options: Mapping[str, Any]) -> Iterator[str]:
    """Options of the command line from keywords. An option that may be repeated is repeated per item of a mapping or
    list."""
    by_keyword = {
        name: option for option in command.params if isinstance(option, click.Option) for name in _keywords(option)
    }
    for given_name, value in options.items():
        name = new_key(given_name, str(command.name))
        if (option := by_keyword.get(name)) is None:
            raise UserError(f"{name!r} is not an option of {command.name}; use one of {', '.join(sorted(by_keyword))}")
        word = max(option.opts, key=len)
        values = [f"{key}={_text(item)}" for key, item in value.items()] if isinstance(value, Mapping) else value
        if option.is_flag:
            yield from [word] if value else []
        elif value is not None:
            for item in values if option.multiple and isinstance(values, list | tuple) else [values]:
                yield from (word, *map(str, item)) if option.nargs > 1 else (word, _text(item))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _keywords(option: click.Parameter) -> list[str]:
    """An option's names as keywords, the longest first."""
    if not isinstance(option, click.Option) or option.hidden:
        return []
    return [name.lstrip("-").replace("-", "_") for name in sorted(option.opts, key=len, reverse=True)]


def _show_options(function: Callable[..., Any], command: click.Command) -> None:
    """Make help() and notebooks list the command's options as keywords instead of `**options`."""
    kinds = inspect.Parameter
    *positional, _ = inspect.signature(function).parameters.values()
    visible = [option for option in command.params if not getattr(option, "hidden", False)]
    names = [name for option in visible for name in _keywords(option)[:1]]
    keywords = [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in names]
    function.__signature__ = inspect.Signature([*positional, *keywords])  # type: ignore[attr-defined]


_show_options(run, run_command.run)
_show_options(compare, compare_command.compare)
