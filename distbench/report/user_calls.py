"""Users' own calls: one row a call and variant."""

from distbench.records.dataframe import Row, measured_of, records_of
from distbench.report.section_protocol import MAX_NAMED, ReportedRun, Section
from distbench.show.blocks import Table, TableColumns, capped, table_of
from distbench.show.terminal import without_shared
from distbench.show.units import brief_time_text, p95_notes, spread_of, time_text, whole_text, word_text
from distbench.spec.printable_text import listed

MAX_ROWS = 100


def _name(row: Row) -> str:
    return str(row["id"]).removeprefix("call/")


COLUMNS: TableColumns = (
    ("<call", _name),
    ("ranks", lambda row: whole_text(row["group_size"])),
    ("median", lambda row: time_text(row["median_s"])),
    ("p95", lambda row: time_text(row["p95_s"])),
    ("samples", lambda row: whole_text(row["num_samples"])),
    ("<stopped by", lambda row: word_text(row["stop_reason"])),
)


def headline(reported: ReportedRun) -> list[str]:
    """Each call's median."""
    rows = records_of(measured_of(reported.frame, "call"))
    names, _ = without_shared([*map(_name, rows)])
    times = [f"{name} {brief_time_text(row['median_s'])}" for name, row in zip(names, rows, strict=True)]
    return [f"a call takes {listed(times, MAX_NAMED)}"] if times else []


def tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    """What one run's calls cost, in file order."""
    rows = records_of(measured_of(reported.frame, "call"))
    if not rows:
        return []
    spread, text = spread_of(rows)
    columns = (*COLUMNS[:3], (f"<{spread}", text), *COLUMNS[3:])
    optional = ("stopped by", "samples", "ranks", "p95", spread)
    return [capped(table_of("calls", columns, rows, p95_notes(rows), (), optional), MAX_ROWS)]


SECTION = Section(headline, tables)
