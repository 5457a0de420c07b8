"""Ranks that arrive last in their group more often than by chance: binomial tests of all ranks as one family (Holm)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.statistics.intervals import Floats, median, median_ci

ALPHA = 0.05
MIN_PAIRED = 3  # samples for a correlation of neighbours


class Lateness(NamedTuple):
    """How often and by how much one rank of one group arrives last.

    Args:
        group, member: index of the group, and of the rank in the group.
        num_last: samples in which the rank is last.
        late_s, low_s, high_s: median of seconds after the median of the group's other ranks, over these samples, with
            its 95 % interval.
        p: probability of so many samples by chance, adjusted over all ranks and groups.
    """

    group: int
    member: int
    num_last: int
    late_s: float
    low_s: float
    high_s: float
    p: float


def latenesses(groups: Sequence[Floats]) -> list[Lateness]:
    """Test each rank of each group that is last in a sample.

    If all ranks are alike, each rank of n is last with probability 1/n. Therefore the number of samples in which a rank
    is last is binomial. A sample is a step, because the collectives of a step depend on each other. Samples also depend
    on each other if a disturbance lasts for several samples. `_independent_share` reduces their number for this reason.

    Args:
        groups: arrivals in seconds (any zero per sample) in order of time, each [samples, ranks of the group]; two or
            more ranks.
    """
    from scipy.special import betainc

    from distbench.statistics.significance import holm

    rows: list[Lateness] = []
    chances: list[float] = []
    for group, arrivals in enumerate(groups):
        num_samples, num_ranks = arrivals.shape
        last = arrivals.argmax(axis=1) if num_samples else np.empty(0, dtype=np.int64)
        share = _independent_share(last, num_ranks)
        for member in range(num_ranks):
            of_member = arrivals[last == member]
            after = of_member[:, member] - np.median(np.delete(of_member, member, axis=1), axis=1)
            late_s = [float(value) for value in after]
            count = len(late_s)
            # The binomial tail, also for numbers that are not whole.
            others = share * (num_samples - count)
            chances.append(float(betainc(share * count, others + 1, 1 / num_ranks)) if count else 1.0)
            rows.append(Lateness(group, member, count, median(late_s), *median_ci(late_s), p=1.0))
    adjusted = holm(np.array(chances))
    return [row._replace(p=p) for row, p in zip(rows, adjusted.tolist(), strict=True) if row.num_last]


def _independent_share(last: NDArray[np.int64], num_ranks: int) -> float:
    """Return the share of samples that are independent, from repeats of the last rank in neighbouring samples.

    The correlation r is the excess of repeats over those of independent samples with the same frequencies, as in
    Cohen's kappa; the share of an autoregressive series is (1 - r) / (1 + r) (Bartlett, J. Roy. Stat. Soc. 98, 1935).
    """
    if len(last) < MIN_PAIRED:
        return 1.0
    frequencies = np.bincount(last, minlength=num_ranks) / len(last)
    expected = float((frequencies**2).sum())
    repeated = float((last[1:] == last[:-1]).mean())
    excess = (repeated - expected) / (1 - expected) if expected < 1 else 0.0
    return (1 - max(excess, 0.0)) / (1 + max(excess, 0.0))


def fewest_last(num_samples: int, num_ranks: int, num_tests: int, alpha: float = ALPHA) -> int | None:
    """Return the smallest number of samples in which a rank must be last for significance; None if all are too few.

    Args:
        num_tests: number of ranks over all groups. Bonferroni's correction is used, which needs at most one sample more
            than Holm's.
    """
    from scipy.special import bdtrc

    counts = np.arange(1, num_samples + 1)
    enough = np.flatnonzero(bdtrc(counts - 1, num_samples, 1 / num_ranks) * num_tests <= alpha)
    return int(counts[enough[0]]) if len(enough) else None


def fewest_samples(num_ranks: int, num_tests: int, alpha: float = ALPHA) -> int:
    """Return the number of samples below which even a rank that is always last is not significant."""
    return int(np.ceil(np.log(num_tests / alpha) / np.log(num_ranks) - 1e-9))
