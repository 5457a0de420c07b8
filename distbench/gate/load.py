"""Whether others kept the CPUs busier on one side: then no difference in time can be blamed on code."""

import math
from collections.abc import Sequence

from distbench.compare.pairing import Pairing
from distbench.runs.launches import Launch

SURE = 2.0  # standard errors: a difference in load that launches scatter around is none


def load_conflict(
    baseline: Sequence[Launch], candidate: Sequence[Launch], pairing: Pairing, load_share: float
) -> str | None:
    """One sentence if foreign load differed between the sides by more than `load_share` of the CPUs, else None.

    An idle baseline against a contended candidate makes most unchanged cases look slower, whatever the statistics.

    Args:
        baseline: launches.
        candidate: launches.
        pairing: which of them are compared.
        load_share: the difference from which nothing can be told.
    """
    left = [baseline[index].foreign_load for index in pairing.baseline]
    right = [candidate[index].foreign_load for index in pairing.candidate]
    if pairing.interleaved:
        pairs = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
        left, right = [one for one, _ in pairs], [other for _, other in pairs]
        spread = _variance([other - one for one, other in pairs]) / max(len(pairs), 1)
    else:
        spread = sum(_variance(_known(side)) / max(len(_known(side)), 1) for side in (left, right))
    if not _known(left) or not _known(right):
        return None
    before, after = _mean(_known(left)), _mean(_known(right))
    if abs(after - before) <= load_share or abs(after - before) <= SURE * math.sqrt(spread):
        return None
    return (
        f"foreign load differed: {100 * before:.0f} % of the CPUs in the baseline, {100 * after:.0f} % in the candidate"
    )


def _known(loads: Sequence[float | None]) -> list[float]:
    return [load for load in loads if load is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    center = _mean(values)
    return sum((value - center) ** 2 for value in values) / (len(values) - 1)
