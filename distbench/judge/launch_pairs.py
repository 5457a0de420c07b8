"""Which launches are compared with which: neighbours in time as pairs, or all of one side with all of the other.

Machines drift: over half an hour more than most regressions. Launches that took turns saw the same drift, so the
difference within a pair is free of it. Nothing has to declare that they took turns: their start and end times show it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distbench.records.launch_values import Launch
from distbench.statistics.intervals import Floats
from distbench.statistics.significance import LogDifference, paired_difference, unpaired_difference

INTERLEAVED_SHARE = 0.75  # of the smaller side's launches that must have a neighbour on the other side
# What may lie between the two launches of a pair: a build or a checkout, but not the time in which a machine drifts by
# more than it does during the launches themselves.
MAX_GAP_S = 600.0
MAX_GAP_LAUNCHES = 3.0  # or so many times the longer launch of the two
CLOCK_S = 1.0  # shorter overlaps do not count: clocks are set back, and some tools write whole seconds
TURNS = "the launches did not take turns, and machines drift"


@dataclass(frozen=True)
class Span:
    """When one launch ran.

    Args:
        name: the launch's, for sentences.
        start: seconds since the epoch, 0 where unknown; likewise `end`.
    """

    name: str
    start: float
    end: float

    @property
    def is_known(self) -> bool:
        """Whether both ends are known, and in order."""
        return 0 < self.start <= self.end

    def overlaps(self, other: "Span") -> bool:
        """Whether both ran at one time, or began at the same moment."""
        shared_s = min(self.end, other.end) - max(self.start, other.start)
        return self.start == other.start or shared_s > CLOCK_S


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
        baseline: indexes into the baseline's launches: of each pair its one, or all of them.
        candidate: likewise, partners in the same order.
        num_left_out: launches without a neighbour on the other side, left out of the pairs.
        refusal: why they are compared unpaired, as launches of two occasions; "" where they took turns.
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
    return Pairing(
        tuple(range(len(baseline))), tuple(range(len(candidate))), refusal=refusal, is_disturbed=overlap is not None
    )


def _neighbours(
    sides: Sequence[Sequence[Span]], timeline: Sequence[tuple[float, int, int]]
) -> tuple[list[tuple[int, int]], list[float]]:
    """Pairs of neighbours as (baseline's index, candidate's), and the seconds between those too far apart."""
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
    for baseline_span in baseline:
        for candidate_span in candidate:
            if baseline_span.overlaps(candidate_span):
                names = f"{baseline_span.name} and {candidate_span.name}"
                return f"launches {names} ran at the same time and disturb each other"
    return None


def difference_between(sides: Sequence[Floats], pairing: Pairing) -> LogDifference:
    """The difference within pairs where launches took turns, else that of two independent samples.

    The sides are logarithms, each [tests, launches]; nan where a launch lacks the value.
    """
    left, right = sides[0][:, list(pairing.baseline)], sides[1][:, list(pairing.candidate)]
    return paired_difference(left, right) if pairing.interleaved else unpaired_difference(left, right)
