"""Planner against planner over many pairs: who wins beyond noise, by how much, and what the best would save."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.compare.intervals import Floats, Interval, Ints, geometric_mean, geometric_mean_with_ci
from distbench.compare.passes import MIN_PASSES, compare_passes
from distbench.compare.verdicts import FASTER, SLOWER
from distbench.laboratory.planner_table import Bools, PlannerTable
from distbench.planning.choice import choose
from distbench.spec.planner_names import BASELINE, TORCH_PLANNERS

BETTER_OF_TORCH = "the better of greedy and min_cost"
CHOSEN = "choosing by prediction"
# A planner that takes this much longer than torch's better one on a pair is called a loss worth naming.
WORSE_SHARE = 0.10
NEAR_BEST = 0.10
# Planner, what it is compared with, mesh ("2x4") and size class; the last two "" for the pairs in focus.
Place = tuple[str, str, str, str]


class PlannerRun(NamedTuple):
    """What one planner did, or what several are compared with: fields of `PlannerTable`, one element (row) a pair."""

    name: str
    times: Floats
    passes: Floats
    runs_as: NDArray[Any]
    taken_from: NDArray[Any]  # the planner's name, of each pair
    again: Floats  # as `passes`, measured once more where it is a baseline that was; nan elsewhere


class Ratios(NamedTuple):
    """One planner's time over another's, pairs of one family; every array has one element a pair of the table.

    Pairs on which both run the same cannot differ, nor does a baseline from itself measured again: they are the table's
    own proof. They count in the family, and `num_false` of the `num_controls` that have enough passes came out faster
    or slower all the same.
    """

    ratio: Interval  # 95 % for all of them together, from passes
    same: Bools  # both run the same: the ratio is truly one
    enough: Bools  # both have enough passes in common
    side: Ints  # -1 where the first is faster beyond noise, 1 where the second is, else 0; 0 where both run the same
    num_controls: int
    num_false: int
    told: list[str]  # what the family could tell, as sentences


class Tally(NamedTuple):
    """How a planner did against a baseline over some pairs that both moved."""

    num_pairs: int
    num_differing: int  # on which the two do not run the same
    num_faster: int  # the planner is faster beyond noise
    num_slower: int  # the baseline is
    num_much_slower: int  # of these, the ones whose interval lies above 1 + WORSE_SHARE as a whole
    mean: tuple[float, float, float]  # geometric mean of planner / baseline over num_pairs, its 95 % CI over pairs


class PathDifference(NamedTuple):
    """How often two planners plan another path: `num_differing` of `num_pairs`."""

    num_pairs: int
    num_differing: int


class Regret(NamedTuple):
    """What a planner (or CHOSEN) takes over the best measured of each non-trivial pair that it moved."""

    num_pairs: int
    mean: float  # geometric mean of its time over the best's, at least 1
    worst: float  # the largest such ratio
    share_near: float  # of pairs on which it is within NEAR_BEST of the best
    num_best: int  # pairs on which it is the best


class LargestGain(NamedTuple):
    """A pair (its index) with a large gain of a planner over greedy: the ratio with its 95 % interval."""

    pair: int
    planner: str
    ratio: tuple[float, float, float]


def run_of(table: PlannerTable, planner: str) -> PlannerRun:
    """What one planner of the table did."""
    at, taken_from = table.at(planner), np.full(len(table.pairs), planner, dtype=object)
    again = table.again if planner == BASELINE else np.full_like(table.again, np.nan)
    return PlannerRun(planner, table.times[at], table.passes[at], table.runs_as[at], taken_from, again)


def ratios(one: PlannerRun, other: PlannerRun, pairs: Bools) -> Ratios:
    """One planner's time over another's: each of `pairs` that both moved is a test of one family; nan elsewhere."""
    at = np.flatnonzero(pairs & np.isfinite(one.times) & np.isfinite(other.times))
    proofs = np.flatnonzero(np.isfinite(other.again[at]).any(axis=1))
    references = [*range(len(at), 2 * len(at)), *[-1] * len(at), *(proofs + len(at))]
    found = compare_passes(np.concatenate([one.passes[at], other.passes[at], other.again[at][proofs]]), references)
    same, side = (one.runs_as == other.runs_as) & (one.runs_as != ""), np.zeros(len(pairs), dtype=np.int64)
    verdicts = np.array(found.verdict[: len(at)], dtype=object)
    side[at] = (verdicts == SLOWER).astype(int) - (verdicts == FASTER).astype(int)
    enough = np.zeros(len(pairs), dtype=bool)
    enough[at] = found.num_passes[: len(at)] >= MIN_PASSES
    ratio = Interval(*(_spread(part[: len(at)], at, len(pairs)) for part in (found.ratio, found.low, found.high)))
    controls = same & enough
    of_proofs = np.array(found.verdict[2 * len(at) :], dtype=object)[found.num_passes[2 * len(at) :] >= MIN_PASSES]
    return Ratios(
        ratio=ratio,
        same=same & np.isfinite(ratio.center),
        enough=enough,
        side=np.where(same, 0, side),
        num_controls=int(controls.sum()) + len(of_proofs),
        num_false=int(np.count_nonzero(side[controls])) + int(np.isin(of_proofs, (FASTER, SLOWER)).sum()),
        told=found.told(f"a pair that {one.name} makes", other.name),
    )


def proof_lines(found: Sequence[Ratios]) -> list[str]:
    """How many pairs that cannot differ were called different, as a sentence; none where there are no such pairs.

    Those ran the same twice: one path by both planners, or the baseline once more.
    """
    num_controls, num_false = sum(one.num_controls for one in found), sum(one.num_false for one in found)
    if not num_controls:
        return []
    return [f"proof: {num_false} of {num_controls} pairs that ran the same twice were called different"]


def _spread(values: Floats, at: Ints, size: int) -> Floats:
    whole = np.full(size, np.nan)
    whole[at] = values
    return whole


def tally(found: Ratios, pairs: Bools | Ints) -> Tally:
    """Counts and the mean over some pairs, given as a mask or as indexes."""
    side, ratio = found.side[pairs], found.ratio.center[pairs]
    much_slower = (found.side > 0) & (found.ratio.low > 1 + WORSE_SHARE)
    return Tally(
        num_pairs=len(side),
        num_differing=int((~found.same[pairs]).sum()),
        num_faster=int((side < 0).sum()),
        num_slower=int((side > 0).sum()),
        num_much_slower=int(much_slower[pairs].sum()),
        mean=geometric_mean_with_ci(ratio),
    )


def ratios_of(table: PlannerTable) -> dict[tuple[str, str], Ratios]:
    """Every planner over greedy and over torch's better one, by their names; each two planners are one family."""
    return {
        (planner, reference.name): ratios(run_of(table, planner), reference, reference.taken_from != planner)
        for reference in _references(table)
        for planner in table.planners
        if planner != reference.name
    }


