"""Which planner is used by prediction alone."""

import pytest

from distbench.planning.redistribution_plans import choose


@pytest.mark.parametrize(
    ("predicted_s", "wanted"),
    [
        # Ours must be a tenth faster than the better of torch's, not than greedy.
        ({"greedy": 10.0, "min_cost": 10.0, "calibrated": 9.1, "direct": 9.5}, "greedy"),
        ({"greedy": 10.0, "min_cost": 8.0, "calibrated": 7.3}, "min_cost"),
        ({"greedy": 10.0, "min_cost": 8.0, "calibrated": 7.1}, "calibrated"),
        ({"greedy": 10.0, "min_cost": 10.0, "calibrated": 5.0, "direct": 3.0}, "direct"),
        # Equal within 2 %: the simplest.
        ({"greedy": 10.0, "min_cost": 9.9, "direct": 12.0}, "greedy"),
        ({"greedy": 10.0, "min_cost": 10.0, "calibrated": 3.03, "direct": 3.0}, "calibrated"),
        # Nothing to send.
        ({"greedy": 0.0, "min_cost": 0.0, "direct": 0.0}, "greedy"),
        # One side only.
        ({"calibrated": 2.0, "direct": 1.0}, "direct"),
        ({"min_cost": 2.0}, "min_cost"),
    ],
)
def test_torchs_own_path_is_left_for_a_clear_gain_only(predicted_s: dict[str, float], wanted: str) -> None:
    assert choose(predicted_s) == wanted
