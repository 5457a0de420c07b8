"""Users' own calls: one row a call and variant."""

from typing import TYPE_CHECKING

from distbench.compare.intervals import MIN_SAMPLES_FOR_CI
from distbench.render.blocks import Table, capped
from distbench.render.units import time_ci_text, time_text, whole_text
from distbench.runs.frame import Row

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 100
COLUMNS = ("<call", "ranks", "median", "<95 % CI", "p95", "samples", "<stopped by")


def tables(frame: "pd.DataFrame") -> list[Table]:
    """What one run's calls cost, in file order; nothing when there are none."""
    kept = frame[(frame["kind"] == "call") & (frame["status"] == "ok") & frame["median_s"].notna()]
    if kept.empty:
        return []
    shown: list[Row] = kept.head(MAX_ROWS).to_dict("records")
    notes = ["* fewer than 6 samples: the interval is their whole range and does not reach 95 %"]
    few = any(record["num_samples"] < MIN_SAMPLES_FOR_CI for record in shown)
    table = Table("calls", COLUMNS, [_row(record) for record in shown], notes if few else [])
    return [capped(table, len(kept), MAX_ROWS)]


def _row(record: Row) -> tuple[str, ...]:
    return (
        str(record["id"]).removeprefix("call/"),
        whole_text(record["group_size"]),
        time_text(record["median_s"]),
        time_ci_text(record["median_s"], record["ci_low_s"], record["ci_high_s"], record["num_samples"]),
        time_text(record["p95_s"]),
        whole_text(record["num_samples"]),
        record["stop_reason"] if isinstance(record["stop_reason"], str) else "-",
    )
