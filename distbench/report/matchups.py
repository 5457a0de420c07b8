"""Planner against planner over many pairs: who wins beyond noise, by how much, and what the best would save."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.choice import choose
from distbench.report.board import TORCHS, Board, Bools, ratio_to, widenings
from distbench.report.stats import Floats, Interval, Ints, geometric_mean, geometric_mean_ci, side_of_one

BASELINE = "greedy"
BETTER_OF_TORCH = "the better of greedy and min_cost"
CHOSEN = "choosing by prediction"
# A planner that takes this much longer than torch's better one on a pair is called a loss worth naming.
WORSE_SHARE = 0.10
NEAR_BEST = 0.10


class Matchup(NamedTuple):
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


class Difference(NamedTuple):
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


class Striking(NamedTuple):
    """A pair with a large gain over greedy.

    Args:
        row: its row on the board.
        planner: whose gain it is.
        ratio: the planner's time over greedy's, with its widened 95 % CI.
    """

    row: int
    planner: str
    ratio: tuple[float, float, float]


def matchups(board: Board, focus: Bools) -> list[Matchup]:
    """Every planner against greedy and torch's better one: by mesh and size, and ("") over the pairs in focus."""
    found = []
    widening = widenings(board, BASELINE)
    for name, reference, runs_as, enough in _references(board):
        for planner in board.planners:
            if planner == name:
                continue
            ratio = ratio_to(board, planner, reference, widening)
            same = (board.runs_as[planner] == runs_as) & np.isfinite(ratio.center)
            sides = side_of_one(ratio, enough & board.enough[planner] & ~same)
            for mesh, size, chosen in [*board.groups(), ("", "", focus)]:
                keep = chosen & board.speaks() & np.isfinite(ratio.center)
                if keep.any():
                    found.append(_matchup(planner, name, mesh, size, ratio, sides, same, keep))
    return found


def _references(board: Board) -> list[tuple[str, Interval, NDArray[Any], Bools]]:
    """(name, times, what runs, enough samples) of each thing that planners are compared with."""
    found = []
    if BASELINE in board.planners:
        found.append((BASELINE, board.times[BASELINE], board.runs_as[BASELINE], board.enough[BASELINE]))
    if all(planner in board.planners for planner in TORCHS):
        one, other = TORCHS
        takes = np.less_equal(board.times[one].center, board.times[other].center) | ~board.has(other)
        times = Interval(*(np.where(takes, a, b) for a, b in zip(board.times[one], board.times[other], strict=True)))
        runs_as = np.where(takes, board.runs_as[one], board.runs_as[other])
        found.append((BETTER_OF_TORCH, times, runs_as, np.where(takes, board.enough[one], board.enough[other])))
    return found


def _matchup(
    planner: str, name: str, mesh: str, size: str, ratio: Interval, sides: Ints,
    same: Bools, keep: Bools,
) -> Matchup:  # fmt: skip
    ratios = ratio.center[keep]
    return Matchup(
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


def differences(board: Board, focus: Bools) -> list[Difference]:
    """How often min_cost and calibrated leave greedy's path, and calibrated min_cost's; as `matchups` groups."""
    found = []
    for planner, other in (("min_cost", "greedy"), ("calibrated", "greedy"), ("calibrated", "min_cost")):
        if planner not in board.planners or other not in board.planners:
            continue
        both = board.has(planner) & board.has(other)
        differing = both & (board.paths[planner] != board.paths[other])
        for mesh, size, chosen in [*board.groups(), ("", "", focus)]:
            if (both & chosen).any():
                counts = int((both & chosen).sum()), int((differing & chosen).sum())
                found.append(Difference(planner, other, mesh, size, *counts))
    return found


def regrets(board: Board, focus: Bools) -> list[Regret]:
    """Every planner, and choosing by prediction alone, against the best measured of each non-trivial pair in focus."""
    if not board.planners:
        return []
    times = np.array([board.times[planner].center for planner in board.planners])
    best = np.nanmin(times, axis=0)
    looked_at = focus & board.speaks()
    found = [_regret(planner, board.times[planner].center, best, looked_at) for planner in board.planners]
    chosen = chosen_by_prediction(board)
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


def chosen_by_prediction(board: Board) -> Ints:
    """The index of the planner that `choose` takes by the predictions of each pair, -1 where none has a prediction."""
    predicted = np.array([board.numbers["predicted_s"][planner] for planner in board.planners])
    known = np.isfinite(predicted) & np.array([board.has(planner) for planner in board.planners])
    found = np.full(len(board.pairs), -1, dtype=np.int64)
    for pair in np.flatnonzero(known.any(axis=0)).tolist():
        places = np.flatnonzero(known[:, pair]).tolist()
        taken = choose({board.planners[place]: float(predicted[place, pair]) for place in places})
        found[pair] = board.planners.index(taken)
    return found


def ratio_when_chosen(board: Board, chosen: Bools) -> tuple[float, float, float]:
    """Choosing by prediction over greedy: geometric mean and its CI over the non-trivial ones of some pairs."""
    if BASELINE not in board.planners:
        return (np.nan, np.nan, np.nan)
    times = np.array([board.times[planner].center for planner in board.planners])
    pick = chosen_by_prediction(board)
    taken = np.where(pick >= 0, times[np.maximum(pick, 0), np.arange(times.shape[1])], np.nan)
    ratios = (taken / board.times[BASELINE].center)[chosen & board.speaks()]
    return (geometric_mean(ratios), *geometric_mean_ci(ratios))


def striking(board: Board, focus: Bools, count: int) -> list[Striking]:
    """The pairs in focus with the largest measured gain over greedy beyond noise, each once, by its fastest planner."""
    if BASELINE not in board.planners:
        return []
    widening = widenings(board, BASELINE)
    best: dict[int, Striking] = {}
    for planner in board.planners:
        if planner == BASELINE:
            continue
        ratio = ratio_to(board, planner, board.times[BASELINE], widening)
        enough = board.enough[planner] & board.enough[BASELINE] & ~board.same(planner, BASELINE)
        for index in np.flatnonzero((side_of_one(ratio, enough) < 0) & board.speaks() & focus).tolist():
            found = Striking(index, planner, _at(ratio, index))
            if index not in best or found.ratio[0] < best[index].ratio[0]:
                best[index] = found
    return sorted(best.values(), key=lambda pair: pair.ratio[0])[:count]


def _at(ratio: Interval, index: int) -> tuple[float, float, float]:
    return float(ratio.center[index]), float(ratio.low[index]), float(ratio.high[index])
