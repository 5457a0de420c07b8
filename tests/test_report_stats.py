"""Statistics and numbers as text, against values worked out by hand or from independent formulas."""

import itertools
import math

import numpy as np
import pytest

from distbench.compare.intervals import (
    Interval,
    geometric_mean,
    geometric_mean_ci,
    margin_of,
    ratio_of,
    side_of_one,
    summarise,
    widened,
    widening_for,
)
from distbench.render.units import bandwidth_text, count_text, ratio_text, size_text, time_ci_text, time_text
from distbench.runs.frame import factors_of


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
    found = summarise([nine, [], [3.0, 1.0], [7.0]])
    # 9 samples: the 2nd and the 8th bound the median with 96.1 % (Binomial(9, 1/2)); the tables in textbooks agree.
    assert [found[name][0] for name in ("median_s", "ci_low_s", "ci_high_s", "p95_s", "min_s")] == [
        0.005, 0.002, 0.008, 0.009, 0.001,
    ]  # fmt: skip
    assert all(math.isnan(values[1]) for values in found.values())
    assert (found["median_s"][2], found["ci_low_s"][2], found["ci_high_s"][2]) == (2.0, 1.0, 3.0)
    assert found["median_s"][3] == 7.0


def test_p95_is_the_nearest_rank() -> None:
    found = summarise([[float(value) for value in range(1, count + 1)] for count in (19, 20, 21, 100)])
    assert found["p95_s"].tolist() == [19.0, 19.0, 20.0, 95.0]


@pytest.mark.parametrize(
    ("count", "ranks"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (50, (18, 33)), (100, (40, 61))]
)
def test_median_interval_has_the_ranks_of_the_textbook_table(count: int, ranks: tuple[int, int]) -> None:
    found = summarise([[float(value) for value in range(1, count + 1)]])
    assert (found["ci_low_s"][0], found["ci_high_s"][0]) == ranks


def test_ratio_interval_by_hand() -> None:
    # Both medians known to a factor of 2 either way: the ratio to a factor of 2 ** sqrt(2).
    ratio = ratio_of(interval((8.0, 4.0, 16.0)), interval((2.0, 1.0, 4.0)))
    reach = 2 ** math.sqrt(2)
    assert [part[0] for part in ratio] == pytest.approx([4.0, 4.0 / reach, 4.0 * reach])


def test_ratio_interval_takes_the_bound_on_the_right_side() -> None:
    # The denominator may only be larger, so the ratio may only be smaller.
    ratio = ratio_of(interval((1.0, 1.0, 1.0)), interval((1.0, 1.0, 3.0)))
    assert [part[0] for part in ratio] == pytest.approx([1.0, 1 / 3, 1.0])


def test_ratio_covers_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    samples = [np.exp(draw.normal(0.0, 0.5, (2000, 25))) for _ in range(2)]
    found = [summarise(part.tolist()) for part in samples]
    ratio = ratio_of(*(Interval(part["median_s"], part["ci_low_s"], part["ci_high_s"]) for part in found))
    assert 0.94 <= ((ratio.low <= 1) & (ratio.high >= 1)).mean() <= 0.985


def test_sides_and_margins() -> None:
    ratio = interval((0.5, 0.4, 0.8), (1.0, 0.9, 1.1), (2.0, 1.25, 3.0), (0.5, 0.4, 0.8))
    assert side_of_one(ratio, np.array([True, True, True, False])).tolist() == [-1, 0, 1, 0]
    assert margin_of(ratio).tolist() == pytest.approx([1.25, 1.0, 1.25, 1.25])


def test_widening_makes_intervals_hold_for_controls() -> None:
    # 19 controls: the ceil(0.95 * 20) = 19th smallest need is the largest. It is e^0.3 with a reach of 0.1: 3 times.
    logs = [0.01 * index for index in range(18)] + [-0.3]
    ratio = interval(*((math.exp(log), math.exp(log - 0.1), math.exp(log + 0.1)) for log in logs))
    assert widening_for(ratio, np.ones(19, dtype=bool)) == pytest.approx(3.0)
    assert widened(ratio, 3.0).high[-1] == pytest.approx(1.0)
    assert widening_for(ratio, np.arange(19) < 18) == 1.0


def test_geometric_mean_and_its_interval() -> None:
    assert geometric_mean(np.array([0.5, 2.0, 4.0, math.nan])) == pytest.approx(4 ** (1 / 3))
    assert math.isnan(geometric_mean(np.array([])))
    low, high = geometric_mean_ci(np.array([0.5, 2.0] * 20))
    assert 0.7 < low < 1 < high < 1.4
    assert (low, high) == geometric_mean_ci(np.array([0.5, 2.0] * 20))


TEXTS = [
    (time_text(0.000641), "641 us"),
    (time_text(0.00123), "1.23 ms"),
    (time_text(12.0), "12.0  s"),
    (time_text(0.0009996), "1.00 ms"),
    (time_text(3e-9), "3.00 ns"),
    (time_text(math.nan), "-"),
    (time_ci_text(0.000641, 0.000576, 0.0012345, 9), "[576, 1234]"),
    (time_ci_text(0.00123, 0.0012, 0.0013, 5), "[1.20, 1.30]*"),
    (size_text(512), "512 B"),
    (size_text(65536), "64 KiB"),
    (size_text(1572864), "1.50 MiB"),
    (bandwidth_text(1.61), "1.61  "),
    (bandwidth_text(0.00016), "0.0002"),
    (bandwidth_text(123.4), "123     "),
    (count_text(812), "812"),
    (count_text(5210), "5.21 k"),
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
