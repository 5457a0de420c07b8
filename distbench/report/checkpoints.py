"""Saves and loads of a step's state by torch.distributed.checkpoint."""

from distbench.records.dataframe import Row, measured_of, records_of
from distbench.report.section_protocol import ReportedRun, Section
from distbench.show.blocks import Table, TableColumns, capped, table_of
from distbench.show.units import NOTHING, brief_time_text, known, size_text, spread_of, time_text, word_text

MAX_ROWS = 100


def _rows(reported: ReportedRun) -> list[Row]:
    return records_of(measured_of(reported.frame, "checkpoint"))


def _headline(reported: ReportedRun) -> list[str]:
    """The blocked and the total time of each way of saving."""
    saves = [row for row in _rows(reported) if known(row.get("blocked_s"))]
    times = [
        f"{row['op'].removeprefix('save ')} {brief_time_text(row['blocked_s'])} of {brief_time_text(row['median_s'])}"
        for row in saves
    ]
    return [f"save of {size_text(saves[0]['state_bytes'])} blocks the step for: {', '.join(times)}"] if saves else []


def _tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    rows = _rows(reported)
    if not rows:
        return []
    spread, spread_text = spread_of(rows)
    columns: TableColumns = (
        ("<checkpoint", lambda row: row["op"]),
        ("<variant", lambda row: word_text(row["variant"] or None)),
        ("<saved on", lambda row: row["source"]),
        ("<loaded on", lambda row: word_text(row["target"])),
        ("blocked", lambda row: time_text(row["blocked_s"]) if known(row.get("blocked_s")) else NOTHING),
        ("total", lambda row: time_text(row["median_s"])),
        (f"<{spread}", spread_text),
        ("files", lambda row: size_text(row["state_bytes"])),
        ("rate", lambda row: f"{size_text(row['state_bytes'] / row['median_s'])}/s"),
    )
    notes = [
        "blocked: until the save returns, on the slowest rank; total: until all files are written",
        "each case is checked: the loaded state is equal to the saved state to the bit",
    ]
    return [capped(table_of("checkpoints", columns, rows, notes, (), (spread, "rate"), ("<variant",)), MAX_ROWS)]


SECTION = Section(_headline, _tables)
