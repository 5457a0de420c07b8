"""The gate: verdicts and an exit code for a baseline and a candidate. This module does not read files or print."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from distbench.judge.paired_launches import (
    DTYPE,
    MAX_LISTED,
    Group,
    Pairing,
    Span,
    difference_between,
    differences,
    groups_of,
    leave_out_outliers,
    pairing_of,
    spans_of,
    without_dtype,
)
from distbench.records.launches import FAILED, NOT_RUN, SECONDS, Launch, Unit, Value, units_of
from distbench.records.run_file import SHOWN
from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text, listed
from distbench.statistics.intervals import Floats
from distbench.statistics.significance import Block, LogDifference, Tested, tested, tolerance_words
from distbench.statistics.verdicts import (
    BROKEN,
    IMPROVEMENT,
    INCOMPARABLE,
    INCONCLUSIVE,
    INVALID,
    JUDGED,
    METRICS,
    MISSING,
    NEW,
    PASS,
    REGRESSION,
    VERDICTS,
    Options,
)

LOAD_SHARE = 0.25  # difference in foreign load, as a share of the CPUs, above which there is no verdict
LOOSE = 3.0  # number of tolerances. If an undecided case may be slower by more than this, the headline is not PASS.


@dataclass(frozen=True)
class MetricVerdict:
    """The verdict on one metric of one case; figures are None with too few launches.

    Args:
        verdict: "regression", "inconclusive", "improvement" or "pass".
        baseline_s, candidate_s: geometric mean over the side's launches, in seconds or in the unit.
        change: candidate over baseline, minus one; its confidence interval is `low` to `high`.
        p: p value of the hypothesis "not slower", adjusted for all tests of the comparison.
        tolerance: the largest change that is not a regression, including the floor in seconds.
        detectable: the smallest true slowdown that is detected four times in five.
        num_launches: number of pairs, or of launches on the smaller side.
        num_more: further pairs, or launches per side, to decide an inconclusive metric; None if decided or unreachable.
        suspected: a measured "regression" or "improvement" that is in doubt, or None.
    """

    metric: str
    verdict: str
    baseline_s: float
    candidate_s: float
    change: float
    low: float | None
    high: float | None
    p: float | None
    tolerance: float
    detectable: float | None
    num_launches: int
    num_more: int | None = None
    suspected: str | None = None


@dataclass(frozen=True)
class CaseVerdict:
    """The verdict on one case.

    Args:
        scenario: the scenario; if it has several groups of launches, also the fields in which they differ.
        verdict: one of VERDICTS.
        paired: whether launches were compared in pairs.
        metrics: one verdict per metric, the deciding metric first; empty if nothing was compared.
        unit: unit of the metrics' numbers, which are reciprocals if higher numbers are better.
    """

    scenario: str
    case_id: str
    verdict: str
    reason: str
    paired: bool = False
    metrics: tuple[MetricVerdict, ...] = ()
    notes: tuple[str, ...] = ()
    unit: Unit = SECONDS

    @property
    def suspected(self) -> str | None:
        """The worst measured change that is in doubt, over all metrics."""
        verdicts = {metric.suspected for metric in self.metrics}
        return REGRESSION if REGRESSION in verdicts else IMPROVEMENT if IMPROVEMENT in verdicts else None

    @property
    def excess(self) -> float:
        """The largest excess of a measured slowdown over the tolerance, over all metrics, as a share of the
        baseline."""
        return max((metric.change - metric.tolerance for metric in self.metrics), default=0.0)

    @property
    def is_loose(self) -> bool:
        """Whether a slowdown of more than LOOSE tolerances is not excluded."""
        return any(metric.high is None or metric.high > LOOSE * metric.tolerance for metric in self.metrics)

    @property
    def change(self) -> float:
        """The deciding metric's change; 0 if nothing was compared."""
        return self.metrics[0].change if self.metrics else 0.0


