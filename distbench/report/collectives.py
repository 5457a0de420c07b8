"""Collectives: bandwidth per mesh dim, op, dtype and size."""

from typing import TYPE_CHECKING

from distbench.render.blocks import Table, capped
from distbench.render.units import bandwidth_text, size_text, time_ci_text, time_text, whole_text
from distbench.runs.frame import Row

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 100
# How a footnote names the collective itself, as against the function that was called.
OWN_NAMES = {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "all_to_all": "all-to-all"}
COLUMNS = ("<op", "<dtype", "size", "median", "<95 % CI", "p95", "algbw GB/s", "busbw GB/s")


def collectives_of(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The collectives measured and found right, ordered by mesh dim (in file order), op, dtype and size.

    Added: `busbw_low_gb_per_s` and `busbw_high_gb_per_s`, busbw at the slow and the fast end of the median's 95 % CI.
    """
    kept = frame[(frame["kind"] == "collective") & (frame["status"] == "ok") & frame["median_s"].notna()].copy()
    kept["mesh_dim"] = kept["mesh_dim"].fillna("unknown")
    kept["op"] = kept["op"].fillna("unknown")
    kept["busbw_low_gb_per_s"] = kept["busbw_gb_per_s"] * kept["median_s"] / kept["ci_high_s"]
    kept["busbw_high_gb_per_s"] = kept["busbw_gb_per_s"] * kept["median_s"] / kept["ci_low_s"]
    ranks = {name: rank for rank, name in enumerate(kept["mesh_dim"].unique())}
    kept["mesh_dim_rank"] = kept["mesh_dim"].map(ranks)
    return kept.sort_values(["mesh_dim_rank", "op", "dtype", "payload_bytes"], kind="stable")


def tables(frame: "pd.DataFrame") -> list[Table]:
    """One table a mesh dim, of one run's frame."""
    measured = collectives_of(frame)
    return [_table(str(mesh_dim), of_dim) for mesh_dim, of_dim in measured.groupby("mesh_dim", sort=False)]


def _table(mesh_dim: str, measured: "pd.DataFrame") -> Table:
    shown: list[Row] = measured.head(MAX_ROWS).to_dict("records")
    sizes = "/".join(whole_text(size) for size in measured["group_size"].dropna().unique()) or "an unknown number of"
    backends = "/".join(measured["backend"].dropna().unique()) or "unknown backend"
    title = f"mesh dim {mesh_dim}: groups of {sizes} ranks over {backends}"
    breaks = frozenset(index for index in range(1, len(shown)) if shown[index]["op"] != shown[index - 1]["op"])
    if len(breaks) + 1 == len(shown):
        breaks = frozenset()
    table = Table(title, COLUMNS, [_row(record) for record in shown], footnotes(measured), breaks)
    return capped(table, len(measured), MAX_ROWS)


def _row(record: Row) -> tuple[str, ...]:
    return (
        record["op"] + ("^" if _runs_as_another(record) else ""),
        record["dtype"] if isinstance(record["dtype"], str) else "-",
        size_text(record["payload_bytes"]),
        time_text(record["median_s"]),
        time_ci_text(record["median_s"], record["ci_low_s"], record["ci_high_s"], record["num_samples"]),
        time_text(record["p95_s"]),
        bandwidth_text(record["algbw_gb_per_s"]),
        bandwidth_text(record["busbw_gb_per_s"]),
    )


def _runs_as_another(record: Row) -> bool:
    return isinstance(record["backend_op"], str) and bool(record["backend_op"] != record["op"])


def footnotes(measured: "pd.DataFrame") -> list[str]:
    """Sentences on ops that the backend runs as another, and on intervals from too few samples."""
    other = measured[measured["backend_op"].notna() & (measured["backend_op"] != measured["op"])]
    notes = [
        f"^ {op} runs as {backend_op} on {backend}: its busbw is not {OWN_NAMES.get(op, op)}'s own"
        for op, backend_op, backend in other[["op", "backend_op", "backend"]].drop_duplicates().itertuples(index=False)
    ]
    if (measured["num_samples"] < 6).any():
        notes.append("* fewer than 6 samples: the interval is their whole range and does not reach 95 %")
    return notes
