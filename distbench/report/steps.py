"""Training steps: one row a variant, each against the first."""

from typing import TYPE_CHECKING

import numpy as np

from distbench.compare.intervals import MIN_SAMPLES_FOR_CI, Interval, ratio_of, side_of_one
from distbench.render.blocks import Table, capped
from distbench.render.units import (
    count_text,
    error_text,
    ratio_text,
    size_text,
    time_ci_text,
    time_text,
    whole_text,
)
from distbench.runs.frame import Row

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 40
VERDICTS = {1: "faster", -1: "slower", 0: "within noise"}
PEAKS = ("peak_allocated_bytes", "peak_growth_bytes")


def steps_of(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The steps that were measured and right, in file order, with their speed-up against the first of them.

    Added: `speedup`, `speedup_low`, `speedup_high` (95 % CI, method of `stats.ratio_of`), `verdict` ("baseline",
    "faster", "slower", "within noise", "too few samples"), and `peak_bytes`. The speed-up is of tokens a second where
    both batches count tokens, else of time.
    """
    kept = frame[(frame["kind"] == "step") & (frame["status"] == "ok") & frame["median_s"].notna()].copy()
    kept["peak_bytes"] = kept[PEAKS[0]].fillna(kept[PEAKS[1]])
    # A scenario without axes has one variant of no name; the scenario's own name says more than a blank.
    names = zip(kept["variant"], kept["scenario"], strict=True)
    kept["variant"] = [next((name for name in pair if isinstance(name, str) and name), "step") for pair in names]
    work = (kept["num_tokens"] if kept["num_tokens"].notna().all() else kept["num_tokens"] * 0 + 1).to_numpy(float)
    work = np.where(np.isfinite(work) & (work > 0), work, 1.0)
    each = Interval(*(kept[name].to_numpy() / work for name in ("median_s", "ci_low_s", "ci_high_s")))
    first = Interval(*(part[:1].repeat(len(part)) for part in each))
    speedup = ratio_of(first, each)
    num_samples = kept["num_samples"].to_numpy()
    enough = (num_samples >= MIN_SAMPLES_FOR_CI) & (num_samples[:1] >= MIN_SAMPLES_FOR_CI).all()
    kept["speedup"], kept["speedup_low"], kept["speedup_high"] = speedup
    words = np.where(enough, [VERDICTS[side] for side in side_of_one(speedup, enough).tolist()], "too few samples")
    kept["verdict"] = ["baseline", *words.tolist()[1:]] if len(kept) else []
    return kept


def tables(frame: "pd.DataFrame") -> list[Table]:
    """What one run's steps cost, and whether they computed the right thing; nothing when there are none."""
    measured = steps_of(frame)
    if measured.empty:
        return []
    shown: list[Row] = measured.head(MAX_ROWS).to_dict("records")
    return [capped(_times(shown), len(measured), MAX_ROWS), capped(_checks(shown), len(measured), MAX_ROWS)]


def _times(shown: list[Row]) -> Table:
    phases = ("forward", "backward", "optimizer")
    columns = ("<variant", *phases, "step\n95 % CI", "tokens/s", "<speed-up\n95 % CI", "<verdict")
    rows = []
    for record in shown:
        ci = time_ci_text(record["median_s"], record["ci_low_s"], record["ci_high_s"], record["num_samples"])
        speedup = ratio_text(record["speedup"], record["speedup_low"], record["speedup_high"])
        is_baseline = record["verdict"] == "baseline"
        rows.append(
            (
                record["variant"],
                *(time_text(record[f"{phase}_s"]) for phase in phases),
                f"{time_text(record['median_s'])}\n{ci}",
                count_text(record["tokens_per_s"]),
                "1" if is_baseline else speedup.replace(" ", "\n", 1),
                record["verdict"],
            )
        )
    notes = ["a phase is the median of its own slowest rank, so phases need not add up to the step"]
    if any(record["num_samples"] < MIN_SAMPLES_FOR_CI for record in shown):
        notes.append("* fewer than 6 samples: the interval is their whole range and does not reach 95 %")
    return Table("step time", columns, rows, notes)


def _checks(shown: list[Row]) -> Table:
    on_cpu = all(not np.isfinite(record[PEAKS[0]]) for record in shown)
    peak = "peak memory\ngrowth" if on_cpu else "peak memory\nallocated"
    columns = ("<variant", peak, "loss error", "gradient\nerror", "<worst gradient", "samples", "<stopped by")
    rows = [
        (
            record["variant"],
            size_text(record["peak_bytes"]),
            error_text(record["loss_rel_error"]),
            error_text(record["grad_rel_error"]),
            record["worst_grad"] if isinstance(record["worst_grad"], str) else "-",
            whole_text(record["num_samples"]),
            record["stop_reason"] if isinstance(record["stop_reason"], str) else "-",
        )
        for record in shown
    ]
    notes = ["errors are relative to the same step on one device"]
    if on_cpu and len(rows) > 1:
        notes.append("growth counts new pages only: a variant that reuses the memory of an earlier one looks small")
    return Table("memory, and agreement with one device", columns, rows, notes)
