"""Training steps: one row a variant, each against the first."""

from typing import TYPE_CHECKING

import numpy as np

from distbench.compare.intervals import MIN_SAMPLES_FOR_CI, Interval, ratio_of
from distbench.compare.verdicts import noise_words
from distbench.render.blocks import Table, TableColumns, capped, table_of
from distbench.render.units import (
    FEW_SAMPLES,
    count_text,
    error_text,
    median_ci_text,
    ratio_text,
    size_text,
    time_text,
    whole_text,
    word_text,
)
from distbench.runs.frame import Row, measured_of

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 40
PEAKS = ("peak_allocated_bytes", "peak_growth_bytes")


def _speedup_text(row: Row) -> str:
    if row["verdict"] == "baseline":
        return "1"
    return ratio_text(row["speedup"], row["speedup_low"], row["speedup_high"]).replace(" ", "\n", 1)


TIMES: TableColumns = (
    ("<variant", lambda row: str(row["variant"])),
    ("forward", lambda row: time_text(row["forward_s"])),
    ("backward", lambda row: time_text(row["backward_s"])),
    ("optimizer", lambda row: time_text(row["optimizer_s"])),
    ("step\n95 % CI", lambda row: f"{time_text(row['median_s'])}\n{median_ci_text(row)}"),
    ("tokens/s", lambda row: count_text(row["tokens_per_s"])),
    ("<speed-up\n95 % CI", _speedup_text),
    ("<verdict", lambda row: str(row["verdict"])),
)
CHECKS: TableColumns = (
    ("<variant", lambda row: str(row["variant"])),
    ("peak memory\nallocated", lambda row: size_text(row["peak_bytes"])),
    ("loss error", lambda row: error_text(row["loss_rel_error"])),
    ("gradient\nerror", lambda row: error_text(row["grad_rel_error"])),
    ("<worst gradient", lambda row: word_text(row["worst_grad"])),
    ("samples", lambda row: whole_text(row["num_samples"])),
    ("<stopped by", lambda row: word_text(row["stop_reason"])),
)


def steps_of(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The steps that were measured and right, in file order, with their speed-up against the first of them.

    Added: `speedup`, `speedup_low`, `speedup_high` (95 % CI, method of `intervals.ratio_of`), `verdict` ("baseline",
    "faster", "slower", "within noise", "too few samples"), and `peak_bytes`. The speed-up is of tokens a second where
    both batches count tokens, else of time.
    """
    kept = measured_of(frame, "step")
    kept["peak_bytes"] = kept[PEAKS[0]].fillna(kept[PEAKS[1]])
    # A scenario without axes has one variant of no name; the scenario's own name says more than a blank.
    kept["variant"] = kept["variant"].replace("", None).fillna(kept["scenario"]).replace("", None).fillna("step")
    work = (kept["num_tokens"] if kept["num_tokens"].notna().all() else kept["num_tokens"] * 0 + 1).to_numpy(float)
    work = np.where(np.isfinite(work) & (work > 0), work, 1.0)
    each = Interval(*(kept[name].to_numpy() / work for name in ("median_s", "ci_low_s", "ci_high_s")))
    speedup = ratio_of(Interval(*(part[:1] for part in each)), each)
    num_samples = kept["num_samples"].to_numpy()
    enough = (num_samples >= MIN_SAMPLES_FOR_CI) & (num_samples[:1] >= MIN_SAMPLES_FOR_CI).all()
    kept["speedup"], kept["speedup_low"], kept["speedup_high"] = speedup
    kept["verdict"] = ["baseline", *noise_words(speedup, enough).tolist()[1:]] if len(kept) else []
    return kept


def tables(frame: "pd.DataFrame") -> list[Table]:
    """What one run's steps cost, and whether they computed the right thing; nothing when there are none."""
    measured = steps_of(frame)
    if measured.empty:
        return []
    rows: list[Row] = measured.to_dict("records")
    notes = ["a phase is the median of its own slowest rank, so phases need not add up to the step"]
    if (measured["num_samples"] < MIN_SAMPLES_FOR_CI).any():
        notes.append(FEW_SAMPLES)
    times = table_of("step time", TIMES, rows, notes)
    return [capped(times, MAX_ROWS), capped(_checks(rows), MAX_ROWS)]


def _checks(rows: list[Row]) -> Table:
    on_cpu = all(not np.isfinite(row[PEAKS[0]]) for row in rows)
    notes = ["errors are relative to the same step on one device"]
    if on_cpu and len(rows) > 1:
        notes.append("growth counts new pages only: a variant that reuses the memory of an earlier one looks small")
    columns = [(name.replace("allocated", "growth") if on_cpu else name, text) for name, text in CHECKS]
    return table_of("memory, and agreement with one device", columns, rows, notes)
