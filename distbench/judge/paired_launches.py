"""Pairing of launches with equal environments: neighbours in time form pairs if the launches alternated. Otherwise all
launches of one side are compared with all launches of the other side.

The speed of a machine drifts: over half an hour, by more than most regressions. Alternating launches have the same
drift, so the difference within a pair does not contain the drift. Start and end times show whether launches alternated.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from distbench.records.launches import Launch
from distbench.records.run_file import MUST_AGREE
from distbench.spec.errors import UserError, nearest
from distbench.spec.printable_text import listed
from distbench.statistics.intervals import Floats
from distbench.statistics.significance import LogDifference, outlying_pairs, paired_difference, unpaired_difference

DTYPE = "dtype"  # part of a case's id, not of the environment
_DTYPE_IN_ID = re.compile(r"(?<=/)([a-z]+\d+)(?=\[)")
MAX_LISTED = 3


@dataclass(frozen=True)
class Group:
    """The launches of one scenario that are compared with each other, oldest first.

    Args:
        label: the scenario's name, and the fields in which its groups differ.
        conflicts: sentences on fields that prevent the comparison; empty without a conflict.
    """

    label: str
    baseline: Sequence[Launch]
    candidate: Sequence[Launch]
    conflicts: tuple[str, ...] = ()


def check_allowed(fields: Iterable[str]) -> tuple[str, ...]:
    """Return the fields that may differ, without duplicates. Raise UserError for a name neither in MUST_AGREE nor
    "dtype"."""
    names = (*MUST_AGREE, DTYPE)
    for name in fields:
        if name not in names:
            raise UserError(f"--allow-different {name!r} is not a field that must agree ({nearest(name, names)})")
    return tuple(dict.fromkeys(fields))


def groups_of(baseline: Sequence[Launch], candidate: Sequence[Launch], allowed: Sequence[str]) -> list[Group]:
    """Group the launches of both sides by scenario and by all fields that must agree.

    Other launches of a scenario form one more group, with conflicts if both sides have such launches.
    """
    groups: list[Group] = []
    fields = [name for name in MUST_AGREE if name not in allowed]
    for scenario in dict.fromkeys(launch.scenario for launch in (*baseline, *candidate)):
        sides = [[launch for launch in side if launch.scenario == scenario] for side in (baseline, candidate)]
        # If both sides have the same sets of parameters, pair launches with equal parameters. Otherwise ignore
        # parameters, so that a scenario with a new parameter is still compared.
        by_variants = {launch.variants for launch in sides[0]} == {launch.variants for launch in sides[1]}
        left: dict[tuple[str, ...], list[Launch]] = {}
        right: dict[tuple[str, ...], list[Launch]] = {}
        for side, by_facts in zip(sides, (left, right), strict=True):
            for launch in side:
                facts = (repr(launch.facts.get(name)) for name in fields)
                by_facts.setdefault((*facts, launch.variants if by_variants else ""), []).append(launch)
        common = [key for key in left if key in right]
        labels = _labels(scenario, [left[key][0] for key in common])
        groups += [Group(label, left[key], right[key]) for key, label in zip(common, labels, strict=True)]
        lone_left, lone_right = (
            [launch for key, launches in by_facts.items() if key not in common for launch in launches]
            for by_facts in (left, right)
        )
        conflicts = []
        if lone_left and lone_right:
            conflicts = differences(lone_left, lone_right, fields)
            conflicts = conflicts or ["no two launches of different sides agree in every field"]
        if lone_left or lone_right:
            groups.append(Group(scenario, lone_left, lone_right, tuple(conflicts)))
    return groups


def _labels(scenario: str, firsts: Sequence[Launch]) -> list[str]:
    differing = [name for name in MUST_AGREE if len({repr(launch.facts[name]) for launch in firsts}) > 1]
    if not differing:
        return [scenario] * len(firsts)
    return [f"{scenario} ({', '.join(f'{name} {launch.facts[name]}' for name in differing)})" for launch in firsts]


def differences(baseline: Sequence[Launch], candidate: Sequence[Launch], fields: Iterable[str]) -> list[str]:
    """Sentences on the `fields` whose values differ between the sides."""
    sentences = []
    for name in fields:
        left, right = (sorted({_text(launch.facts.get(name)) for launch in side}) for side in (baseline, candidate))
        if left and right and left != right:
            left_text, right_text = listed(left, MAX_LISTED, " and "), listed(right, MAX_LISTED, " and ")
            sentences.append(f"{name}: {left_text} in the baseline, {right_text} in the candidate")
    return sentences


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items()) or "none"
    return "not recorded" if value is None else str(value)


def without_dtype(case_id: str) -> tuple[str, str | None]:
    """Return the id without its dtype, and the dtype: `collective/?[256]/x` and `f32` for `collective/f32[256]/x`."""
    match = _DTYPE_IN_ID.search(case_id)
    return (_DTYPE_IN_ID.sub("?", case_id, count=1), match[1]) if match else (case_id, None)


INTERLEAVED_SHARE = 0.75  # of the smaller side's launches that must have a neighbour on the other side
# The gap between the launches of a pair may contain a build, but no more drift than the launches.
MAX_GAP_S = 600.0
MAX_GAP_LAUNCHES = 3.0  # or this multiple of the longer launch
CLOCK_S = 1.0  # shorter overlaps are ignored: clocks are corrected, and some tools record whole seconds
NOT_ALTERNATING = "the launches did not alternate, and machines drift"


@dataclass(frozen=True)
class Span:
    """The time span of one launch.

    Args:
        name: the launch's name.
        start, end: seconds since the epoch, 0 if unknown.
        pair: the common name of this launch and its partner on the other side, or None.
    """

    name: str
    start: float
    end: float
    pair: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether start and end are known and in order."""
        return 0 < self.start <= self.end