def tallies(table: PlannerTable, focus: Bools, all_ratios: Mapping[tuple[str, str], Ratios]) -> dict[Place, Tally]:
    """Every planner against greedy and torch's better one, over pairs that communicate."""
    counted = {}
    for (planner, reference), found in all_ratios.items():
        moved = table.communicates & np.isfinite(found.ratio.center)
        for mesh, size, pairs in [*table.groups(), ("", "", focus)]:
            if (pairs & moved).any():
                counted[planner, reference, mesh, size] = tally(found, pairs & moved)
    return counted


def _references(table: PlannerTable) -> list[PlannerRun]:
    """What planners are compared with, as far as it was measured."""
    found = [run_of(table, BASELINE)] if BASELINE in table.planners else []
    if all(planner in table.planners for planner in TORCH_PLANNERS):
        one, other = (run_of(table, planner) for planner in TORCH_PLANNERS)
        is_one = (one.times <= other.times) | np.isnan(other.times)
        passes = np.where(is_one[:, None], one.passes, other.passes)
        again = np.where(is_one[:, None], one.again, other.again)
        runs_as = np.where(is_one, one.runs_as, other.runs_as)
        taken_from = np.where(is_one, one.taken_from, other.taken_from)
        times = np.where(is_one, one.times, other.times)
        found.append(PlannerRun(BETTER_OF_TORCH, times, passes, runs_as, taken_from, again))
    return found


