"""The report as a page: tiles, the plot of all variants, the planner study, and per run a section with plots and
comparisons that the reader selects.
"""

import contextlib
import gzip
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import numpy as np

from distbench.records.dataframe import PASSES, records_of
from distbench.records.run_file import Run
from distbench.report.headline import NOT_OK, UNDECIDED, forest_figures
from distbench.report.planner_study import Study
from distbench.report.planner_study_text import code_blocks, laboratory_figures, planner_tables, verdict_lines
from distbench.report.section_protocol import ReportedRun
from distbench.report.sections import NOT_OK_TITLE, SECTIONS, Contents, overview, spent_line, summary, warnings_of
from distbench.report.steps import steps_of
from distbench.report.trace_rows import Trace, traces_of
from distbench.report.trace_tables import trace_blocks
from distbench.report.trace_timeline import chrome_text, timeline_figures
from distbench.show.blocks import Block, Heading, Lines, Table
from distbench.show.html import (
    BAD,
    FAINT,
    GOOD,
    Download,
    PageBlock,
    Picker,
    Picture,
    SectionHeading,
    Tiles,
    Verdict,
    page_of,
)
from distbench.show.plots import styled
from distbench.show.units import counts_text, disk_text, known
from distbench.spec.file_io import write_whole, writing
from distbench.statistics.pass_comparison import BASELINE, as_table, compare_pairs
from distbench.statistics.verdicts import FASTER, SLOWER

MAX_TRACE = 300_000  # bytes, compressed
# Figure of the planner study to the title of the next table.
BEFORE = {
    "ratio-by-size": "Time relative to greedy",
    "cost-over-best": "Cost of each choice",
    "predicted-against-measured": "Predicted by",
}


def write_page(page: Path, blocks: Iterable[PageBlock]) -> str:
    """Draw the figures and write the page. Return a sentence with the path.

    Raises:
        UserError: the file cannot be written.
    """
    with styled():
        all_blocks = list(blocks)
        text = page_of(next(block.text for block in all_blocks if isinstance(block, Heading)), all_blocks)
    with writing(f"--page {page}"):
        write_whole(page, text)
    return f"page written: {page}"


def page_blocks(contents: Contents) -> Iterable[PageBlock]:
    """Yield the title, the summary, and the full report."""
    yield Heading(_title(contents.runs), 1)
    yield SectionHeading("Summary", mark=_mark(contents.runs))
    # The headline first, and no next commands.
    _, machines, findings, notes, then, headline = summary(contents)
    yield Verdict(_texts(headline))
    yield _tiles(contents)
    yield from (Picture(figure) for _, figure in forest_figures(contents.outcome.compared))
    for study in contents.studies:
        yield Heading(f"Which redistribution planner to use on {study.machine}", 3)
        yield Verdict(verdict_lines(study))
    yield from (findings, then, notes, machines)
    yield from runs_pickers(contents.reported)
    tables = [block for block in overview(contents.reported) if isinstance(block, Table)]
    bad = [table for table in tables if table.title.startswith(NOT_OK_TITLE)]
    yield from bad
    for study in contents.studies:
        yield from (*code_blocks(study), *_tables_with_figures(study))
    for reported in contents.reported:
        run = reported.run
        yield SectionHeading(contents.name_of(run), mark=_mark([run]))
        yield from (Picture(figure) for section in SECTIONS for _, figure in section.figures(reported))
        yield from variants_picker(reported)
        yield from (block for section in SECTIONS for block in section.tables(reported, True))
        traces, failed = traces_of([run])
        time_spent = spent_line(run)
        yield Lines((*failed, f"run file: {run.path.name}", *([time_spent] if time_spent else [])))
        for trace in traces:
            yield from traced_blocks(trace)
    yield Heading("Runs")
    yield from (table for table in tables if table not in bad)


def _texts(block: Block) -> tuple[str, ...]:
    assert isinstance(block, Lines)
    return block.texts


def _tiles(contents: Contents) -> Tiles:
    """Numbers of correct cases, slower, faster and undecided variants, and machine warnings."""
    outcome, sides = contents.outcome, contents.outcome.num_by_verdict
    num_cases, num_warnings = outcome.num_by_status.total(), len(warnings_of(contents.runs))
    word = "simulated" if outcome.is_simulated else "correct"
    of_all = "" if outcome.num_correct == num_cases else f" of {num_cases}"
    look = BAD if outcome.num_not_ok else GOOD if outcome.num_correct else FAINT
    variants = (
        (str(sides[SLOWER]), SLOWER, BAD if sides[SLOWER] else ""),
        (str(sides[FASTER]), FASTER, GOOD if sides[FASTER] else ""),
        (str(sides[UNDECIDED]), UNDECIDED, ""),
    )
    warnings = (str(num_warnings), f"machine warning{'s' * (num_warnings != 1)}", BAD if num_warnings else "")
    correct = (f"{outcome.num_correct}{of_all}", f"case{'s' * (num_cases != 1)} {word}", look)
    return Tiles((correct, *(variants if outcome.compared else ()), warnings))


def traced_blocks(trace: Trace) -> Iterable[PageBlock]:
    """Yield a traced step's timeline, the trace as a file for Perfetto, and the times by path."""
    heading, first, *tables = trace_blocks(trace)
    yield from (heading, first)
    if trace.is_timed:
        yield from (Picture(figure) for _, figure in timeline_figures([trace]))
        yield _chrome_download(trace)
    yield from tables


