"""Baseline and candidate to verdicts. Nothing is printed and nothing is read here."""

from collections.abc import Sequence
from dataclasses import replace

from distbench.compare.options import Options
from distbench.compare.pairing import Pairing
from distbench.compare.verdicts import INCOMPARABLE, INVALID, MISSING, NEW, REGRESSION, VERDICTS
from distbench.gate.comparable import DTYPE, Group, differences, groups_of, listed, spans_of, without_dtype
from distbench.gate.judge import MeasuredCases, judged, measure
from distbench.gate.outcome import CaseVerdict, Gated
from distbench.gate.table import CaseTable, table_of
from distbench.runs.header import SHOWN
from distbench.runs.launches import Launch, Value
from distbench.spec.errors import UserError
from distbench.spec.printable import count_text

OF_LATENCIES = (
    "times are latencies of a forward pass, of which a launch's mean and its fast end (p10, the 10th percentile) are "
    "compared, and not its tail: distbench report prints p50, p90 and p99"
)


def gate(
    baseline: Sequence[Launch], candidate: Sequence[Launch], options: Options, warnings: Sequence[str] = ()
) -> Gated:
    """A verdict for every case of either side, the worst first; `warnings` are handed on.

    Raises:
        UserError: a launch stands on both sides.
    """
    both = {launch.run_id for launch in baseline} & {launch.run_id for launch in candidate}
    if both:
        raise UserError(f"run {min(both)} is in the baseline and in the candidate; give each run to one side only")
    cases: list[CaseVerdict] = []
    measured: list[MeasuredCases] = []
    designs: list[str] = []
    # Each sentence once, with the groups that it is true of.
    stamps: dict[str, list[str]] = {}
    shown: dict[str, list[str]] = {}
    spans = {**spans_of(baseline), **spans_of(candidate)}
    num_not_run = 0
    always_second: list[str] = []
    for group in groups_of(baseline, candidate, options.allowed):
        sides = table_of(group.baseline), table_of(group.candidate)
        if group.conflicts or not group.baseline or not group.candidate:
            cases += _uncompared(group, *sides)
            continue
        untimed, case_ids, notes = _settled(group.label, *sides)
        cases += _other_dtypes(untimed, options.allowed)
        num_not_run += len({*sides[0].values, *sides[1].values}) - len(untimed) - len(case_ids)
        measured.append(measure(group, sides, case_ids, notes, spans, options))
        always_second += _always_second(group, measured[-1].pairing, options)
        designs.append(_design(group, measured[-1].pairing, options))
        designs += [f"{group.label}: {sentence}" for sentence in measured[-1].left_out]
        if any(value.is_latency for launch in (*group.baseline, *group.candidate) for value in launch.cases.values()):
            designs.append(f"{group.label}: {OF_LATENCIES}")
        for fields, said in ((options.allowed, stamps), (SHOWN, shown)):
            for sentence in differences(group.baseline, group.candidate, fields):
                said.setdefault(sentence, []).append(group.label)
    timed, num_tests, num_too_few = judged(measured, options)
    return Gated(
        sorted([*cases, *timed], key=_how_bad),
        options,
        len(baseline),
        len(candidate),
        num_tests,
        num_not_run,
        num_too_few,
        designs,
        _labelled(stamps),
        _labelled(shown),
        warnings=[*warnings, *_unfinished(candidate), *_busy(baseline, candidate, options), *always_second],
    )


def _how_bad(case: CaseVerdict) -> tuple[int, bool, float, str, str]:
    return VERDICTS.index(case.verdict), case.suspected != REGRESSION, -case.change, case.scenario, case.case_id


def _unfinished(candidate: Sequence[Launch]) -> list[str]:
    count = sum(not launch.complete for launch in candidate)
    return [f"{count} of {len(candidate)} candidate launches did not run to their end"] if count else []


def _busy(baseline: Sequence[Launch], candidate: Sequence[Launch], options: Options) -> list[str]:
    """That other processes took much of the machine on both sides alike, which widens every interval."""
    sides = [[one.foreign_load for one in side if one.foreign_load is not None] for side in (baseline, candidate)]
    shares = [min(sum(loads) / len(loads), 1.0) for loads in sides if loads]
    if len(shares) < 2 or min(shares) <= options.load_share:
        return []
    used = f"{100 * shares[0]:.0f} % of the CPUs during the baseline and {100 * shares[1]:.0f} % during the candidate"
    return [f"other processes used {used}; an idle machine finds smaller slowdowns with fewer launches"]


def _always_second(group: Group, pairing: Pairing, options: Options) -> list[str]:
    num_pairs, first = len(pairing.baseline), _num_baseline_first(group, pairing)
    if not pairing.interleaved or num_pairs < options.least_launches(paired=True) or 0 < first < num_pairs:
        return []
    side = "candidate" if first else "baseline"
    left = f"what a launch leaves behind for the next one falls on the {side} alone"
    return [
        f"{group.label}: the {side} ran second in all {num_pairs} pairs, so {left}; toss a coin for each pair's order"
    ]


