"""Planner against planner over many pairs: who wins beyond noise, by how much, and what the best would save."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.compare.intervals import Floats, Interval, Ints, geometric_mean, geometric_mean_ci, side_of_one
from distbench.laboratory.planner_table import Bools, PlannerTable, ratio_to, widenings
from distbench.planning.choice import choose
from distbench.spec.planner_names import BASELINE, TORCH_PLANNERS

BETTER_OF_TORCH = "the better of greedy and min_cost"
CHOSEN = "choosing by prediction"
# A planner that takes this much longer than torch's better one on a pair is called a loss worth naming.
WORSE_SHARE = 0.10
NEAR_BEST = 0.10


class PlannerComparison(NamedTuple):
    """One planner against a baseline over the pairs of one mesh and size that both moved.

    Args:
        planner: the planner.
        baseline: greedy, or BETTER_OF_TORCH.
        mesh: the mesh, as "2x4"; empty for the pairs in focus, whatever their mesh.
        size: the size class; empty for the pairs in focus.
        num_pairs: non-trivial pairs: those that some planner communicates for.
        num_differing: of these, the ones on which the two do not run the same.
        num_faster: the planner is faster beyond noise.
        num_slower: the baseline is.
        num_much_slower: of these, the ones whose interval lies above 1 + WORSE_SHARE as a whole.
        mean: geometric mean of planner / baseline over all num_pairs, with its 95 % CI over pairs.
    """

    planner: str
    baseline: str
    mesh: str
    size: str
    num_pairs: int
    num_differing: int
    num_faster: int
    num_slower: int
    num_much_slower: int
    mean: tuple[float, float, float]


class PathDifference(NamedTuple):
    """How often two planners plan another path: `num_differing` of `num_pairs`, for one mesh and size."""

    planner: str
    other: str
    mesh: str
    size: str
    num_pairs: int
    num_differing: int


class Regret(NamedTuple):
    """What a planner (or CHOSEN) takes over the best measured of each pair.

    Args:
        planner: the planner, or CHOSEN.
        num_pairs: non-trivial pairs that it moved.
        mean: geometric mean of its time over the best's, at least 1.
        worst: the largest such ratio.
        share_near: share of pairs on which it is within NEAR_BEST of the best.
        num_best: pairs on which it is the best.
    """

    planner: str
    num_pairs: int
    mean: float
    worst: float
    share_near: float
    num_best: int


class LargestGain(NamedTuple):
    """A pair with a large gain over greedy.

    Args:
        row: its row on the board.
        planner: whose gain it is.
        ratio: the planner's time over greedy's, with its widened 95 % CI.
    """

    row: int
    planner: str
    ratio: tuple[float, float, float]


def planner_comparisons(planner_table: PlannerTable, focus: Bools) -> list[PlannerComparison]:
    """Every planner against greedy and torch's better one: by mesh and size, and ("") over the pairs in focus."""
    found = []
    widening = widenings(planner_table, BASELINE)
    for name, reference, runs_as, enough in _references(planner_table):
        for planner in planner_table.planners:
            if planner == name:
                continue
            ratio = ratio_to(planner_table, planner, reference, widening)
            same = (planner_table.runs_as[planner] == runs_as) & np.isfinite(ratio.center)
            sides = side_of_one(ratio, enough & planner_table.enough[planner] & ~same)
            for mesh, size, chosen in [*planner_table.groups(), ("", "", focus)]:
                keep = chosen & planner_table.communicates() & np.isfinite(ratio.center)
                if keep.any():
                    found.append(_comparison(planner, name, mesh, size, ratio, sides, same, keep))
    return found


def _references(planner_table: PlannerTable) -> list[tuple[str, Interval, NDArray[Any], Bools]]:
    """(name, times, what runs, enough samples) of each thing that planners are compared with."""
    found = []
    if BASELINE in planner_table.planners:
        found.append(
            (BASELINE, planner_table.times[BASELINE], planner_table.runs_as[BASELINE], planner_table.enough[BASELINE])
        )
    if all(planner in planner_table.planners for planner in TORCH_PLANNERS):
        one, other = TORCH_PLANNERS
        takes = np.less_equal(planner_table.times[one].center, planner_table.times[other].center) | ~planner_table.has(
            other
        )
        times = Interval(
            *(np.where(takes, a, b) for a, b in zip(planner_table.times[one], planner_table.times[other], strict=True))
        )
        runs_as = np.where(takes, planner_table.runs_as[one], planner_table.runs_as[other])
        found.append(
            (BETTER_OF_TORCH, times, runs_as, np.where(takes, planner_table.enough[one], planner_table.enough[other]))
        )
    return found


def _comparison(
    planner: str, name: str, mesh: str, size: str, ratio: Interval, sides: Ints,
    same: Bools, keep: Bools,
) -> PlannerComparison:  # fmt: skip
    ratios = ratio.center[keep]
    return PlannerComparison(
        planner=planner,
        baseline=name,
        mesh=mesh,
        size=size,
        num_pairs=int(keep.sum()),
        num_differing=int((keep & ~same).sum()),
        num_faster=int((sides[keep] < 0).sum()),
        num_slower=int((sides[keep] > 0).sum()),
        num_much_slower=int(((sides > 0) & (ratio.low > 1 + WORSE_SHARE))[keep].sum()),
        mean=(geometric_mean(ratios), *geometric_mean_ci(ratios)),
    )


