"""Redistributions by planner: the table of pairs, comparisons beyond noise, failures by cause."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.planning.priced_plans import choose
from distbench.records.dataframe import PASSES, Row, measured_of, records_of
from distbench.records.run_file import AGAIN, DTYPE_BYTES
from distbench.show.blocks import Rows, Table
from distbench.show.units import NOTHING, percent_text, ratio_text, size_text, time_text, whole_text
from distbench.spec.placements import (
    BASELINE,
    NATIVE,
    OUR_VARIANTS,
    TORCH_PLANNERS,
    VARIANTS,
    Placement,
    parse_placements,
)
from distbench.spec.safe_text import count_text
from distbench.statistics.intervals import Floats, Interval, Ints, geometric_mean, geometric_mean_with_ci, margin_of
from distbench.statistics.pass_comparison import MIN_PASSES, TOO_FEW, as_table, compare_passes
from distbench.statistics.verdicts import FASTER, SLOWER

if TYPE_CHECKING:
    import pandas as pd


# Redistributions that came out wrong or broke, by cause: planner, suite, and what their layouts have in common.

BAD = ("wrong", "raised", "aborted", "timeout")
PAIR_KEY = ["run_file", "mesh", "mesh_shape", "shape", "dtype", "suite", "direction", "flattened", "source", "target"]


class Failure(NamedTuple):
    """Cases of one cause."""

    status: str  # one of BAD
    planner: str
    suite: str  # the laboratory's suite, empty for none
    pattern: str  # what the layouts have in common, in words
    num_cases: int
    example: Row  # the frame's row of the smallest of them
    ours: dict[str, dict[str, int]]  # planner of ours to its statuses on the same pairs, as counts


def failures_of(rows: "pd.DataFrame") -> list[Failure]:
    """Every group of rows (of `laboratory_rows`) that are not ok, most serious status first, then the largest."""
    bad = rows[rows["status"].isin(BAD)]
    if bad.empty:
        return []
    bad = bad.assign(pattern=[pattern_of(record) for record in records_of(bad)])
    outcomes, found = rows[[*PAIR_KEY, "planner", "status"]], []
    for (status, planner, suite, pattern), group in bad.groupby(["status", "planner", "suite", "pattern"], sort=False):
        example = min(records_of(group), key=lambda record: (numel_of(record), str(record["id"])))
        same = group[PAIR_KEY].drop_duplicates().merge(outcomes[outcomes["planner"] != planner])
        statuses = {name: same.loc[same["planner"] == name, "status"] for name in OUR_VARIANTS}
        others = {name: dict(Counter(of_one)) for name, of_one in statuses.items() if len(of_one)}
        found.append(Failure(str(status), str(planner), str(suite), str(pattern), len(group), example, others))
    return sorted(found, key=lambda failure: (BAD.index(failure.status), -failure.num_cases))


def pattern_of(record: Row) -> str:
    """What is special about a row's pair, in words that rows of one cause share; "plain layouts" when nothing is."""
    source, target = sides = _placements(record["source"]), _placements(record["target"])
    both = (*source, *target)
    reduce_ops = sorted({placement.reduce_op for placement in source if placement.reduce_op})
    words = {
        "strided shards": any(placement.split_factor is not None for placement in both),
        "explicit shard order": any(placement.turn is not None for placement in both),
        "Shard to Partial" if _sharded_dims(source) else "to Partial": any(one.reduce_op for one in target),
        "from Partial " + "/".join(reduce_ops): bool(reduce_ops),
        "nested shards": any(len(dims) > len(set(dims)) for dims in map(_sharded_dims, sides)),
        "uneven": _is_uneven(record, sides),
        "a flattened mesh exists": bool(record["flattened"]),
        "backward": record["direction"] == "backward",
    }
    return ", ".join(word for word, is_true in words.items() if is_true) or "plain layouts"


def numel_of(record: Row) -> int:
    """Elements of the full tensor."""
    return math.prod(sizes_in(record["shape"]))


def sizes_in(text: object) -> tuple[int, ...]:
    """`"2x4"` as (2, 4); () for what is no such text."""
    is_shape = isinstance(text, str) and re.fullmatch(r"\d+(x\d+)*", text)
    return tuple(int(part) for part in str(text).split("x")) if is_shape else ()


def _placements(text: object) -> tuple[Placement, ...]:
    """Of a row's side; none where it names no layout."""
    try:
        return parse_placements(str(text))
    except ValueError:
        return ()


