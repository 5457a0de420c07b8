import numpy as np
import pytest

from distbench.statistics.pass_comparison import MIN_PASSES, compare_passes, pass_medians

NUM_TABLES = 150
REFERENCES = [-1, *[0] * 7]


def passes(rng: np.random.Generator, num_passes: int, spread: float = 0.1, skewed: bool = False) -> np.ndarray:
    """Seconds of 8 equal variants: each pass of each has its own level."""
    noise = rng.exponential(spread, (8, num_passes)) if skewed else rng.normal(0, spread, (8, num_passes))
    return 0.01 * np.exp(noise + rng.normal(0, spread, num_passes))


def share_of_tables(num_passes: int, slower: dict[int, float], row: int | None = None, skewed: bool = False) -> float:
    """How many of NUM_TABLES tables call an unchanged row (or, where one is named, that row) faster or slower."""
    rng, result = np.random.default_rng(num_passes), 0
    for _ in range(NUM_TABLES):
        values = passes(rng, num_passes, skewed=skewed)
        for index, share in slower.items():
            values[index] *= 1 + share
        verdicts = compare_passes(values, REFERENCES).verdict
        looked_at = [row] if row is not None else [index for index in range(1, 8) if index not in slower]
        result += any(verdicts[index] in ("faster", "slower") for index in looked_at)
    return result / NUM_TABLES


@pytest.mark.parametrize("num_passes", [8, 12, 24])
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.long
def test_equal_variants_have_a_verdict_in_at_most_5_percent_of_tables(num_passes: int, skewed: bool) -> None:
    # 150 tables of which 5 % are wrong show more than 16 in 2 of 1000 series.
    assert share_of_tables(num_passes, {}, skewed=skewed) <= 16 / NUM_TABLES


def test_variants_that_differ_widely_hide_nothing_and_blame_nobody() -> None:
    others = {3: 0.8, 4: 0.5, 5: -0.4}
    assert share_of_tables(12, others) <= 16 / NUM_TABLES
    assert share_of_tables(12, others | {1: 0.25}, row=1) >= 0.9


@pytest.mark.long
def test_power_is_a_matter_of_passes() -> None:
    few, many = share_of_tables(8, {1: 0.15}, row=1), share_of_tables(24, {1: 0.15}, row=1)
    assert few < 0.6 < 0.9 < many


def test_one_noisy_variant_does_not_hide_the_steady_ones() -> None:
    rng = np.random.default_rng(5)
    values = passes(rng, 12, spread=0.01)
    values[2] *= np.exp(rng.normal(0, 0.5, 12))
    values[1] *= 1.1
    assert compare_passes(values, REFERENCES).verdict[1] == "slower"


def test_below_8_passes_nothing_is_faster_or_slower() -> None:
    values = passes(np.random.default_rng(0), MIN_PASSES - 1)
    values[1] *= 5
    result = compare_passes(values, REFERENCES)
    assert result.verdict == ["baseline", *["too few passes"] * 7]
    assert result.ratio[1] == pytest.approx(5, rel=0.2) and np.isnan(result.low[1])


def test_the_interval_and_the_verdict_say_the_same() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        values = passes(rng, 10)
        values[1] *= 1.2
        result = compare_passes(values, REFERENCES)
        for row in range(1, 8):
            outside = not result.low[row] <= 1 <= result.high[row]
            assert outside == (result.verdict[row] in ("faster", "slower"))


def test_each_row_has_a_reference_of_its_own_and_passes_it_lacks_are_left_out() -> None:
    values = np.outer([1.0, 2.0, 10.0, 5.0], np.linspace(1, 1.1, 9))
    values[1, 4] = np.nan
    values[3] *= np.exp(np.random.default_rng(1).normal(0, 0.01, 9))
    result = compare_passes(values, [-1, 0, 2, 2])
    assert result.verdict == ["baseline", "slower", "baseline", "faster"]
    assert result.num_passes.tolist() == [0, 8, 0, 9]
    assert result.ratio[1] == pytest.approx(2) and result.ratio[3] == pytest.approx(0.5, rel=0.02)


def test_what_a_table_could_have_found_it_finds_four_times_in_five() -> None:
    rng = np.random.default_rng(7)
    detectable = np.median([compare_passes(passes(rng, 16), REFERENCES).detectable for _ in range(40)])
    assert 0.7 < share_of_tables(16, {1: float(detectable)}, row=1) < 0.9


def test_passes_for_a_smaller_change_grow_with_its_square() -> None:
    result = compare_passes(passes(np.random.default_rng(2), 10), REFERENCES)
    needed = [result.passes_for(change) for change in (0.2, 0.1, 0.05)]
    assert needed[2] == pytest.approx(4 * needed[1], rel=0.1) and needed[0] >= MIN_PASSES


def test_one_value_a_pass() -> None:
    result = pass_medians([1, 2, 9, 4, 6], [(0, 3), (2, 2)], 4)
    assert result.tolist()[::2] == [2, 5] and np.isnan(result[[1, 3]]).all()
