"""Redistributions as one column a pair and one row a planner, so that planners are compared pair by pair."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distbench.compare.intervals import Floats
from distbench.compare.passes import as_table
from distbench.laboratory.failures import PAIR_KEY, sizes_in
from distbench.render.units import size_text
from distbench.runs.frame import PASSES, measured_of
from distbench.runs.run_file import AGAIN, DTYPE_BYTES
from distbench.spec.planner_names import NATIVE, VARIANTS

if TYPE_CHECKING:
    import pandas as pd

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
