"""Cases that both sides measured: their differences, tested as one family, and the verdicts that follow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distbench.compare.families import Block, Tested, tested, tolerance_words
from distbench.compare.log_differences import Floats, LogDifference, difference_between, outlying_pairs
from distbench.compare.options import METRICS, Options
from distbench.compare.pairing import Pairing, Span, pairing_of
from distbench.compare.verdicts import IMPROVEMENT, INCONCLUSIVE, JUDGED, PASS, REGRESSION
from distbench.gate.comparable import Group
from distbench.gate.outcome import CaseVerdict, MetricVerdict
from distbench.gate.table import CaseTable, logarithms
from distbench.runs.launches import Launch

REASONS = {
    REGRESSION: "the {} is slower by more than the tolerance, and not by chance",
    IMPROVEMENT: "the {} is faster by more than the tolerance, and not by chance",
    PASS: "slower by less than the tolerance, if at all",
}


@dataclass(frozen=True)
class MeasuredCases:
    """One group's cases that both sides measured, and their differences.

    Args:
        case_ids: one a row of every array.
        differences: by metric.
        notes: case id to sentences.
        doubt: why nothing of this group may be held against the candidate, or None.
        may_pass: False where foreign load differed, which also forbids a pass.
        left_out: sentences on pairs of launches that lie too far apart to be compared.
    """

    group: Group
    case_ids: Sequence[str]
    pairing: Pairing
    differences: Mapping[str, LogDifference]
    notes: Mapping[str, tuple[str, ...]]
    doubt: str | None
    may_pass: bool
    left_out: tuple[str, ...] = ()


def measure(
    group: Group,
    sides: tuple[CaseTable, CaseTable],
    case_ids: Sequence[str],
    notes: Mapping[str, tuple[str, ...]],
    spans: Mapping[str, Span],
    options: Options,
) -> MeasuredCases:
    """The differences of one group in the cases that both sides measured, and what stands against believing them.

    Args:
        spans: run id to when its launch ran.
    """
    pairing = pairing_of(*([spans[launch.run_id] for launch in side] for side in (group.baseline, group.candidate)))
    logs = {metric: [logarithms(side, case_ids, metric) for side in sides] for metric in METRICS}
    left_out = _leave_out(group, logs, pairing, options) if pairing.interleaved and case_ids else ()
    differences = {metric: difference_between(both, pairing) for metric, both in logs.items()}
    conflict = load_conflict(group.baseline, group.candidate, pairing, options.load_share)
    doubt = conflict
    if doubt is None and pairing.is_disturbed:
        doubt = f"{pairing.refusal}; run one after the other"
    elif doubt is None and not pairing.interleaved and not options.dedicated:
        doubt = f"{pairing.refusal}; interleave them, or give --dedicated"
    return MeasuredCases(group, case_ids, pairing, differences, notes, doubt, conflict is None, left_out)


def _leave_out(
    group: Group, logs: Mapping[str, Sequence[Floats]], pairing: Pairing, options: Options
) -> tuple[str, ...]:
    """Take outlying pairs out of `logs`, by nan; a sentence on each."""
    base, new = list(pairing.baseline), list(pairing.candidate)
    differences = [right[:, new] - left[:, base] for left, right in logs.values()]
    outlying, sizes = outlying_pairs(differences, options.least_launches(paired=True))
    sentences = []
    for pair in np.flatnonzero(outlying).tolist():
        for left, _ in logs.values():
            left[:, base[pair]] = np.nan
        times = np.exp(np.nanmedian([each[:, pair] for each in differences]))
        launches = group.baseline[base[pair]].run_id, group.candidate[new[pair]].run_id
        sentences.append(
            f"left out: launch {launches[1]} took {times:.2f}x the time of launch {launches[0]} in the median case; "
            f"the median pair differs by {np.exp(np.nanmedian(sizes[~outlying])):.2f}x"
        )
    return tuple(sentences)


def load_conflict(
    baseline: Sequence[Launch], candidate: Sequence[Launch], pairing: Pairing, load_share: float
) -> str | None:
    """One sentence if foreign load differed between the sides by more than `load_share` of the CPUs, else None.

    An idle baseline against a contended candidate makes most unchanged cases look slower, whatever the statistics.
    """
    loads = [np.array([[launch.foreign_load for launch in side]], dtype=float) for side in (baseline, candidate)]
    difference = difference_between(loads, pairing)
    # nan, where the load of a side is not known, exceeds nothing.
    if not abs(difference.estimate[0]) > load_share:
        return None
    before, after = 100 * difference.baseline[0], 100 * difference.candidate[0]
    return f"foreign load differed: {before:.0f} % of the CPUs in the baseline, {after:.0f} % in the candidate"


def judged(measured: Sequence[MeasuredCases], options: Options) -> tuple[list[CaseVerdict], int, int]:
    """Cases with times, judged as one family; how many tests it has, and how many cases have too few launches."""
    jobs = [(one, metric, _block(one.differences[metric], metric, options)) for one in measured for metric in METRICS]
    found, num_tests = tested([block for _, _, block in jobs], options)
    by_metric = iter([_metric_verdicts(*job, each, options) for job, each in zip(jobs, found, strict=True)])
    cases = [case for one in measured for case in _cases_of(one, [next(by_metric) for _ in METRICS], options)]
    too_few = sum(
        all(metric.num_launches < options.least_launches(case.paired) for metric in case.metrics) for case in cases
    )
    return cases, num_tests, too_few


def _block(difference: LogDifference, metric: str, options: Options) -> Block:
    """With the logarithm of the slowdown that is still fine, the floor in seconds taken in."""
    floor = options.floor_s / np.exp(difference.baseline)
    return Block(difference, np.log1p(np.maximum(options.tolerances[metric], floor)))


def _cases_of(one: MeasuredCases, by_metric: Sequence[Sequence[MetricVerdict]], options: Options) -> list[CaseVerdict]:
    cases = []
    for case_id, metrics in zip(one.case_ids, zip(*by_metric, strict=True), strict=True):
        # A case is as bad as its worst metric; it is improved where one is and no other is in doubt.
        verdict = next(word for word in JUDGED if word in [metric.verdict for metric in metrics])
        ordered = tuple(sorted(metrics, key=lambda metric: _decides(metric, verdict)))
        reason, notes = _reason(ordered[0], one, options), one.notes.get(case_id, ())
        cases.append(CaseVerdict(one.group.label, case_id, verdict, reason, one.pairing.interleaved, ordered, notes))
    return cases


def _decides(metric: MetricVerdict, verdict: str) -> tuple[bool, bool, float]:
    towards = metric.change if verdict == IMPROVEMENT else -metric.change
    return metric.verdict != verdict, metric.suspected != REGRESSION, towards


def _metric_verdicts(
    one: MeasuredCases, metric: str, block: Block, found: Tested, options: Options
) -> list[MetricVerdict]:
    difference, least = block.difference, options.least_launches(one.pairing.interleaved)
    verdicts, seen = tolerance_words(block, found, options, one.doubt is None, one.may_pass)
    is_open = verdicts == INCONCLUSIVE
    low, high = difference.interval(options.confidence)
    count = difference.num_launches
    more = np.where(count < least, least - count, np.maximum(found.needed - count, 1))
    columns: dict[str, list[Any]] = {
        "verdict": verdicts.tolist(),
        "baseline_s": np.exp(difference.baseline).tolist(),
        "candidate_s": np.exp(difference.candidate).tolist(),
        "change": np.expm1(difference.estimate).tolist(),
        "low": _known(np.expm1(low)),
        "high": _known(np.expm1(high)),
        "p": _known(found.slower),
        "tolerance": np.expm1(block.tolerance).tolist(),
        "detectable": _known(np.expm1(found.detectable)),
        "num_launches": count.tolist(),
        "num_more": [None if value is None else int(value) for value in _known(np.where(is_open, more, np.nan))],
        "suspected": [word or None for word in np.where(is_open, seen, "").tolist()],
    }
    rows = zip(*columns.values(), strict=True)
    return [MetricVerdict(metric, **dict(zip(columns, row, strict=True))) for row in rows]


def _known(values: Floats) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _reason(metric: MetricVerdict, one: MeasuredCases, options: Options) -> str:
    if metric.verdict != INCONCLUSIVE:
        return REASONS[metric.verdict].format(metric.metric)
    least = options.least_launches(one.pairing.interleaved)
    if metric.num_launches < least:
        single, several = ("pair", "pairs") if one.pairing.interleaved else ("launch a side", "launches a side")
        return f"{metric.num_launches} {single if metric.num_launches == 1 else several}; no verdict below {least}"
    if metric.suspected or not one.may_pass:
        seen = {REGRESSION: "slower, but ", IMPROVEMENT: "faster, but "}.get(metric.suspected or "", "")
        return f"{seen}{one.doubt}"
    return "neither a regression nor the lack of one is certain"
