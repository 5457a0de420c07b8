"""Cases summarised by columns of the frame."""

from typing import TYPE_CHECKING

from distbench.compare.intervals import geometric_mean
from distbench.render.blocks import Table, TableColumns, capped, key_columns, table_of
from distbench.render.units import time_text
from distbench.runs.frame import records_of
from distbench.spec.errors import UserError, nearest

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 200
STATISTICS = ("num_cases", "num_ok", "geometric_mean_s", "min_s", "max_s")


def grouped(frame: "pd.DataFrame", group_by: tuple[str, ...]) -> "pd.DataFrame":
    """One row a group, in order of first appearance: the columns asked for, then STATISTICS.

    Means, minima and maxima are of the medians of the group's ok cases, in seconds: a wrong result's time says nothing.
    """
    import pandas as pd

    for name in group_by:
        if name not in frame.columns:
            raise UserError(f"--group-by {name}: no such column ({nearest(name, map(str, frame.columns))})")
    by = list(dict.fromkeys(group_by))
    is_ok = frame["status"] == "ok"
    whole = frame[by].assign(_median_s=frame["median_s"].where(is_ok), _ok=is_ok)
    found = whole.groupby(by, sort=False, dropna=False).agg(
        num_cases=("_ok", "size"),
        num_ok=("_ok", "sum"),
        geometric_mean_s=("_median_s", lambda values: geometric_mean(values.to_numpy(float))),
        min_s=("_median_s", "min"),
        max_s=("_median_s", "max"),
    )
    # A statistic wins over a column of the same name, such as min_s, so that the result has each name once.
    keys = found.index.to_frame(index=False)
    keys.columns = pd.Index([f"{name}_group" if name in STATISTICS else name for name in by])
    return pd.concat([keys, found.reset_index(drop=True)], axis=1)


def table(groups: "pd.DataFrame") -> Table:
    """The groups as a table."""
    keys = [str(name) for name in groups.columns if name not in STATISTICS]
    columns: TableColumns = [
        *key_columns(keys),
        ("cases", lambda row: str(row["num_cases"])),
        ("ok", lambda row: str(row["num_ok"])),
        ("geometric mean", lambda row: time_text(row["geometric_mean_s"])),
        ("min", lambda row: time_text(row["min_s"])),
        ("max", lambda row: time_text(row["max_s"])),
    ]
    title, notes = f"by {', '.join(keys)}", ["times are of the ok cases' medians"]
    return capped(table_of(title, columns, records_of(groups), notes), MAX_ROWS)
