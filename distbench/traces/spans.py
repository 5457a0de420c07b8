"""Stretches of time on one rank: what is left between them, and lanes on which none overlaps another."""

from collections.abc import Iterable, Sequence

Stretch = tuple[float, float]


def left_of(whole: Stretch, taken: Iterable[Stretch]) -> list[Stretch]:
    """The parts of a stretch that none of the others covers, in order."""
    free, at = [], whole[0]
    for start, end in sorted(taken):
        if start > at:
            free.append((at, min(start, whole[1])))
        at = max(at, end)
        if at >= whole[1]:
            break
    if at < whole[1]:
        free.append((at, whole[1]))
    return [(start, end) for start, end in free if end > start]


def lanes_of(stretches: Sequence[Stretch]) -> list[int]:
    """A lane for each stretch (in any order), counted from 0, the lowest that is free when it begins."""
    lanes = [0] * len(stretches)
    ends: list[float] = []
    for index in sorted(range(len(stretches)), key=lambda index: stretches[index]):
        start, end = stretches[index]
        lane = next((lane for lane, free_at in enumerate(ends) if free_at <= start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes
