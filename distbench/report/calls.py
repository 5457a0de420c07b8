"""Users' own calls: one row a call and variant."""

from typing import TYPE_CHECKING

from distbench.records.dataframe import measured_of, records_of
from distbench.show.blocks import Table, TableColumns, capped, table_of
from distbench.show.units import p95_notes, spread_of, time_text, whole_text, word_text

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 100
COLUMNS: TableColumns = (
    ("<call", lambda row: str(row["id"]).removeprefix("call/")),
    ("ranks", lambda row: whole_text(row["group_size"])),
    ("median", lambda row: time_text(row["median_s"])),
    ("p95", lambda row: time_text(row["p95_s"])),
    ("samples", lambda row: whole_text(row["num_samples"])),
    ("<stopped by", lambda row: word_text(row["stop_reason"])),
)


def tables(frame: "pd.DataFrame") -> list[Table]:
    """What one run's calls cost, in file order; nothing when there are none."""
    measured = measured_of(frame, "call")
    if measured.empty:
        return []
    rows = records_of(measured)
    spread, text = spread_of(rows)
    columns = (*COLUMNS[:3], (f"<{spread}", text), *COLUMNS[3:])
    optional = ("stopped by", "samples", "ranks", "p95", spread)
    return [capped(table_of("calls", columns, rows, p95_notes(rows), (), optional), MAX_ROWS)]
