"""Differences of logarithms between two sides, and all tests of one comparison as one family (sign flips, or Holm).

Arrays have one row per test. A launch's value is a mean or a percentile of times; its logarithm makes changes additive
and tails short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from distbench.statistics.intervals import Floats, side_of_bound
from distbench.statistics.verdicts import CONFIDENCE, IMPROVEMENT, INCONCLUSIVE, PASS, REGRESSION, SLOWER_SHARE, Options

POWER = 0.8
MAX_LAUNCHES = 1000
OUTLYING = 4.0  # times the median pair's size
MIN_OUTLYING = 0.05  # pairs with smaller differences are kept
MAX_OUTLYING_SHARE = 0.1  # of the pairs, but at least one
_GRID = np.unique(np.round(np.geomspace(2, MAX_LAUNCHES, 120)).astype(int))


@dataclass(frozen=True)
class LogDifference:
    """Candidate minus baseline, in logarithms, one element per test.

    Args:
        error: standard error, with `freedom` degrees of freedom; nan if there are too few launches.
        num_launches: pairs, or launches of the smaller side.
        baseline: mean of the baseline; `candidate` is the mean of the candidate.
        pairs: each pair's difference, [tests, pairs]; None if launches were not compared in pairs.
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
        """Return whether launches were compared in pairs."""
        return self.pairs is not None

    def p_above(self, sign: int = 1) -> Floats:
        """Return the one-sided p of "no slower" (sign 1) or "no faster" (sign -1): Student's t."""
        with np.errstate(divide="ignore", invalid="ignore"):
            t = sign * self.estimate / self.error
        # Without spread the difference is either zero or certain.
        t = np.where(self.error == 0, np.where(self.estimate == 0, 0.0, np.copysign(np.inf, sign * self.estimate)), t)
        return np.where(np.isnan(self.error), np.nan, stdtr(self.freedom, -t))

    def interval(self) -> tuple[Floats, Floats]:
        """Return the two-sided lower and upper bound of the estimate, with CONFIDENCE."""
        reach = stdtrit(self.freedom, 0.5 + CONFIDENCE / 2) * self.error
        return self.estimate - reach, self.estimate + reach

    def detectable(self, alpha: float, tolerance: Floats) -> Floats:
        """Return the smallest true slowdown (logarithm) that is significant at one-sided `alpha` and above the
        tolerance (logarithm) four times in five.
        """
        return detectable_effect(self.error, stdtrit(self.freedom, 1 - alpha), stdtrit(self.freedom, POWER), tolerance)

    def launches_to_settle(
        self,
        alpha: float,
        tolerance: Floats,
        detected_error: Floats | None = None,
        prior_freedom: float = 0.0,
    ) -> Floats:
        """Return the launches per side (pairs) that would settle a test four times in five if the estimate is true.

        A true change above the tolerance is settled when it is detected at one-sided `alpha`. A change below the
        tolerance is settled when the upper bound is below the tolerance. The result is nan if MAX_LAUNCHES are not
        enough, as for a change near the tolerance.

        Args:
            detected_error: standard error for detecting a slowdown, by default `error`.
            prior_freedom: degrees of freedom of `detected_error`, added to the degrees of freedom of the launches.
        """
        spread = self.error * np.sqrt(self.num_launches)
        detected_spread = spread if detected_error is None else detected_error * np.sqrt(self.num_launches)
        counts = _GRID[:, None].astype(float)
        freedom = counts - 1 if self.is_paired else 2 * (counts - 1)
        all_freedom = freedom + prior_freedom
        critical, luck = stdtrit(all_freedom, 1 - alpha), stdtrit(all_freedom, POWER)
        detectable = detectable_effect(detected_spread / np.sqrt(counts), critical, luck, tolerance)
        reach = (stdtrit(freedom, 0.5 + CONFIDENCE / 2) + stdtrit(freedom, POWER)) * spread / np.sqrt(counts)
        is_settled = (self.estimate >= detectable) | (self.estimate + reach <= tolerance)  # [counts, tests]
        return np.where(is_settled.any(axis=0), _GRID[is_settled.argmax(axis=0)], np.nan)