@dataclass(frozen=True)
class Gated:
    """The outcome of one comparison.

    Args:
        cases: verdicts, the worst first.
        num_baseline, num_candidate: number of launches of the side.
        num_tests: number of statistical tests.
        num_not_run: number of cases that neither side ran (skipped or unsupported).
        num_too_few: number of cases with too few launches for a verdict.
        designs: sentences on the method of comparison of each scenario's launches.
        stamps: differences in fields that may differ.
        shown: differences in fields that are never compared.
        warnings: sentences about files and launches.
        more: advice on more launches, or "" where `distbench ab` does that.
    """

    cases: list[CaseVerdict]
    options: Options
    num_baseline: int
    num_candidate: int
    num_tests: int = 0
    num_not_run: int = 0
    num_too_few: int = 0
    designs: list[str] = field(default_factory=list)
    stamps: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    more: str = ""

    @property
    def worse(self) -> str:
        """The word for a regression of these cases: slower, higher or lower; "worse" for several units."""
        words = {case.unit.words[0] for case in self.cases if case.metrics} or {SECONDS.words[0]}
        return words.pop() if len(words) == 1 else "worse"

    @property
    def counts(self) -> dict[str, int]:
        """The number of cases per verdict that occurs, the worst verdict first."""
        counts = Counter(case.verdict for case in self.cases)
        return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}

    @property
    def num_judged(self) -> int:
        """The number of cases with enough launches for a verdict."""
        return sum(case.verdict in JUDGED for case in self.cases) - self.num_too_few

    def exit_code(self, strict: bool = False) -> int:
        """The exit code: 0 pass, 1 regression, 3 inconclusive (with `strict`), 4 incomparable, missing, invalid or not
        judged."""
        counts = self.counts
        if counts.get(REGRESSION):
            return 1
        if self.num_judged == 0 or any(counts.get(verdict) for verdict in BROKEN):
            return 4
        return 3 if strict and counts.get(INCONCLUSIVE) else 0

    @property
    def look_slower(self) -> list[CaseVerdict]:
        """Undecided cases that were measured slower than the tolerance, the slowest first."""
        slower = [case for case in self.cases if case.verdict == INCONCLUSIVE and case.excess > 0]
        return sorted(slower, key=lambda case: -case.excess)

    @property
    def is_open(self) -> bool:
        """Whether the outcome is neither FAIL nor PASS: no case is decided, or an undecided case looks slower or may be
        much slower.
        """
        if self.exit_code(strict=True) != 3:
            return False
        if any(case.is_loose for case in self.cases if case.verdict == INCONCLUSIVE):
            return True
        return bool(self.look_slower) or not any(self.counts.get(verdict) for verdict in (PASS, IMPROVEMENT))

    @property
    def why_nothing(self) -> str:
        """The reason why no case has a verdict; "" if a case has a verdict."""
        if self.num_judged:
            return ""
        compared = [case for case in self.cases if case.metrics]
        return compared[0].reason if compared else "no measured case is comparable"

    def headline(self, strict: bool = False) -> str:
        """The outcome in one line: `PASS (27 of 30 cases decided): 3 inconclusive, 27 pass`."""
        summary = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items()) or "no case"
        word = {0: "PASS", 1: "FAIL", 3: "INCONCLUSIVE", 4: "NO VERDICT"}[self.exit_code(strict)]
        if word == "PASS" and self.is_open:
            word = "INCONCLUSIVE"
        if word in ("PASS", "INCONCLUSIVE") and (num_open := self.counts.get(INCONCLUSIVE, 0)):
            compared = sum(case.verdict in JUDGED for case in self.cases)
            word += f" ({compared - num_open} of {count_text(compared, 'case')} decided)"
        if word == "NO VERDICT" and not self.num_judged:
            summary += f"; {self.why_nothing}"
        if word.startswith("INCONCLUSIVE") and (slower := self.look_slower):
            change = slower[0].unit.change(max(metric.change for metric in slower[0].metrics))
            summary += f"; {len(slower)} measured {self.worse} than the tolerance, the worst {100 * change:+.1f} %: "
            summary += slower[0].case_id
        return f"{word}: {summary}"


