"""How a report leaves: text, Markdown, CSV or JSON on standard output."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distbench.records.dataframe import PASSES
from distbench.show.blocks import Block, Lines
from distbench.show.terminal import shown
from distbench.spec.printable_text import cell

if TYPE_CHECKING:
    import pandas as pd

DATA_FORMS = ("csv", "json")
FORMS = ("table", "markdown", *DATA_FORMS)


class Rendered(NamedTuple):
    """What to print, and sentences on what was left out or written, for standard error."""

    text: str
    warnings: list[str]


def rendered(
    form: str,
    data: Callable[[], "pd.DataFrame"],
    blocks: Callable[[], Sequence[Block]],
    warnings: Sequence[str],
    plots: Sequence[Path] = (),
    messages: Sequence[str] = (),
) -> Rendered:
    """A report in one of FORMS: `data` for DATA_FORMS, `blocks` for the others; `plots` are files that were drawn."""
    if form in DATA_FORMS:
        # Standard output is data here.
        return Rendered(data_text(data(), form), [*warnings, *(f"plot written: {path}" for path in plots), *messages])
    # The folder apart from the names: a whole path may be longer than a line.
    names = (f"plots written to {plots[0].parent}:", *(f"  {path.name}" for path in plots)) if plots else ()
    return Rendered(shown([*blocks(), Lines(names)], form), [*warnings, *messages])


def data_text(frame: "pd.DataFrame", form: str) -> str:
    """Every row, and every column but arrays; `form` is "csv" or "json", the latter with null for what JSON lacks."""
    frame = frame.drop(columns=PASSES, errors="ignore")
    if form == "csv":
        safe = frame.rename(columns=cell)
        for name in [name for name, column in safe.items() if column.dtype.kind == "O"]:
            safe[name] = [*map(cell, safe[name])]
        return str(safe.to_csv(index=False)).rstrip("\n")
    if frame.empty:
        return "[]"
    # A name's own % signs must survive the filling in of values.
    names = [json.dumps(str(name)).replace("%", "%%") for name in frame.columns]
    record = "{" + ", ".join(f"{name}: %s" for name in names) + "}"
    columns = [_json_cells(frame[name]) for name in frame.columns]
    return "[\n" + ",\n".join(record % row for row in zip(*columns, strict=True)) + "\n]"


def _json_cells(column: "pd.Series[Any]") -> list[str]:
    """Each value as JSON. By column, which is faster."""
    import numpy as np

    missing = column.isna() | column.isin([np.inf, -np.inf]) if column.dtype.kind == "f" else column.isna()
    values = column.to_numpy(object, copy=True)
    values[missing.to_numpy(bool)] = None
    # A line break between values is safe to cut at, for within one JSON writes it as backslash n.
    return json.dumps(values.tolist(), separators=("\n", ":"), allow_nan=False)[1:-1].split("\n")
