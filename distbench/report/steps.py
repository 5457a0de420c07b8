"""Training steps: one row a variant, each against the first."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from distbench.records.dataframe import PASSES, PHASES, Row, measured_of, records_of
from distbench.records.launches import FORWARD_ONLY
from distbench.records.run_file import AGAIN
from distbench.report.section_protocol import MAX_NAMED, NO_VERDICT, Figures, ReportedRun, Section
from distbench.report.trace_rows import SCHEDULE
from distbench.report.trace_timeline import PHASE_COLORS
from distbench.show import plots as style
from distbench.show import units
from distbench.show.blocks import Table, TableColumns, capped, table_of
from distbench.show.plots import Spot, hover
from distbench.show.terminal import without_shared
from distbench.spec.printable_text import count_text, listed
from distbench.statistics.pass_comparison import BASELINE, TOO_FEW, as_table, compare_passes
from distbench.statistics.verdicts import FASTER, SLOWER, WITHIN_NOISE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MAX_ROWS = 40
MAX_BARS = 24
LABEL_WIDTH = 40
BAR = 0.62  # of the room that a bar has


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
    ("schedule", lambda row: units.time_text(row.get("schedule_s"))),
    (
        "idle",
        lambda row: units.percent_text(row["idle_share"]) if units.known(row.get("idle_share")) else units.NOTHING,
    ),
    ("optimizer", lambda row: units.time_text(row["optimizer_s"])),
    ("save", lambda row: units.time_text(row.get("save_s"))),
    ("load", lambda row: units.time_text(row.get("load_s"))),
    ("step", lambda row: units.time_text(row["median_s"])),
    ("rate", rate_text),
    ("<speed-up, 95 % CI", speedup_text),
    ("<verdict", lambda row: str(row["verdict"])),
)
TIMES_WHERE_KNOWN = ("schedule", "idle", "save", "load")
CHECKS: TableColumns = (
    ("<variant", lambda row: str(row["variant"])),
    ("peak memory", lambda row: units.size_text(row["peak_bytes"])),
    ("reserved", lambda row: units.size_text(row["peak_reserved_bytes"])),
    ("predicted", lambda row: units.size_text(row["predicted_peak_bytes"])),
    ("<at", place_text),
    ("loss error", lambda row: units.error_text(row["loss_rel_error"])),
    ("gradient error", lambda row: units.error_text(row["grad_rel_error"])),
    ("<worst gradient", lambda row: units.word_text(row["worst_grad"])),
    ("state", lambda row: units.size_text(row["state_bytes"])),
    ("samples", lambda row: units.whole_text(row["num_samples"])),
    ("<stopped by", lambda row: units.word_text(row["stop_reason"])),
)
LEAST_OF_CHECKS = ("stopped by", "samples", "state", "reserved", "worst gradient", "at", "predicted")


def steps_of(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The steps that were measured and right, in file order, each with its speed-up against the first that computes
    the same: parameters by shape, global batch, loss function.

    Added: `speedup`, `speedup_low`, `speedup_high` (95 % for all rows together, see `compare.passes`), `verdict`
    ("baseline", "faster", "slower", "within noise", "too few passes"), `held_against` (that first variant's name) and
    `peak_bytes`. `attrs`: `sentences`, what the table shows; `detectable`, the share by which a variant
    must be slower to be found; `num_passes`, of the variant that has most.
    """
    measured = measured_of(frame, "step")
    measured["peak_bytes"] = measured["peak_bytes"].fillna(measured["peak_allocated_bytes"])
    # A scenario without axes has one variant of no name; the scenario's own name says more than a blank.
    measured["variant"] = (
        measured["variant"].replace("", None).fillna(measured["scenario"]).replace("", None).fillna("step")
    )
    firsts: dict[str, int] = {}
    references = [firsts.setdefault(str(key), row) for row, key in enumerate(measured["computes"])]
    comparison = compare_passes(as_table(measured[PASSES].tolist()), references)
    measured["speedup"], measured["speedup_low"], measured["speedup_high"] = (
        1 / comparison.ratio,
        1 / comparison.high,
        1 / comparison.low,
    )
    measured["verdict"] = comparison.verdict
    measured["held_against"] = measured["variant"].to_numpy()[references]
    sentences = comparison.sentences("a variant", "its baseline")
    if TOO_FEW not in comparison.verdict and sentences:
        sentences.append("speed-ups hold for all rows together, against the first row that computes the same")
    measured.attrs = {
        "sentences": sentences,
        "detectable": comparison.detectable,
        "num_passes": int(comparison.num_passes.max(initial=0)),
    }
    return measured


