"""Collectives: bandwidth per mesh dim, op, dtype and size."""

from typing import TYPE_CHECKING

from distbench.records.dataframe import Row, measured_of, records_of
from distbench.show import units
from distbench.show.blocks import Table, TableColumns, capped, changes_in, table_of

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 100
# How a footnote names the collective itself, as against the function that was called.
OWN_NAMES = {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "all_to_all": "all-to-all"}


def _op_text(row: Row) -> str:
    runs_as_another = isinstance(row["backend_op"], str) and row["backend_op"] != row["op"]
    return str(row["op"]) + ("^" if runs_as_another else "")


# What COLUMNS reads of a frame that has a hundred.
SHOWN = (
    *("op", "backend_op", "dtype", "payload_bytes", "median_s", "q1_s", "q3_s", "p95_s"),
    *("algbw_gb_per_s", "busbw_gb_per_s"),
)
COLUMNS: TableColumns = (
    ("<op", _op_text),
    ("<dtype", lambda row: units.word_text(row["dtype"])),
    ("size", lambda row: units.size_text(row["payload_bytes"])),
    ("median", lambda row: units.time_text(row["median_s"])),
    (f"<{units.QUARTILES}", units.quartiles_text),
    ("p95", lambda row: units.time_text(row["p95_s"])),
    ("algbw GB/s", lambda row: units.bandwidth_text(row["algbw_gb_per_s"])),
    ("busbw GB/s", lambda row: units.bandwidth_text(row["busbw_gb_per_s"])),
)


def collectives_of(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The collectives measured and found right, ordered by mesh dim (in file order), op, dtype and size.

    Added: `busbw_low_gb_per_s` and `busbw_high_gb_per_s`, busbw at the slow and the fast quartile.
    """
    kept = measured_of(frame, "collective")
    kept[["mesh_dim", "op"]] = kept[["mesh_dim", "op"]].fillna("unknown")
    for end, slowness in (("low", "q3"), ("high", "q1")):
        kept[f"busbw_{end}_gb_per_s"] = kept["busbw_gb_per_s"] * kept["median_s"] / kept[f"{slowness}_s"]
    kept["mesh_dim_rank"] = kept["mesh_dim"].factorize()[0]
    return kept.sort_values(["mesh_dim_rank", "op", "dtype", "payload_bytes"], kind="stable")


def tables(frame: "pd.DataFrame") -> list[Table]:
    """One table a mesh dim, of one run's frame."""
    measured = collectives_of(frame)
    return [_table(str(mesh_dim), of_dim) for mesh_dim, of_dim in measured.groupby("mesh_dim", sort=False)]


def _table(mesh_dim: str, measured: "pd.DataFrame") -> Table:
    backends = "/".join(measured["backend"].dropna().unique()) or "unknown backend"
    sizes = group_sizes_text(measured) or "an unknown number of"
    title = f"mesh dim {mesh_dim}: groups of {sizes} ranks over {backends}"
    breaks = changes_in(measured["op"].tolist())
    if len(breaks) + 1 == len(measured):
        breaks = []
    notes = [
        f"^ {op} runs as {backend_op} on {backend}: its busbw is not {OWN_NAMES.get(op, op)}'s own"
        for op, backend_op, backend in run_as_another(measured)
    ]
    rows = records_of(measured[list(SHOWN)])
    optional = ("p95", units.QUARTILES, "algbw GB/s", "dtype")
    return capped(table_of(title, COLUMNS, rows, notes + units.p95_notes(rows), breaks, optional), MAX_ROWS)


def group_sizes_text(measured: "pd.DataFrame") -> str:
    """Ranks in a group, "2/4" where groups differ; empty where nobody knows."""
    return "/".join(units.whole_text(size) for size in measured["group_size"].dropna().unique())


def run_as_another(measured: "pd.DataFrame") -> list[tuple[str, str, str]]:
    """(op, what the backend runs for it, backend) where the two differ, each once."""
    other = measured[measured["backend_op"].notna() & (measured["backend_op"] != measured["op"])]
    found = other[["op", "backend_op", "backend"]].drop_duplicates()
    return list(found.itertuples(index=False, name=None))
