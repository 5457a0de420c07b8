"""`report --paths` and `--diff`: traced steps to tables, a timeline and a trace file, and one held against another."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.render.blocks import Block, Lines, markdown_of, text_of
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    from distbench.traces.records import Trace


def render_paths(
    named: tuple[Path, ...],
    out: Path,
    form: str,
    plots: Path | None = None,
    page: Path | None = None,
    chrome: Path | None = None,
    by: tuple[str, ...] = (),
) -> tuple[str, list[str]]:
    """(which path costs what in the traced steps of some runs, sentences for beside it).

    Args:
        named: run files and folders, each with or without `::PART` of a case's id; empty for the latest run.
        out: the results folder.
        form: one of FORMS; "csv" and "json" give one row a collective, traced step and rank.
        plots: folder for each trace's timeline, or None.
        page: HTML file for the whole report on these runs, paths and timelines included, or None.
        chrome: file for one trace as Chrome's trace events, or None.
        by: columns of the rows to sum by, instead of the usual tables and rows; empty for these.

    Raises:
        UserError: nothing to report, no trace, an unknown column, several where one is needed, or a file that
            cannot be written.
    """
    from distbench.render.data_text import data_text
    from distbench.report import write_page_of
    from distbench.traces.path_tables import grouped_table, trace_blocks
    from distbench.traces.select import chosen
    from distbench.traces.trace_frame import frame_of_traces

    found = chosen(named, out)
    traces = found.traces
    data = frame_of_traces(traces, by)
    beside = [*found.warnings, *([_write_chrome(chrome, traces)] if chrome else [])]
    written = _draw(traces, plots) if plots else []
    beside += [write_page_of(page, found.runs)] if page else []
    if form in ("csv", "json"):
        beside += [*found.failed, *(f"plot written: {path}" for path in written)]
        return data_text(data, form), beside
    blocks: list[Block] = []
    for trace in traces:
        blocks += [grouped_table(trace, by)] if by else trace_blocks(trace)
    blocks += [Lines(tuple(found.failed))] if found.failed else []
    if written:
        blocks.append(Lines((f"plots written to {written[0].parent}:", *(f"  {path.name}" for path in written))))
    return _text(blocks, form), beside


def render_difference(one: Path, other: Path, form: str) -> tuple[str, list[str]]:
    """(how one traced step differs from another by path, sentences for beside it).

    Args:
        one: A, `RUN` or `RUN::PART`: what is looked at.
        other: B, the same: what it is held against.
        form: one of FORMS; "csv" and "json" give one row a path.

    Raises:
        UserError: a side has no trace, or several.
    """
    from distbench.render.data_text import data_text
    from distbench.traces.diff import difference
    from distbench.traces.diff_text import comparison_blocks
    from distbench.traces.select import one_trace

    (one_side, warnings), (other_side, other_warnings) = one_trace(one), one_trace(other)
    beside = [*warnings, *other_warnings]
    if form in ("csv", "json"):
        return data_text(difference(one_side, other_side), form), beside
    return _text(comparison_blocks(one_side, other_side), form), beside


def _text(blocks: Sequence[Block], form: str) -> str:
    return (text_of if form == "table" else markdown_of)(blocks)


def _write_chrome(path: Path, traces: Sequence["Trace"]) -> str:
    from distbench.traces.chrome import write_chrome

    if len(traces) > 1:
        example = f"{traces[0].run.path}::{traces[0].case_id}"
        raise UserError(
            f"--chrome takes one trace, here are {len(traces)}; give RUN::PART of a case's id, as {example}"
        )
    return write_chrome(path, traces[0])


def _draw(traces: Sequence["Trace"], folder: Path) -> list[Path]:
    from distbench.traces.timeline import draw_timelines

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return draw_timelines(traces, folder)
    except OSError as error:
        raise UserError(f"plots cannot be written to {folder} ({error.strerror}); give a writable folder") from error


__all__ = ["render_difference", "render_paths"]
