"""What the bench of measured sweeps says of a recommendation: plain data."""

import pytest

from benchmarks.bench_sweep_here import against_best


def test_the_best_plan_is_not_chosen_by_the_launch_that_it_is_held_against() -> None:
    """Five plans that take as long, each quick by chance in one launch: every launch alone would say 1.11 of four."""
    launches = [{name: 0.9 if name == quick else 1.0 for name in "abcde"} for quick in "abcde"]
    assert [against_best(launches, name) for name in "abcde"] == pytest.approx([1.0] * 5)


def test_one_launch_in_which_a_plan_is_slow_does_not_count() -> None:
    """As seen here: two plans a percent apart, one of which took 15 % more in one launch of three, throughout."""
    launches = [{"a": 1.01, "b": 1.0}, {"a": 1.01, "b": 1.0}, {"a": 1.15, "b": 1.0}]
    assert against_best(launches, "a") == pytest.approx(1.01)


def test_a_plan_that_is_slower_in_every_launch_is_said_to_be() -> None:
    """Ten percent slower than the best one, on a machine that is not as quick in every launch."""
    launches = [{"best": 1.0, "chosen": 1.1}, {"best": 2.0, "chosen": 2.2}, {"best": 0.5, "chosen": 0.55}]
    assert against_best(launches, "chosen") == pytest.approx(1.1)
    assert against_best(launches, "best") == pytest.approx(1.0)
