"""Statistics and numbers as text, against values worked out by hand or from independent formulas."""

import itertools
import math

import numpy as np
import pytest

from distbench.records.dataframe import factors_of
from distbench.show.units import (
    bandwidth_text,
    rate_text,
    ratio_text,
    short_count_text,
    size_text,
    time_ci_text,
    time_text,
)
from distbench.statistics.intervals import Interval, geometric_mean, geometric_mean_with_ci, margin_of, summarise


def interval(*triples: tuple[float, float, float]) -> Interval:
    center, low, high = (np.array(part, dtype=float) for part in zip(*triples, strict=True))
    return Interval(center, low, high)


# nccl-tests, doc/PERFORMANCE.md: what algbw is multiplied by, for 2, 4 and 8 ranks.
NCCL_TESTS = {
    "all_reduce": (1.0, 1.5, 1.75),
    "all_gather": (0.5, 0.75, 0.875),
    "reduce_scatter": (0.5, 0.75, 0.875),
    "all_to_all": (0.5, 0.75, 0.875),
    "broadcast": (1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("op", NCCL_TESTS)
def test_busbw_factors_are_those_that_nccl_tests_publishes(op: str) -> None:
    assert factors_of([op] * 3, np.array([2.0, 4.0, 8.0])).tolist() == list(NCCL_TESTS[op])


def test_an_op_or_group_that_is_unknown_has_no_busbw_at_all() -> None:
    assert np.isnan(factors_of(["mystery", None, "all_reduce"], np.array([2.0, 2.0, math.nan]))).all()


def test_summary_of_cases_of_different_lengths() -> None:
    nine = [0.005, 0.001, 0.009, 0.003, 0.007, 0.002, 0.008, 0.004, 0.006]
    result = summarise([nine, [], [3.0, 1.0], [7.0]])
    assert [result[name][0] for name in ("median_s", "q1_s", "q3_s", "min_s")] == [0.005, 0.003, 0.007, 0.001]
    assert all(math.isnan(values[1]) for values in result.values())
    assert result["median_s"][2:].tolist() == [2.0, 7.0] and np.isnan(result["q1_s"][2:]).all()


def test_p95_is_the_nearest_rank_and_of_fewer_than_20_samples_there_is_none() -> None:
    result = summarise([[float(value) for value in range(1, count + 1)] for count in (19, 20, 21, 100)])
    assert math.isnan(result["p95_s"][0]) and result["p95_s"][1:].tolist() == [19.0, 20.0, 95.0]


def test_margins() -> None:
    ratio = interval((0.5, 0.4, 0.8), (1.0, 0.9, 1.1), (2.0, 1.25, 3.0), (0.5, math.nan, math.nan))
    assert margin_of(ratio).tolist() == pytest.approx([1.25, 1.0, 1.25, 1.0])


@pytest.mark.parametrize("count", [5, 8, 20])
def test_the_geometric_means_interval_holds_the_truth_as_often_as_it_says(count: int) -> None:
    """A percentile bootstrap held it in 54 % of samples of 2, and 86 % of 5."""
    draws = np.exp(np.random.default_rng(count).normal(0.3, 0.5, (2000, count)))
    bounds = np.array([geometric_mean_with_ci(values)[1:] for values in draws])
    held = ((bounds[:, 0] <= np.exp(0.3)) & (bounds[:, 1] >= np.exp(0.3))).mean()
    assert 0.935 < held < 0.965


def test_geometric_mean_and_its_interval() -> None:
    assert geometric_mean(np.array([0.5, 2.0, 4.0, math.nan])) == pytest.approx(4 ** (1 / 3))
    assert math.isnan(geometric_mean(np.array([])))
    center, low, high = geometric_mean_with_ci(np.array([0.5, 2.0] * 20))
    assert 0.7 < low < 1 < high < 1.4 and center == pytest.approx(1)
    assert np.isnan(geometric_mean_with_ci(np.array([0.5, 2.0, 1.0, 1.5]))[1:]).all()


TEXTS = [
    (time_text(0.000641), "641 us"),
    (time_text(0.00123), "1.23 ms"),
    (time_text(12.0), "12.0  s"),
    (time_text(0.0009996), "1.00 ms"),
    (time_text(3e-9), "3.00 ns"),
    (time_text(math.nan), "-"),
    (time_ci_text(0.000641, 0.000576, 0.0012345), "[576, 1234]"),
    (time_ci_text(0.00123, math.nan, 0.0013), "-"),
    (size_text(512), "512 B"),
    (size_text(65536), "64 KiB"),
    (size_text(1572864), "1.50 MiB"),
    (bandwidth_text(1.61), "1.61  "),
    (bandwidth_text(0.00016), "0.0002"),
    (bandwidth_text(123.4), "123     "),
    (short_count_text(812), "812"),
    (short_count_text(5210), "5.21 k"),
    (rate_text(5761.7), "5,762"),
    (rate_text(0.4312), "0.431"),
    (ratio_text(0.81, 0.78, 0.85), "0.81 [0.78, 0.85]"),
]


@pytest.mark.parametrize(("text", "wanted"), TEXTS)
def test_numbers_as_a_person_reads_them(text: str, wanted: str) -> None:
    assert text == wanted


def test_every_time_has_three_digits_and_the_right_size() -> None:
    for power, digits in itertools.product(range(-9, 3), (1.0, 1.005, 9.994, 9.996)):
        number, unit = time_text(digits * 10.0**power).split()
        scale = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
        assert float(number) * scale == pytest.approx(digits * 10.0**power, rel=0.006)
