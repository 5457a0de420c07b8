"""Reports on run files and on traced steps: tables, Markdown, CSV, JSON, plots and a page."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distbench.records.dataframe import PASSES, any_characters, frame_of, records_of
from distbench.records.results_folder import collect, is_scenario_name, with_cases
from distbench.records.run_file import Run
from distbench.report.page import page_blocks, traced_blocks, write_page
from distbench.report.reproducer import write_reproducers
from distbench.report.sections import Contents, ending, figures_in, overview, report_blocks, summary
from distbench.report.trace_rows import Trace, frame_of_traces, traces_of
from distbench.report.trace_tables import comparison_blocks, difference, grouped_table, trace_blocks
from distbench.report.trace_timeline import timeline_figures, write_chrome
from distbench.show.blocks import Block, Heading, Lines, Table, TableColumns, capped, key_columns, table_of
from distbench.show.html import PageBlock, Verdict
from distbench.show.plots import draw
from distbench.show.terminal import shown, text_of
from distbench.show.units import time_text
from distbench.spec.errors import UserError, nearest
from distbench.spec.file_io import no_garbage_collection
from distbench.spec.printable_text import cell
from distbench.statistics.intervals import geometric_mean

if TYPE_CHECKING:
    import pandas as pd

DATA_FORMS = ("csv", "json")
FORMS = ("table", "markdown", *DATA_FORMS)
MAX_ROWS = 200
STATISTICS = ("num_cases", "num_ok", "geometric_mean_s", "min_s", "max_s")


class Rendered(NamedTuple):
    """The text for standard output, and sentences for standard error on ignored and written files."""

    text: str
    warnings: list[str]


def render(
    runs: tuple[Path, ...],
    out: Path,
    form: str,
    plots: Path | None,
    group_by: tuple[str, ...],
    page: Path | None = None,
    reproducers: Path | None = None,
    full: bool = False,
    command: str = "distbench report",
    cases: str = "",
) -> Rendered:
    """The report on some runs.

    Args:
        runs: targets of `collect`, or empty for every scenario of the latest `distbench run` under `out`.
        form: one of FORMS. "csv" and "json" have every column of the frame, with one row per case. "table" is the
        summary, or the tables of scenarios in `runs`.
        plots: folder for plots.
        group_by: columns by which cases are summarised, or empty for a list of cases.
        page: HTML file for the report with figures.
        reproducers: folder for one script per cause of wrong or broken redistributions.
        full: show every table of every scenario in "table". The other forms are always full.
        command: the command that shows these runs again, with which the summary's next commands begin.
        cases: an expression of -k, or "" for every case.
    """
    if form not in FORMS:
        raise UserError(f"format {form!r} is unknown; use {', '.join(FORMS)}")
    with no_garbage_collection():
        all_runs, warnings = collect(runs, out)
        all_runs = with_cases(all_runs, cases)
        frame = frame_of(all_runs)
    groups = grouped(frame, group_by) if group_by else None
    is_data_alone = (groups is not None or form in DATA_FORMS) and not (plots or page or reproducers)
    contents = Contents.of(all_runs, frame, with_studies=not is_data_alone)
    figure_files = draw(figures_in(contents), plots) if plots else []
    messages = [write_page(page, page_blocks(contents))] if page else []
    if reproducers:
        written = [
            message
            for study in contents.studies
            for message in write_reproducers(study.failures, study.versions, reproducers)
        ]
        messages += written or ["no reproducer written: no redistribution of these runs is wrong or broken"]

    def blocks() -> list[Block]:
        if groups is not None:
            plain = Contents.of(all_runs, frame, with_studies=False)
            return [*overview(plain.reported), _groups_table(groups), *ending(plain)]
        if full or form != "table" or any(is_scenario_name(name) for name in runs):
            return report_blocks(contents, full or form != "table")
        return summary(contents, command)

    return _rendered(form, frame if groups is None else groups, blocks, warnings, figure_files, messages)


def summary_of(run_files: Sequence[Path], report: str) -> str:
    """The summary on some run files at the end of `distbench run`. `report` is the command that shows the report."""
    with no_garbage_collection():
        runs, _ = collect(tuple(run_files), None)
        contents = Contents.of(runs, frame_of(runs))
    return text_of(summary(contents, report))


def grouped(frame: "pd.DataFrame", group_by: tuple[str, ...]) -> "pd.DataFrame":
    """One row per group in order of first appearance, with the columns of `group_by` and STATISTICS.

    Means, minima and maxima in seconds are computed from the medians of the group's ok cases, because wrong results
    have no valid time.
    """
    import pandas as pd

    for name in group_by:
        if name not in frame.columns:
            raise UserError(f"--group-by {name} is not a column ({nearest(name, map(str, frame.columns))})")
    by = list(dict.fromkeys(group_by))
    is_ok = frame["status"] == "ok"
    marked = frame[by].assign(_median_s=frame["median_s"].where(is_ok), _ok=is_ok)
    aggregated = marked.groupby(by, sort=False, dropna=False).agg(
        num_cases=("_ok", "size"),
        num_ok=("_ok", "sum"),
        geometric_mean_s=("_median_s", lambda values: geometric_mean(values.to_numpy(float))),
        min_s=("_median_s", "min"),
        max_s=("_median_s", "max"),
    )
    # A column with the name of a statistic, such as min_s, is renamed, so that the names in the result are unique.
    keys = aggregated.index.to_frame(index=False)
    keys.columns = pd.Index([f"{name}_group" if name in STATISTICS else name for name in by])
    return pd.concat([keys, aggregated.reset_index(drop=True)], axis=1)


def _groups_table(groups: "pd.DataFrame") -> Table:
    keys = [str(name) for name in groups.columns if name not in STATISTICS]
    columns: TableColumns = [
        *key_columns(keys),
        ("cases", lambda row: str(row["num_cases"])),
        ("ok", lambda row: str(row["num_ok"])),
        ("geometric mean", lambda row: time_text(row["geometric_mean_s"])),
        ("min", lambda row: time_text(row["min_s"])),
        ("max", lambda row: time_text(row["max_s"])),
    ]
    title, notes = f"by {', '.join(keys)}", ["times are computed from the medians of ok cases"]
    return capped(table_of(title, columns, records_of(groups), notes), MAX_ROWS)


def _rendered(
    form: str,
    data: "pd.DataFrame",
    blocks: Callable[[], Sequence[Block]],
    warnings: Sequence[str],
    plots: Sequence[Path] = (),
    messages: Sequence[str] = (),
) -> Rendered:
    """A report in one of FORMS, from `data` for DATA_FORMS, from `blocks` for other forms. `plots` are the drawn
    files."""
    if form in DATA_FORMS:
        # Standard output is data here.
        return Rendered(data_text(data, form), [*warnings, *(f"plot written: {path}" for path in plots), *messages])
    # The folder is separate from the names, because a whole path may be longer than a line.
    names = (f"plots written to {plots[0].parent}:", *(f"  {path.name}" for path in plots)) if plots else ()
    return Rendered(shown([*blocks(), Lines(names)], form), [*warnings, *messages])


def data_text(frame: "pd.DataFrame", form: str) -> str:
    """All rows, and all columns except arrays. `form` is "csv" or "json". In JSON, nan and infinite values are null."""
    frame = frame.drop(columns=PASSES, errors="ignore")
    if form == "csv":
        safe = frame.rename(columns=cell)
        with any_characters():
            for name in [name for name, column in safe.items() if column.dtype.kind == "O"]:
                safe[name] = [*map(cell, safe[name])]
        return str(safe.to_csv(index=False)).rstrip("\n")
    if frame.empty:
        return "[]"
    # % signs in names are escaped, because values are filled in with %.
    names = (json.dumps(str(name)).replace("%", "%%") for name in frame.columns)
    record = "{" + ", ".join(f"{name}: %s" for name in names) + "}"
    columns = [_json_cells(frame[name]) for name in frame.columns]
    return "[\n" + ",\n".join(record % row for row in zip(*columns, strict=True)) + "\n]"


def _json_cells(column: "pd.Series[Any]") -> list[str]:
    """Each value as JSON. By column, which is faster."""
    import numpy as np

    missing = column.isna() | column.isin([np.inf, -np.inf]) if column.dtype.kind == "f" else column.isna()
    values = column.to_numpy(object, copy=True)
    values[missing.to_numpy(bool)] = None
    # The text can be split at line breaks, because JSON escapes line breaks within a value.
    return json.dumps(values.tolist(), separators=("\n", ":"), allow_nan=False)[1:-1].split("\n")


# Traced steps: selection by `RUN` or `RUN::PART` (PART is a part of the case's id), and reports.

SEPARATOR = "::"
HOW_TO_TRACE = "trace a step with `distbench run SCENARIO --trace-paths`"


@dataclass(frozen=True)
class SelectedTraces:
    """The given runs, and the traces that RUN or RUN::PART selects."""

    runs: list[Run]
    traces: list[Trace]
    is_part: bool  # a PART is given
    warnings: list[str]  # on files and lines that were left out
    failed: list[str]  # one sentence per trace that failed or cannot be read


def chosen(targets: Sequence[Path], out: Path | None) -> SelectedTraces:
    """The traces of run files and folders, each with or without `::PART`, or of the latest run under `out`."""
    paths_and_parts = [_split(target) for target in targets]
    runs, warnings = collect(tuple(path for path, _ in paths_and_parts), out)
    traces, failed = traces_of(runs)
    if not traces:
        of = ", ".join(map(str, targets)) or f"the latest run under {out}"
        why = f" ({'; '.join(failed)})" if failed else ""
        raise UserError(f"{of} has no trace of a step{why}; {HOW_TO_TRACE}")
    kept = [] if paths_and_parts else traces
    for path, part in paths_and_parts:
        meant = [trace for trace in traces if _is_meant(trace, path, part)]
        if part and not meant:
            raise UserError(f"no traced case id of {path} contains {part!r}; {_there_are(traces)}")
        kept = [trace for trace in traces if trace in kept or trace in meant]
    return SelectedTraces(runs, kept, any(part for _, part in paths_and_parts), warnings, failed)


def selected_trace(given: Path) -> tuple[Trace, list[str]]:
    """The trace that `RUN` or `RUN::PART` selects, and sentences on ignored files and lines.

    A PART that is the last part of a case's id selects that case, even if other ids contain PART.
    """
    selected = chosen((given,), None)
    path, part = _split(given)
    traces = [trace for trace in selected.traces if part and trace.case_id.endswith(f"/{part}")] or selected.traces
    if len(traces) > 1:
        how = f"give {path}{SEPARATOR}PART with a part of one's case id"
        raise UserError(f"{given} has {len(traces)} traces ({_there_are(traces)}); {how}")
    return traces[0], [*selected.warnings, *selected.failed]


def _split(given: Path) -> tuple[Path, str]:
    """(the run file or folder, the part of a case's id after `::`, which may be empty)."""
    if given.exists():
        return given, ""
    path, _, part = str(given).partition(SEPARATOR)
    return Path(path), part


def _is_meant(trace: Trace, path: Path, part: str) -> bool:
    is_of_run = trace.run.path.resolve().is_relative_to(path.resolve()) or trace.run.scenario == str(path)
    return is_of_run and part in trace.case_id


def _there_are(traces: Sequence[Trace]) -> str:
    return f"available: {', '.join(trace.case_id for trace in traces[:8])}" + (", ..." if len(traces) > 8 else "")


def render_paths(
    targets: tuple[Path, ...],
    out: Path,
    form: str,
    plots: Path | None = None,
    page: Path | None = None,
    chrome: Path | None = None,
    by: tuple[str, ...] = (),
) -> Rendered:
    """A report on the cost of each path in the traced steps of some runs.

    Args:
        targets: run files and folders, each with or without `::PART` of a case's id, or empty for the latest run.
        form: one of FORMS. "csv" and "json" have one row per collective, traced step and rank.
        plots: folder for timelines, one per trace.
        page: HTML file for the whole report on these runs with paths and timelines, or if a PART is given, only for
        paths and timelines of the selected traces.
        chrome: file for one trace in the format of Chrome's trace events.
        by: columns by which rows are summed, or empty for the usual tables and rows.
    """
    selected = chosen(targets, out)
    traces = selected.traces
    data = frame_of_traces(traces, by)
    messages = []
    if chrome and len(traces) > 1:
        how = f"give RUN::PART with a part of a case's id, such as {traces[0].run.path}::{traces[0].case_id}"
        raise UserError(f"--chrome needs one trace, not {len(traces)}; {how}")
    if chrome:
        messages.append(write_chrome(chrome, traces[0]))
    figure_files = draw(timeline_figures(traces), plots) if plots else []
    messages += [write_page(page, _traces_page(selected))] if page else []
    if form in DATA_FORMS:
        messages += selected.failed

    def blocks() -> list[Block]:
        tables = (block for trace in traces for block in ([grouped_table(trace, by)] if by else trace_blocks(trace)))
        return [*tables, Lines(tuple(selected.failed))]

    return _rendered(form, data, blocks, selected.warnings, figure_files, messages)


def _traces_page(selected: SelectedTraces) -> Iterable[PageBlock]:
    if not selected.is_part:
        return page_blocks(Contents.of(selected.runs, frame_of(selected.runs)))
    title = f"distbench: traced steps of {', '.join(dict.fromkeys(trace.run.scenario for trace in selected.traces))}"
    return chain([Heading(title, 1)], _traced(selected.traces))


def _traced(traces: Sequence[Trace]) -> Iterator[PageBlock]:
    """Yield blocks lazily, so that figures are drawn in the page's style."""
    return (block for trace in traces for block in traced_blocks(trace))


def render_difference(target: Path, other_target: Path, form: str, page: Path | None = None) -> Rendered:
    """A report on the differences between two traced steps (`RUN` or `RUN::PART`). "csv" and "json" have one row per
    path.

    `page` is an HTML file for the report, with the tables of both steps.
    """
    (trace_a, warnings), (trace_b, other_warnings) = selected_trace(target), selected_trace(other_target)
    messages = []
    if page:
        heading, verdict, *more_blocks = comparison_blocks(trace_a, trace_b)
        assert isinstance(verdict, Lines)
        blocks = chain([heading, Verdict(verdict.texts), *more_blocks], _traced((trace_a, trace_b)))
        messages = [write_page(page, blocks)]
    return _rendered(
        form,
        difference(trace_a, trace_b),
        lambda: comparison_blocks(trace_a, trace_b),
        [*warnings, *other_warnings],
        messages=messages,
    )


__all__ = ["FORMS", "Rendered", "data_text", "render", "render_difference", "render_paths", "summary_of"]
