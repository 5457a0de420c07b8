"""Operators on DTensors: what each one pays under placements of its inputs, and each planner's time beside it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from distbench.records.dataframe import Row, measured_of, records_of
from distbench.report.section_protocol import ReportedRun, Section
from distbench.show.blocks import Table, TableColumns, capped, changes_in, table_of
from distbench.show.units import NOTHING, known, size_text, time_text, whole_text, word_text
from distbench.spec.placements import BASELINE

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 100
KEYS = ("op", "dtype", "source")
PAID = ("result", "gradients", "forward_pays", "backward_pays")
COLUMNS: TableColumns = (
    ("<operator", lambda row: word_text(row["op"])),
    ("<inputs", lambda row: word_text(row["source"])),
    ("<result", lambda row: word_text(row["result"])),
    ("<gradients", lambda row: word_text(row["gradients"]) or NOTHING),
    ("unasked", lambda row: whole_text(row["num_implicit"])),
    ("sent", lambda row: size_text(row["wire_bytes"])),
)


def operators_of(frame: "pd.DataFrame") -> list[Row]:
    """One row an operator and placements of its inputs, in file order; planners that pay the same share one.

    Added: `times`, planner's name to its row of the frame.
    """
    by_key: dict[tuple[object, ...], Row] = {}
    records = records_of(measured_of(frame, "operator"))
    for record in sorted(records, key=lambda record: record["planner"] != BASELINE):
        key = tuple(record[name] for name in (*KEYS, *PAID))
        by_key.setdefault(key, {**record, "times": {}})["times"][record["planner"]] = record
    first = {tuple(record[name] for name in KEYS): place for place, record in reversed([*enumerate(records)])}
    return sorted(by_key.values(), key=lambda row: first[tuple(row[name] for name in KEYS)])


def tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    """What one run's operators pay."""
    rows = operators_of(reported.frame)
    if not rows:
        return []
    planners = list(dict.fromkeys(name for row in rows for name in row["times"]))
    times: TableColumns = [(name, partial(_time_text, name)) for name in planners]
    notes = [
        "unasked: collectives, forward and backward, of redistributions that nobody asked for; sent: by one rank",
        "a time is the median of forward and backward; where it is blank, that planner pays otherwise: another row",
    ]
    columns = (*COLUMNS, *times, ("<pays", _payment_text))
    optional = ("gradients", *planners[1:], "unasked")
    table = table_of("operators on DTensors", columns, rows, notes, changes_in([row["op"] for row in rows]), optional)
    return [capped(replace(table, prose="pays"), MAX_ROWS)]


def _time_text(planner: str, row: Row) -> str:
    of_planner = row["times"].get(planner)
    return time_text(of_planner["median_s"]) if of_planner else ""


def _payment_text(row: Row) -> str:
    parts = [f"{phase}: {row[f'{phase}_pays']}" for phase in ("forward", "backward") if row[f"{phase}_pays"]]
    return "; ".join(parts) or "nothing"


def headline(reported: ReportedRun) -> Iterator[str]:
    """How many redistribute unasked, which of them sends most, and where planners pay otherwise."""
    rows = operators_of(reported.frame)
    placed = dict.fromkeys(tuple(row[name] for name in KEYS) for row in rows)
    unasked = [row for row in rows if known(row["num_implicit"]) and row["num_implicit"] > 0]
    if not rows:
        return
    count = len({tuple(row[name] for name in KEYS) for row in unasked})
    line = f"{count} of {len(placed)} operators and placements redistribute unasked"
    if unasked:
        most = max(unasked, key=lambda row: row["wire_bytes"])
        line += f"; most is sent by {most['op']} of {most['source']}: {size_text(most['wire_bytes'])} a rank"
    yield line
    if otherwise := len(rows) - len(placed):
        yield f"planners pay otherwise on {otherwise} of them"


SECTION = Section(headline, tables)
