"""`report --paths` and `--diff`: traced steps to tables, a timeline and a trace file, and one held against another."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from distbench.render.blocks import Block, Heading, Lines
from distbench.render.html import PageBlock, Verdict
from distbench.render.plot_style import draw
from distbench.report.contents import Contents
from distbench.report.output import DATA_FORMS, Rendered, rendered
from distbench.report.page import page_blocks, traced_blocks, write_page
from distbench.runs.frame import frame_of
from distbench.spec.errors import UserError
from distbench.traces.chrome import write_chrome
from distbench.traces.costs import frame_of_traces
from distbench.traces.diff import difference
from distbench.traces.diff_text import comparison_blocks
from distbench.traces.path_tables import grouped_table, trace_blocks
from distbench.traces.records import Trace
from distbench.traces.select import Chosen, chosen, one_trace
from distbench.traces.timeline import timeline_figures


def render_paths(
    named: tuple[Path, ...],
    out: Path,
    form: str,
    plots: Path | None = None,
    page: Path | None = None,
    chrome: Path | None = None,
    by: tuple[str, ...] = (),
) -> Rendered:
    """Which path costs what in the traced steps of some runs.

    Args:
        named: run files and folders, each with or without `::PART` of a case's id; empty for the latest run.
        form: one of FORMS; "csv" and "json" give one row a collective, traced step and rank.
        plots: folder for each trace's timeline.
        page: HTML file for the whole report on these runs, paths and timelines included; where a PART is named, for
            the paths and timelines of what it means alone.
        chrome: file for one trace as Chrome's trace events.
        by: columns of the rows to sum by, instead of the usual tables and rows; empty for these.
    """
    found = chosen(named, out)
    traces = found.traces
    data = frame_of_traces(traces, by)
    messages = [_write_chrome(chrome, traces)] if chrome else []
    written = draw(timeline_figures(traces), plots) if plots else []
    messages += [write_page(page, _page(found))] if page else []

    def blocks() -> list[Block]:
        shown = [block for trace in traces for block in ([grouped_table(trace, by)] if by else trace_blocks(trace))]
        return [*shown, Lines(tuple(found.failed))]

    if form in DATA_FORMS:
        messages += found.failed
    return rendered(form, lambda: data, blocks, found.warnings, written, messages)


def _page(found: Chosen) -> Iterable[PageBlock]:
    if not found.is_part:
        return page_blocks(Contents.of(found.runs, frame_of(found.runs)))
    title = f"distbench: traced steps of {', '.join(dict.fromkeys(trace.run.scenario for trace in found.traces))}"
    return [Heading(title, 1), *(block for trace in found.traces for block in traced_blocks(trace))]


def render_difference(one: Path, other: Path, form: str, page: Path | None = None) -> Rendered:
    """How one traced step (`RUN` or `RUN::PART`) differs from another; "csv" and "json" give one row a path.

    `page` is an HTML file for the same, and for what each of the two steps spends.
    """
    (one_side, warnings), (other_side, other_warnings) = one_trace(one), one_trace(other)

    def on_page() -> Iterator[PageBlock]:
        heading, verdict, *others = comparison_blocks(one_side, other_side)
        yield from (heading, Verdict(verdict.texts) if isinstance(verdict, Lines) else verdict, *others)
        yield from (block for side in (one_side, other_side) for block in traced_blocks(side))

    return rendered(
        form,
        lambda: difference(one_side, other_side),
        lambda: comparison_blocks(one_side, other_side),
        [*warnings, *other_warnings],
        messages=[write_page(page, on_page())] if page else [],
    )


def _write_chrome(path: Path, traces: Sequence[Trace]) -> str:
    if len(traces) > 1:
        example = f"{traces[0].run.path}::{traces[0].case_id}"
        how = f"give RUN::PART of a case's id, as {example}"
        raise UserError(f"--chrome takes one trace, here are {len(traces)}; {how}")
    return write_chrome(path, traces[0])
