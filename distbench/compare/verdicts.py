"""The words for what a comparison found; nothing else names a verdict."""

import numpy as np
from numpy.typing import NDArray

from distbench.compare.intervals import Interval, side_of_one

# Of a case that is held against a tolerance (`families.tolerance_words`). The worst first: how a report is ordered.
REGRESSION, INVALID, MISSING, INCOMPARABLE = "regression", "invalid", "missing", "incomparable"
INCONCLUSIVE, NEW, IMPROVEMENT, PASS = "inconclusive", "new", "improvement", "pass"
VERDICTS = (REGRESSION, INVALID, MISSING, INCOMPARABLE, INCONCLUSIVE, NEW, IMPROVEMENT, PASS)
JUDGED = (REGRESSION, INCONCLUSIVE, IMPROVEMENT, PASS)
BROKEN = (INVALID, MISSING, INCOMPARABLE)  # there is nothing to compare, though there should be
# Of a ratio without a tolerance.
FASTER, SLOWER, WITHIN_NOISE, TOO_FEW = "faster", "slower", "within noise", "too few samples"


def noise_words(speedup: Interval, enough: NDArray[np.bool_]) -> NDArray[np.str_]:
    """FASTER, SLOWER, WITHIN_NOISE or TOO_FEW, one a speed-up: within noise is one whose interval holds one.

    A speed-up is the other's time over this one's, so more than 1 is faster; `enough`: it rests on enough samples.
    """
    side = side_of_one(speedup, enough)
    return np.select([~enough, side > 0, side < 0], [TOO_FEW, FASTER, SLOWER], WITHIN_NOISE)
