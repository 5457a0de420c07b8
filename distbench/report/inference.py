"""Forward passes alone: percentiles of their latency, throughput, and what their cache takes; one row a variant."""

from functools import partial
from typing import TYPE_CHECKING

from distbench.records.dataframe import Row, records_of
from distbench.records.launches import FORWARD_ONLY
from distbench.records.run_file import AGAIN
from distbench.report.steps import MAX_ROWS, RESERVED, about_memory, place_text, rate_text, speedup_text, steps_of
from distbench.show import units
from distbench.show.blocks import Table, TableColumn, TableColumns, capped, table_of
from distbench.statistics.intervals import MIN_FOR_PERCENTILE
from distbench.statistics.pass_comparison import MIN_PASSES
from distbench.statistics.verdicts import WITHIN_NOISE

if TYPE_CHECKING:
    import pandas as pd

PERCENTS = tuple(MIN_FOR_PERCENTILE)
TAILS = PERCENTS[1:]
MORE = "measure with --passes"  # each of them has one at least


def percentile_s(row: Row, percent: int) -> float:
    """A percentile of a row's samples, seconds; nan where they are too few to know it, or means of several passes."""
    is_single = percent == PERCENTS[0] or row["pipelined"] == 1
    return float(row[f"p{percent}_s"]) if is_single else float("nan")


def num_slower(row: Row, percent: int) -> int:
    """How many of a row's samples lie beyond its percentile."""
    return int(row["num_samples"]) * (100 - percent) // 100


def _tail_name(percent: int) -> str:
    return f"p{percent} (slower)"


def _tail_text(percent: int, row: Row) -> str:
    seconds = percentile_s(row, percent)
    return f"{units.time_text(seconds)} ({num_slower(row, percent)})" if units.known(seconds) else units.NOTHING


LATENCIES: TableColumns = (
    ("<variant", lambda row: str(row["variant"])),
    ("p50", lambda row: units.time_text(percentile_s(row, PERCENTS[0]))),
    *((_tail_name(percent), partial(_tail_text, percent)) for percent in TAILS),
    ("samples", lambda row: units.whole_text(row["num_samples"])),
    ("tokens/s", lambda row: units.count_text(row["tokens_per_s"])),
    ("<speed-up, 95 % CI", speedup_text),
    ("<verdict", lambda row: str(row["verdict"])),
)
CHECKS: TableColumns = (
    ("<variant", lambda row: str(row["variant"])),
    ("KV cache", lambda row: units.size_text(row["cache_bytes"])),
    ("peak memory", lambda row: units.size_text(row["peak_bytes"])),
    ("predicted", lambda row: units.size_text(row["predicted_peak_bytes"])),
    ("<at", place_text),
    ("output error", lambda row: units.error_text(row["output_rel_error"])),
    ("<stopped by", lambda row: units.word_text(row["stop_reason"])),
)


def forward_rows(frame: "pd.DataFrame") -> list[Row]:
    """The forward passes that were measured and right, as `steps_of` gives them."""
    return _forward_only(steps_of(frame))


def _forward_only(measured: "pd.DataFrame") -> list[Row]:
    rows = records_of(measured[measured["mode"] == FORWARD_ONLY])
    return rows


def tables(frame: "pd.DataFrame", full: bool = True) -> list[Table]:
    """What one run's forward passes take; nothing when there are none.

    Where not `full`, variants within noise are counted alone, and whether outputs were right is left out.
    """
    measured = steps_of(frame)
    rows = _forward_only(measured)
    if not rows:
        return []
    told = [row for row in rows if full or row["verdict"] != WITHIN_NOISE]
    notes = [*_about_percentiles(rows), *measured.attrs["told"]]
    if num_left_out := len(rows) - len(told):
        notes.insert(0, f"{num_left_out} more {WITHIN_NOISE} of what they are held against: --full lists them")
    optional = ("samples", *map(_tail_name, TAILS), "tokens/s", "samples/s")
    unknown = [
        _tail_name(percent) for percent in TAILS if not any(units.known(percentile_s(row, percent)) for row in rows)
    ]
    columns = [column for column in LATENCIES if column[0] not in unknown]
    columns = columns if any(units.known(row["num_tokens"]) for row in rows) else [*map(_in_samples, columns)]
    times = table_of("latency of a forward pass", columns, told, notes, (), optional)
    return [capped(times, MAX_ROWS), *([capped(_checks(rows), MAX_ROWS)] if full else [])]


def _in_samples(column: TableColumn) -> TableColumn:
    """The column of throughput where no row says how many tokens it has; any other as it is."""
    return ("samples/s", lambda row: units.count_text(row["samples_per_s"])) if column[0] == "tokens/s" else column


def _about_percentiles(rows: list[Row]) -> list[str]:
    notes = [
        "a sample is one forward pass on its slowest rank; percentiles are of all samples (in brackets: those slower)"
    ]
    if any(row["pipelined"] != 1 for row in rows):
        return [*notes, "--pipelined: a sample is a mean of several forward passes, which tells no p90 and no p99"]
    for percent in PERCENTS:
        fewest = min(int(row["num_samples"]) for row in rows)
        if any(not units.known(percentile_s(row, percent)) for row in rows):
            least = MIN_FOR_PERCENTILE[percent]
            notes.append(f"p{percent} takes {least} samples, a row here has {fewest}: {MORE} {max(least, MIN_PASSES)}")
    return notes


def _checks(rows: list[Row]) -> Table:
    columns = list(CHECKS)
    if any(units.known(row["peak_reserved_bytes"]) for row in rows):
        columns.insert(3, RESERVED)
    notes = [
        "KV cache is what a rank keeps of keys and values, the rank that keeps most; peak memory has it too",
        *about_memory(rows),
        "errors are of the logits, relative to the largest one on one device",
    ]
    optional = ("stopped by", "reserved", "at", "predicted")
    return table_of("memory, and agreement with one device", columns, rows, notes, (), optional)


def latency_lines(frame: "pd.DataFrame") -> list[str]:
    """The median of each variant, and what it gives a second, in one line."""
    rows = [row for row in forward_rows(frame) if not str(row["variant"]).endswith(AGAIN)]
    listed = [f"{row['variant']} {units.brief_time_text(row['median_s'])}, {rate_text(row)}" for row in rows]
    return [f"median latency: {'; '.join(listed)}"] if listed else []
