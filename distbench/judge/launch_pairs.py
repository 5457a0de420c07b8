"""Which launches are compared with which: launches whose environments agree, as pairs of neighbours in time where they
took turns, else all of one side with all of the other.

Machines drift: over half an hour more than most regressions. Launches that took turns saw the same drift, so the
difference within a pair is free of it. Nothing has to declare that they took turns: their start and end times show it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from distbench.records.launches import Launch
from distbench.records.run_file import MUST_AGREE
from distbench.spec.errors import UserError, nearest
from distbench.spec.printable_text import listed
from distbench.statistics.intervals import Floats
from distbench.statistics.significance import LogDifference, paired_difference, unpaired_difference

DTYPE = "dtype"  # part of a case's id, not of the environment
_DTYPE_IN_ID = re.compile(r"(?<=/)([a-z]+\d+)(?=\[)")
MAX_LISTED = 3


@dataclass(frozen=True)
class Group:
    """Launches of one scenario, oldest first, that are compared with each other.

    Args:
        label: the scenario's name, and what differs from another group of the same scenario.
        conflicts: sentences on fields that forbid the comparison; empty where it is allowed.
    """

    label: str
    baseline: Sequence[Launch]
    candidate: Sequence[Launch]
    conflicts: tuple[str, ...] = ()


def check_allowed(fields: Iterable[str]) -> tuple[str, ...]:
    """The fields that may differ, each once; a UserError for a name that is neither in MUST_AGREE nor "dtype"."""
    names = (*MUST_AGREE, DTYPE)
    for name in fields:
        if name not in names:
            raise UserError(f"--allow-different {name!r} is not a field that must agree ({nearest(name, names)})")
    return tuple(dict.fromkeys(fields))


def groups_of(baseline: Sequence[Launch], candidate: Sequence[Launch], allowed: Sequence[str]) -> list[Group]:
    """Launches of both sides put together by scenario and by all fields that must agree.

    Other launches of a scenario are one more group: with conflicts where they are on both sides.
    """
    groups: list[Group] = []
    fields = [name for name in MUST_AGREE if name not in allowed]
    for scenario in dict.fromkeys(launch.scenario for launch in (*baseline, *candidate)):
        sides = [[launch for launch in side if launch.scenario == scenario] for side in (baseline, candidate)]
        # Launches with the same parameters hold the same cases and are paired with each other. A scenario that has
        # gained a parameter is still compared.
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
            conflicts = conflicts or ["no launch of one side agrees with one of the other in every field"]
        if lone_left or lone_right:
            groups.append(Group(scenario, lone_left, lone_right, tuple(conflicts)))
    return groups


def _labels(scenario: str, firsts: Sequence[Launch]) -> list[str]:
    differing = [name for name in MUST_AGREE if len({repr(launch.facts[name]) for launch in firsts}) > 1]
    if not differing:
        return [scenario] * len(firsts)
    return [f"{scenario} ({', '.join(f'{name} {launch.facts[name]}' for name in differing)})" for launch in firsts]


def differences(baseline: Sequence[Launch], candidate: Sequence[Launch], fields: Iterable[str]) -> list[str]:
    """Sentences on those of `fields` whose values differ between the sides."""
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
    """The id with its dtype blanked, and the dtype: `collective/f32[256]/x` is `collective/?[256]/x` in f32."""
    match = _DTYPE_IN_ID.search(case_id)
    return (_DTYPE_IN_ID.sub("?", case_id, count=1), match[1]) if match else (case_id, None)


INTERLEAVED_SHARE = 0.75  # of the smaller side's launches that must have a neighbour on the other side
# Between the launches of a pair: time for a build, but not for more drift than during the launches themselves.
MAX_GAP_S = 600.0
MAX_GAP_LAUNCHES = 3.0  # or so many times the longer launch of the two
CLOCK_S = 1.0  # shorter overlaps do not count: clocks are set back, and some tools write whole seconds
TURNS = "the launches did not take turns, and machines drift"


@dataclass(frozen=True)
class Span:
    """When one launch ran.

    Args:
        name: the launch's.
        start: seconds since the epoch, 0 where unknown; likewise `end`.
    """

    name: str
    start: float
    end: float

    @property
    def is_known(self) -> bool:
        """Whether both ends are known, and in order."""
        return 0 < self.start <= self.end


def spans_of(launches: Sequence[Launch]) -> dict[str, Span]:
    """When each launch of one side ran, by run id: one command that ran several scenarios is one launch here."""
    together: dict[str, list[Launch]] = {}
    for launch in launches:
        together.setdefault(launch.invocation_id or launch.run_id, []).append(launch)
    spans: dict[str, Span] = {}
    for some in together.values():
        start, end = min(run.started_at for run in some), max(run.ended_at for run in some)
        spans |= {run.run_id: Span(run.run_id, start, end if run.ended_at else 0.0) for run in some}
    return spans


@dataclass(frozen=True)
class Pairing:
    """How two sides' launches go together.

    Args:
        baseline: indexes of the baseline's launches, one per pair, or all of them.
        candidate: likewise, partners in the same order.
        num_left_out: launches without a neighbour on the other side, left out of the pairs.
        refusal: why they are compared unpaired; "" where they took turns.
        is_disturbed: whether two launches of different sides ran at the same time.
    """

    baseline: tuple[int, ...]
    candidate: tuple[int, ...]
    num_left_out: int = 0
    refusal: str = ""
    is_disturbed: bool = False

    @property
    def interleaved(self) -> bool:
        """Whether launches took turns."""
        return not self.refusal


def pairing_of(baseline: Sequence[Span], candidate: Sequence[Span]) -> Pairing:
    """Neighbours in time as pairs, where that is how the launches were run."""
    sides = (baseline, candidate)
    # A launch that was killed has no end, so it is unknown what it disturbed: no pair contains it.
    timeline = sorted(
        (span.start, side, index) for side in (0, 1) for index, span in enumerate(sides[side]) if span.is_known
    )
    overlap = _overlap(*([span for span in side if span.is_known] for side in sides))
    pairs, far = _neighbours(sides, timeline)
    # One pair alone is also what two blocks, all of A and then all of B, have where they meet.
    least = max(2, INTERLEAVED_SHARE * min(map(len, sides)))
    if overlap is None and len(pairs) >= least:
        left, right = zip(*pairs, strict=True)
        return Pairing(left, right, len(baseline) + len(candidate) - 2 * len(pairs))
    refusal = overlap or TURNS
    if overlap is None and len(pairs) + len(far) >= least:
        refusal = f"at least {min(far) / 60:.0f} min lie between launches of the two sides, and machines drift"
    elif overlap is None and len(timeline) < len(baseline) + len(candidate):
        refusal = "when some launches began or ended is not recorded, so that they cannot be paired"
    everyone = tuple(range(len(baseline))), tuple(range(len(candidate)))
    return Pairing(*everyone, refusal=refusal, is_disturbed=overlap is not None)


def _neighbours(
    sides: Sequence[Sequence[Span]], timeline: Sequence[tuple[float, int, int]]
) -> tuple[list[tuple[int, int]], list[float]]:
    """Pairs of neighbours as (baseline's index, candidate's), and the seconds between neighbours too far apart."""
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
    """One sentence on the first two launches of different sides that ran at the same time, else None."""
    for left, right in product(baseline, candidate):
        shared_s = min(left.end, right.end) - max(left.start, right.start)
        if left.start == right.start or shared_s > CLOCK_S:
            return f"launches {left.name} and {right.name} ran at the same time and disturb each other"
    return None


def difference_between(sides: Sequence[Floats], pairing: Pairing) -> LogDifference:
    """The difference within pairs where launches took turns, else that of two independent samples.

    The sides are logarithms, each [tests, launches]; nan where a launch lacks the value.
    """
    left, right = sides[0][:, list(pairing.baseline)], sides[1][:, list(pairing.candidate)]
    return paired_difference(left, right) if pairing.interleaved else unpaired_difference(left, right)
