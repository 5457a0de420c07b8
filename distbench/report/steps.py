"""Training steps: one row a variant, each against the first."""

from typing import TYPE_CHECKING

import numpy as np

from distbench.records.dataframe import PASSES, Row, measured_of, records_of
from distbench.records.launches import FORWARD_ONLY
from distbench.show import units
from distbench.show.blocks import Table, TableColumns, capped, table_of
from distbench.statistics.pass_comparison import TOO_FEW, as_table, compare_passes
from distbench.statistics.verdicts import WITHIN_NOISE

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 40


def speedup_text(row: Row) -> str:
    """A row's speed-up over what it is held against, with its interval."""
    if row["verdict"] == "baseline":
        return "1"
    return units.ratio_text(row["speedup"], row["speedup_low"], row["speedup_high"])


def place_text(row: Row) -> str:
    """Phase and module of the peak."""
    phase, owner = units.word_text(row["peak_phase"]), row["peak_owner"]
    return f"{phase}, {owner or 'the model itself'}" if isinstance(owner, str) else phase


def rate_text(row: Row) -> str:
    """Tokens a second, or samples where the scenario does not say how many tokens there are."""
    unit = "tokens" if units.known(row["num_tokens"]) else "samples"
    rate = row[f"{unit}_per_s"]
    return f"{units.count_text(rate)} {unit}/s" if units.known(rate) else units.NOTHING


TIMES: TableColumns = (
    ("<variant", lambda row: str(row["variant"])),
    ("forward", lambda row: units.time_text(row["forward_s"])),
    ("backward", lambda row: units.time_text(row["backward_s"])),
    ("optimizer", lambda row: units.time_text(row["optimizer_s"])),
    ("step", lambda row: units.time_text(row["median_s"])),
    ("rate", rate_text),
    ("<speed-up, 95 % CI", speedup_text),
    ("<verdict", lambda row: str(row["verdict"])),
)
STATE_TIMES: TableColumns = (
    ("save", lambda row: units.time_text(row.get("save_s"))),
    ("load", lambda row: units.time_text(row.get("load_s"))),
)
PIPELINE_TIMES: TableColumns = (
    ("schedule", lambda row: units.time_text(row.get("schedule_s"))),
    ("idle", lambda row: units.percent_text(row["idle_share"]) if units.known(row["idle_share"]) else units.NOTHING),
)
STATE = ("state", lambda row: units.size_text(row["state_bytes"]))
RESERVED = ("reserved", lambda row: units.size_text(row["peak_reserved_bytes"]))
CHECKS: TableColumns = (
    ("<variant", lambda row: str(row["variant"])),
    ("peak memory", lambda row: units.size_text(row["peak_bytes"])),
    ("predicted", lambda row: units.size_text(row["predicted_peak_bytes"])),
    ("<at", place_text),
    ("loss error", lambda row: units.error_text(row["loss_rel_error"])),
    ("gradient error", lambda row: units.error_text(row["grad_rel_error"])),
    ("<worst gradient", lambda row: units.word_text(row["worst_grad"])),
    ("samples", lambda row: units.whole_text(row["num_samples"])),
    ("<stopped by", lambda row: units.word_text(row["stop_reason"])),
)
LEAST_OF_CHECKS = ("stopped by", "samples", "state", "reserved", "worst gradient", "at", "predicted")