def headline(reported: ReportedRun) -> list[str]:
    """The best and the worst variant beyond noise, how many are within it, and how sure that is."""
    measured = steps_of(reported.frame)
    rows = records_of(measured)
    if not rows:
        return []
    names, _ = without_shared([str(row["variant"]) for row in rows])
    called = dict(zip((row["variant"] for row in rows), names, strict=True))
    first = rows[0]
    is_forward = first["mode"] == FORWARD_ONLY
    unit_word = "forward pass" if is_forward else "step"
    took = f"{units.brief_time_text(first['median_s'])} a {unit_word}"
    other_rows = [row for row in rows if row["verdict"] != BASELINE]
    if not other_rows and is_forward:
        return []  # a line of latencies says it all
    if not other_rows:
        times = [f"{name} {units.brief_time_text(row['median_s'])}" for name, row in zip(names, rows, strict=True)]
        return [took] if len(rows) == 1 else [f"a {unit_word} takes {listed(times, MAX_NAMED)}"]
    again = [row for row in other_rows if str(row["variant"]).endswith(AGAIN)]
    variants = [row for row in other_rows if row not in again]
    faster, slower, same, too_few = (
        [row for row in variants if row["verdict"] == verdict] for verdict in (FASTER, SLOWER, WITHIN_NOISE, TOO_FEW)
    )
    parts = []
    if faster:
        parts.append(f"best: {_speed_text(max(faster, key=lambda row: row['speedup']), called)}")
    if slower:
        parts.append(f"worst: {_speed_text(min(slower, key=lambda row: row['speedup']), called)}")
    if same:
        baselines = list(dict.fromkeys(called[row["held_against"]] for row in same))
        of = baselines[0] if len(baselines) == 1 else f"their {len(baselines)} baselines"
        parts.append(f"{len(same)} {WITHIN_NOISE} of {of}" + f" ({took})" * (not parts))
    if too_few:
        parts.append(f"{took} as {called[first['variant']]}; {NO_VERDICT} on {len(too_few)} more")
    differing = [row for row in again if row["verdict"] in (FASTER, SLOWER)]
    doubts = [f"caution: the baseline, measured again, came out {row['verdict']}" for row in differing]
    return ["; ".join(parts), *_how_sure(measured.attrs["detectable"], measured.attrs["num_passes"]), *doubts]


def _speed_text(row: Row, called: dict[object, str]) -> str:
    speed = units.ratio_text(row["speedup"], row["speedup_low"], row["speedup_high"])
    return f"{called[row['variant']]} at {speed} times the speed of {called[row['held_against']]}"


def _how_sure(detectable: float, num_passes: int) -> list[str]:
    if not math.isfinite(detectable):
        return []
    return [
        f"{count_text(num_passes, 'pass', 'passes')}: what takes {units.percent_text(detectable)} "
        "longer would have been found"
    ]


def tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    """What one run's training steps cost.

    Where not `full`, variants within noise are counted alone, and whether steps computed the right thing is left out.
    """
    measured = steps_of(reported.frame)
    rows = records_of(measured[measured["mode"] != FORWARD_ONLY])
    if not rows:
        return []
    notes = ["a phase is the median of its own slowest rank, so phases need not add up to the step"]
    spread, spread_text = units.spread_of(rows)
    where_known: tuple[str, ...] = TIMES_WHERE_KNOWN
    if pipelines := [row for row in rows if units.known(row.get("schedule_s"))]:
        # Forward and backward take turns in a pipeline's schedule.
        where_known += ("forward", "backward")
        notes.append(_about_idle(pipelines))
    notes += measured.attrs["sentences"]
    at = 1 + [name for name, _ in TIMES].index("step")
    columns = (*TIMES[:at], (f"<step's {spread}", spread_text), *TIMES[at:])
    optional = ("load", "save", "optimizer", "rate", f"step's {spread}", "forward", "backward")
    return times_and_checks("step time", columns, rows, notes, optional, where_known, _checks(rows), full)


def times_and_checks(
    title: str,
    columns: TableColumns,
    rows: Sequence[Row],
    notes: list[str],
    optional: tuple[str, ...],
    where_known: tuple[str, ...],
    checks: Table,
    full: bool,
) -> list[Table]:
    """The table of times and, where `full`, `checks`; where not, rows within noise are counted alone."""
    shown_rows = [row for row in rows if full or row["verdict"] != WITHIN_NOISE]
    if num_left_out := len(rows) - len(shown_rows):
        notes = [f"{num_left_out} more {WITHIN_NOISE} of what they are held against: --full lists them", *notes]
    times = table_of(title, columns, shown_rows, notes, (), optional, where_known)
    return [capped(table, MAX_ROWS) for table in ((times, checks) if full else (times,))]


