"""From which size on one of two ways is faster, from a verdict per size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distbench.statistics.verdicts import FASTER, SLOWER


@dataclass(frozen=True)
class Crossing:
    """A change of sign between two ways.

    If the ratio changes sign once between both ends, the crossing is between them with the confidence of the verdicts.

    Args:
        low: the largest size with the verdict before the change; 0 if smaller sizes have no verdict.
        high: the smallest size with the verdict after it.
        size: the size at which the ratio is 1, by lines between logarithms; nan without `low`.
        becomes: the verdict from `high` on, "faster" or "slower".
    """

    low: float
    high: float
    size: float
    becomes: str


def crossings_of(sizes: Sequence[float], ratios: Sequence[float], verdicts: Sequence[str]) -> list[Crossing]:
    """Return the sizes at which a way becomes faster or slower than its reference.

    A first verdict that is not at the smallest size is a crossing without `low`.

    Args:
        sizes: ascending sizes.
        ratios: time of the way divided by that of its reference, by size.
        verdicts: verdict of each ratio, from one family of tests.
    """
    decided = [at for at, verdict in enumerate(verdicts) if verdict in (FASTER, SLOWER)]
    crossings = []
    if decided and decided[0] > 0:
        crossings.append(Crossing(0.0, sizes[decided[0]], math.nan, verdicts[decided[0]]))
    for before, after in pairwise(decided):
        if verdicts[before] != verdicts[after]:
            size = _zero(sizes[before : after + 1], ratios[before : after + 1])
            crossings.append(Crossing(sizes[before], sizes[after], size, verdicts[after]))
    return crossings


def _zero(sizes: Sequence[float], ratios: Sequence[float]) -> float:
    """Return where log ratio is 0 on lines over log size; the middle of the places, if there are several."""
    places = []
    for (left, first), (right, second) in pairwise(zip(sizes, ratios, strict=True)):
        start, end = math.log(first), math.log(second)
        if (start > 0) != (end > 0):
            places.append(math.log(left) + (math.log(right) - math.log(left)) * start / (start - end))
    return math.exp(sorted(places)[len(places) // 2]) if places else math.nan


def fastest_by_size(
    sizes: Sequence[float], seconds: Sequence[Sequence[float]], verdicts: Sequence[Sequence[str]]
) -> list[tuple[float, int]]:
    """Return (size, way) where the way to use changes, ascending; way 0 is the reference, and the way below all sizes.

    A way is used from a size on at which it is faster than the reference, until a size at which it is slower, or
    another way is faster and has a smaller median.

    Args:
        sizes: ascending sizes.
        seconds: median by way, then by size.
        verdicts: the same for verdicts against the reference.
    """
    used, table = 0, [(0.0, 0)]
    for at, size in enumerate(sizes):
        faster = [way for way in range(1, len(verdicts)) if verdicts[way][at] == FASTER]
        kept = 0 if verdicts[used][at] == SLOWER else used
        best = min(faster, key=lambda way: seconds[way][at]) if faster else kept
        if best != used:
            used = best
            table.append((size, used))
    return table
