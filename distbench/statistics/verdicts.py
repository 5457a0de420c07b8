"""The verdicts of a comparison, and its options: tolerance, error rate, power."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Verdicts of a case with a tolerance (`significance.tolerance_words`), the worst first, as in reports.
REGRESSION, INVALID, MISSING, INCOMPARABLE = "regression", "invalid", "missing", "incomparable"
INCONCLUSIVE, NEW, IMPROVEMENT, PASS = "inconclusive", "new", "improvement", "pass"
VERDICTS = (REGRESSION, INVALID, MISSING, INCOMPARABLE, INCONCLUSIVE, NEW, IMPROVEMENT, PASS)
JUDGED = (REGRESSION, INCONCLUSIVE, IMPROVEMENT, PASS)
BROKEN = (INVALID, MISSING, INCOMPARABLE)  # a comparison is missing
# Verdicts of a ratio without a tolerance.
FASTER, SLOWER, WITHIN_NOISE = "faster", "slower", "within noise"

MIN_PASSES = 8  # fewer passes have too few choices of signs for a family of tests
METRICS = ("mean", "p10")
TOLERANCE = 0.05
CONFIDENCE = 0.95  # of the shown interval; a pass requires an upper bound below the tolerance
# The share of alpha for regressions; improvements get the rest. With five eighths one choice of signs in 32 is still a
# regression at 5 %, so that 5 pairs can give a verdict.
SLOWER_SHARE = 0.625


@dataclass(frozen=True)
class Options:
    """Options of one comparison.

    Args:
        tolerances: largest slowdown that is not a regression, as a fraction, by metric.
        floor_s: difference in seconds below which a slowdown of any share is not a regression.
        alpha: probability of any false regression or improvement, over all cases and metrics.
        min_launches: smallest number of pairs, or launches per side, for a verdict.
        dedicated: whether the machine has no other users, so that an earlier baseline may fail a build.
        allowed: fields that may differ between the sides.
    """

    tolerances: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(METRICS, TOLERANCE))
    floor_s: float = 0.0
    alpha: float = 0.05
    min_launches: int = 5
    dedicated: bool = False
    allowed: tuple[str, ...] = ()

    def least_launches(self, paired: bool) -> int:
        """Return the smallest number of pairs, or launches per side, for a verdict.

        n pairs have 2^n choices of signs. With too few pairs, no case could be a regression, and a case that cannot
        fail must not pass.
        """
        fewest = math.ceil(-math.log2(SLOWER_SHARE * self.alpha) - 1e-9)
        return max(self.min_launches, fewest) if paired else self.min_launches