@dataclass(frozen=True)
class CaseTable:
    """One side's launches of one group.

    Args:
        values: case id to the case's value in each launch; None if the launch lacks the case.
        expected: case id to the number of launches whose parameters include the case.
    """

    launches: Sequence[Launch]
    values: dict[str, list[Value | None]]
    expected: dict[str, int]

    @classmethod
    def of(cls, launches: Sequence[Launch]) -> "CaseTable":
        """Build the table of the given launches."""
        values: dict[str, list[Value | None]] = {}
        seen_under: dict[str, set[str]] = {}
        for column, launch in enumerate(launches):
            for case_id, value in launch.cases.items():
                values.setdefault(case_id, [None] * len(launches))[column] = value
                seen_under.setdefault(case_id, set()).add(launch.variants)
        num_with = Counter(launch.variants for launch in launches)
        expected = {case_id: sum(num_with[text] for text in texts) for case_id, texts in seen_under.items()}
        return cls(launches, values, expected)

    def failed(self, case_id: str) -> list[Value]:
        """The values of a case with status wrong, raised, timed out or aborted."""
        return [value for value in self._of(case_id) if value.status in FAILED]

    def num_ok(self, case_id: str) -> int:
        """The number of launches that measured a case."""
        return sum(value.status == "ok" for value in self._of(case_id))

    def num_lacking(self, case_id: str) -> int:
        """The number of launches that should have measured a case, but lack it, skipped it or could not run it."""
        values = self._of(case_id)
        return self.expected.get(case_id, 0) - len(values) + sum(value.status in NOT_RUN for value in values)

    def logarithms(self, case_ids: Sequence[str], metric: str) -> Floats:
        """Logarithms of one metric, shape [cases, launches]; nan if a launch did not measure the case."""
        rows = (self.values[case_id] for case_id in case_ids)
        table = [
            [getattr(value, f"{metric}_s") if value and value.status == "ok" else math.nan for value in row]
            for row in rows
        ]
        return np.log(np.array(table).reshape(len(case_ids), len(self.launches)))

    def _of(self, case_id: str) -> list[Value]:
        return [value for value in self.values.get(case_id, ()) if value is not None]


# Cases that both sides measured: their differences, tested as one family, and their verdicts.

REASONS = {
    REGRESSION: "the {metric} is {worse} by more than the tolerance, and not by chance",
    IMPROVEMENT: "the {metric} is {better} by more than the tolerance, and not by chance",
    PASS: "{worse} by less than the tolerance, if at all",
}


@dataclass(frozen=True)
class MeasuredCases:
    """The cases of one group that both sides measured, with the differences between the sides.

    Args:
        differences: metric to its differences, one row per case.
        notes: case id to sentences.
        doubt: the reason why the changes of this group give no verdict, or "".
        may_pass: False if foreign load differed, which also prevents a pass.
        left_out: sentences on pairs of launches that were left out as outliers.
    """

    group: Group
    case_ids: Sequence[str]
    pairing: Pairing
    differences: Mapping[str, LogDifference]
    notes: Mapping[str, tuple[str, ...]]
    doubt: str
    may_pass: bool
    left_out: Sequence[str]

    def unit(self, case_id: str) -> Unit:
        """The unit of a case."""
        sides = (*self.group.baseline, *self.group.candidate)
        return next(launch.cases[case_id].unit for launch in sides if case_id in launch.cases)