def differences(table: PlannerTable, focus: Bools) -> dict[Place, PathDifference]:
    """How often min_cost and calibrated leave greedy's path, and calibrated min_cost's."""
    found = {}
    for planner, other in (("min_cost", "greedy"), ("calibrated", "greedy"), ("calibrated", "min_cost")):
        if planner not in table.planners or other not in table.planners:
            continue
        one, two = table.at(planner), table.at(other)
        both = table.measured[one] & table.measured[two]
        differing = both & (table.paths[one] != table.paths[two])
        for mesh, size, pairs in [*table.groups(), ("", "", focus)]:
            if (both & pairs).any():
                counts = int((both & pairs).sum()), int((differing & pairs).sum())
                found[planner, other, mesh, size] = PathDifference(*counts)
    return found


def regrets(table: PlannerTable, focus: Bools) -> dict[str, Regret]:
    """Every planner, and CHOSEN, against the best measured of each non-trivial pair in focus that it moved."""
    if not table.planners:
        return {}
    best, pairs = np.nanmin(table.times, axis=0), focus & table.communicates
    taken = dict(zip(table.planners, table.times, strict=True)) | {CHOSEN: times_when_chosen(table)}
    over = {name: (times / best)[pairs & np.isfinite(times)] for name, times in taken.items()}
    return {name: _regret(values) for name, values in over.items() if values.size}


def _regret(over: Floats) -> Regret:
    near = float((over <= 1 + NEAR_BEST).mean())
    return Regret(over.size, geometric_mean(over), float(over.max()), near, int((over == 1).sum()))


def times_when_chosen(table: PlannerTable) -> Floats:
    """Each pair's time by the planner that `choose` takes by the predictions; nan where none has a prediction."""
    predicted = table.numbers["predicted_s"]
    known = np.isfinite(predicted) & table.measured
    taken = np.full(len(table.pairs), np.nan)
    for pair in np.flatnonzero(known.any(axis=0)).tolist():
        plans = {table.planners[at]: float(predicted[at, pair]) for at in np.flatnonzero(known[:, pair]).tolist()}
        taken[pair] = table.times[table.at(choose(plans)), pair]
    return taken


def ratio_when_chosen(table: PlannerTable, focus: Bools) -> tuple[float, float, float]:
    """Choosing by prediction over greedy: geometric mean and its CI over the non-trivial pairs in focus."""
    if BASELINE not in table.planners:
        return (np.nan, np.nan, np.nan)
    over = times_when_chosen(table) / table.times[table.at(BASELINE)]
    return geometric_mean_with_ci(over[focus & table.communicates])


def largest_gains(
    table: PlannerTable, focus: Bools, all_ratios: Mapping[tuple[str, str], Ratios], count: int
) -> list[LargestGain]:
    """The pairs in focus with the largest measured gain over greedy beyond noise, each once, by its fastest planner."""
    over_greedy = {planner: found for (planner, reference), found in all_ratios.items() if reference == BASELINE}
    others, found = list(over_greedy), list(over_greedy.values())
    if not others:
        return []
    pairs = focus & table.communicates
    gains = np.stack([np.where((one.side < 0) & pairs, one.ratio.center, np.inf) for one in found])
    best, least = gains.argmin(axis=0), gains.min(axis=0)
    largest = [pair for pair in np.argsort(least, kind="stable").tolist() if np.isfinite(least[pair])][:count]
    return [LargestGain(pair, others[best[pair]], _at(found[best[pair]].ratio, pair)) for pair in largest]


def _at(ratio: Interval, pair: int) -> tuple[float, float, float]:
    return float(ratio.center[pair]), float(ratio.low[pair]), float(ratio.high[pair])