def spans_of(launches: Sequence[Launch]) -> dict[str, Span]:
    """Return the time span of each launch of one side, by run id; a command with several scenarios is one launch."""
    together: dict[str, list[Launch]] = {}
    for launch in launches:
        together.setdefault(launch.invocation_id or launch.run_id, []).append(launch)
    spans: dict[str, Span] = {}
    for some in together.values():
        start, end = min(run.started_at for run in some), max(run.ended_at for run in some)
        spans |= {run.run_id: Span(run.run_id, start, end if run.ended_at else 0.0, run.pair) for run in some}
    return spans


@dataclass(frozen=True)
class Pairing:
    """The pairs of two sides' launches.

    Args:
        baseline: indexes of the baseline's launches: one per pair, or all launches if unpaired.
        candidate: indexes of the candidate's launches; pairs in the same order.
        num_left_out: number of launches in no pair, because they have no neighbour on the other side.
        refusal: the reason why launches are compared unpaired; "" if they alternated.
        is_disturbed: whether two launches of different sides ran at the same time.
        is_given: whether the user named the pairs; then the order within a pair is unknown.
    """

    baseline: tuple[int, ...]
    candidate: tuple[int, ...]
    num_left_out: int = 0
    refusal: str = ""
    is_disturbed: bool = False
    is_given: bool = False

    @property
    def interleaved(self) -> bool:
        """Whether launches alternated."""
        return not self.refusal


def pairing_of(baseline: Sequence[Span], candidate: Sequence[Span]) -> Pairing:
    """Return the pairs that the user named; otherwise neighbours in time, where the launches alternated.

    Raises:
        UserError: two launches of one side have the same pair.
    """
    sides = (baseline, candidate)
    if all(span.pair is not None for span in (*baseline, *candidate)):
        return _given_pairs(sides)
    # A killed launch has no end time and is in no pair, because its overlap with other launches is unknown.
    timeline = sorted(
        (span.start, side, index) for side in (0, 1) for index, span in enumerate(sides[side]) if span.is_known
    )
    overlap = _overlap(*([span for span in side if span.is_known] for side in sides))
    pairs, far = _neighbours(sides, timeline)
    # A single pair also occurs between two blocks: all launches of A, then all launches of B.
    least = max(2, INTERLEAVED_SHARE * min(map(len, sides)))
    if overlap is None and len(pairs) >= least:
        left, right = zip(*pairs, strict=True)
        return Pairing(left, right, len(baseline) + len(candidate) - 2 * len(pairs))
    refusal = overlap or NOT_ALTERNATING
    if overlap is None and len(pairs) + len(far) >= least:
        refusal = f"at least {min(far) / 60:.0f} min passed between launches of the two sides, and machines drift"
    elif overlap is None and len(timeline) < len(baseline) + len(candidate):
        refusal = "some launches have no recorded start or end, so they cannot be paired"
    everyone = tuple(range(len(baseline))), tuple(range(len(candidate)))
    return Pairing(*everyone, refusal=refusal, is_disturbed=overlap is not None)


