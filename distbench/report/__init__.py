"""What a person reads of run files: tables, Markdown, CSV, JSON and plots. Only `render` puts them together."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench.results import Run
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from distbench.report.layout import Block

FORMS = ("table", "markdown", "csv", "json")


@dataclass
class Rendered:
    """A report.

    Args:
        text: what to print.
        warnings: sentences about what was left out, for beside the report.
    """

    text: str
    warnings: list[str] = field(default_factory=list)


def render(runs: tuple[Path, ...], out: Path, form: str, plots: Path | None, group_by: tuple[str, ...]) -> Rendered:
    """The report on some runs.

    Args:
        runs: run files and folders of them; empty for every scenario of the latest `distbench run` under `out`.
        out: the results folder.
        form: one of FORMS; "csv" and "json" give every column of the frame, one row (record) a case.
        plots: folder to draw plots in as well, or None.
        group_by: columns to summarise cases by instead of listing them; empty to list them.

    Raises:
        UserError: nothing to report, a file that is no run file, an unknown form or column, or a folder for plots that
            cannot be written.
    """
    from distbench.report.collect import collect
    from distbench.report.frame import frame_of
    from distbench.report.groups import grouped

    if form not in FORMS:
        raise UserError(f"format {form!r} is unknown; use {', '.join(FORMS)}")
    with _no_garbage_collection():
        found, warnings = collect(runs, out)
        whole = frame_of(found)
    frames = _by_run(whole, found)
    groups = grouped(whole, group_by) if group_by else None
    written = _draw(found, frames, plots) if plots else []
    if form in ("csv", "json"):
        # Standard output is data here, so the list of plots goes beside it.
        text = _data_text(whole if groups is None else groups, form)
        return Rendered(text, [*warnings, *(f"plot written: {path}" for path in written)])
    return Rendered(_page(found, frames, groups, written, form), warnings)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Records hold no cycles; looking for some again and again as they come in doubles the time of a large report."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _by_run(whole: "pd.DataFrame", runs: Sequence[Run]) -> list["pd.DataFrame"]:
    """The frame cut where one run's cases end and the next one's begin."""
    frames, start = [], 0
    for run in runs:
        frames.append(whole.iloc[start : start + len(run.cases)])
        start += len(run.cases)
    return frames


def _draw(runs: Sequence[Run], frames: Sequence["pd.DataFrame"], folder: Path) -> list[Path]:
    from distbench.report.plots import draw_all

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return draw_all(runs, frames, folder)
    except OSError as error:
        raise UserError(f"plots cannot be written to {folder} ({error.strerror}); give a writable folder") from error


def _data_text(frame: "pd.DataFrame", form: str) -> str:
    import json

    if form == "csv":
        return str(frame.to_csv(index=False)).rstrip("\n")
    if frame.empty:
        return "[]"
    # A name's own % signs must survive the filling in of values.
    names = [json.dumps(str(name)).replace("%", "%%") for name in frame.columns]
    record = "{" + ", ".join(f"{name}: %s" for name in names) + "}"
    columns = [_json_cells(frame[name]) for name in frame.columns]
    return "[\n" + ",\n".join(record % row for row in zip(*columns, strict=True)) + "\n]"


def _json_cells(column: "pd.Series[Any]") -> list[str]:
    """Each value as JSON; null for whatever JSON has no word for. By column, which is faster."""
    import json

    import numpy as np

    missing = column.isna() | column.isin([np.inf, -np.inf]) if column.dtype.kind == "f" else column.isna()
    values = column.to_numpy(object, copy=True)
    values[missing.to_numpy(bool)] = None
    # A line break between values is safe to cut at, for within one JSON writes it as backslash n.
    return json.dumps(values.tolist(), separators=("\n", ":"), allow_nan=False)[1:-1].split("\n")


def _page(
    runs: Sequence[Run],
    frames: Sequence["pd.DataFrame"],
    groups: "pd.DataFrame | None",
    written: Sequence[Path],
    form: str,
) -> str:
    from distbench.report.groups import table
    from distbench.report.layout import Lines, markdown_of, text_of
    from distbench.report.overview import overview

    blocks: list[Block] = [*overview(runs)]
    if groups is not None:
        blocks.append(table(groups))
    else:
        for run, frame in zip(runs, frames, strict=True):
            blocks += _section(run, frame)
    if written:
        # The folder apart from the names: a whole path may be longer than a line.
        blocks.append(Lines((f"plots written to {written[0].parent}:", *(f"  {path.name}" for path in written))))
    return (text_of if form == "table" else markdown_of)(blocks)


def _section(run: Run, frame: "pd.DataFrame") -> list["Block"]:
    from distbench.report import collectives, redistributions, steps
    from distbench.report.layout import Heading, Lines
    from distbench.report.overview import scenario_name, spent_line

    spent = spent_line(run)
    return [
        Heading(scenario_name(run)),
        Lines((f"run file: {_short(run.path)}",)),
        *collectives.tables(frame),
        *steps.tables(frame),
        *redistributions.tables(frame),
        *([Lines((spent,))] if spent else []),
    ]


def _short(path: Path) -> Path:
    """Relative to the working folder, where it lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


__all__ = ["FORMS", "Rendered", "render"]
