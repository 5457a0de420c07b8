"""Probabilistic bisection: the probability of each commit to be the first slower commit, from noisy pairs of launches.

Each answer "is this commit slower than the good commit?" may be wrong, so no commit is ever excluded. Every pair of
launches multiplies the chances by its likelihood, and the next pair measures the commit that divides the chances into
halves (Horstein, IEEE Trans. Inf. Theory 9, 1963; Waeber, Frazier and Henderson, SIAM J. Control Optim. 51, 2013).

The model of a pair's difference d of logarithms at a commit: d = level + scale * t, with t of Student's distribution
with 4 degrees of freedom, because single launches may be disturbed. The level of a commit is, if the commit is

- not slower: 0 with chance 4/5, else evenly between -threshold and threshold,
- slower: with chance 1/2 about the slowdown of the bad commit, else evenly between the threshold and 1.5 times this
  slowdown, because a history may have several changes.

Commits before the first slower commit are not slower. All other commits are slower. The scale is unknown; the chances
are averages over a grid of scales.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distbench.statistics.intervals import Floats

DEGREES = 4.0  # of freedom of a pair's noise
# The probability, before the search, that no commit is slower. On a noisy machine the gate detects few true slowdowns,
# so many slowdowns that the gate detects are false alarms.
NEVER = 0.3
SCALES = np.geomspace(1 / 8, 8, 25)  # times the median deviation
MIN_SCALE = 1e-4  # The smallest scale, so that launches without noise also have a scale.
NUM_LEVELS = 121


@dataclass(frozen=True)
class Step:
    """The change from the good to the bad commit, before the search: logarithms.

    Args:
        pairs: differences of pairs of the good and the bad commit.
        threshold: the largest level of a commit that is not slower.
    """

    pairs: Floats
    threshold: float

    @property
    def size(self) -> float:
        """The slowdown of the bad commit."""
        return float(np.median(self.pairs))


def threshold_of(pairs: Floats, tolerance: float) -> float:
    """Return the level above which a commit is slower: the tolerance, but at most half of the whole change."""
    return min(tolerance, float(np.median(pairs)) / 2)


def chances(num_commits: int, pairs: Mapping[int, Sequence[float]], step: Step) -> Floats:
    """Return the probability of each commit to be the first slower commit.

    Args:
        num_commits: commits after the good commit; the last is the bad commit.
        pairs: commit's number, from 1, to its pairs' differences from the good commit, in logarithms. Pairs of `step`
            are not repeated here, because the case was chosen by them.

    Returns:
        Shape [num_commits + 1]: the chances of commits 1 to `num_commits`, and that no commit is slower.
    """
    levels, weights, scales = _grid(pairs, step)
    # log likelihood of a commit's pairs, [2, scales], if the commit is not slower or slower.
    not_slower, slower = np.zeros((2, num_commits + 1, len(scales)))
    for number, differences in pairs.items():
        of_levels = _log_likelihood(np.asarray(differences), levels, scales)
        not_slower[number], slower[number] = (_log_sum(of_levels + np.log(row)[:, None]) for row in weights)
    # The first slower commit is k: the sum of `not_slower` before k, and of `slower` from k on.
    before = np.cumsum(not_slower, axis=0)
    after = np.cumsum(slower[::-1], axis=0)[::-1]
    of_first = np.concatenate([before[:-1] + after[1:], before[-1:]])
    of_scale = _log_sum(_log_likelihood(step.pairs, levels, scales))
    prior = np.append(np.full(num_commits, (1 - NEVER) / num_commits), NEVER)
    total = _log_sum((of_first + of_scale).T) + np.log(prior)
    return np.asarray(np.exp(total - _log_sum(total)))


def level_interval(number: int, pairs: Mapping[int, Sequence[float]], step: Step) -> tuple[float, float, float]:
    """Return median, 2.5 % and 97.5 % quantile of a slower commit's level, in logarithms."""
    levels, weights, scales = _grid(pairs, step)
    of_scale = _log_sum(_log_likelihood(step.pairs, levels, scales))
    likelihood = _log_likelihood(np.asarray(pairs.get(number, ())), levels, scales) + np.log(weights[1])[:, None]
    of_level = _log_sum((likelihood + of_scale).T)
    shares = np.cumsum(np.exp(of_level - _log_sum(of_level)))
    middle, low, high = np.interp((0.5, 0.025, 0.975), shares, levels).tolist()
    return middle, low, high


