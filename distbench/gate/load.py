"""Whether others kept the CPUs busier on one side: then no difference in time can be blamed on code."""

from collections.abc import Sequence

import numpy as np

from distbench.compare.log_differences import difference_between
from distbench.compare.pairing import Pairing
from distbench.runs.launches import Launch

SURE = 2.0  # standard errors: a difference in load that launches scatter around is none


def load_conflict(
    baseline: Sequence[Launch], candidate: Sequence[Launch], pairing: Pairing, load_share: float
) -> str | None:
    """One sentence if foreign load differed between the sides by more than `load_share` of the CPUs, else None.

    An idle baseline against a contended candidate makes most unchanged cases look slower, whatever the statistics.
    """
    loads = [np.array([[launch.foreign_load for launch in side]], dtype=float) for side in (baseline, candidate)]
    difference = difference_between(loads, pairing)
    # nan, where the load of a side is not known, exceeds nothing; one launch has no error.
    if not abs(difference.estimate[0]) > max(load_share, SURE * np.nan_to_num(difference.error[0])):
        return None
    before, after = 100 * difference.baseline[0], 100 * difference.candidate[0]
    return f"foreign load differed: {before:.0f} % of the CPUs in the baseline, {after:.0f} % in the candidate"