def _sharded_dims(placements: Iterable[Placement]) -> list[int]:
    """The tensor dim of each shard, in order of the mesh dims."""
    return [placement.tensor_dim for placement in placements if placement.tensor_dim is not None]


def _is_uneven(record: Row, layouts: Iterable[Sequence[Placement]]) -> bool:
    shape, mesh_shape = sizes_in(record["shape"]), sizes_in(record["mesh_shape"])
    return any(
        length % math.prod(size for size, one in zip(mesh_shape, placements, strict=False) if one.tensor_dim == dim)
        for placements in layouts
        for dim, length in enumerate(shape)
    )


# Redistributions as one column a pair and one row a planner, so that planners are compared pair by pair.

Bools = NDArray[np.bool_]
MAX_EXACT_SIZES = 6
SIZE_LIMITS = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
SIZE_CLASSES = ("under 4 KiB", "4 to 64 KiB", "64 KiB to 1 MiB", "1 to 16 MiB", "16 MiB and more")
NUMBERS = ("num_collectives", "wire_bytes", "wire_bytes_executed", "predicted_s", "planning_cold_s")


@dataclass(frozen=True)
class PlannerTable:
    """What was measured and right. Arrays are [planners, pairs], pairs in file order.

    `pairs` has one row a pair: PAIR_KEY, `payload_bytes`, `size` (its class, as text), `bound_bytes` (nan for none).
    """

    pairs: "pd.DataFrame"
    planners: tuple[str, ...]  # those that were run, in the order of VARIANTS, others behind
    times: Floats  # the median, seconds; nan where a planner has no right result
    passes: Floats  # [planners, pairs, passes] its median sample in each pass, seconds; nan where it has none
    again: Floats  # [pairs, passes] the same of greedy, measured once more on some pairs as a proof; nan on others
    paths: NDArray[Any]  # as text; "" where there is none
    runs_as: NDArray[Any]  # path and executed collectives: who agrees in it cannot differ in time; "" if unknown
    numbers: dict[str, Floats]  # those of NUMBERS; nan where there is none

    def at(self, planner: str) -> int:
        """A planner's row in the arrays."""
        return self.planners.index(planner)

    @property
    def measured(self) -> Bools:
        """Where a planner was measured, and right."""
        return np.isfinite(self.times)

    @property
    def communicates(self) -> Bools:
        """Which pairs some planner needs communication for; the others are trivial."""
        return np.asarray(np.nan_to_num(self.numbers["num_collectives"]).max(axis=0, initial=0) > 0)

    def sizes(self) -> list[str]:
        """The size classes, ascending."""
        smallest = self.pairs.groupby("size", sort=False)["payload_bytes"].min()
        return [str(size) for size in smallest.sort_values(kind="stable").index]

    def groups(self) -> list[tuple[str, str, Bools]]:
        """(mesh, size class, which pairs) of each mesh and size, ascending."""
        found = self.pairs.groupby(["mesh_shape", "size"], sort=False)
        smallest, members = found["payload_bytes"].min(), found.indices
        ordered = sorted(smallest.index, key=lambda label: (sizes_in(label[0]), smallest[label]))
        return [(mesh, size, self.mask(members[mesh, size])) for mesh, size in ordered]

    def mask(self, indexes: Any) -> Bools:
        """True for the pairs of these indexes."""
        chosen = np.zeros(len(self.pairs), dtype=bool)
        chosen[indexes] = True
        return chosen


