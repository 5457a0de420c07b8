"""Medians, quartiles, percentiles and geometric means of many cases at once; distribution-free median intervals."""

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SUMMARY = ("median_s", "q1_s", "q3_s", "p95_s", "min_s", "p50_s", "p90_s", "p99_s")
MIN_FOR_QUARTILES = 4
MIN_FOR_P95 = 20  # with fewer, the 95th percentile is the maximum
MIN_FOR_MEAN_CI = 5
# The largest of this many independent samples exceeds the percentile with 95 % probability: 1 - q^n >= 0.95.
MIN_FOR_PERCENTILE = {50: 5, 90: 29, 99: 299}


class Interval(NamedTuple):
    """Estimates with the bounds of their 95 % confidence intervals, one element per case; nan without an estimate."""

    center: Floats
    low: Floats
    high: Floats


def summarise(samples: Sequence[Sequence[float]]) -> dict[str, Floats]:
    """Return the columns of SUMMARY, in seconds, one element per case; nan for a case without enough samples.

    Quartiles, interpolated between order statistics, show the spread of samples, not the error of the median, because
    neighbouring samples depend on each other. p50 to p99 are nearest-rank percentiles, so each is a measured sample;
    percentiles are nan below MIN_FOR_PERCENTILE samples.
    """
    counts = counts_of(samples)
    out = {name: np.full(len(samples), np.nan) for name in SUMMARY}
    for count in np.unique(counts[counts > 0]).tolist():
        rows = np.flatnonzero(counts == count)
        ordered = np.sort(np.array([samples[row] for row in rows.tolist()], dtype=np.float64), axis=1)
        out["median_s"][rows] = np.median(ordered, axis=1)
        out["min_s"][rows] = ordered[:, 0]
        if count >= MIN_FOR_QUARTILES:
            out["q1_s"][rows], out["q3_s"][rows] = np.quantile(ordered, (0.25, 0.75), axis=1)
        if count >= MIN_FOR_P95:
            out["p95_s"][rows] = ordered[:, -(-95 * count // 100) - 1]
        for percent, least in MIN_FOR_PERCENTILE.items():
            if count >= least:
                out[f"p{percent}_s"][rows] = ordered[:, -(-percent * count // 100) - 1]
    return out


def counts_of(samples: Sequence[Sequence[float]]) -> Ints:
    """Return the number of samples of each case."""
    return np.fromiter((len(of_case) for of_case in samples), dtype=np.int64, count=len(samples))


def side_of_bound(low: Floats, high: Floats, bound: float) -> Ints:
    """Return 1 if the whole 95 % interval is above the bound, -1 if it is below, else 0 ("within noise").

    The bound is 1 for a ratio, 0 for a difference of logarithms. nan gives 0.
    """
    return np.greater(low, bound).astype(np.int64) - np.less(high, bound).astype(np.int64)


def margin_of(ratio: Interval) -> Floats:
    """Return the interval bound nearest to 1 as a factor; 1.0 if the interval contains 1 or is unknown."""
    return np.nan_to_num(np.maximum(np.fmax(1 / ratio.high, ratio.low), 1.0), nan=1.0)


def geometric_mean(values: Floats) -> float:
    """Return the geometric mean of the positive, finite values; nan without values."""
    kept = values[np.isfinite(values) & (values > 0)]
    return float(np.exp(np.log(kept).mean())) if kept.size else float("nan")


def geometric_mean_with_ci(values: Floats) -> tuple[float, float, float]:
    """Return the geometric mean over cases, and the bounds of its 95 % interval by Student's t of the logarithms.

    The interval is the uncertainty of the mean for other cases. Below MIN_FOR_MEAN_CI cases the bounds are nan.
    """
    from scipy.special import stdtrit  # ranks import this file but do not call this function

    logs = np.log(values[np.isfinite(values) & (values > 0)])
    if logs.size < MIN_FOR_MEAN_CI:
        return geometric_mean(values), math.nan, math.nan
    reach = stdtrit(logs.size - 1, 0.975) * logs.std(ddof=1) / np.sqrt(logs.size)
    return geometric_mean(values), float(np.exp(logs.mean() - reach)), float(np.exp(logs.mean() + reach))


def median(values: Sequence[float]) -> float:
    """Return the sample median; nan for no values."""
    return statistics.median(values) if len(values) else math.nan


@lru_cache(maxsize=4096)
def median_ci_ranks(count: int) -> tuple[int, int]:
    """Return 0-based ranks of the order statistics that bound the median with at least 95 % confidence.

    The method is distribution-free: the number of samples below the median is Binomial(count, 1/2) (Conover, Practical
    Nonparametric Statistics, 3.2). Below 6 samples no pair of ranks reaches 95 %, and the extremes are returned.
    """
    if count < 6:
        return 0, count - 1
    from scipy.special import bdtrik  # imported only if used

    # At most 2.5 % of the sample draws have this many or fewer below the median.
    low = int(bdtrik(0.025, count, 0.5))
    return low, count - 1 - low


def median_ci(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and upper bound of the median's 95 % confidence interval; (nan, nan) for no values."""
    if not values:
        return math.nan, math.nan
    ordered = sorted(values)
    low, high = median_ci_ranks(len(ordered))
    return ordered[low], ordered[high]


def is_steady(values: Sequence[float], target_ci: float) -> bool:
    """Return whether the median's 95 % confidence interval is at most `target_ci` times as wide as the median."""
    low, high = median_ci(values)
    return high - low <= target_ci * median(values)