def _given_pairs(sides: Sequence[Sequence[Span]]) -> Pairing:
    by_name: list[dict[str | None, int]] = [{}, {}]
    for side, indexes in zip(sides, by_name, strict=True):
        for index, span in enumerate(side):
            if span.pair in indexes:
                both = f"launches {side[indexes[span.pair]].name} and {span.name} of one side have pair {span.pair!r}"
                raise UserError(f"{both}; a pair is one launch per side")
            indexes[span.pair] = index
    names = [name for name in by_name[0] if name in by_name[1]]
    left, right = (tuple(indexes[name] for name in names) for indexes in by_name)
    refusal = "" if len(names) > 1 else "fewer than two launches have a partner with the same --pair"
    if refusal:
        left, right = (tuple(range(len(side))) for side in sides)
    return Pairing(left, right, len(sides[0]) + len(sides[1]) - 2 * len(left), refusal, is_given=True)


def _neighbours(
    sides: Sequence[Sequence[Span]], timeline: Sequence[tuple[float, int, int]]
) -> tuple[list[tuple[int, int]], list[float]]:
    """Return pairs of neighbours as (baseline's index, candidate's index), and the gaps of too distant neighbours in
    seconds."""
    pairs, far, position = [], [], 0
    while position + 1 < len(timeline):
        (_, side, index), (_, next_side, next_index) = timeline[position], timeline[position + 1]
        if side == next_side:
            position += 1
            continue
        span, next_span = sides[side][index], sides[next_side][next_index]
        gap_s, longer_s = next_span.start - span.end, max(span.end - span.start, next_span.end - next_span.start)
        if gap_s > max(MAX_GAP_S, MAX_GAP_LAUNCHES * longer_s):
            far.append(gap_s)
            position += 1
            continue
        pairs.append((index, next_index) if side == 0 else (next_index, index))
        position += 2
    return pairs, far


def _overlap(baseline: Sequence[Span], candidate: Sequence[Span]) -> str | None:
    """Return a sentence on the first two launches of different sides that ran at the same time, else None."""
    for left, right in product(baseline, candidate):
        shared_s = min(left.end, right.end) - max(left.start, right.start)
        if left.start == right.start or shared_s > CLOCK_S:
            return f"launches {left.name} and {right.name} ran at the same time and disturb each other"
    return None


def difference_between(sides: Sequence[Floats], pairing: Pairing) -> LogDifference:
    """Return the difference within pairs if launches alternated, else the difference of two independent samples.

    The sides are logarithms of shape [tests, launches], with nan if a launch lacks the value.
    """
    left, right = sides[0][:, list(pairing.baseline)], sides[1][:, list(pairing.candidate)]
    return paired_difference(left, right) if pairing.interleaved else unpaired_difference(left, right)


def leave_out_outliers(group: Group, logs: Mapping[str, Sequence[Floats]], pairing: Pairing, least: int) -> list[str]:
    """Replace outlying pairs by nan in `logs`, and return a sentence on each pair.

    Args:
        logs: a metric to the logarithms of both sides, of shape [cases, launches].
        least: minimum number of remaining pairs; with fewer remaining, no pair is left out.
    """
    base, new = list(pairing.baseline), list(pairing.candidate)
    differences = [right[:, new] - left[:, base] for left, right in logs.values()]
    outlying, sizes = outlying_pairs(differences, least)
    sentences = []
    for pair in np.flatnonzero(outlying).tolist():
        for left, _ in logs.values():
            left[:, base[pair]] = np.nan
        times = np.exp(np.nanmedian([difference[:, pair] for difference in differences]))
        first, second = group.baseline[base[pair]].run_id, group.candidate[new[pair]].run_id
        sentences.append(
            f"left out: launch {second} took {times:.2f}x the time of launch {first} (median over cases); "
            f"the median pair of launches differs by {np.exp(np.nanmedian(sizes[~outlying])):.2f}x"
        )
    return sentences
