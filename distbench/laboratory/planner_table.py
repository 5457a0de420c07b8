"""The board: redistributions as one row a pair and one column a planner, so that planners are compared pair by pair."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distbench.compare.intervals import MIN_CONTROLS, MIN_SAMPLES_FOR_CI, Floats, Interval, ratio_of, widening_for
from distbench.laboratory.failures import PAIR_KEY, sizes_in
from distbench.render.units import size_text
from distbench.runs.run_file import DTYPE_BYTES
from distbench.spec.planner_names import NATIVE, VARIANTS

if TYPE_CHECKING:
    import pandas as pd

Bools = NDArray[np.bool_]
MAX_EXACT_SIZES = 6
SIZE_CLASSES = (
    (1 << 12, "under 4 KiB"),
    (1 << 16, "4 to 64 KiB"),
    (1 << 20, "64 KiB to 1 MiB"),
    (1 << 24, "1 to 16 MiB"),
)
LARGEST_CLASS = "16 MiB and more"


@dataclass(frozen=True)
class PlannerTable:
    """What was measured and right, by pair (rows, in file order) and planner.

    Args:
        pairs: one row a pair: PAIR_KEY, `payload_bytes`, `size` (its class, as text), `bound_bytes` (nan for none).
        planners: those that were run, in the order of VARIANTS, others behind.
        times: planner to its medians with their intervals, seconds; nan where it has no right result.
        enough: planner to whether its interval rests on enough samples.
        paths: planner to its paths as text; "" where there is none.
        runs_as: planner to path and executed collectives: two that agree in it cannot differ in time.
        numbers: column name to planner to values: `num_collectives`, `sent_bytes`, `predicted_s`, `planning_s`.
    """

    pairs: "pd.DataFrame"
    planners: tuple[str, ...]
    times: dict[str, Interval]
    enough: dict[str, Bools]
    paths: dict[str, NDArray[Any]]
    runs_as: dict[str, NDArray[Any]]
    numbers: dict[str, dict[str, Floats]]

    def has(self, planner: str) -> Bools:
        """Which pairs it was measured on, and right."""
        return np.isfinite(self.times[planner].center)

    def same(self, planner: str, other: str) -> Bools:
        """Which pairs the two must take the same time for: same path, same collectives executed."""
        return (self.runs_as[planner] == self.runs_as[other]) & self.has(planner) & self.has(other)

    def communicates(self) -> Bools:
        """Which pairs some planner needs communication for; the others are trivial."""
        counts = np.array([self.numbers["num_collectives"][planner] for planner in self.planners])
        return np.asarray(np.nan_to_num(counts).max(axis=0) > 0) if len(self.planners) else np.zeros(0, bool)

    def sizes(self) -> list[str]:
        """The size classes, ascending."""
        smallest = self.pairs.groupby("size", sort=False)["payload_bytes"].min()
        return [str(size) for size in smallest.sort_values(kind="stable").index]

    def groups(self) -> list[tuple[str, str, Bools]]:
        """(mesh, size class, which pairs) of each mesh and size, ascending."""
        labels = self.pairs[["mesh_shape", "size"]].apply(tuple, axis=1)
        firsts = self.pairs.assign(label=labels).groupby("label", sort=False)["payload_bytes"].min()
        ordered = sorted(firsts.index, key=lambda label: (sizes_in(label[0]), firsts[label]))
        return [(label[0], label[1], (labels == label).to_numpy(bool)) for label in ordered]


def laboratory_rows(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The redistributions of a frame, missing texts as "", sizes and meshes filled in from the rest of the row.

    What direct did in a run with native all-to-alls is direct's own: it never used DTensor's.
    """
    rows = frame[frame["kind"] == "redistribute"].copy()
    for name in ("mesh", "mesh_shape", "suite", "direction", "flattened", "source", "target", "dtype", "shape"):
        rows[name] = rows[name].fillna("")
    rows["planner"] = rows["planner"].fillna("").replace({f"direct{NATIVE}": "direct"})
    of_run = ["x".join(part.partition("=")[2] for part in mesh.split(",")) for mesh in rows["mesh"]]
    rows["mesh_shape"] = np.where(rows["mesh_shape"] == "", of_run, rows["mesh_shape"])
    numel = np.array([np.prod(sizes_in(shape)) if sizes_in(shape) else np.nan for shape in rows["shape"]], dtype=float)
    itemsize = rows["dtype"].map(DTYPE_BYTES).to_numpy(float)
    sizes = rows["payload_bytes"]
    rows["payload_bytes"] = sizes.where(sizes.notna(), numel * itemsize)
    return rows


