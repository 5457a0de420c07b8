"""Medians of samples and their distribution-free intervals."""

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache


def median(values: Sequence[float]) -> float:
    """The sample median; nan for none."""
    return statistics.median(values) if len(values) else math.nan


@lru_cache(maxsize=4096)
def median_ci_ranks(count: int) -> tuple[int, int]:
    """0-based ranks of the order statistics that bound the median with at least 95 % confidence.

    Distribution-free: the number of samples below the median is Binomial(count, 1/2) (Conover, Practical
    Nonparametric Statistics, 3.2). Below 6 samples no pair of ranks reaches 95 %; the extremes are given.
    """
    if count < 6:
        return 0, count - 1
    tail, lower, total = 0.0, 0, 2.0**-count if count <= 1000 else 0.0
    if total == 0.0:
        lower = math.floor((count - 1.959964 * math.sqrt(count)) / 2)
        return max(lower - 1, 0), min(count - lower, count - 1)
    mass = total
    while tail + mass <= 0.025:
        tail += mass
        mass *= (count - lower) / (lower + 1)
        lower += 1
    return lower - 1, count - lower


def median_ci(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper bound of the median's 95 % confidence interval; (nan, nan) for no values."""
    if not values:
        return math.nan, math.nan
    ordered = sorted(values)
    low, high = median_ci_ranks(len(ordered))
    return ordered[low], ordered[high]
