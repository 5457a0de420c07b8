"""The planner study: redistributions as arrays of [planners, pairs], differences beyond noise, and causes of wrong
results."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.planning.redistribution_plans import choose
from distbench.records.dataframe import PASSES, Row, measured_of, records_of
from distbench.records.run_file import AGAIN, DTYPE_BYTES, Run
from distbench.show.units import size_text
from distbench.spec.placements import BASELINE, NATIVE, OUR_VARIANTS, VARIANTS, Placement, parse_placements
from distbench.statistics.intervals import Floats, Interval, Ints, geometric_mean, geometric_mean_with_ci
from distbench.statistics.pass_comparison import as_table, compare_passes
from distbench.statistics.verdicts import FASTER, MIN_PASSES, SLOWER

if TYPE_CHECKING:
    import pandas as pd

PAIR_KEY = ["run_file", "mesh", "mesh_shape", "shape", "dtype", "suite", "direction", "flattened", "source", "target"]
Bools = NDArray[np.bool_]
MAX_EXACT_SIZES = 6
SIZE_LIMITS = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
SIZE_CLASSES = ("under 4 KiB", "4 to 64 KiB", "64 KiB to 1 MiB", "1 to 16 MiB", "16 MiB and more")
TEXTS = ["mesh", "mesh_shape", "suite", "direction", "flattened", "source", "target", "dtype", "shape", "planner"]
NUMBERS = ("num_collectives", "wire_bytes", "wire_bytes_executed", "predicted_s", "planning_cold_s")


@dataclass(frozen=True)
class PlannerTable:
    """The measured, correct results as arrays of [planners, pairs], with pairs in file order.

    `pairs` has one row per pair, with PAIR_KEY, `payload_bytes`, `size` (the size class as text) and `bound_bytes` (nan
    if unknown).
    """

    pairs: "pd.DataFrame"
    planners: tuple[str, ...]  # in the order of VARIANTS, then other planners
    times: Floats  # median in seconds, nan if a planner has no correct result
    passes: Floats  # [planners, pairs, passes] median sample of each pass in seconds, nan if missing
    again: Floats  # [pairs, passes] the control of greedy on some pairs, nan on other pairs
    paths: NDArray[Any]  # as text, "" if missing
    runs_as: NDArray[Any]  # path and executed collectives, by which times should be equal, "" if unknown
    numbers: dict[str, Floats]  # columns of NUMBERS, nan if missing

    def at(self, planner: str) -> int:
        """A planner's row in the arrays."""
        return self.planners.index(planner)

    @property
    def measured(self) -> Bools:
        """Mask of planners and pairs with measured, correct values."""
        return np.isfinite(self.times)

    @property
    def communicates(self) -> Bools:
        """Mask of pairs for which at least one planner needs communication. Other pairs are trivial."""
        return np.asarray(np.nan_to_num(self.numbers["num_collectives"]).max(axis=0, initial=0) > 0)

    def sizes(self) -> list[str]:
        """The size classes in ascending order."""
        smallest = self.pairs.groupby("size", sort=False)["payload_bytes"].min()
        return [str(size) for size in smallest.sort_values(kind="stable").index]

    def groups(self) -> list[tuple[str, str, Bools]]:
        """(mesh, size class, mask of pairs) per mesh and size in ascending order."""
        grouped = self.pairs.groupby(["mesh_shape", "size"], sort=False)
        smallest, members = grouped["payload_bytes"].min(), grouped.indices
        ordered = sorted(smallest.index, key=lambda label: (sizes_in(label[0]), smallest[label]))
        return [(mesh, size, self.mask(members[mesh, size])) for mesh, size in ordered]

    def mask(self, indexes: Any) -> Bools:
        """A mask that is true for the pairs of these indexes."""
        chosen = np.zeros(len(self.pairs), dtype=bool)
        chosen[indexes] = True
        return chosen


def sizes_in(text: object) -> tuple[int, ...]:
    """`"2x4"` as (2, 4), or () for any other text."""
    is_shape = isinstance(text, str) and re.fullmatch(r"\d+(x\d+)*", text)
    return tuple(int(part) for part in str(text).split("x")) if is_shape else ()