def _measured(
    group: Group,
    sides: tuple[CaseTable, CaseTable],
    case_ids: Sequence[str],
    notes: Mapping[str, tuple[str, ...]],
    spans: Mapping[str, Span],
    options: Options,
) -> MeasuredCases:
    """The differences of one group in these cases, and the reason to doubt them. `spans`: run id to its time span."""
    pairing = pairing_of(*([spans[launch.run_id] for launch in side] for side in (group.baseline, group.candidate)))
    logs = {metric: [side.logarithms(case_ids, metric) for side in sides] for metric in METRICS}
    least = options.least_launches(paired=True)
    left_out = leave_out_outliers(group, logs, pairing, least) if pairing.interleaved and case_ids else []
    differences = {metric: difference_between(side_logs, pairing) for metric, side_logs in logs.items()}
    conflict = load_conflict(group.baseline, group.candidate, pairing)
    doubt = conflict
    if not doubt and pairing.is_disturbed:
        doubt = f"{pairing.refusal}; run the launches one after the other"
    elif not doubt and not pairing.interleaved and not options.dedicated:
        doubt = f"{pairing.refusal}; alternate the launches, or give --dedicated"
    return MeasuredCases(group, case_ids, pairing, differences, notes, doubt, not conflict, left_out)


def load_conflict(baseline: Sequence[Launch], candidate: Sequence[Launch], pairing: Pairing) -> str:
    """One sentence if foreign load differed between the sides by more than LOAD_SHARE of the CPUs, else "".

    If the CPUs were idle in the baseline and busy in the candidate, most unchanged cases look slower, and no
    statistical test corrects this.
    """
    loads = [np.array([[launch.foreign_load for launch in side]], dtype=float) for side in (baseline, candidate)]
    difference = difference_between(loads, pairing)
    # The difference is nan if the load of a side is unknown; nan is not larger than any share.
    if not abs(difference.estimate[0]) > LOAD_SHARE:
        return ""
    before, after = 100 * difference.baseline[0], 100 * difference.candidate[0]
    return f"other processes used {before:.0f} % of the CPUs in the baseline, {after:.0f} % in the candidate"


def _judged(measured: Sequence[MeasuredCases], options: Options) -> tuple[list[CaseVerdict], int, int]:
    """Return the verdicts on cases with times, tested as one family, the number of tests, and the number of cases with
    too few launches."""
    blocks = [[_block(of_group.differences[metric], metric, options) for metric in METRICS] for of_group in measured]
    results, num_tests = tested(list(chain.from_iterable(blocks)), options)
    remaining, cases, num_too_few = iter(results), list[CaseVerdict](), 0
    for of_group, group_blocks in zip(measured, blocks, strict=True):
        by_metric = [
            _metric_verdicts(of_group, metric, block, next(remaining), options)
            for metric, block in zip(METRICS, group_blocks, strict=True)
        ]
        least = options.least_launches(of_group.pairing.interleaved)
        for case_id, *metrics in zip(of_group.case_ids, *by_metric, strict=True):
            cases.append(_case_of(case_id, metrics, of_group, least))
            num_too_few += all(metric.num_launches < least for metric in metrics)
    return cases, num_tests, num_too_few


def _block(difference: LogDifference, metric: str, options: Options) -> Block:
    """Add the logarithm of the largest slowdown that is not a regression, including the floor in seconds."""
    floor = options.floor_s / np.exp(difference.baseline)
    return Block(difference, np.log1p(np.maximum(options.tolerances[metric], floor)))


def _case_of(case_id: str, metrics: Sequence[MetricVerdict], measured: MeasuredCases, least: int) -> CaseVerdict:
    """Return the case's verdict: the verdict of its worst metric, or "improvement" if a metric improved and no other is
    in doubt."""
    verdict = next(word for word in JUDGED if word in [metric.verdict for metric in metrics])
    sign = 1 if verdict == IMPROVEMENT else -1
    ordered = sorted(
        metrics,
        key=lambda metric: (metric.verdict != verdict, metric.suspected != REGRESSION, sign * metric.change),
    )
    is_paired, notes = measured.pairing.interleaved, measured.notes.get(case_id, ())
    unit = measured.unit(case_id)
    reason = _reason(ordered[0], measured, least, unit)
    return CaseVerdict(measured.group.label, case_id, verdict, reason, is_paired, tuple(ordered), notes, unit)