def _about_idle(rows: list[Row]) -> str:
    least = {units.percent_text(row["least_idle_share"]) for row in rows if units.known(row["least_idle_share"])}
    text = "idle: the share of schedule (forward and backward) in which a rank works on no stage, the mean over ranks"
    return f"{text}; at least {', '.join(sorted(least))} where all stages take as long" if least else text


def _checks(rows: list[Row]) -> Table:
    notes = [*about_memory(rows), "errors are relative to the same step on one device"]
    title = "memory, and agreement with one device"
    return table_of(title, CHECKS, rows, notes, (), LEAST_OF_CHECKS, ("reserved", "state"))


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


def figures(reported: ReportedRun) -> Figures:
    """Step time by variant: phases stacked, the whole step's median and interval over them."""
    steps = steps_of(reported.frame)
    steps = steps[steps["mode"] != FORWARD_ONLY].head(MAX_BARS)
    if steps.empty:
        return
    figure, (axes,) = style.new_figure(1, 9, 1.7 + 0.55 * len(steps))
    scale, unit = (1.0, "s") if steps["median_s"].max() >= 1 else (1e-3, "ms")
    ends, names = [0.0] * len(steps), [_spaced(name) for name in steps["variant"]]
    for phase, color in _phases_in(steps).items():
        widths = (steps[f"{phase}_s"].fillna(0.0) / scale).tolist()
        if any(widths):
            axes.barh(range(len(steps)), widths, left=ends, color=color, height=BAR, label=phase)
            for at, (variant, end, width) in enumerate(zip(names, ends, widths, strict=True)):
                hover_text = f"{variant}\n{phase}: {units.brief_time_text(width * scale)}"
                hover(axes, [Spot(end, at - BAR / 2, hover_text, width, BAR)] if width else [])
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    _whole_steps(axes, steps, scale)
    style.name_bars(axes, [textwrap.fill(name, LABEL_WIDTH) for name in names])
    axes.set_xlabel(f"time a step ({unit})")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2, handlelength=1, columnspacing=1.4)
    style.title(figure, f"{reported.run.scenario}: where a step's time goes")
    parts = "each bar part is the median of that phase's slowest rank, so parts need not add up to the step"
    style.caption(figure, parts)
    yield "step", figure


def _phases_in(steps: "pd.DataFrame") -> dict[str, str]:
    """Phases in the order of a step, each with its colour; a pipeline's forward and backward are one, its schedule."""
    return {phase: PHASE_COLORS[phase] for phase in (SCHEDULE, *PHASES) if f"{phase}_s" in steps}


def _whole_steps(axes: "Axes", steps: "pd.DataFrame", scale: float) -> None:
    medians, rows = (steps["median_s"] / scale).to_numpy(float), records_of(steps)
    spread, ends = (
        (units.CONFIDENCE, "ci_low_s ci_high_s") if steps["ci_low_s"].notna().any() else (units.QUARTILES, "q1_s q3_s")
    )
    low, high = ((steps[name] / scale).fillna(steps["median_s"] / scale).to_numpy(float) for name in ends.split())
    below, above = medians - low, high - medians
    axes.errorbar(
        medians, range(len(steps)), xerr=[below, above], fmt="D", color=style.BLACK, markersize=4.5, capsize=3,
        linewidth=1.2, label=f"whole step, median and {spread}",
    )  # fmt: skip
    hover(axes, [Spot(median, at, _step_said(row)) for at, (median, row) in enumerate(zip(medians, rows, strict=True))])
    stacked = steps[[f"{phase}_s" for phase in _phases_in(steps)]].sum(axis=1).to_numpy(float) / scale
    reached = [max(pair) for pair in zip(medians + above, stacked, strict=True)]
    for place, (median, end) in enumerate(zip(medians, reached, strict=True)):
        text = units.brief_time_text(median * scale)
        axes.annotate(text, (end, place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(reached) * 1.12)


def _spaced(variant: object) -> str:
    """A variant's name with room to be broken in."""
    return str(variant).replace(",", ", ")


def _step_said(row: Row) -> str:
    time_line = f"whole step: {units.brief_time_text(row['median_s'])}"
    interval = units.time_ci_text(row["median_s"], row["ci_low_s"], row["ci_high_s"])
    ratio = units.ratio_text(row["speedup"], row["speedup_low"], row["speedup_high"])
    against = f"{ratio} times as fast as its baseline: {row['verdict']}"
    if row["verdict"] == "baseline":
        against = "the baseline of the others"
    return f"{_spaced(row['variant'])}\n{time_line}{'' if interval == units.NOTHING else f' {interval}'}\n{against}"


SECTION = Section(headline, tables, figures)
