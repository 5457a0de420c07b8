"""The gate's statistics against published values, and its planning against simulation."""

import numpy as np
import pytest
from scipy.special import stdtrit

from distbench.statistics.significance import holm, paired_difference, unpaired_difference

# Student, Biometrika 6 (1908): extra hours of sleep with two drugs, ten patients; the results are those that R's
# documentation of t.test gives for its data set `sleep`.
FIRST = np.array([[0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]])
SECOND = np.array([[1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]])


def test_paired_t_on_students_sleep_data() -> None:
    difference = paired_difference(FIRST, SECOND)
    assert difference.estimate[0] == pytest.approx(1.58)
    assert difference.estimate[0] / difference.error[0] == pytest.approx(4.0621, abs=1e-4)
    assert difference.freedom[0] == 9
    assert difference.p_above(1)[0] == pytest.approx(0.002833 / 2, abs=1e-6)
    low, high = difference.interval()
    assert (low[0], high[0]) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)


def test_welch_on_students_sleep_data() -> None:
    difference = unpaired_difference(FIRST, SECOND)
    assert difference.estimate[0] / difference.error[0] == pytest.approx(1.8608, abs=1e-4)
    assert difference.freedom[0] == pytest.approx(17.776, abs=1e-3)
    assert difference.p_above(1)[0] == pytest.approx(0.07939 / 2, abs=1e-5)
    low, high = difference.interval()
    assert (low[0], high[0]) == pytest.approx((-0.2054832, 3.3654832), abs=1e-6)


def test_missing_launches_are_left_out_pair_by_pair() -> None:
    extra = np.array([[np.nan, 50.0]])
    difference = paired_difference(np.hstack([FIRST, [[9.0, np.nan]]]), np.hstack([SECOND, extra]))
    assert difference.num_launches[0] == 10
    assert difference.estimate[0] == pytest.approx(1.58)


def test_holm_as_in_the_textbook() -> None:
    # p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm") of R: 0.03 0.06 0.06 0.02.
    adjusted = holm(np.array([0.01, np.nan, 0.04, 0.03, 0.005]))
    assert np.isnan(adjusted[1])
    assert adjusted[[0, 2, 3, 4]] == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_one_launch_has_an_estimate_and_no_error() -> None:
    difference = paired_difference(np.array([[1.0]]), np.array([[1.5]]))
    assert difference.estimate[0] == 0.5
    assert np.isnan(difference.error[0]) and np.isnan(difference.p_above(1)[0])


def test_equal_times_are_no_evidence_and_a_constant_shift_is() -> None:
    same = np.full((1, 6), -7.0)
    assert paired_difference(same, same).p_above(1)[0] == pytest.approx(0.5)
    assert paired_difference(same, same + 0.3).p_above(1)[0] == 0
    assert paired_difference(same, same + 0.3).p_above(-1)[0] == 1


@pytest.mark.parametrize("paired", [True, False])
def test_what_a_plan_calls_detectable_is_found_four_times_in_five(paired: bool) -> None:
    draw = np.random.default_rng(7)
    alpha, tolerance, count, spread, tries = 0.05 / 60, np.log(1.05), 10, 0.05, 20_000
    compare = paired_difference if paired else unpaired_difference
    left = spread * draw.standard_normal((tries, count))
    right = spread * draw.standard_normal((tries, count))
    # The plan for the typical error: half of all series have a smaller one.
    truth = float(np.median(compare(left, right).detectable(alpha, np.full(tries, tolerance))))
    result = compare(left, right + truth)
    power = np.mean((result.p_above(1) <= alpha) & (result.estimate > tolerance))
    assert 0.7 < power < 0.9


def test_the_number_of_launches_to_settle_is_enough_and_not_wasteful() -> None:
    draw = np.random.default_rng(8)
    alpha, tolerance, spread, tries = 0.05 / 60, np.log(1.05), 0.1, 4000
    pilot = spread * np.array([[1.0, -1.0] * 5]) * np.sqrt(0.9)  # its standard deviation is exactly `spread`
    for truth, passes in ((0.15, False), (0.0, True)):
        planned = paired_difference(np.zeros((1, 10)), pilot + truth)
        count = int(planned.launches_to_settle(alpha, np.array([tolerance]))[0])
        assert count > 10
        differences = truth + spread * draw.standard_normal((tries, count))
        made = paired_difference(np.zeros_like(differences), differences)
        settled = made.interval()[1] < tolerance if passes else made.p_above(1) <= alpha
        assert 0.7 < np.mean(settled) < 0.95


def test_a_change_at_the_tolerance_is_never_settled() -> None:
    pilot = np.array([[0.1, -0.1] * 5]) + np.log(1.05)
    planned = paired_difference(np.zeros((1, 10)), pilot)
    assert np.isnan(planned.launches_to_settle(0.001, np.array([np.log(1.05)]))[0])


def test_quantiles_are_those_of_the_published_table() -> None:
    # Abramowitz and Stegun, table 26.10: t for nu = 4, 9, 30 at A = 0.95 and 0.99, two-sided.
    table = {(4, 0.975): 2.776, (4, 0.995): 4.604, (9, 0.975): 2.262, (9, 0.995): 3.250, (30, 0.975): 2.042}
    for (freedom, probability), value in table.items():
        assert stdtrit(freedom, probability) == pytest.approx(value, abs=5e-4)
