"""A frame as data: CSV or JSON."""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


def data_text(frame: "pd.DataFrame", form: str) -> str:
    """Every row, and every column but arrays; `form` is "csv" or "json", the latter with null for what JSON lacks."""
    frame = frame[[name for name in frame.columns if not any(isinstance(value, np.ndarray) for value in frame[name])]]
    if form == "csv":
        return str(frame.to_csv(index=False)).rstrip("\n")
    if frame.empty:
        return "[]"
    # A name's own % signs must survive the filling in of values.
    names = [json.dumps(str(name)).replace("%", "%%") for name in frame.columns]
    record = "{" + ", ".join(f"{name}: %s" for name in names) + "}"
    columns = [_json_cells(frame[name]) for name in frame.columns]
    return "[\n" + ",\n".join(record % row for row in zip(*columns, strict=True)) + "\n]"


def _json_cells(column: "pd.Series[Any]") -> list[str]:
    """Each value as JSON. By column, which is faster."""
    missing = column.isna() | column.isin([np.inf, -np.inf]) if column.dtype.kind == "f" else column.isna()
    values = column.to_numpy(object, copy=True)
    values[missing.to_numpy(bool)] = None
    # A line break between values is safe to cut at, for within one JSON writes it as backslash n.
    return json.dumps(values.tolist(), separators=("\n", ":"), allow_nan=False)[1:-1].split("\n")
