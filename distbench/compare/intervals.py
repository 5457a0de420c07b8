"""Statistics of many cases at once: medians with their intervals, ratios of medians with theirs. Nothing prints."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.compare.medians import median_ci_ranks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SUMMARY = ("median_s", "ci_low_s", "ci_high_s", "p95_s", "min_s")
# Below this many samples no pair of order statistics holds the median with 95 % confidence (2 * 0.5**5 > 0.05).
MIN_SAMPLES_FOR_CI = 6
MIN_CONTROLS = 19
RESAMPLES = 1000
SEED = 20260101


class Interval(NamedTuple):
    """Estimates with the bounds of their 95 % confidence intervals, one element a case; nan where there is none."""

    center: Floats
    low: Floats
    high: Floats


def summarise(samples: Sequence[Sequence[float]]) -> dict[str, Floats]:
    """The columns of SUMMARY, in seconds, one element a case; nan for a case with no samples.

    The interval is the distribution-free one of `medians.median_ci_ranks`. p95 is the nearest-rank percentile, so it is
    always a sample that was measured. The sequences may be of any lengths.
    """
    counts = counts_of(samples)
    out = {name: np.full(len(samples), np.nan) for name in SUMMARY}
    for count in np.unique(counts[counts > 0]).tolist():
        rows = np.flatnonzero(counts == count)
        ordered = np.sort(np.array([samples[row] for row in rows.tolist()], dtype=np.float64), axis=1)
        low, high = median_ci_ranks(count)
        out["median_s"][rows] = np.median(ordered, axis=1)
        out["ci_low_s"][rows] = ordered[:, low]
        out["ci_high_s"][rows] = ordered[:, high]
        out["p95_s"][rows] = ordered[:, -(-95 * count // 100) - 1]
        out["min_s"][rows] = ordered[:, 0]
    return out


def median_intervals(samples: Sequence[Sequence[float]]) -> Interval:
    """The medians with their intervals, as `summarise` gives them."""
    found = summarise(samples)
    return Interval(found["median_s"], found["ci_low_s"], found["ci_high_s"])


def counts_of(samples: Sequence[Sequence[float]]) -> Ints:
    """How many samples each case has."""
    return np.fromiter((len(of_case) for of_case in samples), dtype=np.int64, count=len(samples))


def ratio_of(numerator: Interval, denominator: Interval) -> Interval:
    """Ratio of two independent medians with its 95 % interval, element by element.

    Method: MOVER on logarithms (Zou & Donner, Statistics in Medicine 27, 2008): with d the difference of the two log
    medians, the lower bound is d - sqrt((center - low of the numerator)^2 + (high - center of the denominator)^2), the
    upper bound the mirror image, everything in logarithms. It needs only the two medians' own intervals, keeps their
    asymmetry, and is closed form, so a thousand rows cost nothing. It knows nothing of drift between the two: what
    that does is seen on pairs that must not differ. Both are positive and of one length.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        above, below = _logs(numerator), _logs(denominator)
        ratio = above.center - below.center
        low = ratio - np.hypot(above.center - above.low, below.high - below.center)
        high = ratio + np.hypot(above.high - above.center, below.center - below.low)
        return Interval(np.exp(ratio), np.exp(low), np.exp(high))


def _logs(interval: Interval) -> Interval:
    return Interval(*(np.log(np.where(part > 0, part, np.nan)) for part in interval))


def widening_for(ratio: Interval, controls: NDArray[np.bool_]) -> float:
    """By what factor (at least 1) intervals must be widened for 95 % of the ratios marked as controls to hold one.

    Samples of one launch depend on each other, so intervals made of them are too narrow by as much as the machine
    drifts. Controls are ratios that are truly one; each needs |log ratio| over the distance to its bound on that side.
    The factor is the ceil(0.95 (n + 1))-th smallest of these (split conformal prediction: it holds for any
    distribution, as far as the other ratios are as noisy as the controls). Below MIN_CONTROLS there is no such rank: 1.
    """
    if controls.sum() < MIN_CONTROLS:
        return 1.0
    center, low, high = (np.log(part[controls]) for part in ratio)
    reach = np.where(center > 0, center - low, high - center)
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.sort(np.nan_to_num(np.abs(center) / reach, nan=0.0))
    factor = float(needed[math.ceil(0.95 * (len(needed) + 1)) - 1])
    return max(factor, 1.0) if math.isfinite(factor) else 1.0


def widened(ratio: Interval, factor: float | Floats) -> Interval:
    """Both bounds moved away from the centre by a factor, or by each one's own, on the log scale."""
    low = ratio.center * (ratio.low / ratio.center) ** factor
    return Interval(ratio.center, low, ratio.center * (ratio.high / ratio.center) ** factor)


def side_of_one(ratio: Interval, enough: NDArray[np.bool_]) -> Ints:
    """-1 where the whole interval lies below one, 1 where above; else, and with too few samples for either, 0."""
    return np.where(enough, side_of_bound(ratio.low, ratio.high, 1.0), 0)


def side_of_bound(low: Floats, high: Floats, bound: float) -> Ints:
    """The rule for "beyond noise": 1 where the whole 95 % interval lies above the bound, -1 where below it, else 0.

    The bound is 1 for a ratio, 0 for a difference of logarithms. A nan decides nothing.
    """
    return np.greater(low, bound).astype(np.int64) - np.less(high, bound).astype(np.int64)


def margin_of(ratio: Interval) -> Floats:
    """How far the interval's nearest bound is from one, as a factor above one; 1.0 where the interval holds one."""
    return np.maximum(np.fmax(1 / ratio.high, ratio.low), 1.0)


def geometric_mean(values: Floats) -> float:
    """Geometric mean of the positive, finite values; nan for none."""
    kept = values[np.isfinite(values) & (values > 0)]
    return float(np.exp(np.log(kept).mean())) if kept.size else float("nan")


def geometric_mean_with_ci(values: Floats) -> tuple[float, float, float]:
    """The geometric mean, and the bounds of its interval as `geometric_mean_ci` gives them."""
    return (geometric_mean(values), *geometric_mean_ci(values))


def geometric_mean_ci(values: Floats) -> tuple[float, float]:
    """95 % interval of the geometric mean over cases: percentile bootstrap, fixed seed; (nan, nan) below 2 values.

    The cases are what is resampled: it tells how far the mean would move had other cases been chosen.
    """
    logs = np.log(values[np.isfinite(values) & (values > 0)])
    if logs.size < 2:
        return float("nan"), float("nan")
    draw = np.random.default_rng(SEED)
    means = [logs[draw.integers(logs.size, size=logs.size)].mean() for _ in range(RESAMPLES)]
    low, high = np.exp(np.percentile(means, (2.5, 97.5)))
    return float(low), float(high)
