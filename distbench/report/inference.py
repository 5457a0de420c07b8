"""Forward passes alone: percentiles of their latency, throughput, and what their cache takes; one row a variant."""

import textwrap
from functools import partial
from typing import TYPE_CHECKING

from distbench.records.dataframe import Row, records_of
from distbench.records.launches import FORWARD_ONLY
from distbench.records.run_file import AGAIN
from distbench.report.section_protocol import Figures, ReportedRun, Section
from distbench.report.steps import (
    LABEL_WIDTH,
    MAX_BARS,
    about_memory,
    place_text,
    rate_text,
    speedup_text,
    steps_of,
    times_and_checks,
)
from distbench.show import plots as style
from distbench.show import units
from distbench.show.blocks import Table, TableColumns, table_of
from distbench.show.plots import Spot, hover
from distbench.statistics.intervals import MIN_FOR_PERCENTILE
from distbench.statistics.pass_comparison import MIN_PASSES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PERCENTS = tuple(MIN_FOR_PERCENTILE)
TAILS = PERCENTS[1:]
MARKS = dict(zip(PERCENTS, (("D", style.BLUE), ("o", style.SKY), ("s", style.ORANGE)), strict=True))
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
    ("samples/s", lambda row: units.count_text(row["samples_per_s"])),
    ("<speed-up, 95 % CI", speedup_text),
    ("<verdict", lambda row: str(row["verdict"])),
)
CHECKS: TableColumns = (
    ("<variant", lambda row: str(row["variant"])),
    ("KV cache", lambda row: units.size_text(row["cache_bytes"])),
    ("peak memory", lambda row: units.size_text(row["peak_bytes"])),
    ("reserved", lambda row: units.size_text(row["peak_reserved_bytes"])),
    ("predicted", lambda row: units.size_text(row["predicted_peak_bytes"])),
    ("<at", place_text),
    ("output error", lambda row: units.error_text(row["output_rel_error"])),
    ("<stopped by", lambda row: units.word_text(row["stop_reason"])),
)


def _forward_only(measured: "pd.DataFrame") -> list[Row]:
    return records_of(measured[measured["mode"] == FORWARD_ONLY])


def tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    """What one run's forward passes take.

    Where not `full`, variants within noise are counted alone, and whether outputs were right is left out.
    """
    measured = steps_of(reported.frame)
    rows = _forward_only(measured)
    if not rows:
        return []
    notes = [*_about_percentiles(rows), *measured.attrs["sentences"]]
    tails = tuple(map(_tail_name, TAILS))
    # Samples where no row says how many tokens it has.
    in_other_unit = "samples/s" if any(units.known(row["num_tokens"]) for row in rows) else "tokens/s"
    columns = [column for column in LATENCIES if column[0] != in_other_unit]
    optional = ("samples", *tails, "tokens/s", "samples/s")
    return times_and_checks("latency of a forward pass", columns, rows, notes, optional, tails, _checks(rows), full)


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
    notes = [
        "KV cache is what a rank keeps of keys and values, the rank that keeps most; peak memory has it too",
        *about_memory(rows),
        "errors are of the logits, relative to the largest one on one device",
    ]
    optional = ("stopped by", "reserved", "at", "predicted")
    return table_of("memory, and agreement with one device", CHECKS, rows, notes, (), optional, ("reserved",))


def headline(reported: ReportedRun) -> list[str]:
    """The median of each variant, and what it gives a second, in one line."""
    rows = [row for row in _forward_only(steps_of(reported.frame)) if not str(row["variant"]).endswith(AGAIN)]
    listed = [f"{row['variant']} {units.brief_time_text(row['median_s'])}, {rate_text(row)}" for row in rows]
    return [f"median latency: {'; '.join(listed)}"] if listed else []


def figures(reported: ReportedRun) -> Figures:
    """The latency of each variant's forward pass."""
    rows = _forward_only(steps_of(reported.frame))[:MAX_BARS]
    if not rows:
        return
    figure, (axes,) = style.new_figure(1, 9, 1.7 + 0.55 * len(rows))
    largest = max(percentile_s(row, percent) for row in rows for percent in PERCENTS if _is_known(row, percent))
    scale, unit = (1.0, "s") if largest >= 1 else (1e-3, "ms")
    for percent, (marker, color) in MARKS.items():
        known_rows = [(at, row) for at, row in enumerate(rows) if _is_known(row, percent)]
        if known_rows:
            seconds = [percentile_s(row, percent) / scale for _, row in known_rows]
            axes.scatter(
                seconds, [at for at, _ in known_rows], marker=marker, color=color, s=46, label=f"p{percent}", zorder=3
            )
            hover(axes, [Spot(x, at, _said(row, percent)) for x, (at, row) in zip(seconds, known_rows, strict=True)])
    _spans(axes, rows, scale)
    axes.set_xlim(0, largest / scale * 1.12)
    style.name_bars(axes, [textwrap.fill(str(row["variant"]).replace(",", ", "), LABEL_WIDTH) for row in rows])
    axes.set_xlabel(f"latency of a forward pass ({unit})")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, handlelength=1, columnspacing=1.4)
    style.title(figure, f"{reported.run.scenario}: latency of a forward pass")
    style.caption(
        figure, "of all samples, each on its slowest rank; a percentile that they are too few for is left out"
    )
    yield "latency", figure


def _is_known(row: Row, percent: int) -> bool:
    return units.known(percentile_s(row, percent))


def _spans(axes: "Axes", rows: list[Row], scale: float) -> None:
    for at, row in enumerate(rows):
        latencies = [percentile_s(row, percent) / scale for percent in PERCENTS if _is_known(row, percent)]
        if latencies:
            axes.plot([latencies[0], latencies[-1]], [at, at], color=style.LIGHT, linewidth=3, zorder=1)


def _said(row: Row, percent: int) -> str:
    of = f"{num_slower(row, percent)} of {row['num_samples']:.0f} samples were slower"
    return f"{row['variant']}\np{percent}: {units.brief_time_text(percentile_s(row, percent))}\n{of}"


SECTION = Section(headline, tables, figures)