def laboratory_rows(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The redistributions of a frame. Missing texts are "", and missing sizes and meshes are derived from other
    columns.

    `is_again` marks controls, which are repeated measurements of greedy. In runs with native all-to-alls, direct is the
    same planner, because direct does not use DTensor's all-to-all.
    """
    rows = frame[frame["kind"] == "redistribute"].copy()
    rows[TEXTS] = rows[TEXTS].fillna("")
    rows["planner"] = rows["planner"].replace({f"direct{NATIVE}": "direct"})
    rows["is_again"] = rows["id"].astype(str).str.endswith(AGAIN)  # of no rows, ids have no type
    of_run = ["x".join(part.partition("=")[2] for part in mesh.split(",")) for mesh in rows["mesh"]]
    rows["mesh_shape"] = np.where(rows["mesh_shape"] == "", of_run, rows["mesh_shape"])
    numel = {shape: float(np.prod(sizes)) if (sizes := sizes_in(shape)) else np.nan for shape in rows["shape"].unique()}
    of_shape = rows["dtype"].map(DTYPE_BYTES).astype(float) * rows["shape"].map(numel).astype(float)
    rows["payload_bytes"] = rows["payload_bytes"].fillna(of_shape)
    return rows


def planner_table_of(rows: "pd.DataFrame") -> PlannerTable:
    """The table of rows from `laboratory_rows`."""
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
    again = measured_rows[measured_rows["is_again"]][[*PAIR_KEY, PASSES]].drop_duplicates(PAIR_KEY)
    num_passes = of_passes.shape[1]
    again_passes = [
        values[:num_passes] if isinstance(values, np.ndarray) else np.full(num_passes, np.nan)
        for values in pairs[PAIR_KEY].merge(again, how="left")[PASSES]
    ]
    return PlannerTable(
        pairs=pairs,
        planners=planners,
        times=spread(right["median_s"], np.nan),
        passes=passes,
        again=as_table(again_passes),
        paths=spread(path, ""),
        runs_as=spread((path + " | " + backend_op).where(path != "", ""), ""),
        numbers={name: spread(right[name], np.nan) for name in NUMBERS},
    )


def size_classes(sizes: Floats) -> list[str]:
    """Each size in bytes as text, or as the name of a size class if there are more than MAX_EXACT_SIZES sizes."""
    if len(np.unique(sizes)) <= MAX_EXACT_SIZES:
        return [size_text(size) for size in sizes.tolist()]
    return [SIZE_CLASSES[place] for place in np.searchsorted(SIZE_LIMITS, sizes, side="right")]


def median_of(values: Floats) -> float:
    """The median of the finite values, or nan without finite values."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")


# Comparisons of two planners over many pairs.

BETTER_OF_TORCH = "the better of greedy and min_cost"
# A planner that takes this share longer than torch's better planner on a pair is much slower.
WORSE_SHARE = 0.10


class Ratios(NamedTuple):
    """One planner's time relative to a reference, tested on all pairs together. Every array has one element per pair of
    the table.

    Pairs with equal paths and repeated measurements of a baseline are controls, which have no real difference. Controls
    are part of the tests. `num_false` of `num_controls` controls with enough passes are falsely faster or slower.
    """

    ratio: Interval  # with 95 % intervals for all pairs together, from passes
    same: Bools  # the same path on both sides
    enough: Bools  # enough passes on both sides
    side: Ints  # -1: the planner is faster beyond noise, 1: the reference is, 0: neither, or same path
    num_controls: int
    num_false: int
    sentences: list[str]  # on the family's detectable differences

    def at(self, pair: int) -> tuple[float, float, float]:
        """The ratio of a pair with its interval."""
        center, low, high = (float(part[pair]) for part in self.ratio)
        return center, low, high


