"""Sign flips against a slow reckoning by hand, and what they promise against simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from distbench.statistics.significance import MAX_LENT, PRIOR_FREEDOM, flip_tests


def by_hand(blocks: list[list[list[float]]]) -> list[float]:
    """Adjusted p of every row, in plain Python: every choice of signs, the largest statistic under each."""
    priors = []
    for block in blocks:
        squares = sorted(sum(one * one for one in row) / len(row) for row in block)
        half = len(squares) // 2
        priors.append(squares[half] if len(squares) % 2 else (squares[half - 1] + squares[half]) / 2)

    def statistic(row: list[float], prior: float) -> float:
        count, mean = len(row), sum(row) / len(row)
        rest = sum((one - mean) ** 2 for one in row)
        variance = (rest + PRIOR_FREEDOM * prior) / (count - 1 + PRIOR_FREEDOM)
        # No row is taken for more than four times as noisy as it is itself.
        return mean / min(math.sqrt(variance / count), MAX_LENT * math.sqrt(rest / (count - 1) / count))

    result = [statistic(row, prior) for block, prior in zip(blocks, priors, strict=True) for row in block]
    most = max(len(row) for block in blocks for row in block)
    largest = [
        max(
            statistic([sign * one for sign, one in zip(signs, row, strict=False)], prior)
            for block, prior in zip(blocks, priors, strict=True)
            for row in block
        )
        for signs in itertools.product((1, -1), repeat=most)
    ]
    return [sum(one >= each - 1e-9 for one in largest) / len(largest) for each in result]


def test_as_reckoned_by_hand_also_with_blocks_of_other_lengths() -> None:
    draw = np.random.default_rng(1)
    first, second = draw.normal(0.05, 0.1, (4, 7)), draw.normal(0.1, 0.1, (3, 5))
    first[0] = draw.normal(0.05, 0.002, 7)
    expected = by_hand([first.tolist(), second.tolist()])
    result = flip_tests([first, second], 5, 0.05)
    assert np.concatenate([one.slower for one in result]) == pytest.approx(expected)
    # The other way round, slower is faster.
    turned = flip_tests([-first, -second], 5, 0.05)
    assert np.concatenate([one.faster for one in turned]) == pytest.approx(expected)


def test_five_pairs_that_agree_are_one_choice_of_signs_in_32() -> None:
    (result,) = flip_tests([np.array([[0.2, 0.21, 0.19, 0.22, 0.2]])], 5, 0.05)
    assert result.slower.tolist() == [1 / 32] and result.faster.tolist() == [1.0]
    (same,) = flip_tests([np.array([[0.2] * 5])], 5, 0.05)
    assert same.slower.tolist() == [1 / 32], "no spread at all"
    (none,) = flip_tests([np.zeros((2, 5))], 5, 0.05)
    assert none.slower.tolist() == [1.0, 1.0]


def test_a_missing_pair_is_left_out_and_too_few_are_no_test() -> None:
    rows = np.array([[0.2, 0.21, np.nan, 0.19, 0.22, 0.2], [0.2, np.nan, np.nan, 0.1, 0.1, 0.1]])
    (result,) = flip_tests([rows], 5, 0.05)
    assert result.slower[0] == 1 / 32 and np.isnan(result.slower[1]) and np.isnan(result.error[1])


def test_many_pairs_are_sampled_and_agree_with_students_t() -> None:
    draw = np.random.default_rng(2)
    row = draw.normal(0.04, 0.1, (1, 30))
    (result,) = flip_tests([row], 5, 0.05)
    expected = stats.ttest_1samp(row[0], 0, alternative="greater").pvalue
    assert 0.01 < expected < 0.1
    assert result.slower[0] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("tail", ["normal", "cauchy"])
@pytest.mark.parametrize("num_pairs", [5, 10])
@pytest.mark.long
def test_the_family_errs_as_seldom_as_promised_whatever_launches_share(tail: str, num_pairs: int) -> None:
    """Cases that rise and fall with their launch, spreads a hundredfold apart, tails without a variance."""
    draw = np.random.default_rng(3)
    tries, rows = 400, 30
    spread = np.exp(draw.normal(0, 1.2, (rows, 1)))
    errors = 0
    for _ in range(tries):
        noise = getattr(draw, f"standard_{tail}")
        block = spread * (noise(size=(1, num_pairs)) + noise(size=(rows, num_pairs)))
        (result,) = flip_tests([block], 5, 0.05)
        errors += bool((result.slower <= 0.05).any())
    # 5 % of 400 is 20; 33 is three standard deviations above.
    assert errors <= 33


@pytest.mark.parametrize("num_pairs", [5, 10])
@pytest.mark.long
def test_what_is_called_detectable_is_found_four_times_in_five(num_pairs: int) -> None:
    draw = np.random.default_rng(4)
    tries, rows, tolerance = 400, 30, np.full(30, np.log(1.05))
    truths = []
    for _ in range(40):
        (result,) = flip_tests([0.07 * draw.standard_normal((rows, num_pairs))], 5, 0.05)
        truths.append(np.median(result.detectable(tolerance)))
    truth, hits = float(np.median(truths)), 0
    for _ in range(tries):
        block = 0.07 * draw.standard_normal((rows, num_pairs))
        block[0] += truth
        (result,) = flip_tests([block], 5, 0.05)
        hits += bool(result.slower[0] <= 0.05 and block[0].mean() > tolerance[0])
    assert 0.68 < hits / tries < 0.92


def test_too_few_pairs_for_the_level_detect_nothing() -> None:
    (result,) = flip_tests([np.random.default_rng(5).standard_normal((3, 5))], 5, 0.01)
    assert np.isinf(result.critical) and np.isinf(result.detectable(np.zeros(3))).all()
