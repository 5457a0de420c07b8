"""Comparison of cases of one launch by passes: the verdicts of a report's tables.

Times drift over a launch, so the pass is the unit: a case has one value per pass, and the cases of a pass are measured
in random order. The null distribution is the largest statistic over all rows of the table when each pass's differences
keep or change their signs together (single-step maxT of Westfall and Young, 1993); its error rate is valid for any
noise. Rows that clearly differ take part by their residuals, so that other intervals remain narrow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from distbench.statistics.intervals import Floats
from distbench.statistics.significance import PRIOR_FREEDOM, SignFlips, detectable_effect, leaning_error, sign_choices
from distbench.statistics.verdicts import FASTER, MIN_PASSES, SLOWER, WITHIN_NOISE

# Error rate of a table. Reports guarantee 5 %: at 4 %, one trial in five of 20 unchanged launches has two tables with a
# verdict, at 2 % one in seventeen, and equally many slowdowns by 10 and 20 % were detected (docs/statistics.md).
ALPHA = 0.02
CLEAR = 0.001  # two-sided p of a row's own t test below which it clearly differs
MAX_ADVISED = 1000  # most passes that a sentence recommends
LUCK = 0.84  # standard normal deviations: four times in five
BASELINE, TOO_FEW = "baseline", "too few passes"


@dataclass(frozen=True)
class PassComparison:
    """Rows of one table, each compared with its reference; one element per row, nan without a comparison.

    Args:
        ratio: the row's time divided by its reference's, as geometric mean over the passes that both have.
        low: lower bound of the ratio, with at least 95 % confidence for all rows together, from the verdict's error.
        high: upper bound of the ratio.
        num_passes: number of passes that both have.
        verdict: "baseline" (compared with itself or nothing), "faster", "slower", "within noise" or "too few passes".
        detectable: the smallest slowdown, as a fraction, that is detected four times in five at the median row; nan
            without a test.
    """

    ratio: Floats
    low: Floats
    high: Floats
    num_passes: NDArray[np.int64]
    verdict: list[str]
    detectable: float

    def passes_for(self, change: float) -> int | None:
        """Return the total number of passes that detect a change of this share four times in five; None if unknown."""
        if not math.isfinite(self.detectable) or not self.num_passes.any():
            return None
        num_passes = float(np.median(self.num_passes[self.num_passes > 0]))
        needed = num_passes * (math.log1p(self.detectable) / math.log1p(change)) ** 2
        return max(MIN_PASSES, math.ceil(needed))

    def sentences(self, subject: str, reference: str) -> list[str]:
        """Return sentences on the smallest detectable slowdown, or why there are no verdicts.

        Args:
            subject: a noun for the rows; `reference` is a noun for their references.
        """
        if TOO_FEW in self.verdict:
            advice = f"use --passes {MIN_PASSES} or a larger --budget"
            return [f"fewer than {MIN_PASSES} passes give no verdicts: {advice}"]
        if not math.isfinite(self.detectable):
            return []
        needed = self.passes_for(0.1)
        is_near = self.detectable > 0.1 and needed and needed <= MAX_ADVISED
        more = f"; 10 % would need about {needed} passes" if is_near else ""
        sentence = (
            f"{subject} {100 * self.detectable:.0f} % slower than {reference} would be detected four times in five"
        )
        return [f"{sentence}{more}"]


def compare_passes(values: Floats, references: Sequence[int]) -> PassComparison:
    """Compare every row with its reference row, as one family.

    ALPHA is the probability of any false "faster" or "slower", over the table.

    Args:
        values: seconds, [rows, passes]; nan if a row has no value in a pass.
        references: number of each row's reference row; -1, or the row itself, for no reference.
    """
    rows, against = np.arange(len(values)), np.asarray(references, dtype=np.int64).reshape(len(values))
    compared = (against >= 0) & (against != rows)
    differences = np.full(values.shape, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values)
        differences[compared] = logs[compared] - logs[against[compared]]
    is_known = np.isfinite(differences)
    count = is_known.sum(axis=1)
    mean = np.where(is_known, differences, 0.0).sum(axis=1) / np.where(count, count, np.nan)
    tested = count >= MIN_PASSES
    error, critical = np.full(len(values), np.nan), math.nan
    if tested.any():
        residuals = np.where(is_known, differences - mean[:, None], 0.0)[tested]
        error[tested], critical = _error_and_critical(mean[tested], residuals, is_known[tested])
    reach = critical * error
    conditions = [~compared, ~tested, mean - reach > 0, mean + reach < 0]
    return PassComparison(
        ratio=np.exp(mean),
        low=np.exp(mean - reach),
        high=np.exp(mean + reach),
        num_passes=count,
        verdict=np.select(conditions, [BASELINE, TOO_FEW, SLOWER, FASTER], WITHIN_NOISE).tolist(),
        detectable=_detectable(error[tested], critical, count[tested]) if tested.any() else math.nan,
    )


def compare_pairs(values: Floats) -> tuple[list[tuple[int, int]], PassComparison]:
    """Compare every two rows, as one family.

    Args:
        values: seconds, [rows, passes]; nan if a row has no value in a pass.

    Returns:
        Pairs (row, its reference), and their comparison, one element per pair.
    """
    pairs = list(combinations(range(len(values)), 2))
    of_pairs = np.array([values[row] for row, _ in pairs]).reshape(len(pairs), values.shape[1])
    references = [len(pairs) + reference for _, reference in pairs] + [-1] * len(values)
    comparison = compare_passes(np.vstack([of_pairs, values]), references)
    parts = {
        name: getattr(comparison, name)[: len(pairs)] for name in ("ratio", "low", "high", "num_passes", "verdict")
    }
    return pairs, replace(comparison, **parts)


def _error_and_critical(mean: Floats, residuals: Floats, is_known: NDArray[np.bool_]) -> tuple[Floats, float]:
    """Return standard errors of mean differences, and the mean over error that chance exceeds with share ALPHA."""
    count = is_known.sum(axis=1)
    squares = (residuals**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        is_clear = np.abs(mean) > stdtrit(count - 1, 1 - CLEAR / 2) * np.sqrt(squares / (count - 1) / count)
    # A residual is smaller than its deviation from the true mean.
    unshrunk = residuals * np.sqrt(count / (count - 1))[:, None]
    chance = np.where(is_clear[:, None], unshrunk, residuals + np.where(is_known, mean[:, None], 0.0))
    flips = SignFlips.of(chance, count)
    largest = flips.largest(sign_choices(chance.shape[1]), is_two_sided=True)
    return leaning_error(squares, flips.prior, count), float(np.quantile(largest, 1 - ALPHA, method="higher"))


def _detectable(error: Floats, critical: float, count: NDArray[np.int64]) -> float:
    """Return the smallest slowdown that is detected four times in five, at the median row."""
    freedom = float(np.median(count)) - 1 + PRIOR_FREEDOM
    # The standard deviation of the noncentral t, by the normal approximation of Johnson and Kotz.
    luck = LUCK * math.sqrt(1 + critical**2 / (2 * freedom))
    return float(np.expm1(detectable_effect(float(np.median(error)), critical, luck)))


def pass_medians(samples: Sequence[float], pass_counts: Sequence[Sequence[int]], num_passes: int) -> Floats:
    """Return a case's median sample in each pass, nan in passes without samples.

    Args:
        samples: seconds, pass after pass.
        pass_counts: (number of the pass, samples in it), in the order of `samples`.
        num_passes: number of passes of the launch.
    """
    medians, start = np.full(num_passes, np.nan), 0
    for number, count in pass_counts:
        if count and number < num_passes:
            medians[number] = np.median(samples[start : start + count])
        start += count
    return medians


def as_table(rows: Sequence[Floats]) -> Floats:
    """Stack rows of any lengths as [rows, longest], filled with nan."""
    table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table
