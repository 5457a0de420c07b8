"""Which launches are held against which: by their start times, or all of one side against all of the other.

Machines drift: over half an hour more than most regressions. Launches that took turns (A B B A ...) saw the same drift,
so the difference within a pair is free of it. Nobody has to say that they took turns; their start times do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

INTERLEAVED_SHARE = 0.75  # of the smaller side's launches that must have a neighbour on the other side


@dataclass(frozen=True)
class Pairing:
    """How two sides' launches go together.

    Args:
        interleaved: whether they took turns; else they are compared unpaired, as of two occasions.
        baseline: indexes into the baseline's launches: of each pair its one, or all of them.
        candidate: likewise, partners in the same order.
        num_left_out: launches without a neighbour on the other side, left out of the pairs.
    """

    interleaved: bool
    baseline: tuple[int, ...]
    candidate: tuple[int, ...]
    num_left_out: int = 0


def pairing_of(baseline: Sequence[float], candidate: Sequence[float]) -> Pairing:
    """Neighbours in time as pairs, where that is how the launches were run; start times in seconds, 0 where unknown."""
    everything = Pairing(False, tuple(range(len(baseline))), tuple(range(len(candidate))))
    if not baseline or not candidate or min(*baseline, *candidate) <= 0:
        return everything
    sides = (baseline, candidate)
    timeline = sorted((moment, side, index) for side in (0, 1) for index, moment in enumerate(sides[side]))
    pairs, position = [], 0
    while position + 1 < len(timeline):
        (_, side, index), (_, next_side, next_index) = timeline[position], timeline[position + 1]
        if side == next_side:
            position += 1
            continue
        pairs.append((index, next_index) if side == 0 else (next_index, index))
        position += 2
    # One pair alone is also what two blocks, all of A and then all of B, have where they meet.
    if len(pairs) < 2 or len(pairs) < INTERLEAVED_SHARE * min(len(baseline), len(candidate)):
        return everything
    left, right = zip(*pairs, strict=True)
    return Pairing(True, left, right, len(baseline) + len(candidate) - 2 * len(pairs))
