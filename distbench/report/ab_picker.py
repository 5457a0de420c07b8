"""Comparisons of two variants of one run, or of two runs of one scenario, which a reader of the page selects."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from distbench.records.dataframe import PASSES, records_of
from distbench.report.section_protocol import ReportedRun
from distbench.report.steps import steps_of
from distbench.show.html import Picker
from distbench.show.units import known
from distbench.statistics.pass_comparison import BASELINE, as_table, compare_pairs

MAX_VARIANTS = 24
MAX_RUNS, MAX_CASES = 20, 200
NOT_COMPARABLE = "Not comparable, because the two steps compute different results"
ONE_LAUNCH = (
    "Ratio of medians without a verdict, because each side has only one launch. For a verdict, measure both in turn "
    "(distbench ab) or compare "
    "several launches per side (distbench compare)"
)


def variants_picker(reported: ReportedRun) -> Iterator[Picker]:
    """Comparisons of any two variants of a run's steps. Comparisons with the baseline are from the table, others are
    tested together. Nothing for fewer than three variants, because the table shows the only comparison."""
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
