"""`report --paths` and `--diff`: which trace is meant, its tables, timeline and trace file, one step against
another."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distbench.records.dataframe import frame_of
from distbench.records.results_folder import collect
from distbench.records.run_file import Run
from distbench.report.overview import Contents
from distbench.report.page import page_blocks, traced_blocks, write_page
from distbench.report.report_formats import DATA_FORMS, Rendered, rendered
from distbench.report.trace_diff import comparison_blocks, difference
from distbench.report.trace_rows import Trace, frame_of_traces, traces_of
from distbench.report.trace_tables import grouped_table, trace_blocks
from distbench.report.trace_timeline import timeline_figures, write_chrome
from distbench.show.blocks import Block, Heading, Lines
from distbench.show.html import PageBlock, Verdict
from distbench.show.plots import draw
from distbench.spec.errors import UserError

# Which trace is meant: `RUN`, or `RUN::PART` with a part of the case's id.

SEPARATOR = "::"
HOW_TO_TRACE = "trace a step with `distbench run SCENARIO --trace-paths`"


@dataclass(frozen=True)
class SelectedTraces:
    """The runs that were named, and their traces without those that no PART means."""

    runs: list[Run]
    traces: list[Trace]
    is_part: bool  # a PART was named
    warnings: list[str]  # on files and lines that were left out
    failed: list[str]  # one for each trace that failed or cannot be read


def chosen(targets: Sequence[Path], out: Path | None) -> SelectedTraces:
    """The traces of run files and folders, each with or without `::PART`; of the latest run under `out` for none."""
    paths_and_parts = [_split(target) for target in targets]
    runs, warnings = collect(tuple(path for path, _ in paths_and_parts), out)
    traces, failed = traces_of(runs)
    if not traces:
        of = ", ".join(map(str, targets)) or f"the latest run under {out}"
        why = f" ({'; '.join(failed)})" if failed else ""
        raise UserError(f"{of} holds no trace of a step{why}; {HOW_TO_TRACE}")
    for path, part in paths_and_parts:
        if not any(_is_meant(trace, path, part) for trace in traces) and part:
            raise UserError(f"no traced case of {path} has {part!r} in its id; {_there_are(traces)}")
    kept = [
        trace
        for trace in traces
        if not paths_and_parts or any(_is_meant(trace, path, part) for path, part in paths_and_parts)
    ]
    return SelectedTraces(runs, kept, any(part for _, part in paths_and_parts), warnings, failed)


def selected_trace(given: Path) -> tuple[Trace, list[str]]:
    """The one trace that `RUN` or `RUN::PART` names, and sentences on what was left out.

    A PART that is the whole end of one case's id means that case, whatever else holds it.
    """
    selected = chosen((given,), None)
    path, part = _split(given)
    traces = [trace for trace in selected.traces if part and trace.case_id.endswith(f"/{part}")] or selected.traces
    if len(traces) > 1:
        how = f"give {path}{SEPARATOR}PART with a part of one's case id"
        raise UserError(f"{given} holds {len(traces)} traces; {how}; {_there_are(traces)}")
    return traces[0], [*selected.warnings, *selected.failed]


def _split(given: Path) -> tuple[Path, str]:
    """(the run file or folder, the part of a case's id after `::`; empty for none)."""
    if given.exists():
        return given, ""
    path, _, part = str(given).partition(SEPARATOR)
    return Path(path), part


def _is_meant(trace: Trace, path: Path, part: str) -> bool:
    is_of_run = trace.run.path.resolve().is_relative_to(path.resolve()) or trace.run.scenario == str(path)
    return is_of_run and part in trace.case_id


def _there_are(traces: Sequence[Trace]) -> str:
    case_ids = ", ".join(trace.case_id for trace in traces[:8])
    return f"there are: {case_ids}" + (", ..." if len(traces) > 8 else "")


def render_paths(
    targets: tuple[Path, ...],
    out: Path,
    form: str,
    plots: Path | None = None,
    page: Path | None = None,
    chrome: Path | None = None,
    by: tuple[str, ...] = (),
) -> Rendered:
    """Which path costs what in the traced steps of some runs.

    Args:
        targets: run files and folders, each with or without `::PART` of a case's id; empty for the latest run.
        form: one of FORMS; "csv" and "json" give one row a collective, traced step and rank.
        plots: folder for each trace's timeline.
        page: HTML file for the whole report on these runs, paths and timelines included; where a PART is named, for
            the paths and timelines of what it means alone.
        chrome: file for one trace as Chrome's trace events.
        by: columns of the rows to sum by, instead of the usual tables and rows; empty for these.
    """
    selected = chosen(targets, out)
    traces = selected.traces
    data = frame_of_traces(traces, by)
    messages = [_write_chrome(chrome, traces)] if chrome else []
    figure_files = draw(timeline_figures(traces), plots) if plots else []
    messages += [write_page(page, _page(selected))] if page else []

    def blocks() -> list[Block]:
        shown_blocks = [
            block for trace in traces for block in ([grouped_table(trace, by)] if by else trace_blocks(trace))
        ]
        return [*shown_blocks, Lines(tuple(selected.failed))]

    if form in DATA_FORMS:
        messages += selected.failed
    return rendered(form, lambda: data, blocks, selected.warnings, figure_files, messages)


def _page(selected: SelectedTraces) -> Iterable[PageBlock]:
    if not selected.is_part:
        return page_blocks(Contents.of(selected.runs, frame_of(selected.runs)))
    title = f"distbench: traced steps of {', '.join(dict.fromkeys(trace.run.scenario for trace in selected.traces))}"
    return [Heading(title, 1), *(block for trace in selected.traces for block in traced_blocks(trace))]


def render_difference(target: Path, other_target: Path, form: str, page: Path | None = None) -> Rendered:
    """How one traced step (`RUN` or `RUN::PART`) differs from another; "csv" and "json" give one row a path.

    `page` is an HTML file for the same, and for what each of the two steps spends.
    """
    (one_side, warnings), (other_side, other_warnings) = selected_trace(target), selected_trace(other_target)

    def on_page() -> Iterator[PageBlock]:
        heading, verdict, *more_blocks = comparison_blocks(one_side, other_side)
        yield from (heading, Verdict(verdict.texts) if isinstance(verdict, Lines) else verdict, *more_blocks)
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
