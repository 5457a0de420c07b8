"""Spans of time, (begin, end) in seconds: their union, and the covered part of another span."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return ascending, disjoint spans that cover the same time as `spans`."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


class Cover:
    """The covered time of any span, by bisection."""

    def __init__(self, spans: Iterable[Span]) -> None:
        merged = union(spans)
        self._begins = [begin for begin, _ in merged]
        self._ends = [end for _, end in merged]
        self._before = [0.0, *accumulate(end - begin for begin, end in merged)]

    def seconds(self, span: Span) -> float:
        """Return the covered seconds of a span."""
        return self._until(span[1]) - self._until(span[0])

    def _until(self, moment: float) -> float:
        place = bisect_right(self._begins, moment)
        return self._before[place] - max(self._ends[place - 1] - moment, 0.0) if place else 0.0
