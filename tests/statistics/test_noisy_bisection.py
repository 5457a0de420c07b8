"""Probabilistic bisection: chances of commits, by pairs whose differences are chosen here."""

import numpy as np
import pytest

from distbench.statistics.noisy_bisection import (
    NEVER,
    Step,
    chances,
    level_interval,
    next_commit,
    separable_groups,
    smallest_range,
    threshold_of,
)

SLOWER = float(np.log(1.2))
STEP = Step(SLOWER + np.array([0.01, -0.02, 0.015, -0.01, 0.02, -0.015, 0.005]), threshold=0.05)
ALL = [True] * 8


def test_before_the_first_pair_all_commits_are_equally_likely_and_none_may_be_slower() -> None:
    beliefs = chances(8, {}, STEP)
    assert beliefs[:-1] == pytest.approx([(1 - NEVER) / 8] * 8) and beliefs.sum() == pytest.approx(1)
    # Half of the chances are up to commit 6, since no commit may be slower.
    assert next_commit(beliefs, ALL) == 6
    assert next_commit(beliefs, [number != 6 for number in range(1, 9)]) == 5


def test_a_slow_commit_moves_the_chances_before_it_and_a_fast_one_behind_it() -> None:
    slow = chances(8, {4: [SLOWER]}, STEP)
    assert slow[:4].sum() > 0.95 and slow[:4] == pytest.approx([slow[0]] * 4)
    fast = chances(8, {4: [0.0]}, STEP)
    # Then the bad commit is measured again, since no commit may be slower.
    assert fast[:4].sum() < 0.05 and next_commit(fast, ALL) == 8
    assert next_commit(chances(8, {4: [0.0], 8: [SLOWER]}, STEP), ALL) == 6


def test_neighbours_of_which_one_is_slow_name_it_and_a_doubtful_pair_does_not() -> None:
    sure = chances(8, {4: [0.01, -0.01], 5: [SLOWER, SLOWER + 0.01]}, STEP)
    assert sure.argmax() + 1 == 5 and sure[4] > 0.99
    doubtful = chances(8, {4: [SLOWER / 2]}, STEP)
    assert 0.05 < doubtful[:4].sum() < 0.95


def test_one_disturbed_pair_does_not_decide() -> None:
    """Commit 4 is not slower; one of its launches was disturbed."""
    pairs = {4: [0.0, 0.01, SLOWER, -0.01, 0.0], 5: [SLOWER] * 4}
    assert chances(8, pairs, STEP).argmax() + 1 == 5


def test_where_the_bad_commit_is_not_slower_again_no_commit_is_named() -> None:
    assert chances(8, {8: [0.0, 0.01, -0.01], 4: [0.0]}, STEP)[-1] > 0.95


def test_a_smaller_first_step_of_two_is_found() -> None:
    """The whole change is twice as large as that of the first slower commit."""
    twice = Step(STEP.pairs + SLOWER, threshold_of(STEP.pairs + SLOWER, np.log(1.05)))
    beliefs = chances(8, {3: [0.0, 0.01], 4: [SLOWER, SLOWER - 0.01], 6: [2 * SLOWER]}, twice)
    assert beliefs.argmax() + 1 == 4 and beliefs[3] > 0.95


def test_a_commit_is_slower_above_the_tolerance_but_at_most_above_half_of_the_change() -> None:
    assert threshold_of(STEP.pairs, 0.05) == 0.05
    assert threshold_of(STEP.pairs, 1.0) == pytest.approx(SLOWER / 2, rel=0.05)


def test_launches_without_noise_are_certain() -> None:
    exact = Step(np.full(7, SLOWER), 0.05)
    assert chances(8, {4: [0.0], 5: [SLOWER]}, exact)[4] > 0.95


def test_the_slowdown_s_interval_has_the_true_one_and_narrows_with_pairs() -> None:
    middle, low, high = level_interval(5, {5: [SLOWER, SLOWER + 0.01, SLOWER - 0.01]}, STEP)
    assert low < SLOWER < high and middle == pytest.approx(SLOWER, abs=0.01)
    _, before, after = level_interval(5, {}, STEP)
    assert after - before > high - low


def test_commits_that_cannot_be_measured_are_one_group_with_the_next() -> None:
    beliefs = np.array([0.1, 0.2, 0.3, 0.3, 0.1])
    groups = separable_groups(beliefs, [True, False, False, True])
    assert groups == [(1, 1, pytest.approx(0.1)), (2, 4, pytest.approx(0.8))]
    assert smallest_range(groups, 0.7) == (2, 4, pytest.approx(0.8))


def test_the_smallest_range_is_the_shortest_with_the_certainty_and_else_everything() -> None:
    groups = [(1, 1, 0.2), (2, 2, 0.3), (3, 3, 0.4), (4, 4, 0.05)]
    assert smallest_range(groups, 0.65)[:2] == (2, 3)
    assert smallest_range(groups, 0.85)[:2] == (1, 3)
    assert smallest_range(groups, 0.99) == (1, 4, pytest.approx(0.95))
