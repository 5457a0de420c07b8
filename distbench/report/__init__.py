"""What a person reads of run files: tables, Markdown, CSV, JSON, plots and a page. Only `render` puts them together."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.runs.run_file import Run
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from distbench.laboratory.study import Study
    from distbench.render.blocks import Block

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


def render(
    runs: tuple[Path, ...],
    out: Path,
    form: str,
    plots: Path | None,
    group_by: tuple[str, ...],
    page: Path | None = None,
    reproducers: Path | None = None,
) -> Rendered:
    """The report on some runs.

    Args:
        runs: run files and folders of them; empty for every scenario of the latest `distbench run` under `out`.
        out: the results folder.
        form: one of FORMS; "csv" and "json" give every column of the frame, one row (record) a case.
        plots: folder to draw plots in as well, or None.
        group_by: columns to summarise cases by instead of listing them; empty to list them.
        page: HTML file to write the same report to, with its figures, or None.
        reproducers: folder for one script for each cause of wrong or broken redistributions, or None.

    Raises:
        UserError: nothing to report, a file that is no run file, an unknown form or column, or a file or folder that
            cannot be written.
    """
    from distbench.laboratory.study import studies_of
    from distbench.render.data_text import data_text
    from distbench.report.groups import grouped
    from distbench.runs.find import collect
    from distbench.runs.frame import frame_of

    if form not in FORMS:
        raise UserError(f"format {form!r} is unknown; use {', '.join(FORMS)}")
    with _no_garbage_collection():
        found, warnings = collect(runs, out)
        whole = frame_of(found)
    frames = _by_run(whole, found)
    groups = grouped(whole, group_by) if group_by else None
    is_told = form not in ("csv", "json") and groups is None
    studies = studies_of(found, frames) if is_told or plots or page or reproducers else []
    written = _draw(found, frames, studies, plots) if plots else []
    beside: list[str] = []
    if page:
        beside.append(_write_page(page, found, frames, studies))
    if reproducers:
        beside += _write_reproducers(reproducers, studies)
    if form in ("csv", "json"):
        # Standard output is data here, so the list of plots goes beside it.
        text = data_text(whole if groups is None else groups, form)
        return Rendered(text, [*warnings, *(f"plot written: {path}" for path in written), *beside])
    return Rendered(_report_text(found, frames, studies, groups, written, form), [*warnings, *beside])


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


def _draw(
    runs: Sequence[Run], frames: Sequence["pd.DataFrame"], studies: Sequence["Study"], folder: Path
) -> list[Path]:
    from distbench.report.plots import draw_all

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return draw_all(runs, frames, studies, folder)
    except OSError as error:
        raise UserError(f"plots cannot be written to {folder} ({error.strerror}); give a writable folder") from error


def _report_text(
    runs: Sequence[Run],
    frames: Sequence["pd.DataFrame"],
    studies: Sequence["Study"],
    groups: "pd.DataFrame | None",
    written: Sequence[Path],
    form: str,
) -> str:
    from distbench.render.blocks import Lines, markdown_of, text_of
    from distbench.report.groups import table
    from distbench.report.overview import overview
    from distbench.report.sections import report_blocks

    blocks: list[Block] = (
        [*overview(runs), table(groups)] if groups is not None else report_blocks(runs, frames, studies)
    )
    if written:
        # The folder apart from the names: a whole path may be longer than a line.
        blocks.append(Lines((f"plots written to {written[0].parent}:", *(f"  {path.name}" for path in written))))
    return (text_of if form == "table" else markdown_of)(blocks)


def write_page_of(page: Path, runs: Sequence[Run]) -> str:
    """Write the page on some runs; a sentence that says so.

    Raises:
        UserError: it cannot be written.
    """
    from distbench.laboratory.study import studies_of
    from distbench.runs.frame import frame_of

    frames = _by_run(frame_of(runs), runs)
    return _write_page(page, runs, frames, studies_of(runs, frames))


def _write_page(page: Path, runs: Sequence[Run], frames: Sequence["pd.DataFrame"], studies: Sequence["Study"]) -> str:
    from distbench.render.html import page_of
    from distbench.render.plot_style import styled
    from distbench.report.sections import page_blocks

    with styled():
        blocks, title = page_blocks(runs, frames, studies)
        text = page_of(title, blocks)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--page {page} cannot be written ({error.strerror}); give another file") from error
    return f"page written: {page}"


def _write_reproducers(folder: Path, studies: Sequence["Study"]) -> list[str]:
    from distbench.laboratory.reproducer import write_reproducers

    lines = []
    for study in studies:
        written, left_out = write_reproducers(study.failures, study.versions, folder)
        lines += [*(f"reproducer written: {path}" for path in written), *left_out]
    return lines or ["no reproducer written: no redistribution of these runs is wrong or broken"]


__all__ = ["FORMS", "Rendered", "render", "write_page_of"]
