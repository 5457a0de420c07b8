"""Differences of logarithms between two sides, tested, bounded and planned for: arrays in, arrays out, one row a test.

A launch's value is a mean or a percentile of times, so the logarithm makes changes additive and tails short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from distbench.compare.pairing import Pairing

Floats = NDArray[np.float64]
POWER = 0.8
MAX_LAUNCHES = 1000
OUTLYING = 4.0  # times the median pair's size
MIN_OUTLYING = 0.05  # a pair that is no further apart hides nothing
MAX_OUTLYING_SHARE = 0.1  # of the pairs; one in any case
_GRID = np.unique(np.round(np.geomspace(2, MAX_LAUNCHES, 120)).astype(int))


@dataclass(frozen=True)
class LogDifference:
    """Candidate minus baseline, in logarithms; every array with one element a test.

    Args:
        error: the estimate's standard error; nan where there are too few launches for one.
        freedom: degrees of freedom of that error.
        num_launches: pairs, or launches of the smaller side.
        baseline: that side's mean; likewise `candidate`.
        pairs: each pair's difference, [tests, pairs]; None where launches were not compared in pairs.
    """

    estimate: Floats
    error: Floats
    freedom: Floats
    num_launches: NDArray[np.int64]
    baseline: Floats
    candidate: Floats
    pairs: Floats | None

    @property
    def is_paired(self) -> bool:
        """Whether launches were compared in pairs."""
        return self.pairs is not None

    def p_above(self, sign: int = 1) -> Floats:
        """One-sided p of "no slower" (sign 1) or "no faster" (sign -1): Student's t."""
        with np.errstate(divide="ignore", invalid="ignore"):
            t = sign * self.estimate / self.error
        # No spread at all: what is there is either no difference, or one that is certain.
        t = np.where(self.error == 0, np.where(self.estimate == 0, 0.0, np.copysign(np.inf, sign * self.estimate)), t)
        return np.where(np.isnan(self.error), np.nan, stdtr(self.freedom, -t))

    def interval(self, confidence: float) -> tuple[Floats, Floats]:
        """Lower and upper bound of the estimate, two-sided."""
        reach = stdtrit(self.freedom, 0.5 + confidence / 2) * self.error
        return self.estimate - reach, self.estimate + reach

    def detectable(self, alpha: float, tolerance: Floats) -> Floats:
        """The smallest true slowdown that such data would have called a regression four times in five.

        It must be significant at `alpha`, one-sided, and its estimate above the tolerance, which is in logarithms. The
        noncentral t is taken for a shifted one, as usual for planning (Cohen, Statistical Power Analysis, 2.4).
        """
        return _detectable(self.error, self.freedom, alpha, tolerance)

    def launches_to_settle(
        self,
        alpha: float,
        confidence: float,
        tolerance: Floats,
        found_error: Floats | None = None,
        prior_freedom: float = 0.0,
    ) -> Floats:
        """Launches a side (pairs) in all that would settle it four times in five, were the estimate the truth.

        A true change above the tolerance is settled when it is found, one below when the upper bound falls below the
        tolerance; nan where MAX_LAUNCHES are not enough, as at a change near the tolerance.

        Args:
            alpha: one-sided level of the one test.
            confidence: of the interval whose upper bound a pass needs.
            tolerance: in logarithms.
            found_error: the standard error by which a slowdown is found, where that is not `error`.
            prior_freedom: degrees of freedom that it has beyond those of its own launches.
        """
        spread = self.error * np.sqrt(self.num_launches)
        found_spread = spread if found_error is None else found_error * np.sqrt(self.num_launches)
        counts = _GRID[:, None].astype(float)
        freedom = counts - 1 if self.is_paired else 2 * (counts - 1)
        detectable = _detectable(found_spread / np.sqrt(counts), freedom + prior_freedom, alpha, tolerance)
        reach = (stdtrit(freedom, 0.5 + confidence / 2) + stdtrit(freedom, POWER)) * spread / np.sqrt(counts)
        is_settled = (self.estimate >= detectable) | (self.estimate + reach <= tolerance)  # [counts, tests]
        return np.where(is_settled.any(axis=0), _GRID[is_settled.argmax(axis=0)], np.nan)


def _detectable(error: Floats, freedom: Floats | float, alpha: float, tolerance: Floats) -> Floats:
    luck = stdtrit(freedom, POWER)
    return np.maximum((stdtrit(freedom, 1 - alpha) + luck) * error, tolerance + luck * error)