def steps_of(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The steps that were measured and right, in file order, each with its speed-up against the first that computes
    the same: parameters by shape, global batch, loss function.

    Added: `speedup`, `speedup_low`, `speedup_high` (95 % for all rows together, see `compare.passes`), `verdict`
    ("baseline", "faster", "slower", "within noise", "too few passes"), `held_against` (that first variant's name) and
    `peak_bytes`. `attrs`: `told`, what the table could tell, as sentences; `detectable`, the share by which a variant
    must be slower to be found; `num_passes`, of the variant that has most.
    """
    kept = measured_of(frame, "step")
    kept["peak_bytes"] = kept["peak_bytes"].fillna(kept["peak_allocated_bytes"])
    # A scenario without axes has one variant of no name; the scenario's own name says more than a blank.
    kept["variant"] = kept["variant"].replace("", None).fillna(kept["scenario"]).replace("", None).fillna("step")
    firsts: dict[str, int] = {}
    references = [firsts.setdefault(str(key), row) for row, key in enumerate(kept["computes"])]
    found = compare_passes(as_table(kept[PASSES].tolist()), references)
    kept["speedup"], kept["speedup_low"], kept["speedup_high"] = 1 / found.ratio, 1 / found.high, 1 / found.low
    kept["verdict"] = found.verdict
    kept["held_against"] = kept["variant"].to_numpy()[references]
    told = found.told("a variant", "its baseline")
    if TOO_FEW not in found.verdict and told:
        told.append("speed-ups hold for all rows together, against the first row that computes the same")
    kept.attrs = {"told": told, "detectable": found.detectable, "num_passes": int(found.num_passes.max(initial=0))}
    return kept


def tables(frame: "pd.DataFrame", full: bool = True) -> list[Table]:
    """What one run's training steps cost; nothing when there are none.

    Where not `full`, variants within noise are counted alone, and whether steps computed the right thing is left out.
    """
    measured = steps_of(frame)
    rows = records_of(measured[measured["mode"] != FORWARD_ONLY])
    if not rows:
        return []
    notes = ["a phase is the median of its own slowest rank, so phases need not add up to the step"]
    spread, spread_text = units.spread_of(rows)
    state = STATE_TIMES if any(units.known(row.get("save_s")) for row in rows) else ()
    pipelines = [row for row in rows if units.known(row.get("schedule_s"))]
    begin = TIMES[:4]
    if pipelines:
        # Forward and backward take turns in a pipeline's schedule.
        apart = () if len(pipelines) == len(rows) else TIMES[1:3]
        begin = (TIMES[0], *apart, *PIPELINE_TIMES, TIMES[3])
        notes.append(_about_idle(pipelines))
    columns = (*begin, *state, TIMES[4], (f"<step's {spread}", spread_text), *TIMES[5:])
    told = [row for row in rows if full or row["verdict"] != WITHIN_NOISE]
    if num_left_out := len(rows) - len(told):
        notes.insert(0, f"{num_left_out} more {WITHIN_NOISE} of what they are held against: --full lists them")
    optional = ("load", "save", "optimizer", "rate", f"step's {spread}", "forward", "backward")
    times = table_of("step time", columns, told, notes + measured.attrs["told"], (), optional)
    return [capped(times, MAX_ROWS), *([capped(_checks(rows), MAX_ROWS)] if full else [])]


def _about_idle(rows: list[Row]) -> str:
    least = {units.percent_text(row["least_idle_share"]) for row in rows if units.known(row["least_idle_share"])}
    text = "idle: the share of schedule (forward and backward) in which a rank works on no stage, the mean over ranks"
    return f"{text}; at least {', '.join(sorted(least))} where all stages take as long" if least else text


def _checks(rows: list[Row]) -> Table:
    columns = list(CHECKS)
    if any(np.isfinite(row["peak_reserved_bytes"]) for row in rows):
        columns.insert(2, RESERVED)
    if any(units.known(row["state_bytes"]) for row in rows):
        columns.insert(-2, STATE)
    notes = [*about_memory(rows), "errors are relative to the same step on one device"]
    return table_of("memory, and agreement with one device", columns, rows, notes, (), LEAST_OF_CHECKS)


def about_memory(rows: list[Row]) -> list[str]:
    """Notes on the columns of memory."""
    notes = []
    if any(np.isfinite(row["peak_bytes"]) for row in rows):
        notes.append("peak memory is what torch's allocator has handed out, on the rank that holds most")
    elif any(np.isfinite(row["peak_growth_bytes"]) for row in rows):
        notes.append("this run has the growth of resident memory only, which depends on what ran before: not shown")
    if any(np.isfinite(row["predicted_peak_bytes"]) for row in rows):
        notes.append("predicted are tensors alive as torch's tracker counts them, without the batch")
    reasons = dict.fromkeys(row["memory_reason"] for row in rows if isinstance(row["memory_reason"], str))
    if any(units.known(row["state_bytes"]) for row in rows):
        notes.append("state is the part of parameters, buffers and optimizer that a rank saves, where one is saved")
    return [*notes, *(f"where memory has a -: {reason}" for reason in reasons)]
