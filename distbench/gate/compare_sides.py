"""Baseline and candidate to verdicts. Nothing is printed and nothing is read here."""

from collections.abc import Sequence
from dataclasses import replace

from distbench.compare.options import Options
from distbench.compare.pairing import Pairing
from distbench.gate.comparable import DTYPE, Group, differences, groups_of, without_dtype
from distbench.gate.judge import MeasuredCases, judged, measure
from distbench.gate.table import CaseTable, side_of
from distbench.gate.verdict import INCOMPARABLE, INVALID, MISSING, NEW, REGRESSION, VERDICTS, CaseVerdict, Gated
from distbench.runs.header import SHOWN
from distbench.runs.launches import Launch
from distbench.spec.errors import UserError

MAX_LABELS = 3


def gate(
    baseline: Sequence[Launch], candidate: Sequence[Launch], options: Options, warnings: Sequence[str] = ()
) -> Gated:
    """A verdict for every case of either side, the worst first.

    Args:
        baseline: its launches.
        candidate: its launches.
        options: the terms.
        warnings: sentences to hand on.

    Raises:
        UserError: a launch stands on both sides.
    """
    both = {launch.run_id for launch in baseline} & {launch.run_id for launch in candidate}
    if both:
        raise UserError(f"run {min(both)} is in the baseline and in the candidate; give each run to one side only")
    gated = Gated([], options, len(baseline), len(candidate), warnings=[*warnings, *_unfinished(candidate)])
    measured: list[MeasuredCases] = []
    stamps: dict[str, list[str]] = {}
    shown: dict[str, list[str]] = {}
    num_not_run = 0
    for group in groups_of(baseline, candidate, options.allowed):
        if group.conflicts or not group.baseline or not group.candidate:
            gated.cases.extend(_uncompared(group))
            continue
        sides = side_of(group.baseline), side_of(group.candidate)
        settled, rows, notes, skipped = _settled(group, *sides, options.allowed)
        gated.cases.extend(settled)
        num_not_run += skipped
        measured.append(measure(group, *sides, rows, notes, options))
        gated.designs.append(_design(group, measured[-1].pairing, options))
        for fields, said in ((options.allowed, stamps), (SHOWN, shown)):
            for sentence in differences(group.baseline, group.candidate, fields):
                said.setdefault(sentence, []).append(group.label)
    timed, num_tests, num_too_few = judged(measured, options)
    cases = sorted([*gated.cases, *timed], key=_how_bad)
    gated = replace(gated, stamps=_labelled(stamps), shown=_labelled(shown))
    return replace(gated, cases=cases, num_tests=num_tests, num_not_run=num_not_run, num_too_few=num_too_few)


def _how_bad(case: CaseVerdict) -> tuple[int, bool, float, str, str]:
    return VERDICTS.index(case.verdict), case.suspected != REGRESSION, -case.change, case.scenario, case.case_id


def _unfinished(candidate: Sequence[Launch]) -> list[str]:
    count = sum(not launch.complete for launch in candidate)
    return [f"{count} of {len(candidate)} candidate launches did not run to their end"] if count else []


def _labelled(said: dict[str, list[str]]) -> list[str]:
    """Each sentence once, after the groups that it is true of."""
    lines = []
    for text, labels in said.items():
        more = f" and {len(labels) - MAX_LABELS} more" if len(labels) > MAX_LABELS else ""
        lines.append(f"{', '.join(labels[:MAX_LABELS])}{more}: {text}")
    return lines


def _design(group: Group, pairing: Pairing, options: Options) -> str:
    if pairing.interleaved:
        left_out = f", {pairing.num_left_out} launches left out" if pairing.num_left_out else ""
        return f"{group.label}: {len(pairing.baseline)} pairs of launches that took turns{left_out}"
    sides = f"{len(group.baseline)} against {len(group.candidate)} launches"
    if options.dedicated:
        return f"{group.label}: {sides} that did not take turns, compared unpaired (--dedicated)"
    return f"{group.label}: {sides} that did not take turns: another occasion, so a slowdown is only warned about"