def _metric_verdicts(
    measured: MeasuredCases, metric: str, block: Block, result: Tested, options: Options
) -> list[MetricVerdict]:
    difference, least = block.difference, options.least_launches(measured.pairing.interleaved)
    verdicts, suspected = tolerance_words(block, result, options, not measured.doubt, measured.may_pass)
    is_open = verdicts == INCONCLUSIVE
    low, high = difference.interval()
    count = difference.num_launches
    more = np.where(count < least, least - count, np.maximum(result.needed - count, 1))
    columns = {
        "verdict": verdicts.tolist(),
        "baseline_s": np.exp(difference.baseline).tolist(),
        "candidate_s": np.exp(difference.candidate).tolist(),
        "change": np.expm1(difference.estimate).tolist(),
        "low": _known(np.expm1(low)),
        "high": _known(np.expm1(high)),
        "p": _known(result.slower),
        "tolerance": np.expm1(block.tolerance).tolist(),
        "detectable": _known(np.expm1(result.detectable)),
        "num_launches": count.tolist(),
        "num_more": [None if value is None else int(value) for value in _known(np.where(is_open, more, np.nan))],
        "suspected": [word or None for word in np.where(is_open, suspected, "").tolist()],
    }
    rows = zip(*columns.values(), strict=True)
    return [MetricVerdict(metric, **dict(zip(columns, row, strict=True))) for row in rows]


def _known(values: Floats) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _reason(metric: MetricVerdict, measured: MeasuredCases, least: int, unit: Unit) -> str:
    worse, better = unit.words
    if metric.verdict != INCONCLUSIVE:
        return REASONS[metric.verdict].format(metric=metric.metric, worse=worse, better=better)
    if metric.num_launches < least:
        words = ("pair", "pairs") if measured.pairing.interleaved else ("launch per side", "launches per side")
        return f"{count_text(metric.num_launches, *words)}; a verdict needs at least {least}"
    if metric.suspected or not measured.may_pass:
        prefix = {REGRESSION: f"{worse}, but ", IMPROVEMENT: f"{better}, but "}.get(metric.suspected or "", "")
        return f"{prefix}{measured.doubt}"
    return "neither a regression nor a pass is certain"


OF_LATENCIES = (
    "times are latencies of a forward pass. The gate compares each launch's mean and 10th percentile (p10), not the "
    "tail: distbench report prints p50, p90 and p99"
)