def _num_baseline_first(group: Group, pairing: Pairing) -> int:
    pairs = zip(pairing.baseline, pairing.candidate, strict=False)
    return sum(group.baseline[one].started_at < group.candidate[other].started_at for one, other in pairs)


def _labelled(said: dict[str, list[str]]) -> list[str]:
    return [f"{listed(labels, ', ')}: {text}" for text, labels in said.items()]


def _design(group: Group, pairing: Pairing, options: Options) -> str:
    if pairing.interleaved:
        first = _num_baseline_first(group, pairing)
        num_left_out = pairing.num_left_out
        left_out = f", {count_text(num_left_out, 'launch', 'launches')} left out" if num_left_out else ""
        count = count_text(len(pairing.baseline), "pair")
        took_turns = f"{count} of launches that took turns, the baseline first in {first}"
        return f"{group.label}: {took_turns}{left_out}"
    against = count_text(len(group.candidate), "launch", "launches")
    sides = f"{len(group.baseline)} against {against}, compared unpaired: {pairing.refusal}"
    if options.dedicated and not pairing.is_disturbed:
        return f"{group.label}: {sides} (--dedicated)"
    return f"{group.label}: {sides}; so a slowdown is only warned about"


def _uncompared(group: Group, baseline: CaseTable, candidate: CaseTable) -> list[CaseVerdict]:
    """Every case of a group that stands on one side, or whose sides differ in a field that must agree."""
    if not group.conflicts and not group.baseline:
        return [_alone(group.label, case_id, candidate, "in no baseline") for case_id in candidate.values]
    ids = dict.fromkeys((*baseline.values, *candidate.values)) or ("(no case)",)
    if group.conflicts:
        return [CaseVerdict(group.label, case_id, INCOMPARABLE, "; ".join(group.conflicts)) for case_id in ids]
    reason = f"the candidate has no launch of {group.label}"
    return [CaseVerdict(group.label, case_id, MISSING, reason) for case_id in ids]


def _alone(label: str, case_id: str, candidate: CaseTable, why: str) -> CaseVerdict:
    if failed := candidate.failed(case_id):
        return CaseVerdict(label, case_id, INVALID, _failure(failed, candidate, "candidate"))
    return CaseVerdict(label, case_id, NEW, f"{why}, so there is nothing to compare it with")


def _failure(failed: Sequence[Value], side: CaseTable, name: str) -> str:
    counted = (
        f"{failed[0].status} in {len(failed)} of {count_text(len(side.launches), f'{name} launch', f'{name} launches')}"
    )
    return f"{counted}: {failed[0].error}" if failed[0].error else counted


def _settled(
    label: str, baseline: CaseTable, candidate: CaseTable
) -> tuple[list[CaseVerdict], list[str], dict[str, tuple[str, ...]]]:
    """Cases whose verdict needs no times; those that need them, and notes on them. The rest was run on neither side."""
    settled: list[CaseVerdict] = []
    timed: list[str] = []
    notes: dict[str, tuple[str, ...]] = {}
    for case_id in dict.fromkeys((*baseline.values, *candidate.values)):
        if verdict := _untimed(label, case_id, baseline, candidate):
            settled.append(verdict)
        elif baseline.num_ok(case_id):
            timed.append(case_id)
            if lacking := baseline.num_lacking(case_id):
                notes[case_id] = (f"{lacking} of {len(baseline.launches)} baseline launches lack it",)
    return settled, timed, notes


def _untimed(label: str, case_id: str, baseline: CaseTable, candidate: CaseTable) -> CaseVerdict | None:
    before, after = baseline.num_ok(case_id), candidate.num_ok(case_id)
    broken_before = baseline.failed(case_id)
    if candidate.failed(case_id):
        return _alone(label, case_id, candidate, "")
    if before and broken_before:
        return CaseVerdict(label, case_id, INVALID, _failure(broken_before, baseline, "baseline"))
    if after and not before:
        return _alone(label, case_id, candidate, "failed in the baseline" if broken_before else "not in the baseline")
    lacking = len(candidate.launches) if not after else candidate.num_lacking(case_id)
    if (before or broken_before) and lacking:
        launches = count_text(len(candidate.launches), "launch", "launches")
        return CaseVerdict(label, case_id, MISSING, f"not measured in {lacking} of {launches}")
    return None


def _other_dtypes(settled: list[CaseVerdict], allowed: Sequence[str]) -> list[CaseVerdict]:
    """A missing and a new case that differ in nothing but their dtype are one case that cannot be compared."""
    if DTYPE in allowed:
        return settled
    new = dict(without_dtype(case.case_id) for case in settled if case.verdict == NEW)
    cases = []
    for case in settled:
        key, dtype = without_dtype(case.case_id)
        is_same = case.verdict == MISSING and dtype and key in new
        reason = f"dtype: {dtype} in the baseline, {new.get(key)} in the candidate"
        cases.append(replace(case, verdict=INCOMPARABLE, reason=reason) if is_same else case)
    return cases
