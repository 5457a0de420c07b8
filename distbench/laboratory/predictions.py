"""Predicted against measured: how far off, and whether plans are ranked right."""

from itertools import combinations
from typing import NamedTuple

import numpy as np

from distbench.laboratory.planner_table import Bools, PlannerTable

# Plans predicted further apart than this are expected to be ranked right.
APART = 0.35


class PredictionError(NamedTuple):
    """One planner's predictions over the non-trivial pairs of one size class (empty: of those in focus).

    Args:
        planner: the planner.
        size: the size class.
        num_pairs: pairs with a prediction.
        error: median of |predicted / measured - 1|.
        bias: median of predicted / measured.
    """

    planner: str
    size: str
    num_pairs: int
    error: float
    bias: float


class PredictionRanking(NamedTuple):
    """Of `num_plans` pairs of plans predicted more than APART apart, `num_right` were measured in that order.

    Two plans of one redistribution that run the same count once.
    """

    num_plans: int
    num_right: int


def prediction_errors(planner_table: PlannerTable, focus: Bools) -> list[PredictionError]:
    """By planner and size, and (size "") over the pairs in focus; planners without predictions are left out."""
    found = []
    for planner in planner_table.planners:
        predicted, measured = planner_table.numbers["predicted_s"][planner], planner_table.times[planner].center
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = predicted / measured
        known = np.isfinite(ratio) & (predicted > 0) & planner_table.communicates()
        for size in [*planner_table.sizes(), ""]:
            chosen = known & ((planner_table.pairs["size"] == size).to_numpy(bool) if size else focus)
            if chosen.any():
                errors, bias = np.abs(ratio[chosen] - 1), ratio[chosen]
                found.append(
                    PredictionError(planner, size, int(chosen.sum()), float(np.median(errors)), float(np.median(bias)))
                )
    return found


def ranking(planner_table: PlannerTable, focus: Bools) -> PredictionRanking:
    """How plans predicted more than APART apart were measured, over the non-trivial pairs in focus."""
    num_plans = num_right = 0
    for index in np.flatnonzero(planner_table.communicates() & focus).tolist():
        plans: dict[str, tuple[float, float]] = {}
        for planner in planner_table.planners:
            predicted = float(planner_table.numbers["predicted_s"][planner][index])
            measured = float(planner_table.times[planner].center[index])
            if np.isfinite(predicted) and np.isfinite(measured) and predicted > 0:
                plans.setdefault(str(planner_table.runs_as[planner][index]), (predicted, measured))
        for one, other in combinations(plans.values(), 2):
            if max(one[0], other[0]) > (1 + APART) * min(one[0], other[0]):
                num_plans += 1
                num_right += (one[0] < other[0]) == (one[1] < other[1])
    return PredictionRanking(num_plans, num_right)
