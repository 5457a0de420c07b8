"""Predicted against measured: how far off, and whether plans are ranked right."""

from itertools import combinations
from typing import NamedTuple

import numpy as np

from distbench.compare.intervals import Floats, Ints
from distbench.laboratory.planner_table import Bools, PlannerTable

# Plans predicted further apart than this are expected to be ranked right.
APART = 0.35


class PredictionError(NamedTuple):
    """How far off predictions are."""

    num_pairs: int  # pairs with a prediction
    error: float  # median of |predicted / measured - 1|
    bias: float  # median of predicted / measured


class PredictionRanking(NamedTuple):
    """Of `num_plans` pairs of plans predicted more than APART apart, `num_right` were measured in that order.

    Two plans of one redistribution that run the same count once.
    """

    num_plans: int
    num_right: int


def prediction_errors(table: PlannerTable, focus: Bools) -> dict[tuple[str, str], PredictionError]:
    """By planner and size class over non-trivial pairs, and (size "") over those in focus; only what was predicted."""
    found = {}
    for planner, predicted, measured in zip(table.planners, *_predicted_and_measured(table), strict=True):
        over = predicted / measured
        for size in [*table.sizes(), ""]:
            pairs = np.isfinite(over) & ((table.pairs["size"] == size).to_numpy(bool) if size else focus)
            if pairs.any():
                error = float(np.median(np.abs(over[pairs] - 1)))
                found[planner, size] = PredictionError(int(pairs.sum()), error, float(np.median(over[pairs])))
    return found


def _predicted_and_measured(table: PlannerTable) -> tuple[Floats, Floats]:
    """Seconds, [planners, pairs]; nan where one of the two is missing or the pair is trivial."""
    predicted, measured = table.numbers["predicted_s"], table.times
    known = np.isfinite(predicted) & np.isfinite(measured) & (predicted > 0) & table.communicates
    return np.where(known, predicted, np.nan), np.where(known, measured, np.nan)


def predicted_pairs(table: PlannerTable, planner: str) -> tuple[Ints, Floats, Floats]:
    """The non-trivial pairs on which a planner has both: their indexes, seconds predicted, seconds measured."""
    predicted, measured = (values[table.at(planner)] for values in _predicted_and_measured(table))
    pairs = np.flatnonzero(np.isfinite(predicted))
    return pairs, predicted[pairs], measured[pairs]


def ranking(table: PlannerTable, focus: Bools) -> PredictionRanking:
    """How plans predicted more than APART apart were measured, over the non-trivial pairs in focus."""
    num_plans = num_right = 0
    predicted, measured = _predicted_and_measured(table)
    for pair in np.flatnonzero(focus).tolist():
        plans: dict[str, tuple[float, float]] = {}
        for at in np.flatnonzero(np.isfinite(predicted[:, pair])).tolist():
            plans.setdefault(str(table.runs_as[at, pair]), (predicted[at, pair], measured[at, pair]))
        for one, other in combinations(plans.values(), 2):
            if max(one[0], other[0]) > (1 + APART) * min(one[0], other[0]):
                num_plans += 1
                num_right += int((one[0] < other[0]) == (one[1] < other[1]))
    return PredictionRanking(num_plans, num_right)