def _chrome_download(trace: Trace) -> PageBlock:
    """A download of all traced steps, or a command if the download would make the page large."""
    content = gzip.compress(chrome_text(trace).encode(), mtime=0)
    how = "open it at ui.perfetto.dev (Open trace file) or in chrome://tracing"
    if len(content) > MAX_TRACE:
        command = f"distbench report --paths {trace.run.path.name}::{trace.case_id} --chrome trace.json"
        return Lines((f"For all traced steps in Perfetto, write the trace with `{command}`, then {how}.",))
    use = f"({disk_text(len(content))}): all traced steps for Perfetto. Save the file, then {how}."
    return Download(f"{trace.name}-trace.json.gz", content, "application/gzip", use)


def _tables_with_figures(study: Study) -> Iterable[PageBlock]:
    figures = dict(laboratory_figures(study))
    for block in planner_tables(study):
        for name, title in BEFORE.items():
            if name in figures and getattr(block, "title", "").startswith(title):
                yield Picture(figures.pop(name))
        yield block
    yield from (Picture(figure) for figure in figures.values())


def _title(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(run.scenario for run in runs))
    machines = ", ".join(dict.fromkeys(run.about.environment.machine or "unknown machine" for run in runs))
    subject = names[0] if len(names) == 1 else f"{len(names)} scenarios"
    title, started_at = f"distbench: {subject} on {machines}", min((run.about.started_at for run in runs), default=0.0)
    # A header may have no valid start.
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return f"{title}, {datetime.fromtimestamp(started_at, UTC).date()}" if started_at > 0 else title
    return title


def _mark(runs: Sequence[Run]) -> str:
    """A text such as "1 wrong, 2 interrupted" on cases that are not ok, or an empty text."""
    num_by_status = Counter(case["status"] for run in runs for case in run.cases)
    counts = {status: num_by_status[status] for status in NOT_OK}
    return counts_text(counts | {"interrupted": sum(run.footer is None for run in runs)})


MAX_VARIANTS = 24
MAX_RUNS, MAX_CASES = 20, 200
NOT_COMPARABLE = "Not comparable, because the two steps compute different results"
ONE_LAUNCH = (
    "Ratio of medians without a verdict, because each side has only one launch. For a verdict, alternate launches of "
    "both (distbench ab), or compare several launches per side (distbench compare)"
)


def variants_picker(reported: ReportedRun) -> Iterator[Picker]:
    """Comparisons of any two variants of a run's steps. Comparisons with the baseline are from the table. Other
    comparisons are tested together. Empty for fewer than three variants, whose only comparison is in the table.
    """
    measured = steps_of(reported.frame).head(MAX_VARIANTS)
    if len(measured) < 3:
        return
    pairs: dict[tuple[int, int], tuple[float, float, float, str]] = {}
    computed = [str(key) for key in measured["computes"]]
    for _, places in groupby(sorted(range(len(computed)), key=lambda at: (computed[at], at)), computed.__getitem__):
        group = list(places)
        if len(group) < 2:
            continue
        chosen, comparison = compare_pairs(as_table(measured[PASSES].iloc[group].tolist()))
        numbers = zip(comparison.ratio, comparison.low, comparison.high, comparison.verdict, strict=True)
        for (at, reference), numbers_of_pair in zip(chosen, numbers, strict=True):
            pairs[group[at], group[reference]] = numbers_of_pair
        for at, row in zip(group, records_of(measured.iloc[group]), strict=True):
            if row["verdict"] != BASELINE:
                ratio, low, high = (1 / row[name] for name in ("speedup", "speedup_high", "speedup_low"))
                pairs.pop((group[0], at), None)
                pairs[at, group[0]] = ratio, low, high, row["verdict"]
    yield Picker(
        f"Compare two variants of {reported.run.scenario}",
        tuple(measured["variant"].astype(str)),
        ("step",),
        tuple((seconds,) for seconds in measured["median_s"].tolist()),
        {pair: numbers for pair, numbers in pairs.items() if np.isfinite(numbers[0])},
        NOT_COMPARABLE,
    )


def runs_pickers(reported: Sequence[ReportedRun]) -> Iterator[Picker]:
    """Comparisons of any two runs of the same scenario, case by case."""
    for scenario in dict.fromkeys(part.run.scenario for part in reported):
        parts = [part for part in reported if part.run.scenario == scenario][-MAX_RUNS:]
        if len(parts) < 2:
            continue
        medians = []
        for part in parts:
            rows = records_of(part.frame[part.frame["status"] == "ok"])
            medians.append({str(row["id"]): row["median_s"] for row in rows if known(row["median_s"])})
        cases = list(dict.fromkeys(case for of_run in medians for case in of_run))[:MAX_CASES]
        labels = [f" ({part.run.about.label})" if part.run.about.label else "" for part in parts]
        yield Picker(
            f"Compare two runs of {scenario}",
            tuple(f"{part.run.path.stem}{label}" for part, label in zip(parts, labels, strict=True)),
            tuple(cases),
            tuple(tuple(of_run.get(case) for case in cases) for of_run in medians),
            {},
            ONE_LAUNCH,
        )