def gate(
    baseline: Sequence[Launch], candidate: Sequence[Launch], options: Options, warnings: Sequence[str] = ()
) -> Gated:
    """Return a verdict for every case of either side, the worst first, with the given `warnings`.

    Raises:
        UserError: a launch is on both sides, a case is in two units, or a floor in time is given for other numbers.
    """
    if shared_ids := {launch.run_id for launch in baseline} & {launch.run_id for launch in candidate}:
        where = f"run {min(shared_ids)} is in the baseline and in the candidate"
        raise UserError(f"{where}; give each run on one side only")
    units = units_of((*baseline, *candidate))
    if options.floor_s and (other := next((unit for unit in units.values() if not unit.is_time), None)):
        unit_text = f"the unit {other.name}" if other.name else "no unit"
        raise UserError(
            f"--floor-us is for times, and some numbers have {unit_text}; leave --floor-us out, or give --unit"
        )
    cases: list[CaseVerdict] = []
    measured: list[MeasuredCases] = []
    designs: list[str] = []
    # Each sentence appears once, with the labels of its groups.
    stamps: dict[str, list[str]] = {}
    shown_stamps: dict[str, list[str]] = {}
    spans = {**spans_of(baseline), **spans_of(candidate)}
    num_not_run = 0
    unfinished = sum(not launch.complete for launch in candidate)
    sentences = [*warnings]
    if unfinished:
        sentences.append(f"{unfinished} of {len(candidate)} candidate launches did not finish")
    sentences += _busy(baseline, candidate)
    for group in groups_of(baseline, candidate, options.allowed):
        sides = CaseTable.of(group.baseline), CaseTable.of(group.candidate)
        if group.conflicts or not group.baseline or not group.candidate:
            cases += _uncompared(group, *sides)
            continue
        untimed, case_ids, notes = _settled(group.label, *sides)
        cases += _other_dtypes(untimed, options.allowed)
        num_not_run += len({*sides[0].values, *sides[1].values}) - len(untimed) - len(case_ids)
        measured.append(_measured(group, sides, case_ids, notes, spans, options))
        design, second = _designs(group, measured[-1].pairing, options)
        sentences += [f"{group.label}: {sentence}" for sentence in second]
        is_latency = any(
            value.is_latency for launch in (*group.baseline, *group.candidate) for value in launch.cases.values()
        )
        of_latencies = [OF_LATENCIES] if is_latency else []
        designs += [f"{group.label}: {sentence}" for sentence in (design, *measured[-1].left_out, *of_latencies)]
        for fields, labels_by_sentence in ((options.allowed, stamps), (SHOWN, shown_stamps)):
            for sentence in differences(group.baseline, group.candidate, fields):
                labels_by_sentence.setdefault(sentence, []).append(group.label)
    timed, num_tests, num_too_few = _judged(measured, options)
    return Gated(
        sorted([*cases, *timed], key=_badness),
        options,
        len(baseline),
        len(candidate),
        num_tests,
        num_not_run,
        num_too_few,
        designs,
        [f"{listed(labels, MAX_LISTED)}: {text}" for text, labels in stamps.items()],
        [f"{listed(labels, MAX_LISTED)}: {text}" for text, labels in shown_stamps.items()],
        sentences,
        next((launch.more for launch in (*baseline, *candidate) if launch.more), ""),
    )


def _badness(case: CaseVerdict) -> tuple[int, bool, float, str, str]:
    return VERDICTS.index(case.verdict), case.suspected != REGRESSION, -case.change, case.scenario, case.case_id


def _busy(baseline: Sequence[Launch], candidate: Sequence[Launch]) -> list[str]:
    """Return a warning if other processes used much CPU time on both sides, which widens every interval."""
    sides = [
        [launch.foreign_load for launch in side if launch.foreign_load is not None] for side in (baseline, candidate)
    ]
    if not all(sides):
        return []
    before, after = (min(sum(loads) / len(loads), 1.0) for loads in sides)
    if min(before, after) <= LOAD_SHARE:
        return []
    used = f"{100 * before:.0f} % of the CPUs during the baseline and {100 * after:.0f} % during the candidate"
    return [f"other processes used {used}; use an idle machine to detect smaller slowdowns with fewer launches"]


def _designs(group: Group, pairing: Pairing, options: Options) -> tuple[str, list[str]]:
    """Return a sentence on the method of comparison, and a warning if one side always ran second."""
    if not pairing.interleaved:
        against = count_text(len(group.candidate), "launch", "launches")
        sides = f"{len(group.baseline)} versus {against}, compared unpaired: {pairing.refusal}"
        is_trusted = options.dedicated and not pairing.is_disturbed
        return sides + (" (--dedicated)" if is_trusted else "; a slowdown is a warning only"), []
    pairs = list(zip(pairing.baseline, pairing.candidate, strict=True))
    left_out = f", {count_text(pairing.num_left_out, 'launch', 'launches')} left out" if pairing.num_left_out else ""
    if pairing.is_given:
        return f"{count_text(len(pairs), 'pair')} by --pair{left_out}", []
    first = sum(group.baseline[base].started_at < group.candidate[new].started_at for base, new in pairs)
    design = f"{count_text(len(pairs), 'pair')} of alternating launches, the baseline first in {first}{left_out}"
    if len(pairs) < options.least_launches(paired=True) or 0 < first < len(pairs):
        return design, []
    second = f"the {'candidate' if first else 'baseline'} ran second in all {len(pairs)} pairs"
    return design, [
        f"{second}, so only this side has the after-effects of another launch; use a random order in each pair"
    ]


