"""The parts of a report that a kind of case contributes. `sections.py` lists the kinds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from distbench.records.run_file import Run
from distbench.report.planner_study import Study
from distbench.show.blocks import Block
from distbench.statistics.pass_comparison import TOO_FEW

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Figures = Iterator[tuple[str, "Figure"]]
NO_VERDICT = f"{TOO_FEW} for a verdict"
MAX_NAMED = 4
MAX_PANELS = 4
PER_ROW = 2


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run of a report. The frame has one row per case. `study` is the planner study with the run's redistributions,
    or None."""

    run: Run
    frame: "pd.DataFrame"
    study: Study | None = None


class Compared(NamedTuple):
    """One variant's time relative to its baseline, with the simultaneous 95 % interval over all variants of a table."""

    name: str
    baseline: str
    ratio: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class Section:
    """A kind of case as functions of a run, which return nothing if the run has no such case.

    Args:
        headline: lines of the summary.
        tables: tables. If the second argument (full) is False, rows that confirm the expected result are left out.
        figures: (name, figure) for plots and page.
        compared: variants with a comparison with a baseline.
    """

    headline: Callable[[ReportedRun], Iterable[str]]
    tables: Callable[[ReportedRun, bool], Sequence[Block]] = lambda run, full: ()
    figures: Callable[[ReportedRun], Iterable[tuple[str, "Figure"]]] = lambda run: ()
    compared: Callable[[ReportedRun], Iterable[Compared]] = lambda run: ()