def _uncompared(group: Group) -> list[CaseVerdict]:
    """Every case of a group that stands on one side, or whose sides differ in a field that must agree."""
    sides = side_of(group.baseline), side_of(group.candidate)
    if group.conflicts:
        reason = "; ".join(group.conflicts)
        ids = dict.fromkeys((*sides[0].values, *sides[1].values)) or {"(no case)": None}
        return [CaseVerdict(group.label, case_id, INCOMPARABLE, reason) for case_id in ids]
    if group.baseline:
        reason = f"the candidate has no launch of {group.label}"
        return [CaseVerdict(group.label, case_id, MISSING, reason) for case_id in sides[0].values or ("(no case)",)]
    return [_alone(group.label, case_id, sides[1], "in no baseline") for case_id in sides[1].values]


def _alone(label: str, case_id: str, candidate: CaseTable, why: str) -> CaseVerdict:
    failed = candidate.failed(case_id)
    if failed:
        return CaseVerdict(label, case_id, INVALID, _failure(failed, candidate, "candidate"))
    return CaseVerdict(label, case_id, NEW, f"{why}, so there is nothing to compare it with")


def _failure(failed: Sequence[object], side: CaseTable, name: str) -> str:
    first = failed[0]
    status, error = getattr(first, "status", ""), getattr(first, "error", None)
    return f"{status} in {len(failed)} of {len(side.launches)} {name} launches" + (f": {error}" if error else "")


def _settled(
    group: Group, baseline: CaseTable, candidate: CaseTable, allowed: Sequence[str]
) -> tuple[list[CaseVerdict], list[str], dict[str, tuple[str, ...]], int]:
    """Cases whose verdict needs no times, those that need them, notes on the latter, and how many neither side ran."""
    settled: list[CaseVerdict] = []
    rows: list[str] = []
    notes: dict[str, tuple[str, ...]] = {}
    num_not_run = 0
    for case_id in dict.fromkeys((*baseline.values, *candidate.values)):
        verdict = _untimed(group.label, case_id, baseline, candidate)
        if verdict is not None:
            settled.append(verdict)
        elif baseline.num_ok(case_id):
            rows.append(case_id)
            absent = baseline.num_absent(case_id) + baseline.num_not_run(case_id)
            if absent:
                notes[case_id] = (f"{absent} of {len(baseline.launches)} baseline launches lack it",)
        else:
            num_not_run += 1
    return _other_dtypes(settled, allowed), rows, notes, num_not_run


def _untimed(label: str, case_id: str, baseline: CaseTable, candidate: CaseTable) -> CaseVerdict | None:
    before, after = baseline.num_ok(case_id), candidate.num_ok(case_id)
    broken_before = baseline.failed(case_id)
    if candidate.failed(case_id):
        return _alone(label, case_id, candidate, "")
    if before and broken_before:
        return CaseVerdict(label, case_id, INVALID, _failure(broken_before, baseline, "baseline"))
    if after and not before:
        return _alone(label, case_id, candidate, "failed in the baseline" if broken_before else "not in the baseline")
    lacking = len(candidate.launches) if not after else candidate.num_absent(case_id) + candidate.num_not_run(case_id)
    if (before or broken_before) and lacking:
        return CaseVerdict(label, case_id, MISSING, f"not measured in {lacking} of {len(candidate.launches)} launches")
    return None


def _other_dtypes(settled: list[CaseVerdict], allowed: Sequence[str]) -> list[CaseVerdict]:
    """A missing and a new case that differ in nothing but their dtype are one case that cannot be compared."""
    if DTYPE in allowed:
        return settled
    new = {without_dtype(case.case_id)[0]: case for case in settled if case.verdict == NEW}
    result = []
    for case in settled:
        key, dtype = without_dtype(case.case_id)
        twin = new.get(key) if case.verdict == MISSING and dtype else None
        if twin:
            other = without_dtype(twin.case_id)[1]
            reason = f"dtype: {dtype} in the baseline, {other} in the candidate"
            result.append(replace(case, verdict=INCOMPARABLE, reason=reason))
        else:
            result.append(case)
    return result
