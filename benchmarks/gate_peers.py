"""How other tools would have judged the same samples: from their documentation and sources, by our own hand.

Each gets all samples of a side pooled, for none of them knows launches. All tests vectorised over cases, and one case's
verdict is whether the tool would call it slower.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from distbench.judge.gate_self_test import RecordedSeries, Rule, TrialVerdicts, Window
from distbench.statistics.verdicts import INCONCLUSIVE, REGRESSION

Floats = NDArray[np.float64]
IsSlower = Callable[[Floats, Floats], NDArray[np.bool_]]


def pooled(series: RecordedSeries, window: Window, candidate: bool) -> Floats:
    """One side's samples of each case, launches forgotten: [cases, samples], equally many of each launch."""
    all_samples, indexes = series.samples_s, window.candidate if candidate else window.baseline
    fewest = min(len(of_case[index]) for of_case in all_samples for index in indexes)

    def samples(row: int, index: int) -> Floats:
        result = np.asarray(all_samples[row][index])[:fewest]
        return window.slowed(row, index, result) if candidate else result

    return np.array([np.concatenate([samples(row, index) for index in indexes]) for row in range(len(all_samples))])


def peer_rule(series: RecordedSeries, window: Window, is_slower: IsSlower) -> TrialVerdicts:
    """A tool's verdicts on the pooled samples; it knows no other than slower."""
    slower = is_slower(pooled(series, window, False), pooled(series, window, True))
    return TrialVerdicts(np.where(slower, REGRESSION, INCONCLUSIVE), len(window.baseline))


def pytest_benchmark_mean(left: Floats, right: Floats) -> NDArray[np.bool_]:
    """`--benchmark-compare-fail=mean:5%`."""
    return right.mean(axis=1) > 1.05 * left.mean(axis=1)


def pytest_benchmark_min(left: Floats, right: Floats) -> NDArray[np.bool_]:
    """`--benchmark-compare-fail=min:5%`."""
    return right.min(axis=1) > 1.05 * left.min(axis=1)


def mann_whitney(left: Floats, right: Floats) -> NDArray[np.bool_]:
    """google/benchmark's compare.py: a two-sided U test at 0.05, and the slower median."""
    p = stats.mannwhitneyu(left, right, axis=1, method="asymptotic").pvalue
    return (p < 0.05) & (np.median(right, axis=1) > np.median(left, axis=1))


def pyperf_t(left: Floats, right: Floats) -> NDArray[np.bool_]:
    """pyperf's compare_to: Student's two-sided t test at 95 % over all values, and the larger mean."""
    p = stats.ttest_ind(left, right, axis=1).pvalue
    return (p < 0.05) & (right.mean(axis=1) > left.mean(axis=1))


def asv_factor(left: Floats, right: Floats) -> NDArray[np.bool_]:
    """`asv continuous` with its factor 1.1: medians that far apart, and a U test at its threshold of 0.002."""
    p = stats.mannwhitneyu(left, right, axis=1, method="asymptotic").pvalue
    return (p < 0.002) & (np.median(right, axis=1) > 1.1 * np.median(left, axis=1))


PEERS: dict[str, IsSlower] = {
    "pytest-benchmark mean:5%": pytest_benchmark_mean,
    "pytest-benchmark min:5%": pytest_benchmark_min,
    "Mann-Whitney 0.05 (google/benchmark)": mann_whitney,
    "t-test 0.05 (pyperf)": pyperf_t,
    "asv factor 1.1": asv_factor,
}
RULES: dict[str, Rule] = {name: partial(peer_rule, is_slower=is_slower) for name, is_slower in PEERS.items()}