class Tally(NamedTuple):
    """The result of a planner compared with a reference over pairs that both moved."""

    num_pairs: int
    num_differing: int  # pairs with different paths
    num_faster: int  # the planner is faster beyond noise
    num_slower: int  # the reference is faster beyond noise
    num_much_slower: int  # slower pairs with the whole interval above 1 + WORSE_SHARE
    mean: tuple[float, float, float]  # geometric mean of planner / reference, 95 % CI over pairs


def references_of(table: PlannerTable) -> dict[str, Ints]:
    """References of comparisons by name: greedy, and torch's faster planner of each pair, if measured.

    The values are rows of the table's arrays, one per pair.
    """
    if BASELINE not in table.planners:
        return {}
    greedy = np.full(len(table.pairs), table.at(BASELINE))
    if "min_cost" not in table.planners:
        return {BASELINE: greedy}
    greedys, times = table.times[table.at(BASELINE)], table.times[table.at("min_cost")]
    better = np.where((greedys <= times) | np.isnan(times), greedy, table.at("min_cost"))
    return {BASELINE: greedy, BETTER_OF_TORCH: better}


def ratios(table: PlannerTable, planner: str, reference: str, pairs: Bools) -> Ratios:
    """A planner's time relative to a reference (a name of `references_of`), tested on all `pairs` together that both
    moved. Other pairs, and pairs whose reference is the planner, are nan."""
    row, reference_rows, size = table.at(planner), references_of(table)[reference], len(table.pairs)
    columns = np.arange(size)
    at = np.flatnonzero(pairs & (reference_rows != row) & table.measured[row] & table.measured[reference_rows, columns])
    again = np.where((reference_rows[at] == table.at(BASELINE))[:, None], table.again[at], np.nan)
    repeats = np.flatnonzero(np.isfinite(again).any(axis=1))
    against = [*range(len(at), 2 * len(at)), *[-1] * len(at), *(repeats + len(at))]
    passes = np.concatenate([table.passes[row, at], table.passes[reference_rows[at], at], again[repeats]])
    compared = compare_passes(passes, against)
    verdicts, num_passes = np.array(compared.verdict, dtype=object), compared.num_passes
    sides = (verdicts == SLOWER).astype(int) - (verdicts == FASTER).astype(int)

    def spread(values: NDArray[Any], missing: Any) -> NDArray[Any]:
        filled = np.full(size, missing)
        filled[at] = values[: len(at)]
        return filled

    ratio = Interval(*(spread(part, np.nan) for part in (compared.ratio, compared.low, compared.high)))
    side, enough = spread(sides, 0), spread(num_passes >= MIN_PASSES, False)
    is_same = (table.runs_as[row] == table.runs_as[reference_rows, columns]) & (table.runs_as[row] != "")
    controls = is_same & enough
    of_repeats = sides[2 * len(at) :][num_passes[2 * len(at) :] >= MIN_PASSES]
    return Ratios(
        ratio=ratio,
        same=is_same & np.isfinite(ratio.center),
        enough=enough,
        side=np.where(is_same, 0, side),
        num_controls=int(controls.sum()) + len(of_repeats),
        num_false=int(np.count_nonzero(side[controls])) + int(np.count_nonzero(of_repeats)),
        sentences=compared.sentences(f"a pair with {planner}", reference),
    )


def tally(compared: Ratios, pairs: Bools | Ints) -> Tally:
    """Counts and the mean over some pairs, which are a mask or indexes."""
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
    """A sentence on the number of controls that are falsely different, or [] without controls."""
    num_controls = sum(family.num_controls for family in families)
    num_false = sum(family.num_false for family in families)
    sentence = f"control: {num_false} of {num_controls} comparisons of a path with itself differ"
    return [sentence] if num_controls else []


# Wrong or broken redistributions by cause, which is planner, suite, and common features of layouts.

BAD = ("wrong", "raised", "aborted", "timeout")


class Failure(NamedTuple):
    """Cases of one cause."""

    status: str  # one of BAD
    planner: str
    suite: str  # the suite of the planner study, or ""
    pattern: str  # common features of the layouts, in words
    num_cases: int
    example: Row  # the frame's row of the smallest case
    ours: dict[str, dict[str, int]]  # distbench's planner to counts of statuses on the same pairs