def detectable_effect(
    error: Floats | float, critical: Floats | float, luck: Floats | float, tolerance: Floats | float = -np.inf
) -> Floats:
    """Return the smallest true effect whose estimate exceeds `tolerance`, and whose estimate over `error` exceeds
    `critical`, with probability POWER.

    Args:
        luck: quantile at POWER of the statistic about its expectation. Student's t is the usual choice for planning,
            with a shifted t for the noncentral t (Cohen, Statistical Power Analysis, 2.4).
    """
    with np.errstate(invalid="ignore"):  # an infinite `critical` detects nothing
        effect: Floats = np.maximum(critical * error, tolerance) + luck * error
    return effect


def paired_difference(baseline: Floats, candidate: Floats) -> LogDifference:
    """Return the mean of differences within pairs of logarithms, each [tests, pairs]; pairs with nan are left out."""
    pairs = candidate - baseline
    mean, variance, count = _moments(pairs)
    left, right = (_moments(np.where(np.isfinite(pairs), side, np.nan))[0] for side in (baseline, candidate))
    error = np.sqrt(variance / np.maximum(1, count))
    return LogDifference(mean, error, _known(count.astype(float) - 1), count, left, right, pairs)


def outlying_pairs(metrics: Sequence[Floats], least: int) -> tuple[NDArray[np.bool_], Floats]:
    """Return pairs of launches whose large difference over all cases would hide the differences of other pairs.

    A pair's size is the median of |difference| over all cases and metrics. A flipped sign does not change the size, so
    a test by sign flips keeps its error rate when pairs are left out by size.

    Args:
        metrics: differences of logarithms within pairs, each [cases, pairs], nan if a pair lacks the value.
        least: minimum number of remaining pairs; with fewer remaining, no pair is left out.

    Returns:
        Whether each pair is outlying, and each pair's size; nan for a pair without a value.
    """
    values = np.abs(np.concatenate(metrics))
    sizes = np.full(values.shape[1], np.nan)
    is_known = np.isfinite(values).any(axis=0)
    # The lower median is used, because half of the cases are not enough.
    sizes[is_known] = np.nanquantile(values[:, is_known], 0.5, axis=0, method="lower")
    usual = float(np.median(sizes[is_known])) if is_known.any() else 0.0
    outlying: NDArray[np.bool_] = sizes > max(OUTLYING * usual, MIN_OUTLYING)
    # Many outlying pairs are not accidents.
    too_many = outlying.sum() > max(1, MAX_OUTLYING_SHARE * is_known.sum()) or (is_known & ~outlying).sum() < least
    return np.zeros_like(outlying) if too_many else outlying, sizes


def unpaired_difference(baseline: Floats, candidate: Floats) -> LogDifference:
    """Return the difference of means, with Welch's error and degrees of freedom (Biometrika 34, 1947).

    The sides are logarithms, each [tests, launches of the side], nan if a launch lacks the value.
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
    """Return mean, variance and count of each row's known values; nan for too few values."""
    # numpy's masked arrays are many times slower for the few launches of a gate.
    is_known = np.isfinite(values)
    count = is_known.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(is_known, values, 0.0).sum(axis=1) / count
        squares = np.where(is_known, values - mean[:, None], 0.0) ** 2
        variance = np.where(count > 1, squares.sum(axis=1) / (count - 1), np.nan)
    # Differences by rounding of equal values are not spread.
    rounding = (1e-12 * (1 + np.abs(mean))) ** 2 * count / np.maximum(1, count - 1)
    return mean, np.where(variance <= rounding, 0.0, variance), count


def _known(freedom: Floats) -> Floats:
    return np.where(np.isfinite(freedom) & (freedom > 0), freedom, np.nan)