def differences(planner_table: PlannerTable, focus: Bools) -> list[PathDifference]:
    """How often min_cost and calibrated leave greedy's path, and calibrated min_cost's; as `matchups` groups."""
    found = []
    for planner, other in (("min_cost", "greedy"), ("calibrated", "greedy"), ("calibrated", "min_cost")):
        if planner not in planner_table.planners or other not in planner_table.planners:
            continue
        both = planner_table.has(planner) & planner_table.has(other)
        differing = both & (planner_table.paths[planner] != planner_table.paths[other])
        for mesh, size, chosen in [*planner_table.groups(), ("", "", focus)]:
            if (both & chosen).any():
                counts = int((both & chosen).sum()), int((differing & chosen).sum())
                found.append(PathDifference(planner, other, mesh, size, *counts))
    return found


def regrets(planner_table: PlannerTable, focus: Bools) -> list[Regret]:
    """Every planner, and choosing by prediction alone, against the best measured of each non-trivial pair in focus."""
    if not planner_table.planners:
        return []
    times = np.array([planner_table.times[planner].center for planner in planner_table.planners])
    best = np.nanmin(times, axis=0)
    looked_at = focus & planner_table.communicates()
    found = [
        _regret(planner, planner_table.times[planner].center, best, looked_at) for planner in planner_table.planners
    ]
    chosen = chosen_by_prediction(planner_table)
    if (chosen >= 0).any():
        taken = np.where(chosen >= 0, times[np.maximum(chosen, 0), np.arange(times.shape[1])], np.nan)
        found.append(_regret(CHOSEN, taken, best, looked_at))
    return found


def _regret(name: str, taken: Floats, best: Floats, looked_at: Bools) -> Regret:
    ratios = (taken / best)[looked_at & np.isfinite(taken)]
    if not ratios.size:
        return Regret(name, 0, np.nan, np.nan, np.nan, 0)
    near = float((ratios <= 1 + NEAR_BEST).mean())
    return Regret(name, ratios.size, geometric_mean(ratios), float(ratios.max()), near, int((ratios == 1).sum()))


def chosen_by_prediction(planner_table: PlannerTable) -> Ints:
    """The index of the planner that `choose` takes by the predictions of each pair, -1 where none has a prediction."""
    predicted = np.array([planner_table.numbers["predicted_s"][planner] for planner in planner_table.planners])
    known = np.isfinite(predicted) & np.array([planner_table.has(planner) for planner in planner_table.planners])
    found = np.full(len(planner_table.pairs), -1, dtype=np.int64)
    for pair in np.flatnonzero(known.any(axis=0)).tolist():
        places = np.flatnonzero(known[:, pair]).tolist()
        taken = choose({planner_table.planners[place]: float(predicted[place, pair]) for place in places})
        found[pair] = planner_table.planners.index(taken)
    return found


def ratio_when_chosen(planner_table: PlannerTable, chosen: Bools) -> tuple[float, float, float]:
    """Choosing by prediction over greedy: geometric mean and its CI over the non-trivial ones of some pairs."""
    if BASELINE not in planner_table.planners:
        return (np.nan, np.nan, np.nan)
    times = np.array([planner_table.times[planner].center for planner in planner_table.planners])
    pick = chosen_by_prediction(planner_table)
    taken = np.where(pick >= 0, times[np.maximum(pick, 0), np.arange(times.shape[1])], np.nan)
    ratios = (taken / planner_table.times[BASELINE].center)[chosen & planner_table.communicates()]
    return (geometric_mean(ratios), *geometric_mean_ci(ratios))


def largest_gains(planner_table: PlannerTable, focus: Bools, count: int) -> list[LargestGain]:
    """The pairs in focus with the largest measured gain over greedy beyond noise, each once, by its fastest planner."""
    if BASELINE not in planner_table.planners:
        return []
    widening = widenings(planner_table, BASELINE)
    best: dict[int, LargestGain] = {}
    for planner in planner_table.planners:
        if planner == BASELINE:
            continue
        ratio = ratio_to(planner_table, planner, planner_table.times[BASELINE], widening)
        enough = planner_table.enough[planner] & planner_table.enough[BASELINE] & ~planner_table.same(planner, BASELINE)
        for index in np.flatnonzero((side_of_one(ratio, enough) < 0) & planner_table.communicates() & focus).tolist():
            found = LargestGain(index, planner, _at(ratio, index))
            if index not in best or found.ratio[0] < best[index].ratio[0]:
                best[index] = found
    return sorted(best.values(), key=lambda pair: pair.ratio[0])[:count]


def _at(ratio: Interval, index: int) -> tuple[float, float, float]:
    return float(ratio.center[index]), float(ratio.low[index]), float(ratio.high[index])