def failures_of(rows: "pd.DataFrame") -> list[Failure]:
    """Groups of rows of `laboratory_rows` that are not ok, most serious status first, then largest group first."""
    bad = rows[rows["status"].isin(BAD)]
    bad = bad.assign(pattern=[pattern_of(record) for record in records_of(bad)])
    outcomes, failures = rows[[*PAIR_KEY, "planner", "status"]], []
    for (status, planner, suite, pattern), group in bad.groupby(["status", "planner", "suite", "pattern"], sort=False):
        example = min(records_of(group), key=lambda record: (numel_of(record), str(record["id"])))
        same_pairs = group[PAIR_KEY].drop_duplicates().merge(outcomes[outcomes["planner"] != planner])
        statuses = {name: same_pairs.loc[same_pairs["planner"] == name, "status"] for name in OUR_VARIANTS}
        other_statuses = {name: dict(Counter(of_one)) for name, of_one in statuses.items() if len(of_one)}
        names = (str(status), str(planner), str(suite), str(pattern))
        failures.append(Failure(*names, len(group), example, other_statuses))
    return sorted(failures, key=lambda failure: (BAD.index(failure.status), -failure.num_cases))


def pattern_of(record: Row) -> str:
    """The special features of a row's pair in words, by which rows of one cause are grouped; or "plain layouts"."""
    source, target = sides = placements_of(record["source"]), placements_of(record["target"])
    placements = (*source, *target)
    reduce_ops = sorted({placement.reduce_op for placement in source if placement.reduce_op})
    words = {
        "strided shards": any(placement.split_factor is not None for placement in placements),
        "explicit shard order": any(placement.turn is not None for placement in placements),
        "Shard to Partial" if _sharded_dims(source) else "to Partial": any(part.reduce_op for part in target),
        "from Partial " + "/".join(reduce_ops): bool(reduce_ops),
        "nested shards": any(len(dims) > len(set(dims)) for dims in map(_sharded_dims, sides)),
        "uneven": _is_uneven(record, sides),
        "a flattened mesh exists": bool(record["flattened"]),
        "backward": record["direction"] == "backward",
    }
    return ", ".join(word for word, is_true in words.items() if is_true) or "plain layouts"


def numel_of(record: Row) -> int:
    """The number of elements of the full tensor."""
    return math.prod(sizes_in(record["shape"]))


def placements_of(text: object) -> tuple[Placement, ...]:
    """The placements of one side of a row, or () if the text is not a layout."""
    try:
        return parse_placements(str(text))
    except ValueError:
        return ()


def _sharded_dims(placements: Iterable[Placement]) -> list[int]:
    return [placement.tensor_dim for placement in placements if placement.tensor_dim is not None]


def _is_uneven(record: Row, layouts: Iterable[Sequence[Placement]]) -> bool:
    shape, mesh_shape = sizes_in(record["shape"]), sizes_in(record["mesh_shape"])
    return any(
        length
        % math.prod(
            size for size, placement in zip(mesh_shape, placements, strict=False) if placement.tensor_dim == dim
        )
        for placements in layouts
        for dim, length in enumerate(shape)
    )


# A machine's study, with the contents of tables, figures and page.


class Versions(NamedTuple):
    """The torch version and the backend of a run."""

    torch: str
    backend: str


CHOSEN = "choosing by prediction"
NEAR_BEST = 0.10
# Plans whose predictions differ more are expected to be ranked correctly.
APART = 0.35
MIN_PLANNERS = 3
MAX_STRIKING = 10
LARGE_BYTES = 1 << 20
MIN_FOCUS = 20
# Two planners that may plan different paths.
PATH_PLANNERS = (("min_cost", "greedy"), ("calibrated", "greedy"), ("calibrated", "min_cost"))
# Planner, reference, mesh ("2x4") and size class. Mesh and size class are "" for the pairs in focus.
Place = tuple[str, str, str, str]