def laboratory_rows(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The redistributions of a frame, missing texts as "", sizes and meshes filled in from the rest of the row.

    `is_again` marks those of greedy that were measured once more: a proof, no planner of their own. What direct did in
    a run with native all-to-alls is direct's own: it never used DTensor's.
    """
    rows = frame[frame["kind"] == "redistribute"].copy()
    for name in ("mesh", "mesh_shape", "suite", "direction", "flattened", "source", "target", "dtype", "shape"):
        rows[name] = rows[name].fillna("")
    rows["planner"] = rows["planner"].fillna("").replace({f"direct{NATIVE}": "direct"})
    rows["is_again"] = rows["id"].astype(str).str.endswith(AGAIN)  # of no rows, ids have no type
    of_run = ["x".join(part.partition("=")[2] for part in mesh.split(",")) for mesh in rows["mesh"]]
    rows["mesh_shape"] = np.where(rows["mesh_shape"] == "", of_run, rows["mesh_shape"])
    numel = {shape: float(np.prod(sizes)) if (sizes := sizes_in(shape)) else np.nan for shape in rows["shape"].unique()}
    of_shape = rows["dtype"].map(DTYPE_BYTES).astype(float) * rows["shape"].map(numel).astype(float)
    rows["payload_bytes"] = rows["payload_bytes"].fillna(of_shape)
    return rows


def planner_table_of(rows: "pd.DataFrame") -> PlannerTable:
    """The table of some rows, as `laboratory_rows` gives them."""
    known = measured_of(rows[rows["planner"] != ""], "redistribute")
    right = known[~known["is_again"]].drop_duplicates([*PAIR_KEY, "planner"])
    found = right.groupby(PAIR_KEY, sort=False)
    pairs = found.agg(
        payload_bytes=("payload_bytes", "first"), bound_bytes=("lower_bound_bytes", "first")
    ).reset_index()
    pairs["size"] = size_classes(pairs["payload_bytes"].to_numpy(float))
    names = set(right["planner"])
    planners = (*(name for name in VARIANTS if name in names), *sorted(names - set(VARIANTS)))
    at = right["planner"].map({name: place for place, name in enumerate(planners)}).to_numpy(int), found.ngroup()

    def spread(values: "pd.Series[Any]", missing: Any) -> NDArray[Any]:
        whole = np.full((len(planners), len(pairs)), missing, dtype=object if missing == "" else float)
        whole[at] = values.fillna(missing)
        return whole

    of_passes = as_table(right[PASSES].tolist())
    passes = np.full((len(planners), len(pairs), of_passes.shape[1]), np.nan)
    passes[at] = of_passes
    path, backend_op = (right[name].fillna("").astype(str) for name in ("path", "backend_op"))
    return PlannerTable(
        pairs=pairs,
        planners=planners,
        times=spread(right["median_s"], np.nan),
        passes=passes,
        again=_again_at(pairs, known[known["is_again"]], passes.shape[2]),
        paths=spread(path, ""),
        runs_as=spread((path + " | " + backend_op).where(path != "", ""), ""),
        numbers={name: spread(right[name], np.nan) for name in NUMBERS},
    )


def _again_at(pairs: "pd.DataFrame", again: "pd.DataFrame", num_passes: int) -> Floats:
    found = pairs[PAIR_KEY].merge(again[[*PAIR_KEY, PASSES]].drop_duplicates(PAIR_KEY), how="left")[PASSES]
    nothing = np.full(num_passes, np.nan)
    return as_table([values[:num_passes] if isinstance(values, np.ndarray) else nothing for values in found])


def size_classes(sizes: Floats) -> list[str]:
    """Each size as text where there are few of them, else the name of its class (bytes)."""
    if len(np.unique(sizes)) <= MAX_EXACT_SIZES:
        return [size_text(size) for size in sizes.tolist()]
    return [SIZE_CLASSES[place] for place in np.searchsorted(SIZE_LIMITS, sizes, side="right")]


def median_of(values: Floats) -> float:
    """The median of what is known; nan where nothing is."""
    found = values[np.isfinite(values)]
    return float(np.median(found)) if found.size else float("nan")


# Planner against planner over many pairs: who wins beyond noise, by how much, and what the best would save.

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


MAX_PAIRS = 20


class Comparison(NamedTuple):
    """One planner against greedy on every pair of one shape and dtype that both measured."""

    table: PlannerTable
    planner: str
    shape: str
    dtype: str
    payload_bytes: float
    rows: Ints  # indexes of the pairs in the table, most striking first
    ratios: Ratios  # planner over greedy, these pairs tested together


def comparisons(frame: "pd.DataFrame") -> list[Comparison]:
    """Every planner of a run against greedy, by shape and dtype."""
    table = planner_table_of(laboratory_rows(frame))
    if BASELINE not in table.planners:
        return []
    others = sorted({*table.planners} - {BASELINE}, key=lambda name: (name != "min_cost", name))
    return [comparison for planner in others for comparison in _of_planner(table, planner)]


def _of_planner(table: PlannerTable, planner: str) -> Iterator[Comparison]:
    one, other = run_of(table, planner), run_of(table, BASELINE)
    both = np.flatnonzero(table.measured[table.at(planner)] & table.measured[table.at(BASELINE)])
    for (shape, dtype), of_shape in table.pairs.iloc[both].groupby(["shape", "dtype"], sort=False):
        rows = of_shape.index.to_numpy()
        found, size = ratios(one, other, table.mask(rows)), float(of_shape["payload_bytes"].iloc[0])
        # Differing paths first, then the surest and largest win or loss.
        distance, margin = np.abs(np.log(found.ratio.center)), margin_of(found.ratio)
        keys = (-distance, -margin, ~found.enough, -np.abs(found.side), found.same)
        rows = rows[np.lexsort([key[rows] for key in keys])]
        yield Comparison(table, planner, str(shape), str(dtype), size, rows, found)


def tables(frame: "pd.DataFrame", full: bool = True) -> list[Table]:
    """One table a planner, shape and dtype, of one run's frame; where not `full`, of differences beyond noise alone."""
    return [_table(comparison, full) for comparison in comparisons(frame)]


def _table(comparison: Comparison, full: bool) -> Table:
    planner, found = comparison.planner, comparison.ratios
    columns = ("<planner", "<path", "median", "coll.", "sent", f"<{planner} / {BASELINE}")
    told = comparison.rows[full | (found.side[comparison.rows] != 0)]
    sides = [(pair, name) for pair in told.tolist() for name in (BASELINE, planner)]
    rows = Rows(sides, lambda side: _row(comparison, *side))
    size = size_text(comparison.payload_bytes)
    title = f"{BASELINE} and {planner} on {comparison.dtype}[{comparison.shape}] ({size}), most striking first"
    notes = _summary(comparison)
    if rows:
        notes.append("coll. = collectives on the path; sent = bytes one rank must send along it")
    if num_left_out := len(comparison.rows) - len(told):
        notes.insert(0, f"{num_left_out} more pairs without a difference beyond noise: --full lists them")
    if len(told) > MAX_PAIRS:
        notes.insert(0, f"... {len(told) - MAX_PAIRS} more pairs: --format csv")
    breaks, cap = frozenset(range(2, len(rows), 2)), 2 * MAX_PAIRS
    return Table(title, columns, rows[:cap], notes, breaks, ("coll.", "sent"), together=True, beyond=rows[cap:])


def _row(comparison: Comparison, pair: int, planner: str) -> tuple[str, ...]:
    table, ratio = comparison.table, comparison.ratios.ratio
    at = table.at(planner), pair
    is_baseline = planner == BASELINE
    source, target = table.pairs["source"].iat[pair], table.pairs["target"].iat[pair]
    return (
        planner,
        table.paths[at] or f"{source}->{target}",
        time_text(float(table.times[at])),
        whole_text(float(table.numbers["num_collectives"][at])),
        size_text(float(table.numbers["wire_bytes"][at])),
        ratio_text(*(float(part[pair]) for part in ratio)) if is_baseline else pair_verdict(comparison, pair),
    )


def pair_verdict(comparison: Comparison, pair: int) -> str:
    """Who won a pair and by how much at least: "min_cost by 15 %+", "within noise", "same path", "too few passes".

    The number is how much less time the winner takes, at the end of the interval that is kindest to the loser.
    """
    found = comparison.ratios
    if found.same[pair]:
        return "same path"
    if not found.enough[pair]:
        return TOO_FEW
    if found.side[pair] == 0:
        return "within noise"
    winner = comparison.planner if found.side[pair] < 0 else BASELINE
    return f"{winner} by {percent_text(1 - 1 / float(margin_of(found.ratio)[pair]))}+"


def _summary(comparison: Comparison) -> list[str]:
    table, planner, rows = comparison.table, comparison.planner, comparison.rows
    lines = [count_text(len(rows), "pair") + _outcome(comparison)]
    lines += [*comparison.ratios.told, *proof_lines([comparison.ratios])]
    planning = table.numbers["planning_cold_s"]
    cold = [time_text(median_of(planning[table.at(name), rows])) for name in (BASELINE, planner)]
    if NOTHING not in cold:
        lines.append(f"planning with empty caches, median: {BASELINE} {cold[0]}, {planner} {cold[1]}")
    return lines


def _outcome(comparison: Comparison) -> str:
    planner, found = comparison.planner, comparison.ratios
    differing = comparison.rows[~found.same[comparison.rows]]
    counts, num_too_few = tally(found, differing), int((~found.enough[differing]).sum())
    if not counts.num_pairs:
        return ", 0 with differing paths"
    noise = counts.num_pairs - counts.num_faster - counts.num_slower - num_too_few
    text = f", {counts.num_pairs} with differing paths: {planner} faster beyond noise in {counts.num_faster}, "
    text += f"{BASELINE} in {counts.num_slower}, neither in {noise}"
    if num_too_few:
        text += f", {TOO_FEW} to tell in {num_too_few}"
    return f"{text}; geometric mean of {planner}/{BASELINE} over them {ratio_text(*counts.mean)}"
