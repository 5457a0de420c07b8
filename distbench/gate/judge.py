"""Cases that both sides measured: their differences, tested as one family, and the verdicts that follow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distbench.compare.families import Block, Tested, tested
from distbench.compare.log_differences import Floats, LogDifference, paired_difference, unpaired_difference
from distbench.compare.options import METRICS, Options
from distbench.compare.pairing import Pairing, pairing_of
from distbench.gate.comparable import Group
from distbench.gate.load import load_conflict
from distbench.gate.table import CaseTable, logarithms
from distbench.gate.verdict import IMPROVEMENT, INCONCLUSIVE, PASS, REGRESSION, CaseVerdict, MetricVerdict


@dataclass(frozen=True)
class MeasuredCases:
    """One group's cases that both sides measured, and their differences.

    Args:
        group: the group.
        case_ids: one a row of every array.
        pairing: how its launches go together.
        difference: metric to the differences.
        pairs: metric to each pair's difference, [cases, pairs]; empty where launches did not take turns.
        levels: metric to the sides' mean logarithms.
        notes: case id to sentences.
        doubt: why nothing of this group may be held against the candidate, or None.
        load: whether the doubt is about foreign load, which also forbids a pass.
    """

    group: Group
    case_ids: list[str]
    pairing: Pairing
    difference: dict[str, LogDifference]
    pairs: dict[str, Floats]
    levels: dict[str, tuple[Floats, Floats]]
    notes: dict[str, tuple[str, ...]]
    doubt: str | None
    load: bool


def measure(
    group: Group,
    baseline: CaseTable,
    candidate: CaseTable,
    rows: list[str],
    notes: dict[str, tuple[str, ...]],
    options: Options,
) -> MeasuredCases:
    """The differences of one group, and what stands against believing them.

    Args:
        group: the group.
        baseline: its baseline side.
        candidate: its candidate side.
        rows: ids of the cases that both sides measured.
        notes: case id to sentences, to hand on.
        options: the terms.
    """
    pairing = pairing_of(
        [launch.started_at for launch in group.baseline], [launch.started_at for launch in group.candidate]
    )
    compare = paired_difference if pairing.interleaved else unpaired_difference
    difference, pairs, levels = {}, {}, {}
    for metric, (before, after) in logarithms(baseline, candidate, rows).items():
        left, right = before[:, list(pairing.baseline)], after[:, list(pairing.candidate)]
        if pairing.interleaved:
            whole = np.isfinite(left) & np.isfinite(right)
            left, right = np.where(whole, left, np.nan), np.where(whole, right, np.nan)
            pairs[metric] = right - left
        difference[metric] = compare(left, right)
        levels[metric] = _means(left), _means(right)
    load = load_conflict(group.baseline, group.candidate, pairing, options.load_share)
    doubt = load
    if doubt is None and not pairing.interleaved and not options.dedicated:
        doubt = "the launches did not take turns, and machines drift; interleave them, or give --dedicated"
    return MeasuredCases(group, rows, pairing, difference, pairs, levels, notes, doubt, load is not None)


def _means(values: Floats) -> Floats:
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.where(known.any(axis=1), total / np.maximum(known.sum(axis=1), 1), np.nan)


def judged(measured: Sequence[MeasuredCases], options: Options) -> tuple[list[CaseVerdict], int, int]:
    """Cases with times, judged as one family; how many tests it has, and how many cases have too few launches."""
    blocks = [
        Block(one.difference[metric], one.pairs.get(metric), _tolerance(one, metric, options))
        for one in measured
        for metric in METRICS
    ]
    found, num_tests = tested(blocks, options)
    by_metric = [
        _metric_verdicts(metric, one, block, each, options)
        for (one, metric), block, each in zip(
            [(one, metric) for one in measured for metric in METRICS], blocks, found, strict=True
        )
    ]
    cases: list[CaseVerdict] = []
    for place, one in enumerate(measured):
        first = place * len(METRICS)
        cases += _cases_of(one, by_metric[first : first + len(METRICS)], options)
    too_few = sum(
        all(metric.num_launches < options.least_launches(case.paired) for metric in case.metrics) for case in cases
    )
    return cases, num_tests, too_few


def _tolerance(one: MeasuredCases, metric: str, options: Options) -> Floats:
    """The logarithm of the slowdown that is still fine, the floor in seconds taken in."""
    baseline_s = np.exp(one.levels[metric][0])
    return np.log1p(np.maximum(options.tolerances[metric], options.floor_s / baseline_s))


def _cases_of(one: MeasuredCases, by_metric: Sequence[Sequence[MetricVerdict]], options: Options) -> list[CaseVerdict]:
    cases = []
    for case_id, metrics in zip(one.case_ids, zip(*by_metric, strict=True), strict=True):
        verdict = _together([metric.verdict for metric in metrics])
        ordered = tuple(sorted(metrics, key=lambda metric: _decides(metric, verdict)))
        reason = _reason(ordered[0], one, options)
        cases.append(
            CaseVerdict(
                one.group.label,
                case_id,
                verdict,
                reason,
                one.pairing.interleaved,
                ordered,
                one.notes.get(case_id, ()),
            )
        )
    return cases


def _together(verdicts: Sequence[str]) -> str:
    """A case is as bad as its worst metric; it is improved where one is and no other is in doubt."""
    return next(verdict for verdict in (REGRESSION, INCONCLUSIVE, IMPROVEMENT, PASS) if verdict in verdicts)


def _decides(metric: MetricVerdict, verdict: str) -> tuple[bool, bool, float]:
    towards = metric.change if verdict == IMPROVEMENT else -metric.change
    return metric.verdict != verdict, metric.suspected != REGRESSION, towards


def _metric_verdicts(
    metric: str, one: MeasuredCases, block: Block, found: Tested, options: Options
) -> list[MetricVerdict]:
    difference, tolerance = block.difference, block.tolerance
    left, right = (np.exp(level) for level in one.levels[metric])
    low, high = difference.interval(options.confidence)
    least = options.least_launches(one.pairing.interleaved)
    enough = difference.num_launches >= least
    # Beyond the family's test, a case's own interval must agree: the spread lent by others may be too small for it.
    regressed = enough & (difference.estimate > tolerance) & (found.slower <= options.alpha) & (low > 0)
    improved = enough & (difference.estimate < -tolerance) & (found.faster <= options.alpha) & (high < 0)
    passed = enough & (high < tolerance) & (not one.load)
    verdicts = np.select(
        [regressed & (one.doubt is None), improved & (one.doubt is None), passed & ~regressed & ~improved],
        [REGRESSION, IMPROVEMENT, PASS],
        INCONCLUSIVE,
    )
    suspected = np.select([regressed, improved], [REGRESSION, IMPROVEMENT], "")
    columns = zip(
        verdicts.tolist(),
        left.tolist(),
        right.tolist(),
        np.expm1(difference.estimate).tolist(),
        np.expm1(low).tolist(),
        np.expm1(high).tolist(),
        found.slower.tolist(),
        np.expm1(tolerance).tolist(),
        np.expm1(found.detectable).tolist(),
        difference.num_launches.tolist(),
        found.needed.tolist(),
        suspected.tolist(),
        strict=True,
    )
    return [
        MetricVerdict(
            metric,
            verdict,
            before,
            after,
            change,
            _number(bottom),
            _number(top),
            _number(p),
            allowed,
            _number(findable),
            count,
            _more(verdict, enough_in_all, count, least),
            seen if verdict == INCONCLUSIVE and seen else None,
        )
        for verdict, before, after, change, bottom, top, p, allowed, findable, count, enough_in_all, seen in columns
    ]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _more(verdict: str, needed: float, count: int, least: int) -> int | None:
    if verdict != INCONCLUSIVE:
        return None
    if count < least:
        return least - count
    return max(int(needed) - count, 1) if math.isfinite(needed) else None


def _reason(metric: MetricVerdict, one: MeasuredCases, options: Options) -> str:
    if metric.verdict != INCONCLUSIVE:
        return {
            REGRESSION: f"the {metric.metric} is slower by more than the tolerance, and not by chance",
            IMPROVEMENT: f"the {metric.metric} is faster by more than the tolerance, and not by chance",
            PASS: "slower by less than the tolerance, if at all",
        }[metric.verdict]
    least = options.least_launches(one.pairing.interleaved)
    if metric.num_launches < least:
        pairs, plural = ("pair", "s") if one.pairing.interleaved else ("launch", "es")
        unit = pairs + (plural if metric.num_launches != 1 else "")
        beside = "" if one.pairing.interleaved else " a side"
        return f"{metric.num_launches} {unit}{beside}; no verdict below {least}"
    if one.load or metric.suspected:
        seen = {REGRESSION: "slower, but ", IMPROVEMENT: "faster, but "}.get(metric.suspected or "", "")
        return f"{seen}{one.doubt}"
    return "neither a regression nor the lack of one is certain"