class PathDifference(NamedTuple):
    """Two planners plan different paths on `num_differing` of `num_pairs` pairs."""

    num_pairs: int
    num_differing: int


class Regret(NamedTuple):
    """The time of a planner (or CHOSEN) relative to the best measured time, over non-trivial pairs that the planner
    moved."""

    num_pairs: int
    mean: float  # geometric mean of time / best time, at least 1
    worst: float  # the largest time / best time
    share_near: float  # share of pairs within NEAR_BEST of the best


class LargestGain(NamedTuple):
    """The index of a pair with a large gain of a planner over greedy, and the ratio with its 95 % interval."""

    pair: int
    planner: str
    ratio: tuple[float, float, float]


class PredictionError(NamedTuple):
    """The errors of predictions of `num_pairs` pairs."""

    num_pairs: int
    error: float  # median of |predicted / measured - 1|
    bias: float  # median of predicted / measured


class PredictionRanking(NamedTuple):
    """Of `num_plans` pairs of different plans that are predicted over APART apart, `num_right` are ranked correctly."""

    num_plans: int
    num_right: int


@dataclass(frozen=True, eq=False)
class Study:
    """All runs of redistributions of a machine. Each part is computed at the first use."""

    machine: str
    runs: Sequence[Run]  # oldest first
    rows: "pd.DataFrame"  # from `laboratory_rows`, with the planners' names in the study
    is_native: bool  # all planners used native all-to-all, and their names have no +native

    @property
    def versions(self) -> Versions:
        """The versions of the latest run."""
        environment = self.runs[-1].about.environment
        return Versions(environment.torch or "unknown", environment.backend or "gloo")

    @property
    def profile(self) -> str | None:
        """The profile of the latest run with a profile."""
        return next((run.about.profile for run in reversed(self.runs) if run.about.profile), None)

    @cached_property
    def table(self) -> PlannerTable:
        """The table of correct redistributions."""
        return planner_table_of(self.rows)

    @cached_property
    def _eligible(self) -> Bools:
        """Pairs with greedy's time in the same run, because times of different runs are not comparable."""
        has_greedy = BASELINE in self.table.planners
        return (
            self.table.measured[self.table.at(BASELINE)] if has_greedy else np.ones(len(self.table.pairs), dtype=bool)
        )

    @cached_property
    def focus(self) -> Bools:
        """The pairs of the verdict: pairs of LARGE_BYTES or more if there are enough, else all pairs.

        Small tensors show only latency, and are frequent in suites that test correctness.
        """
        large = (self.table.pairs["payload_bytes"] >= LARGE_BYTES).to_numpy(bool) & self._eligible
        return large if (large & self.table.communicates).sum() >= MIN_FOCUS else self._eligible

    @property
    def focus_text(self) -> str:
        """A text on the pairs in focus."""
        return "of all sizes" if self.focus is self._eligible else f"of {size_text(LARGE_BYTES)} and above"

    @cached_property
    def compared(self) -> Bools:
        """The pairs in focus that communicate."""
        return self.focus & self.table.communicates

    @cached_property
    def _groups(self) -> list[tuple[str, str, Bools]]:
        """(mesh, size class, mask of pairs) per mesh and size, and with ("", "") for the pairs in focus."""
        return [*self.table.groups(), ("", "", self.focus)]

    @cached_property
    def ratios(self) -> dict[tuple[str, str], Ratios]:
        """Ratios by (planner, reference), each tested together. References are greedy and torch's better planner."""
        table = self.table
        return {
            (planner, reference): ratios(table, planner, reference, np.ones(len(table.pairs), dtype=bool))
            for reference in references_of(table)
            for planner in table.planners
            if planner != reference
        }

    @cached_property
    def tallies(self) -> dict[Place, Tally]:
        """Comparisons of every planner with greedy and torch's better planner, over pairs that communicate."""
        tallies = {}
        for (planner, reference), compared in self.ratios.items():
            moved = self.table.communicates & np.isfinite(compared.ratio.center)
            for mesh, size, pairs in self._groups:
                if (pairs & moved).any():
                    tallies[planner, reference, mesh, size] = tally(compared, pairs & moved)
        return tallies

    def against(self, planner: str, baseline: str = BASELINE) -> Tally | None:
        """The comparison of a planner with a baseline over the pairs in focus."""
        return self.tallies.get((planner, baseline, "", ""))

    @cached_property
    def differences(self) -> dict[Place, PathDifference]:
        """Counts of different paths for each two planners of PATH_PLANNERS."""
        table, path_differences = self.table, {}
        for names in PATH_PLANNERS:
            if not set(names) <= set(table.planners):
                continue
            row, reference = map(table.at, names)
            both_measured = table.measured[row] & table.measured[reference]
            differing = both_measured & (table.paths[row] != table.paths[reference])
            for mesh, size, pairs in self._groups:
                if num_pairs := int((both_measured & pairs).sum()):
                    path_differences[*names, mesh, size] = PathDifference(num_pairs, int((differing & pairs).sum()))
        return path_differences

    @cached_property
    def regrets(self) -> dict[str, Regret]:
        """Every planner and CHOSEN, relative to the best measured time of each compared pair that the planner moved."""
        table = self.table
        if not table.planners:
            return {}
        best, regrets = np.nanmin(table.times, axis=0), {}
        for name, times in zip((*table.planners, CHOSEN), (*table.times, self._chosen_times), strict=True):
            over = (times / best)[self.compared & np.isfinite(times)]
            if over.size:
                near = float((over <= 1 + NEAR_BEST).mean())
                regrets[name] = Regret(over.size, geometric_mean(over), float(over.max()), near)
        return regrets

    @cached_property
    def _chosen_times(self) -> Floats:
        """Each pair's time by the planner that `choose` returns for the predictions, or nan without predictions."""
        table, predicted = self.table, self.table.numbers["predicted_s"]
        is_known = np.isfinite(predicted) & table.measured
        chosen_times = np.full(len(table.pairs), np.nan)
        for pair in np.flatnonzero(is_known.any(axis=0)).tolist():
            rows = np.flatnonzero(is_known[:, pair]).tolist()
            plans = {table.planners[row]: float(predicted[row, pair]) for row in rows}
            chosen_times[pair] = table.times[table.at(choose(plans)), pair]
        return chosen_times

    @cached_property
    def chosen_ratio(self) -> tuple[float, float, float]:
        """Time of CHOSEN relative to greedy, as the geometric mean with CI over the compared pairs."""
        if BASELINE not in self.table.planners:
            return (np.nan, np.nan, np.nan)
        over = self._chosen_times / self.table.times[self.table.at(BASELINE)]
        return geometric_mean_with_ci(over[self.compared])

    @cached_property
    def largest_gains(self) -> list[LargestGain]:
        """The pairs in focus with the largest measured gain over greedy beyond noise, each with the fastest planner."""
        over_greedy = {planner: part for (planner, reference), part in self.ratios.items() if reference == BASELINE}
        if not over_greedy:
            return []
        planners, compared = list(over_greedy), list(over_greedy.values())
        gains = np.stack([np.where((part.side < 0) & self.compared, part.ratio.center, np.inf) for part in compared])
        best, least = gains.argmin(axis=0), gains.min(axis=0)
        pairs = [pair for pair in np.argsort(least, kind="stable").tolist() if np.isfinite(least[pair])]
        return [LargestGain(pair, planners[best[pair]], compared[best[pair]].at(pair)) for pair in pairs[:MAX_STRIKING]]

    @cached_property
    def _predicted_and_measured(self) -> tuple[Floats, Floats]:
        """Seconds as [planners, pairs], nan for trivial pairs and pairs without both times."""
        predicted, measured = self.table.numbers["predicted_s"], self.table.times
        is_known = np.isfinite(predicted) & np.isfinite(measured) & (predicted > 0) & self.table.communicates
        return np.where(is_known, predicted, np.nan), np.where(is_known, measured, np.nan)

    def predicted_pairs(self, planner: str) -> tuple[Ints, Floats, Floats]:
        """Return indexes, predicted and measured seconds of the non-trivial pairs for which a planner has both
        times."""
        predicted, measured = (values[self.table.at(planner)] for values in self._predicted_and_measured)
        pairs = np.flatnonzero(np.isfinite(predicted))
        return pairs, predicted[pairs], measured[pairs]

    @cached_property
    def errors(self) -> dict[tuple[str, str], PredictionError]:
        """Errors of predictions by planner and size class over non-trivial pairs, and with size "" over pairs in
        focus."""
        errors = {}
        for planner, predicted, measured in zip(self.table.planners, *self._predicted_and_measured, strict=True):
            over = predicted / measured
            for size in [*self.table.sizes(), ""]:
                of_size = (self.table.pairs["size"] == size).to_numpy(bool) if size else self.focus
                if (pairs := np.isfinite(over) & of_size).any():
                    error = float(np.median(np.abs(over[pairs] - 1)))
                    errors[planner, size] = PredictionError(int(pairs.sum()), error, float(np.median(over[pairs])))
        return errors

    @cached_property
    def ranking(self) -> PredictionRanking:
        """The measured ranking of plans that are predicted more than APART apart, over the pairs in focus."""
        are_right: list[bool] = []
        predicted, measured = self._predicted_and_measured
        for pair in np.flatnonzero(self.focus).tolist():
            plans: dict[str, tuple[float, float]] = {}
            for at in np.flatnonzero(np.isfinite(predicted[:, pair])).tolist():
                plans.setdefault(str(self.table.runs_as[at, pair]), (predicted[at, pair], measured[at, pair]))
            are_right += [
                (plan[0] < other[0]) == (plan[1] < other[1])
                for plan, other in combinations(plans.values(), 2)
                if max(plan[0], other[0]) > (1 + APART) * min(plan[0], other[0])
            ]
        return PredictionRanking(len(are_right), sum(are_right))

    @cached_property
    def sent_over_bound(self) -> dict[str, float]:
        """The geometric mean of sent bytes / lower bound of received bytes, per planner."""
        bound, sent = self.table.pairs["bound_bytes"].to_numpy(float), self.table.numbers["wire_bytes_executed"]
        pairs = self.focus & (bound > 0)
        return {name: geometric_mean(sent[at, pairs] / bound[pairs]) for at, name in enumerate(self.table.planners)}

    @cached_property
    def outcomes(self) -> dict[str, Counter[str]]:
        """Each planner's cases by status."""
        once = self.rows[~self.rows["is_again"]]
        return {str(planner): Counter(part) for planner, part in once.groupby("planner", sort=False)["status"]}

    @cached_property
    def failures(self) -> list[Failure]:
        """Wrong and broken redistributions, by cause."""
        return failures_of(self.rows)


def is_laboratory(frame: "pd.DataFrame") -> bool:
    """Whether a run's frame belongs to a study, because it has suites, or more planners than torch's two."""
    rows = frame[frame["kind"] == "redistribute"]
    return bool(rows["suite"].notna().any()) or rows["planner"].nunique() >= MIN_PLANNERS


def studies_of(runs: Sequence[Run], frames: Sequence["pd.DataFrame"]) -> list[Study]:
    """One study per machine with runs of a planner study, in order of the first runs."""
    import pandas as pd

    by_machine: dict[str, list[tuple[Run, pd.DataFrame]]] = {}
    for run, frame in zip(runs, frames, strict=True):
        if is_laboratory(frame):
            by_machine.setdefault(run.about.environment.machine or "unknown machine", []).append((run, frame))
    studies = []
    for machine, members in by_machine.items():
        rows = laboratory_rows(pd.concat([frame for _, frame in members]))
        is_native = BASELINE not in set(rows["planner"]) and f"{BASELINE}{NATIVE}" in set(rows["planner"])
        if is_native:
            rows["planner"] = rows["planner"].str.removesuffix(NATIVE)
        studies.append(Study(machine, [run for run, _ in members], rows, is_native))
    return studies
