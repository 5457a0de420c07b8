"""Redistributions as one column a pair and one row a planner: who wins beyond noise, and by how much."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.records.dataframe import PASSES, measured_of
from distbench.records.run_file import AGAIN, DTYPE_BYTES
from distbench.show.units import size_text
from distbench.spec.placements import BASELINE, NATIVE, VARIANTS
from distbench.statistics.intervals import Floats, Interval, Ints, geometric_mean_with_ci
from distbench.statistics.pass_comparison import MIN_PASSES, as_table, compare_passes
from distbench.statistics.verdicts import FASTER, SLOWER

if TYPE_CHECKING:
    import pandas as pd

PAIR_KEY = ["run_file", "mesh", "mesh_shape", "shape", "dtype", "suite", "direction", "flattened", "source", "target"]
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
        grouped = self.pairs.groupby(["mesh_shape", "size"], sort=False)
        smallest, members = grouped["payload_bytes"].min(), grouped.indices
        ordered = sorted(smallest.index, key=lambda label: (sizes_in(label[0]), smallest[label]))
        return [(mesh, size, self.mask(members[mesh, size])) for mesh, size in ordered]

    def mask(self, indexes: Any) -> Bools:
        """True for the pairs of these indexes."""
        chosen = np.zeros(len(self.pairs), dtype=bool)
        chosen[indexes] = True
        return chosen


def sizes_in(text: object) -> tuple[int, ...]:
    """`"2x4"` as (2, 4); () for what is no such text."""
    is_shape = isinstance(text, str) and re.fullmatch(r"\d+(x\d+)*", text)
    return tuple(int(part) for part in str(text).split("x")) if is_shape else ()


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
    measured_rows = measured_of(rows[rows["planner"] != ""], "redistribute")
    right = measured_rows[~measured_rows["is_again"]].drop_duplicates([*PAIR_KEY, "planner"])
    by_pair = right.groupby(PAIR_KEY, sort=False)
    pairs = by_pair.agg(
        payload_bytes=("payload_bytes", "first"), bound_bytes=("lower_bound_bytes", "first")
    ).reset_index()
    pairs["size"] = size_classes(pairs["payload_bytes"].to_numpy(float))
    names = set(right["planner"])
    planners = (*(name for name in VARIANTS if name in names), *sorted(names - set(VARIANTS)))
    at = right["planner"].map({name: place for place, name in enumerate(planners)}).to_numpy(int), by_pair.ngroup()

    def spread(values: "pd.Series[Any]", missing: Any) -> NDArray[Any]:
        filled = np.full((len(planners), len(pairs)), missing, dtype=object if missing == "" else float)
        filled[at] = values.fillna(missing)
        return filled

    of_passes = as_table(right[PASSES].tolist())
    passes = np.full((len(planners), len(pairs), of_passes.shape[1]), np.nan)
    passes[at] = of_passes
    path, backend_op = (right[name].fillna("").astype(str) for name in ("path", "backend_op"))
    return PlannerTable(
        pairs=pairs,
        planners=planners,
        times=spread(right["median_s"], np.nan),
        passes=passes,
        again=_again_at(pairs, measured_rows[measured_rows["is_again"]], passes.shape[2]),
        paths=spread(path, ""),
        runs_as=spread((path + " | " + backend_op).where(path != "", ""), ""),
        numbers={name: spread(right[name], np.nan) for name in NUMBERS},
    )


def _again_at(pairs: "pd.DataFrame", again: "pd.DataFrame", num_passes: int) -> Floats:
    pass_lists = pairs[PAIR_KEY].merge(again[[*PAIR_KEY, PASSES]].drop_duplicates(PAIR_KEY), how="left")[PASSES]
    nothing = np.full(num_passes, np.nan)
    return as_table([values[:num_passes] if isinstance(values, np.ndarray) else nothing for values in pass_lists])


def size_classes(sizes: Floats) -> list[str]:
    """Each size as text where there are few of them, else the name of its class (bytes)."""
    if len(np.unique(sizes)) <= MAX_EXACT_SIZES:
        return [size_text(size) for size in sizes.tolist()]
    return [SIZE_CLASSES[place] for place in np.searchsorted(SIZE_LIMITS, sizes, side="right")]


def median_of(values: Floats) -> float:
    """The median of what is known; nan where nothing is."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")


# Planner against planner over many pairs: who wins beyond noise, and by how much.

BETTER_OF_TORCH = "the better of greedy and min_cost"
# A planner that takes this much longer than torch's better one on a pair is called a loss worth naming.
WORSE_SHARE = 0.10


class Reference(NamedTuple):
    """What planners are compared with."""

    name: str
    rows: Ints  # of each pair the planner, as its row in the table


