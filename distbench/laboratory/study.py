"""The redistribution laboratory's findings as data: everything its tables, plots and page say of some runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distbench.compare.intervals import geometric_mean
from distbench.laboratory import comparisons
from distbench.laboratory.comparisons import LargestGain, PathDifference, Place, Ratios, Regret, Tally
from distbench.laboratory.failures import Failure, failures_of
from distbench.laboratory.planner_table import Bools, PlannerTable, laboratory_rows, planner_table_of
from distbench.laboratory.predictions import PredictionError, PredictionRanking, prediction_errors, ranking
from distbench.laboratory.reproducer import Versions
from distbench.render.units import size_text
from distbench.runs.run_file import Run
from distbench.spec.planner_names import BASELINE, NATIVE

if TYPE_CHECKING:
    import pandas as pd

MIN_PLANNERS = 3
MAX_STRIKING = 10
LARGE_BYTES = 1 << 20
MIN_FOCUS = 20


@dataclass(frozen=True)
class Study:
    """What a machine's runs of redistributions say together."""

    machine: str
    runs: Sequence[Run]  # oldest first
    versions: Versions  # torch and backend of the latest run
    profile: str | None  # the file as the latest run was given it
    is_native: bool  # every all-to-all ran as such; the planners' names then do without +native
    table: PlannerTable
    focus: Bools  # the pairs that the verdict is about: those of LARGE_BYTES and above, where there are enough
    focus_text: str
    ratios: dict[tuple[str, str], Ratios]  # planner and what it is held against to its ratios
    tallies: dict[Place, Tally]  # each planner against greedy and against torch's better one
    differences: dict[Place, PathDifference]
    regrets: dict[str, Regret]  # of each planner and CHOSEN that moved a pair in focus
    errors: dict[tuple[str, str], PredictionError]  # by planner and size class, "" for the pairs in focus
    ranking: PredictionRanking
    largest_gains: list[LargestGain]
    chosen_ratio: tuple[float, float, float]  # geometric mean, with its CI, of choosing by prediction over greedy
    sent_over_bound: dict[str, float]  # geometric mean of bytes sent over the receive lower bound
    outcomes: dict[str, Counter[str]]  # planner to its cases by status
    failures: list[Failure]

    def against(self, planner: str, baseline: str = BASELINE) -> Tally | None:
        """A planner against a baseline over the pairs in focus."""
        return self.tallies.get((planner, baseline, "", ""))


def is_laboratory(frame: "pd.DataFrame") -> bool:
    """Whether a run's frame is one that a study is made of: it names suites, or has more planners than torch's two."""
    rows = frame[frame["kind"] == "redistribute"]
    return bool(rows["suite"].notna().any()) or rows["planner"].nunique() >= MIN_PLANNERS


def studies_of(runs: Sequence[Run], frames: Sequence["pd.DataFrame"]) -> list[Study]:
    """One study a machine, of those runs that are a laboratory's, in order of their first runs."""
    import pandas as pd

    by_machine: dict[str, list[tuple[Run, pd.DataFrame]]] = {}
    for run, frame in zip(runs, frames, strict=True):
        if is_laboratory(frame):
            by_machine.setdefault(run.about.environment.machine or "unknown machine", []).append((run, frame))
    return [
        study_of(machine, [run for run, _ in found], pd.concat([frame for _, frame in found]))
        for machine, found in by_machine.items()
    ]


def study_of(machine: str, runs: Sequence[Run], frame: "pd.DataFrame") -> Study:
    """The study of one machine's runs, oldest first, and the frame of their cases."""
    rows = laboratory_rows(frame)
    is_native = BASELINE not in set(rows["planner"]) and f"{BASELINE}{NATIVE}" in set(rows["planner"])
    if is_native:
        rows["planner"] = rows["planner"].str.removesuffix(NATIVE)
    table = planner_table_of(rows)
    focus, focus_text = _focus(table)
    all_ratios, environment = comparisons.ratios_of(table), runs[-1].about.environment
    once = rows[~rows["is_again"]]
    return Study(
        machine=machine,
        runs=runs,
        versions=Versions(environment.torch or "unknown", environment.backend or "gloo"),
        profile=next((run.about.profile for run in reversed(runs) if run.about.profile), None),
        is_native=is_native,
        table=table,
        focus=focus,
        focus_text=focus_text,
        ratios=all_ratios,
        tallies=comparisons.tallies(table, focus, all_ratios),
        differences=comparisons.differences(table, focus),
        regrets=comparisons.regrets(table, focus),
        errors=prediction_errors(table, focus),
        ranking=ranking(table, focus),
        largest_gains=comparisons.largest_gains(table, focus, all_ratios, MAX_STRIKING),
        chosen_ratio=comparisons.ratio_when_chosen(table, focus),
        sent_over_bound=_sent_over_bound(table, focus),
        outcomes={str(planner): Counter(found) for planner, found in once.groupby("planner", sort=False)["status"]},
        failures=failures_of(rows),
    )


def _focus(table: PlannerTable) -> tuple[Bools, str]:
    """Small tensors show latency alone, and suites that look for wrong values have many of them.

    Pairs without greedy's time in the same run are left out: times of different runs are not to be compared.
    """
    is_there = BASELINE in table.planners
    eligible = table.measured[table.at(BASELINE)] if is_there else np.ones(len(table.pairs), dtype=bool)
    large = (table.pairs["payload_bytes"] >= LARGE_BYTES).to_numpy(bool) & eligible
    if (large & table.communicates).sum() >= MIN_FOCUS:
        return large, f"of {size_text(LARGE_BYTES)} and above"
    return eligible, "of all sizes"


def _sent_over_bound(table: PlannerTable, focus: Bools) -> dict[str, float]:
    bound = table.pairs["bound_bytes"].to_numpy(float)
    pairs, sent = focus & (bound > 0), table.numbers["wire_bytes_executed"]
    return {name: geometric_mean(sent[at, pairs] / bound[pairs]) for at, name in enumerate(table.planners)}