def holm(p: Floats) -> Floats:
    """Return adjusted p values (Holm, Scand. J. Statist. 6, 1979); nan (no test) is excluded from the family."""
    adjusted = np.full(p.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    return adjusted


# One family of paired tests, by flipping signs: exact for the family, also if cases depend on each other.
#
# If nothing changed, baseline and candidate of a pair are exchangeable, so the differences of all cases in that pair
# could equally have the other sign. The null distribution is the largest statistic over all tests under each choice of
# signs (Westfall and Young, Resampling-Based Multiple Testing, 1993, single-step maxT). Unlike Holm's correction this
# loses no power if cases rise and fall together with their launch, and needs no normal tails.
#
# The statistic is a mean over a standard error that is moderated by the other cases' spread (as Smyth, Stat. Appl.
# Genet. Mol. Biol. 3, 2004), since 5 pairs hardly show a case's own spread. The moderation affects power only: flipping
# signs does not change sums of squares.

PRIOR_FREEDOM = 8.0  # degrees of freedom of the other cases' spread
MAX_LENT = 4.0
MAX_EXACT_PAIRS = 11
NUM_RANDOM = 2048
SEED = 20260101
ROWS_AT_ONCE = 2000


@dataclass(frozen=True)
class Flipped:
    """The result of flipping signs for one block of tests.

    Args:
        slower: p of "not slower", adjusted over the family; nan without a test.
        faster: p of "not faster", adjusted like `slower`.
        error: standard error of each mean difference, moderated by the other tests of its block.
        critical: value of mean over error above which a test is significant; infinite for too few pairs.
        freedom: degrees of freedom of `error`.
    """

    slower: Floats
    faster: Floats
    error: Floats
    critical: float
    freedom: Floats

    def detectable(self, tolerance: Floats) -> Floats:
        """Return the smallest true slowdown, in logarithms, that is reported as a regression four times in five."""
        return detectable_effect(self.error, self.critical, stdtrit(self.freedom, POWER), tolerance)


def flip_tests(blocks: Sequence[Floats], min_pairs: int, alpha: float) -> list[Flipped]:
    """Test every row of every block as one family at level `alpha`, except rows of fewer than `min_pairs` pairs.

    Args:
        blocks: differences of logarithms, each [tests, pairs of the block] with nan if a pair lacks the value; errors
            of a block's tests moderate each other.
    """
    signs = sign_choices(max((block.shape[1] for block in blocks), default=0))
    tested_rows, flips = [], []
    for block in blocks:
        is_known = np.isfinite(block)
        count = is_known.sum(axis=1)
        rows = np.flatnonzero(count >= max(min_pairs, 2))
        tested_rows.append(rows)
        flips.append(SignFlips.of(np.where(is_known, block, 0.0)[rows], count[rows]))
    largest = reduce(np.maximum, (flip.largest(signs) for flip in flips), np.full(len(signs), -np.inf))
    # This many choices of signs may reach a statistic that is still significant, including the given signs.
    allowed = int(alpha * len(largest) + 1e-9)
    other_largest = np.sort(largest[1:])
    critical = float(other_largest[-allowed]) if 0 < allowed <= len(other_largest) else np.inf
    chance = np.sort(largest)
    results = []
    for block, rows, flip in zip(blocks, tested_rows, flips, strict=True):
        statistic, error = flip.as_given()
        freedom = flip.count.astype(float) - 1 + PRIOR_FREEDOM
        columns = np.full((4, len(block)), np.nan)
        columns[:, rows] = _reached(chance, statistic), _reached(chance, -statistic), error, freedom
        slower, faster, error, freedom = columns
        results.append(Flipped(slower, faster, error, critical, freedom))
    return results


@lru_cache(maxsize=8)
def sign_choices(num_pairs: int) -> NDArray[np.float64]:
    """Return choices of signs, [choices, pairs], closed under minus, given signs first; all choices for few pairs."""
    if num_pairs <= MAX_EXACT_PAIRS:
        bits = (np.arange(2**num_pairs)[:, None] >> np.arange(num_pairs)) & 1
        return (1.0 - 2.0 * bits).astype(float)
    half = np.random.default_rng(SEED).choice([-1.0, 1.0], size=(NUM_RANDOM, num_pairs))
    half[0] = 1.0
    return np.vstack([half, -half])


@dataclass(frozen=True)
class SignFlips:
    """Rows of differences whose signs are flipped together, in all rows of a column at once.

    Args:
        differences: differences, [rows, columns]; 0 for a missing value, so that its sign has no effect.
        count: number of differences of each row.
        squares: sum of squares of each row.
        prior: spread that moderates rows, the median of mean squares.
    """

    differences: Floats
    count: NDArray[np.int64]
    squares: Floats
    prior: float

    @classmethod
    def of(cls, differences: Floats, count: NDArray[np.int64]) -> "SignFlips":
        """Return the flips of these rows."""
        squares = (differences**2).sum(axis=1)
        return cls(differences, count, squares, float(np.median(squares / count)) if len(count) else 0.0)

    def largest(self, signs: Floats, is_two_sided: bool = False) -> Floats:
        """Return the largest statistic of all rows for each choice of `signs`, [choices, columns]; -inf for no row."""
        largest = np.full(len(signs), -np.inf)
        signs = signs[:, : self.differences.shape[1]]
        for start in range(0, len(self.count), ROWS_AT_ONCE):
            piece = slice(start, start + ROWS_AT_ONCE)
            mean = self.differences[piece] @ signs.T / self.count[piece, None]
            statistics, _ = self._statistics(mean, piece)
            statistics = np.abs(statistics) if is_two_sided else statistics
            np.maximum(largest, statistics.max(axis=0), out=largest)
        return largest

    def as_given(self) -> tuple[Floats, Floats]:
        """Return each row's statistic and its standard error, with the given signs."""
        mean = self.differences.sum(axis=1, keepdims=True) / self.count[:, None]
        statistics, errors = self._statistics(mean, slice(None))
        return statistics[:, 0], errors[:, 0]

    def _statistics(self, mean: Floats, piece: slice) -> tuple[Floats, Floats]:
        """Return mean over error, and the error, [rows of the piece, choices of signs]."""
        count, squares = self.count[piece, None], self.squares[piece, None]
        # The sum of squares is equal for all choices of signs, but the mean's part in it is not.
        residual_squares = squares - count * mean**2
        residual_squares = np.where(residual_squares <= 1e-12 * squares, 0.0, residual_squares)
        error = leaning_error(residual_squares, self.prior, count)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(error > 0, mean / error, np.where(mean == 0, 0.0, np.copysign(np.inf, mean))), error


def moderated_variance(squares: Floats, prior: float, freedom: Floats | NDArray[np.int64] | float) -> Floats:
    """Return variances moderated by the other rows' variance `prior` with PRIOR_FREEDOM degrees of freedom.

    The result is the posterior variance of G. K. Smyth, "Linear models and empirical Bayes methods for assessing
    differential expression in microarray experiments" (Stat. Appl. Genet. Mol. Biol. 3, 2004), with a fixed prior.

    Args:
        squares: sums of squared deviations from the mean, with `freedom` degrees of freedom.
    """
    variance: Floats = (squares + PRIOR_FREEDOM * prior) / (freedom + PRIOR_FREEDOM)
    return variance


def leaning_error(squares: Floats, prior: float, count: NDArray[np.int64]) -> Floats:
    """Return the standard error of a mean of `count` values, at most MAX_LENT times the standard error by the row's own
    spread.

    Parameters are as in `moderated_variance`. Without the limit a steady row among noisy rows would look noisy.
    """
    leaning = np.sqrt(moderated_variance(squares, prior, count - 1) / count)
    return np.minimum(leaning, MAX_LENT * np.sqrt(squares / (count - 1) / count)).astype(float)


def _reached(chance: Floats, statistics: Floats) -> Floats:
    """Return the share of sign choices whose largest statistic is at least each of `statistics`."""
    # The comparison is with a slightly smaller value, because the same sum in another order may differ in its last bit.
    finite = np.where(np.isfinite(statistics), statistics, 0.0)
    least = np.where(np.isfinite(statistics), finite - 1e-9 * (1 + np.abs(finite)), statistics)
    return 1 - np.searchsorted(chance, least, side="left") / len(chance)


Words = NDArray[np.str_]


@dataclass(frozen=True)
class Block:
    """One metric of one group of launches, with one row per case and tolerances in logarithms."""

    difference: LogDifference
    tolerance: Floats


@dataclass(frozen=True)
class Tested:
    """The family's result for one block, one element per case, nan without a test.

    Args:
        slower: p of "not slower", adjusted over all tests in both directions.
        faster: p of "not faster", adjusted like `slower`.
        detectable: the smallest true slowdown, in logarithms, that is detected four times in five.
        needed: total launches per side that would settle the case.
    """

    slower: Floats
    faster: Floats
    detectable: Floats
    needed: Floats


def tested(blocks: Sequence[Block], options: Options) -> tuple[list[Tested], int]:
    """Test every block; return the results and the number of tests in the family.

    Regressions get SLOWER_SHARE of alpha, and improvements the rest. If both paired and unpaired groups may fail a
    build, each design gets half of alpha.
    """
    if not blocks:
        return [], 0
    enough = [block.difference.num_launches >= options.least_launches(block.difference.is_paired) for block in blocks]
    num_tests = int(sum(each.sum() for each in enough))
    paired = [block.difference.pairs for block in blocks if block.difference.pairs is not None]
    designs = 2 if 0 < len(paired) < len(blocks) and options.dedicated else 1
    alpha = SLOWER_SHARE * options.alpha / designs
    flipped = iter(flip_tests(paired, options.least_launches(paired=True), alpha))
    corrected = zip(*(_holm(blocks, enough, sign) for sign in (1, -1)), strict=True)
    of_one_test = alpha / max(num_tests, 1)
    results = []
    for block, p_values in zip(blocks, corrected, strict=True):
        (slower, faster), difference, tolerance = p_values, block.difference, block.tolerance
        # The largest statistic with more pairs is unknown, so Bonferroni's bound replaces it in the needed launches.
        terms = of_one_test, tolerance
        if difference.is_paired:
            flips = next(flipped)
            slower, faster, detectable = flips.slower, flips.faster, flips.detectable(tolerance)
            needed = difference.launches_to_settle(*terms, flips.error, PRIOR_FREEDOM)
        else:
            detectable, needed = difference.detectable(of_one_test, tolerance), difference.launches_to_settle(*terms)
        slower, faster = slower * designs / SLOWER_SHARE, faster * designs / (1 - SLOWER_SHARE)
        results.append(Tested(np.minimum(slower, 1.0), np.minimum(faster, 1.0), detectable, needed))
    return results, num_tests


def _holm(blocks: Sequence[Block], enough: Sequence[NDArray[np.bool_]], sign: int) -> list[Floats]:
    """Return adjusted p of each block's tests, "not slower" (sign 1) or "not faster" (-1); nan for paired launches."""
    of_blocks = [
        np.where(mask & (not block.difference.is_paired), block.difference.p_above(sign), np.nan)
        for block, mask in zip(blocks, enough, strict=True)
    ]
    return np.split(holm(np.concatenate(of_blocks)), np.cumsum([len(mask) for mask in enough])[:-1])


def tolerance_words(
    block: Block, result: Tested, options: Options, is_believed: bool, may_pass: bool
) -> tuple[Words, Words]:
    """Return REGRESSION, IMPROVEMENT, PASS or INCONCLUSIVE for each test; and the measured change, or "".

    Args:
        is_believed: whether changes count.
        may_pass: whether a candidate without a measured slowdown may pass.
    """
    difference, tolerance = block.difference, block.tolerance
    low, high = difference.interval()
    # A case's own interval must agree with the family's test, because other cases' spread may be too small for it.
    side = side_of_bound(low, high, 0.0)
    enough = difference.num_launches >= options.least_launches(difference.is_paired)
    regressed = enough & (side > 0) & (difference.estimate > tolerance) & (result.slower <= options.alpha)
    improved = enough & (side < 0) & (difference.estimate < -tolerance) & (result.faster <= options.alpha)
    passed = enough & (high < tolerance) & may_pass & ~regressed & ~improved
    changes = np.select([regressed, improved], [REGRESSION, IMPROVEMENT], "")
    return np.select([is_believed & (changes != ""), passed], [changes, PASS], INCONCLUSIVE), changes