class Ratios(NamedTuple):
    """One planner's time over a reference's, pairs of one family; every array has one element a pair of the table.

    Pairs on which both run the same cannot differ, nor does a baseline from itself measured again: they are the table's
    own proof. They count in the family, and `num_false` of the `num_controls` that have enough passes came out faster
    or slower all the same.
    """

    ratio: Interval  # 95 % for all of them together, from passes
    same: Bools  # both run the same: the ratio is truly one
    enough: Bools  # both have enough passes in common
    side: Ints  # -1 where the planner is faster beyond noise, 1 where the reference is, else (or both the same) 0
    num_controls: int
    num_false: int
    sentences: list[str]  # what the family could tell, as sentences

    def at(self, pair: int) -> tuple[float, float, float]:
        """The ratio of a pair, with its interval."""
        center, low, high = (float(part[pair]) for part in self.ratio)
        return center, low, high


class Tally(NamedTuple):
    """How a planner did against a reference over some pairs that both moved."""

    num_pairs: int
    num_differing: int  # on which the two do not run the same
    num_faster: int  # the planner is faster beyond noise
    num_slower: int  # the reference is
    num_much_slower: int  # of these, the ones whose interval lies above 1 + WORSE_SHARE as a whole
    mean: tuple[float, float, float]  # geometric mean of planner / reference over num_pairs, its 95 % CI over pairs


def references_of(table: PlannerTable) -> list[Reference]:
    """Greedy, and of each pair torch's faster planner, as far as they were measured."""
    if BASELINE not in table.planners:
        return []
    greedy = np.full(len(table.pairs), table.at(BASELINE))
    if "min_cost" not in table.planners:
        return [Reference(BASELINE, greedy)]
    greedys, times = table.times[table.at(BASELINE)], table.times[table.at("min_cost")]
    better = np.where((greedys <= times) | np.isnan(times), greedy, table.at("min_cost"))
    return [Reference(BASELINE, greedy), Reference(BETTER_OF_TORCH, better)]


def ratios(table: PlannerTable, planner: str, reference: Reference, pairs: Bools) -> Ratios:
    """A planner's time over a reference's: each of `pairs` that both moved is a test of one family; nan elsewhere.

    Pairs on which the reference is the planner itself are left out.
    """
    row, reference_rows, size = table.at(planner), reference.rows, len(table.pairs)
    columns = np.arange(size)
    at = np.flatnonzero(pairs & (reference_rows != row) & table.measured[row] & table.measured[reference_rows, columns])
    again = np.where((reference_rows[at] == table.at(BASELINE))[:, None], table.again[at], np.nan)
    proofs = np.flatnonzero(np.isfinite(again).any(axis=1))
    against = [*range(len(at), 2 * len(at)), *[-1] * len(at), *(proofs + len(at))]
    passes = np.concatenate([table.passes[row, at], table.passes[reference_rows[at], at], again[proofs]])
    compared = compare_passes(passes, against)
    verdicts = np.array(compared.verdict, dtype=object)
    sides = (verdicts == SLOWER).astype(int) - (verdicts == FASTER).astype(int)
    num_passes = compared.num_passes

    def spread(values: NDArray[Any], missing: Any) -> NDArray[Any]:
        filled = np.full(size, missing)
        filled[at] = values[: len(at)]
        return filled

    ratio = Interval(*(spread(part, np.nan) for part in (compared.ratio, compared.low, compared.high)))
    side, enough = spread(sides, 0), spread(num_passes >= MIN_PASSES, False)
    is_same = (table.runs_as[row] == table.runs_as[reference_rows, columns]) & (table.runs_as[row] != "")
    controls = is_same & enough
    of_proofs = sides[2 * len(at) :][num_passes[2 * len(at) :] >= MIN_PASSES]
    return Ratios(
        ratio=ratio,
        same=is_same & np.isfinite(ratio.center),
        enough=enough,
        side=np.where(is_same, 0, side),
        num_controls=int(controls.sum()) + len(of_proofs),
        num_false=int(np.count_nonzero(side[controls])) + int(np.count_nonzero(of_proofs)),
        sentences=compared.sentences(f"a pair that {planner} makes", reference.name),
    )


def tally(compared: Ratios, pairs: Bools | Ints) -> Tally:
    """Counts and the mean over some pairs, given as a mask or as indexes."""
    side = compared.side[pairs]
    much_slower = (compared.side > 0) & (compared.ratio.low > 1 + WORSE_SHARE)
    return Tally(
        num_pairs=len(side),
        num_differing=int((~compared.same[pairs]).sum()),
        num_faster=int((side < 0).sum()),
        num_slower=int((side > 0).sum()),
        num_much_slower=int(much_slower[pairs].sum()),
        mean=geometric_mean_with_ci(compared.ratio.center[pairs]),
    )


def proof_lines(families: Sequence[Ratios]) -> list[str]:
    """How many pairs that cannot differ were called different, as a sentence; none where there are no such pairs.

    Those ran the same twice: one path by both planners, or the baseline once more.
    """
    num_controls, num_false = (
        sum(family.num_controls for family in families),
        sum(family.num_false for family in families),
    )
    if not num_controls:
        return []
    return [f"proof: {num_false} of {num_controls} pairs that ran the same twice were called different"]
