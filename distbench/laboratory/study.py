"""The redistribution laboratory's findings as data: everything its tables, plots and page say of some runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distbench.compare.intervals import Floats, geometric_mean
from distbench.laboratory.comparisons import (
    BETTER_OF_TORCH,
    LargestGain,
    PathDifference,
    PlannerComparison,
    Regret,
    differences,
    largest_gains,
    planner_comparisons,
    ratio_when_chosen,
    regrets,
    widenings,
)
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
    """What a machine's runs of redistributions say together.

    Args:
        machine: its name.
        runs: the runs it is made of, oldest first.
        versions: torch and backend of the latest run.
        profile: the profile's file as the latest run was given it, or None.
        is_native: every all-to-all ran as such; the planners' names then do without +native.
        planner_table: the measured times.
        focus: the pairs that the verdict is about: those of LARGE_BYTES and above, where there are enough.
        focus_text: the same in words.
        widening: by what each pair's ratio intervals were widened.
        differences: how often planners' paths differ.
        planner_comparisons: each planner against greedy and against torch's better one.
        regrets: each planner, and choosing by prediction, against the best measured.
        errors: predicted against measured.
        ranking: whether plans predicted apart were ranked right.
        largest_gains: the largest gains over greedy.
        chosen_ratio: geometric mean, with its CI, of choosing by prediction over greedy.
        sent_over_bound: planner to the geometric mean of bytes sent over the receive lower bound.
        outcomes: planner to its cases by status.
        failures: wrong and broken cases by cause.
    """

    machine: str
    runs: Sequence[Run]
    versions: Versions
    profile: str | None
    is_native: bool
    planner_table: PlannerTable
    focus: Bools
    focus_text: str
    widening: Floats
    differences: list[PathDifference]
    planner_comparisons: list[PlannerComparison]
    regrets: list[Regret]
    errors: list[PredictionError]
    ranking: PredictionRanking
    largest_gains: list[LargestGain]
    chosen_ratio: tuple[float, float, float]
    sent_over_bound: dict[str, float]
    outcomes: dict[str, dict[str, int]]
    failures: list[Failure]

    def against(self, planner: str, baseline: str = BASELINE) -> PlannerComparison | None:
        """A planner against a baseline over the pairs in focus."""
        return next(
            (
                m
                for m in self.planner_comparisons
                if (m.planner, m.baseline, m.mesh, m.size) == (planner, baseline, "", "")
            ),
            None,
        )


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
            machine = frame["machine"].dropna().iloc[:1].tolist()
            by_machine.setdefault(machine[0] if machine else "unknown machine", []).append((run, frame))
    return [
        study_of(machine, [run for run, _ in found], pd.concat([frame for _, frame in found]))
        for machine, found in by_machine.items()
    ]


def study_of(machine: str, runs: Sequence[Run], frame: "pd.DataFrame") -> Study:
    """The study of one machine's runs.

    Args:
        machine: its name.
        runs: its runs, oldest first.
        frame: their cases.
    """
    rows = laboratory_rows(frame)
    is_native = BASELINE not in set(rows["planner"]) and f"{BASELINE}{NATIVE}" in set(rows["planner"])
    if is_native:
        rows["planner"] = rows["planner"].str.removesuffix(NATIVE)
    planner_table = planner_table_of(rows)
    focus, focus_text = _focus(planner_table)
    outcomes: dict[str, Counter[str]] = {}
    for planner, status in zip(rows["planner"], rows["status"], strict=True):
        outcomes.setdefault(planner, Counter())[status] += 1
    return Study(
        machine=machine,
        runs=runs,
        versions=_versions(runs[-1]),
        profile=_profile(runs),
        is_native=is_native,
        planner_table=planner_table,
        focus=focus,
        focus_text=focus_text,
        widening=widenings(planner_table, BASELINE),
        differences=differences(planner_table, focus),
        planner_comparisons=planner_comparisons(planner_table, focus),
        regrets=regrets(planner_table, focus),
        errors=prediction_errors(planner_table, focus),
        ranking=ranking(planner_table, focus),
        largest_gains=largest_gains(planner_table, focus, MAX_STRIKING),
        chosen_ratio=ratio_when_chosen(planner_table, focus),
        sent_over_bound=_sent_over_bound(planner_table, focus),
        outcomes={planner: dict(counts) for planner, counts in outcomes.items()},
        failures=failures_of(rows),
    )


def _focus(planner_table: PlannerTable) -> tuple[Bools, str]:
    """Small tensors tell of latency alone, and suites that look for wrong values have many of them.

    Pairs without greedy's time in the same run are left out: times of different runs are not to be compared.
    """
    eligible = (
        planner_table.has(BASELINE)
        if BASELINE in planner_table.planners
        else np.ones(len(planner_table.pairs), dtype=bool)
    )
    large = (planner_table.pairs["payload_bytes"] >= LARGE_BYTES).to_numpy(bool) & eligible
    if (large & planner_table.communicates()).sum() >= MIN_FOCUS:
        return large, f"of {size_text(LARGE_BYTES)} and above"
    return eligible, "of all sizes"


def _sent_over_bound(planner_table: PlannerTable, focus: Bools) -> dict[str, float]:
    bound = planner_table.pairs["bound_bytes"].to_numpy(float)
    found = {}
    for planner in planner_table.planners:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = planner_table.numbers["sent_bytes"][planner] / bound
        found[planner] = geometric_mean(ratio[(bound > 0) & focus])
    return found


def _versions(run: Run) -> Versions:
    facts = run.header.get("environment")
    facts = facts if isinstance(facts, dict) else {}
    return Versions(str(facts.get("torch") or "unknown"), str(facts.get("backend") or "gloo"))


def _profile(runs: Sequence[Run]) -> str | None:
    for run in reversed(runs):
        job = run.header.get("job")
        if isinstance(job, dict) and isinstance(job.get("profile"), str):
            return str(job["profile"])
    return None


__all__ = ["BETTER_OF_TORCH", "Study", "is_laboratory", "studies_of", "study_of"]
