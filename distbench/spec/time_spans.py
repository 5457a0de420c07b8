"""Spans of time, (begin, end) in seconds: their union, and the part of another span that they cover."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Ascending spans that do not touch, covering the same as `spans`."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


class Cover:
    """The covered part of any span; each query is a bisection."""

    def __init__(self, spans: Iterable[Span]) -> None:
        merged = union(spans)
        self._begins = [begin for begin, _ in merged]
        self._ends = [end for _, end in merged]
        self._before = [0.0, *accumulate(end - begin for begin, end in merged)]

    def seconds(self, span: Span) -> float:
        """Seconds of a span that are covered."""
        return self._until(span[1]) - self._until(span[0])

    def _until(self, moment: float) -> float:
        place = bisect_right(self._begins, moment)
        return self._before[place] - max(self._ends[place - 1] - moment, 0.0) if place else 0.0
