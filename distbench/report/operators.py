"""Operators on DTensors, with their redistributions by each planner, and users' calls."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from distbench.records.dataframe import Row, measured_of, records_of
from distbench.report.section_protocol import MAX_NAMED, ReportedRun, Section
from distbench.show.blocks import Table, TableColumns, capped, changes_in, table_of
from distbench.show.terminal import without_shared
from distbench.show.units import (
    NOTHING,
    brief_time_text,
    known,
    p95_notes,
    size_text,
    spread_of,
    time_text,
    whole_text,
    word_text,
)
from distbench.spec.placements import BASELINE
from distbench.spec.printable_text import listed

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 100
KEYS = ("op", "dtype", "source")
PAID = ("result", "gradients", "forward_pays", "backward_pays")


def _payment_text(row: Row) -> str:
    parts = [f"{phase}: {row[f'{phase}_pays']}" for phase in ("forward", "backward") if row[f"{phase}_pays"]]
    return "; ".join(parts) or "nothing"


OPERATOR_COLUMNS: TableColumns = (
    ("<operator", lambda row: word_text(row["op"])),
    ("<inputs", lambda row: word_text(row["source"])),
    ("<result", lambda row: word_text(row["result"])),
    ("<gradients", lambda row: word_text(row["gradients"]) or NOTHING),
    ("implicit", lambda row: whole_text(row["num_implicit"])),
    ("sent", lambda row: size_text(row["wire_bytes"])),
)


def _operators_of(frame: "pd.DataFrame") -> list[Row]:
    """One row per operator and placements of its inputs, in file order. Planners with the same communication have one
    row.

    The added field `times` maps a planner's name to a row of the frame.
    """
    by_key: dict[tuple[object, ...], Row] = {}
    records = records_of(measured_of(frame, "operator"))
    for record in sorted(records, key=lambda record: record["planner"] != BASELINE):
        key = tuple(record[name] for name in (*KEYS, *PAID))
        by_key.setdefault(key, {**record, "times": {}})["times"][record["planner"]] = record
    in_file_order = list(dict.fromkeys(map(_key, records)))
    return sorted(by_key.values(), key=lambda row: in_file_order.index(_key(row)))


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in KEYS)


def _operator_tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    rows = _operators_of(reported.frame)
    if not rows:
        return []
    planners = list(dict.fromkeys(name for row in rows for name in row["times"]))
    times: TableColumns = [(name, partial(_time_text, name)) for name in planners]
    notes = [
        "implicit: collectives of redistributions that no code requested, in forward and backward; sent: by one rank",
        "times are medians of forward and backward; a blank time means that the planner has another row",
    ]
    columns = (*OPERATOR_COLUMNS, *times, ("<pays", _payment_text))
    optional = ("gradients", *planners[1:], "implicit")
    table = table_of("operators on DTensors", columns, rows, notes, changes_in([row["op"] for row in rows]), optional)
    return [capped(replace(table, prose="pays"), MAX_ROWS)]


def _time_text(planner: str, row: Row) -> str:
    of_planner = row["times"].get(planner)
    return time_text(of_planner["median_s"]) if of_planner else ""


def _operator_headline(reported: ReportedRun) -> Iterator[str]:
    """The number of implicit redistributions, the largest communication, and differences between planners."""
    rows = _operators_of(reported.frame)
    if not rows:
        return
    num_placed = len(set(map(_key, rows)))
    implicit = [row for row in rows if known(row["num_implicit"]) and row["num_implicit"] > 0]
    line = f"{len(set(map(_key, implicit)))} of {num_placed} operators and placements redistribute implicitly"
    if implicit:
        most = max(implicit, key=lambda row: row["wire_bytes"])
        line += f"; {most['op']} of {most['source']} sends the most, {size_text(most['wire_bytes'])} per rank"
    yield line
    if otherwise := len(rows) - num_placed:
        yield f"planners communicate differently in {otherwise} of these"


SECTION = Section(_operator_headline, _operator_tables)


# Users' calls, with one row per call and variant.


def _name(row: Row) -> str:
    return str(row["id"]).removeprefix("call/")


def _call_headline(reported: ReportedRun) -> list[str]:
    """Each call's median."""
    rows = records_of(measured_of(reported.frame, "call"))
    names, _ = without_shared([*map(_name, rows)])
    times = [f"{name} {brief_time_text(row['median_s'])}" for name, row in zip(names, rows, strict=True)]
    return [f"time per call: {listed(times, MAX_NAMED)}"] if times else []


def _call_tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    rows = records_of(measured_of(reported.frame, "call"))
    if not rows:
        return []
    spread, spread_text = spread_of(rows)
    columns: TableColumns = (
        ("<call", _name),
        ("ranks", lambda row: whole_text(row["group_size"])),
        ("median", lambda row: time_text(row["median_s"])),
        (f"<{spread}", spread_text),
        ("p95", lambda row: time_text(row["p95_s"])),
        ("samples", lambda row: whole_text(row["num_samples"])),
        ("<stopped by", lambda row: word_text(row["stop_reason"])),
    )
    counters = {case["case"]["id"]: case.get("counters") or {} for case in reported.run.cases}
    per_rank = {row["id"]: counters[row["id"]].get("per_rank") or {} for row in rows}
    names = list(dict.fromkeys(name for of_ranks in per_rank.values() for name in of_ranks))
    imbalances: TableColumns = [(name, partial(_imbalance_text, per_rank, name)) for name in names]
    notes = p95_notes(rows)
    if names:
        notes = [f"{', '.join(names)}: the largest rank's over the mean of all ranks", *notes]
    optional = ("stopped by", "samples", "ranks", "p95", spread)
    return [capped(table_of("calls", (*columns[:1], *imbalances, *columns[1:]), rows, notes, (), optional), MAX_ROWS)]


def _imbalance_text(per_rank: Mapping[str, Mapping[str, Sequence[float]]], name: str, row: Row) -> str:
    of_ranks = per_rank[row["id"]].get(name)
    return f"{max(of_ranks) * len(of_ranks) / sum(of_ranks):.3f}x" if of_ranks and sum(of_ranks) else NOTHING


USER_CALLS = Section(_call_headline, _call_tables)