def planner_table_of(rows: "pd.DataFrame") -> PlannerTable:
    """The board of some rows, as `laboratory_rows` gives them."""
    right = rows[(rows["status"] == "ok") & rows["median_s"].notna() & (rows["planner"] != "")]
    right = right.drop_duplicates([*PAIR_KEY, "planner"])
    # Pairs as numbers: ten text columns make a slow index.
    number = right.groupby(PAIR_KEY, sort=False).ngroup().to_numpy()
    pairs = right.groupby(PAIR_KEY, sort=False, as_index=False).agg(
        payload_bytes=("payload_bytes", "first"), bound_bytes=("lower_bound_bytes", "first")
    )
    pairs["size"] = size_classes(pairs["payload_bytes"].to_numpy(float))
    planners = _ordered(right["planner"].unique().tolist())
    places = {planner: np.flatnonzero((right["planner"] == planner).to_numpy(bool)) for planner in planners}

    def numbers(name: str) -> dict[str, Floats]:
        return {
            planner: _spread(right[name].to_numpy(float), place, number, len(pairs))
            for planner, place in places.items()
        }

    def texts(values: "pd.Series[Any]") -> dict[str, NDArray[Any]]:
        given = values.fillna("").to_numpy(object)
        return {planner: _spread_text(given, place, number, len(pairs)) for planner, place in places.items()}

    centers, lows, highs = (numbers(name) for name in ("median_s", "ci_low_s", "ci_high_s"))
    counts = numbers("num_samples")
    return PlannerTable(
        pairs=pairs,
        planners=planners,
        times={planner: Interval(centers[planner], lows[planner], highs[planner]) for planner in planners},
        enough={planner: np.nan_to_num(counts[planner]) >= MIN_SAMPLES_FOR_CI for planner in planners},
        paths=texts(right["path"]),
        runs_as=texts(right["path"].fillna("") + " | " + right["backend_op"].fillna("")),
        numbers={
            "num_collectives": numbers("num_collectives"),
            "sent_bytes": numbers("wire_bytes_executed"),
            "predicted_s": numbers("predicted_s"),
            "planning_s": numbers("planning_cold_s"),
        },
    )


def _ordered(names: Sequence[str]) -> tuple[str, ...]:
    known = [name for name in VARIANTS if name in set(names)]
    return (*known, *sorted(set(names) - set(known)))


def _spread(values: Floats, places: NDArray[Any], numbers: NDArray[Any], length: int) -> Floats:
    spread = np.full(length, np.nan)
    spread[numbers[places]] = values[places]
    return spread


def _spread_text(values: NDArray[Any], places: NDArray[Any], numbers: NDArray[Any], length: int) -> NDArray[Any]:
    spread = np.full(length, "", dtype=object)
    spread[numbers[places]] = values[places]
    return spread


def size_classes(sizes: Floats) -> list[str]:
    """Each size as text where there are few of them, else the name of its class (bytes)."""
    if len(np.unique(sizes)) <= MAX_EXACT_SIZES:
        return [size_text(size) for size in sizes.tolist()]
    return [next((name for limit, name in SIZE_CLASSES if size < limit), LARGEST_CLASS) for size in sizes.tolist()]


def ratio_to(planner_table: PlannerTable, planner: str, reference: Interval, widening: Floats) -> Interval:
    """A planner's time over a reference's, pair by pair, each interval widened by its own factor."""
    ratio = ratio_of(planner_table.times[planner], reference)
    low = ratio.center * (ratio.low / ratio.center) ** widening
    return Interval(ratio.center, low, ratio.center * (ratio.high / ratio.center) ** widening)


def widenings(planner_table: PlannerTable, baseline: str) -> Floats:
    """By what every pair's ratio intervals are widened, for them to hold where ratios are truly one.

    The controls are pairs on which a planner runs just what the baseline runs; those of one mesh and size are taken
    together over all planners, and all of the board where these are too few (`stats.widening_for`).
    """
    factors = np.ones(len(planner_table.pairs))
    if baseline not in planner_table.planners:
        return factors
    others = [planner for planner in planner_table.planners if planner != baseline]
    everything = _widening(planner_table, baseline, others, np.ones(len(planner_table.pairs), dtype=bool))
    for _, _, chosen in planner_table.groups():
        factors[chosen] = _widening(planner_table, baseline, others, chosen) or everything or 1.0
    return factors


def _widening(planner_table: PlannerTable, baseline: str, others: Sequence[str], chosen: Bools) -> float | None:
    """The factor from the controls among the chosen pairs; None where they are too few to tell."""
    ratios, controls = [], []
    for planner in others:
        ratio = ratio_of(planner_table.times[planner], planner_table.times[baseline])
        keep = (
            chosen
            & planner_table.same(planner, baseline)
            & planner_table.enough[planner]
            & planner_table.enough[baseline]
        )
        ratios.append(Interval(*(part[keep] for part in ratio)))
        controls.append(int(keep.sum()))
    if not ratios:
        return None
    pooled = Interval(*(np.concatenate([getattr(ratio, name) for ratio in ratios]) for name in Interval._fields))
    all_of_them = np.ones(sum(controls), dtype=bool)
    return widening_for(pooled, all_of_them) if sum(controls) >= MIN_CONTROLS else None