def _uncompared(group: Group, baseline: CaseTable, candidate: CaseTable) -> list[CaseVerdict]:
    """Return verdicts without times: for a group with only one side, or with sides that differ in a field that must
    agree."""
    if not group.conflicts and not group.baseline:
        return [_alone(group.label, case_id, candidate, "not in the baseline") for case_id in candidate.values]
    ids = dict.fromkeys((*baseline.values, *candidate.values)) or ("(no case)",)
    verdict, reason = MISSING, f"the candidate has no launch of {group.label}"
    if group.conflicts:
        verdict, reason = INCOMPARABLE, "; ".join(group.conflicts)
    return [CaseVerdict(group.label, case_id, verdict, reason) for case_id in ids]


def _alone(label: str, case_id: str, candidate: CaseTable, why: str) -> CaseVerdict:
    if failed := candidate.failed(case_id):
        return CaseVerdict(label, case_id, INVALID, _failure(failed, candidate, "candidate"))
    return CaseVerdict(label, case_id, NEW, f"{why}, so the case cannot be compared")


def _failure(failed: Sequence[Value], side: CaseTable, name: str) -> str:
    launches = count_text(len(side.launches), f"{name} launch", f"{name} launches")
    error = f": {failed[0].error}" if failed[0].error else ""
    return f"{failed[0].status} in {len(failed)} of {launches}{error}"


def _settled(
    label: str, baseline: CaseTable, candidate: CaseTable
) -> tuple[list[CaseVerdict], list[str], dict[str, tuple[str, ...]]]:
    """Return the cases with a verdict that needs no times, the cases to compare, and notes on them. Neither side ran
    the other cases."""
    settled_cases: list[CaseVerdict] = []
    timed: list[str] = []
    notes: dict[str, tuple[str, ...]] = {}
    for case_id in dict.fromkeys((*baseline.values, *candidate.values)):
        if verdict := _untimed(label, case_id, baseline, candidate):
            settled_cases.append(verdict)
        elif baseline.num_ok(case_id):
            timed.append(case_id)
            if lacking := baseline.num_lacking(case_id):
                notes[case_id] = (f"{lacking} of {len(baseline.launches)} baseline launches lack this case",)
    return settled_cases, timed, notes


def _untimed(label: str, case_id: str, baseline: CaseTable, candidate: CaseTable) -> CaseVerdict | None:
    before, after = baseline.num_ok(case_id), candidate.num_ok(case_id)
    broken_before = baseline.failed(case_id)
    if candidate.failed(case_id):
        return _alone(label, case_id, candidate, "")
    if before and broken_before:
        return CaseVerdict(label, case_id, INVALID, _failure(broken_before, baseline, "baseline"))
    if after and not before:
        return _alone(label, case_id, candidate, "failed in the baseline" if broken_before else "not in the baseline")
    lacking = candidate.num_lacking(case_id) if after else len(candidate.launches)
    if (before or broken_before) and lacking:
        launches = count_text(len(candidate.launches), "launch", "launches")
        return CaseVerdict(label, case_id, MISSING, f"not measured in {lacking} of {launches}")
    return None


def _other_dtypes(settled_cases: list[CaseVerdict], allowed: Sequence[str]) -> list[CaseVerdict]:
    """Join a missing and a new case that differ only in dtype to one case that is not comparable."""
    if DTYPE in allowed:
        return settled_cases
    new = dict(without_dtype(case.case_id) for case in settled_cases if case.verdict == NEW)
    cases = []
    for case in settled_cases:
        key, dtype = without_dtype(case.case_id)
        is_same = case.verdict == MISSING and dtype and key in new
        reason = f"dtype: {dtype} in the baseline, {new.get(key)} in the candidate"
        cases.append(replace(case, verdict=INCOMPARABLE, reason=reason) if is_same else case)
    return cases