def next_commit(beliefs: Floats, is_measurable: Sequence[bool]) -> int:
    """Return the number of the measurable commit that divides the chances into the most equal halves.

    Args:
        is_measurable: for commits 1 to N.
    """
    below = np.cumsum(beliefs[:-1])
    halves = np.where(is_measurable, np.minimum(below, 1 - below), -1.0)
    return int(halves.argmax()) + 1


def separable_groups(beliefs: Floats, is_measurable: Sequence[bool]) -> list[tuple[int, int, float]]:
    """Return (first, last, chance) of each group of commits that pairs can separate. A commit that cannot be measured
    is in the group of the next commit that can be measured.
    """
    groups, first = [], 1
    for number, can in enumerate(is_measurable, 1):
        if can:
            groups.append((first, number, float(beliefs[first - 1 : number].sum())))
            first = number + 1
    return groups


def smallest_range(groups: Sequence[tuple[int, int, float]], certainty: float) -> tuple[int, int, float]:
    """Return the smallest range of neighbouring commits, as (first, last, chance), whose chance is at least
    `certainty`. Return all commits if no range has such a chance.
    """
    best, start, chance = None, 0, 0.0
    for stop, (_, last, of_group) in enumerate(groups):
        chance += of_group
        while start < stop and chance - groups[start][2] >= certainty:
            chance -= groups[start][2]
            start += 1
        span = groups[start][0], last, chance
        if chance >= certainty and (best is None or (last - span[0], -chance) < (best[1] - best[0], -best[2])):
            best = span
    return best or (groups[0][0], groups[-1][1], sum(group[2] for group in groups))


def _grid(pairs: Mapping[int, Sequence[float]], step: Step) -> tuple[Floats, Floats, Floats]:
    """Return levels, their weights if not slower and if slower, [2, levels], and scales."""
    size, threshold = step.size, step.threshold
    levels = np.linspace(-threshold, 1.5 * size, NUM_LEVELS)
    levels[np.abs(levels).argmin()] = 0.0
    deviations = [step.pairs - size, *(np.asarray(some) - np.median(some) for some in pairs.values() if len(some) > 1)]
    scale = max(float(np.median(np.abs(np.concatenate(deviations)))), MIN_SCALE)
    width = max(scale / np.sqrt(len(step.pairs)), levels[1] - levels[0])
    even, at_zero = levels <= threshold, levels == 0.0
    above, near = levels > threshold, np.exp(-0.5 * ((levels - size) / width) ** 2)
    weights = np.stack([0.8 * at_zero + 0.2 * even / even.sum(), 0.5 * near / near.sum() + 0.5 * above / above.sum()])
    return levels, weights + 1e-12, scale * SCALES


def _log_likelihood(differences: Floats, levels: Floats, scales: Floats) -> Floats:
    """Return the sum of the log likelihoods of differences, [levels, scales]. Constant terms are omitted."""
    distances = (differences[:, None, None] - levels[:, None]) / scales
    each = -(DEGREES + 1) / 2 * np.log1p(distances**2 / DEGREES) - np.log(scales)
    return np.asarray(each.sum(axis=0))


def _log_sum(logs: Floats) -> Floats:
    """Return the logarithm of the sum, over the first dim, of the numbers with these logarithms."""
    return np.asarray(np.logaddexp.reduce(logs, axis=0))