def difference_between(sides: Sequence[Floats], pairing: Pairing) -> LogDifference:
    """The difference within pairs where launches took turns, else that of two independent samples.

    The sides are logarithms, each [tests, launches]; nan where a launch lacks the value.
    """
    left, right = sides[0][:, list(pairing.baseline)], sides[1][:, list(pairing.candidate)]
    return paired_difference(left, right) if pairing.interleaved else unpaired_difference(left, right)


def paired_difference(baseline: Floats, candidate: Floats) -> LogDifference:
    """The mean of differences within pairs of logarithms, each [tests, pairs]; a pair with a nan is left out."""
    pairs = candidate - baseline
    mean, variance, count = _moments(pairs)
    left, right = (_moments(np.where(np.isfinite(pairs), side, np.nan))[0] for side in (baseline, candidate))
    error = np.sqrt(variance / np.maximum(1, count))
    return LogDifference(mean, error, _known(count.astype(float) - 1), count, left, right, pairs)


def outlying_pairs(metrics: Sequence[Floats], least: int) -> tuple[NDArray[np.bool_], Floats]:
    """Which pairs of launches are so far apart over all cases that they would hide what the other pairs show.

    A pair's size is the median of |difference| over all cases and metrics. It is the same whatever sign the pair gets,
    so a test by flipping signs keeps its level whatever is left out by size.

    Args:
        metrics: differences of logarithms within pairs, each [cases, pairs], nan where a pair lacks the value.
        least: pairs that must remain; where fewer would, none is left out.

    Returns:
        Whether each pair outlies, and each pair's size; nan for a pair without any value.
    """
    values = np.abs(np.concatenate(metrics))
    sizes = np.full(values.shape[1], np.nan)
    known = np.isfinite(values).any(axis=0)
    # The lower median: half of the cases are not enough.
    sizes[known] = np.nanquantile(values[:, known], 0.5, axis=0, method="lower")
    usual = float(np.median(sizes[known])) if known.any() else 0.0
    outlying: NDArray[np.bool_] = sizes > max(OUTLYING * usual, MIN_OUTLYING)
    # More of them are how these launches are, not accidents.
    too_many = outlying.sum() > max(1, MAX_OUTLYING_SHARE * known.sum()) or (known & ~outlying).sum() < least
    return np.zeros_like(outlying) if too_many else outlying, sizes


def unpaired_difference(baseline: Floats, candidate: Floats) -> LogDifference:
    """The difference of means, with Welch's error and degrees of freedom (Biometrika 34, 1947).

    The sides are as in `difference_between`; their numbers of launches may differ.
    """
    (left, left_variance, left_count), (right, right_variance, right_count) = _moments(baseline), _moments(candidate)
    left_part, right_part = left_variance / np.maximum(1, left_count), right_variance / np.maximum(1, right_count)
    total = left_part + right_part
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = left_part**2 / (left_count - 1) + right_part**2 / (right_count - 1)
        freedom: Floats = np.where(total == 0, left_count + right_count - 2.0, total**2 / parts).astype(float)
    count = np.minimum(left_count, right_count)
    return LogDifference(right - left, np.sqrt(total), _known(freedom), count, left, right, pairs=None)


def _moments(values: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Mean, variance and count of each row's known values; nan where they are too few."""
    # By hand: numpy's masked arrays take many times as long for the few launches that a gate has.
    is_known = np.isfinite(values)
    count = is_known.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(is_known, values, 0.0).sum(axis=1) / count
        squares = np.where(is_known, values - mean[:, None], 0.0) ** 2
        variance = np.where(count > 1, squares.sum(axis=1) / (count - 1), np.nan)
    # Equal values leave a rest of rounding, which is no spread.
    rounding = (1e-12 * (1 + np.abs(mean))) ** 2 * count / np.maximum(1, count - 1)
    return mean, np.where(variance <= rounding, 0.0, variance), count


def _known(freedom: Floats) -> Floats:
    return np.where(np.isfinite(freedom) & (freedom > 0), freedom, np.nan)


def holm(p: Floats) -> Floats:
    """Adjusted p values (Holm, Scand. J. Statist. 6, 1979): below alpha where the family's error stays below it.

    A nan, where no test was made, is no member of the family.
    """
    adjusted = np.full(p.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    return adjusted
