"""Steps, one row per variant: training steps, forward passes (inference), and simulated steps."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.records.dataframe import PASSES, PHASES, Row, measured_of, records_of
from distbench.records.launches import FORWARD_ONLY
from distbench.records.run_file import AGAIN, SIMULATED, Run, guesses_text
from distbench.report.section_protocol import MAX_NAMED, NO_VERDICT, Compared, Figures, ReportedRun, Section
from distbench.report.trace_rows import SCHEDULE
from distbench.report.trace_timeline import PHASE_COLORS
from distbench.show import plots as style
from distbench.show import units
from distbench.show.blocks import Table, TableColumns, capped, table_of
from distbench.show.plots import Spot, hover
from distbench.show.terminal import without_shared
from distbench.show.units import NOTHING, known
from distbench.spec.printable_text import count_text, listed
from distbench.statistics.intervals import MIN_FOR_PERCENTILE, Floats
from distbench.statistics.pass_comparison import BASELINE, TOO_FEW, as_table, compare_passes
from distbench.statistics.verdicts import FASTER, MIN_PASSES, SLOWER, WITHIN_NOISE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROWS = 40
MAX_BARS = 24
LABEL_WIDTH = 40
BAR = 0.62  # height of a bar, in a row of height one


def _speedup_text(row: Row) -> str:
    if row["verdict"] == BASELINE:
        return "1"
    return units.ratio_text(row["speedup"], row["speedup_low"], row["speedup_high"])


def _place_text(row: Row) -> str:
    """Phase and module of the peak."""
    phase, owner = units.word_text(row["peak_phase"]), row["peak_owner"]
    return f"{phase}, {owner or 'the model'}" if isinstance(owner, str) else phase


def _rate_text(row: Row) -> str:
    """Tokens per second, or samples per second if the scenario has no number of tokens."""
    unit = "tokens" if known(row["num_tokens"]) else "samples"
    rate = row[f"{unit}_per_s"]
    return f"{units.short_count_text(rate)} {unit}/s" if known(rate) else NOTHING


VARIANT: TableColumns = (("<variant", lambda row: str(row["variant"])),)
VERDICT: TableColumns = (("<speed-up, 95 % CI", _speedup_text), ("<verdict", lambda row: str(row["verdict"])))
PEAK: TableColumns = (
    ("peak memory", lambda row: units.size_text(row["peak_bytes"])),
    ("reserved", lambda row: units.size_text(row["peak_reserved_bytes"])),
    ("predicted", lambda row: units.size_text(row["predicted_peak_bytes"])),
    ("<at", _place_text),
)
NUM_SAMPLES: TableColumns = (("samples", lambda row: units.whole_text(row["num_samples"])),)
STOPPED_BY: TableColumns = (("<stopped by", lambda row: units.word_text(row["stop_reason"])),)
PHASE_TIMES: TableColumns = (
    ("forward", lambda row: units.time_text(row["forward_s"])),
    ("backward", lambda row: units.time_text(row["backward_s"])),
    ("schedule", lambda row: units.time_text(row.get("schedule_s"))),
    ("idle", lambda row: units.percent_text(row["idle_share"]) if known(row.get("idle_share")) else NOTHING),
    ("optimizer", lambda row: units.time_text(row["optimizer_s"])),
    ("other", lambda row: units.time_text(row.get("other_s"))),
    ("save", lambda row: units.time_text(row.get("save_s"))),
    ("load", lambda row: units.time_text(row.get("load_s"))),
)
CHECKS: TableColumns = (
    *(*VARIANT, *PEAK),
    ("loss error", lambda row: units.error_text(row["loss_rel_error"])),
    ("gradient error", lambda row: units.error_text(row["grad_rel_error"])),
    ("<worst gradient", lambda row: units.word_text(row["worst_grad"])),
    ("state", lambda row: units.size_text(row["state_bytes"])),
    *(*NUM_SAMPLES, *STOPPED_BY),
)


def steps_of(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The measured, correct steps in file order, each with the speed-up over the first step with the same computation
    (shapes of parameters, global batch, loss function).

    Added columns are `speedup`, `speedup_low`, `speedup_high` (95 % for all rows together, see `compare_passes`),
    `verdict` ("baseline", "faster", "slower", "within noise", "too few passes"), `compared_with` (name of the first
    variant) and `peak_bytes`. `attrs` has `sentences` for the table, `detectable` (the smallest detectable slowdown as
    a share) and `num_passes` (the maximum over variants).
    """
    measured = measured_of(frame, "step")
    measured["peak_bytes"] = measured["peak_bytes"].fillna(measured["peak_allocated_bytes"])
    # A scenario without axes has one variant without a name, which gets the scenario's name.
    measured["variant"] = (
        measured["variant"].replace("", None).fillna(measured["scenario"]).replace("", None).fillna("step")
    )
    firsts: dict[str, int] = {}
    references = [firsts.setdefault(str(key), row) for row, key in enumerate(measured["computes"])]
    comparison = compare_passes(as_table(measured[PASSES].tolist()), references)
    sentences = comparison.sentences("a variant", "its baseline")
    if TOO_FEW not in comparison.verdict and sentences:
        sentences.append("speed-ups: over the first row with the same computation; intervals cover all rows together")
    measured = measured.assign(
        speedup=1 / comparison.ratio,
        speedup_low=1 / comparison.high,
        speedup_high=1 / comparison.low,
        verdict=comparison.verdict,
        compared_with=measured["variant"].to_numpy()[references],
    )
    measured.attrs = {
        "sentences": sentences,
        "detectable": comparison.detectable,
        "num_passes": int(comparison.num_passes.max(initial=0)),
    }
    return measured


def _training_headline(reported: ReportedRun) -> list[str]:
    """Lines on the fastest and the slowest variant, variants without a difference, and the detectable slowdown, also of
    forward passes."""
    measured = steps_of(reported.frame)
    rows = records_of(measured)
    if not rows:
        return []
    names, _ = without_shared([str(row["variant"]) for row in rows])
    name_of = dict(zip((row["variant"] for row in rows), names, strict=True))
    first = rows[0]
    is_forward = first["mode"] == FORWARD_ONLY
    unit_word = "forward pass" if is_forward else "step"
    took = f"{units.brief_time_text(first['median_s'])} per {unit_word}"
    other_rows = [row for row in rows if row["verdict"] != BASELINE]
    if not other_rows and is_forward:
        return []  # The line of latencies is enough for forward passes.
    if not other_rows:
        times = [f"{name} {units.brief_time_text(row['median_s'])}" for name, row in zip(names, rows, strict=True)]
        return [took] if len(rows) == 1 else [f"Time per {unit_word}: {listed(times, MAX_NAMED)}"]
    again = [row for row in other_rows if str(row["variant"]).endswith(AGAIN)]
    variants = [row for row in other_rows if row not in again]
    faster, slower, same, too_few = (
        [row for row in variants if row["verdict"] == verdict] for verdict in (FASTER, SLOWER, WITHIN_NOISE, TOO_FEW)
    )
    extremes = [
        max(faster, key=lambda row: row["speedup"], default=None),
        min(slower, key=lambda row: row["speedup"], default=None),
    ]
    lines = [
        f"{name_of[row['variant']]}: {_times_text(row, name_of[row['compared_with']])}"
        for row in extremes
        if row is not None
    ]
    if same:
        baselines = list(dict.fromkeys(name_of[row["compared_with"]] for row in same))
        of = baselines[0] if len(baselines) == 1 else f"their {len(baselines)} baselines"
        lines.append(f"No difference from {of} ({took}) in {len(same)} of {count_text(len(variants), 'variant')}")
    if too_few:
        lines.append(f"{name_of[first['variant']]}: {took}; {NO_VERDICT} in {count_text(len(too_few), 'variant')}")
    if math.isfinite(detectable := measured.attrs["detectable"]):
        passes = count_text(measured.attrs["num_passes"], "pass", "passes")
        lines.append(f"Detectable: slowdowns of {units.percent_text(detectable)} or more ({passes})")
    differing = [row["verdict"] for row in again if row["verdict"] in (FASTER, SLOWER)]
    control = "the control (the baseline measured again)"
    return [*lines, *(f"warning: {control} is {verdict} than the baseline" for verdict in differing)]


def _times_text(row: Row, baseline: str) -> str:
    return units.times_text(1 / row["speedup"], baseline, 1 / row["speedup_high"], 1 / row["speedup_low"])


def _compared(reported: ReportedRun) -> list[Compared]:
    """Every variant except baselines and controls."""
    rows = records_of(steps_of(reported.frame))
    return [
        Compared(
            str(row["variant"]),
            str(row["compared_with"]),
            1 / row["speedup"],
            1 / row["speedup_high"],
            1 / row["speedup_low"],
            row["verdict"],
        )
        for row in rows
        if row["verdict"] != BASELINE and not str(row["variant"]).endswith(AGAIN)
    ]


def _training_tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    measured = steps_of(reported.frame)
    rows = records_of(measured[measured["mode"] != FORWARD_ONLY])
    if not rows:
        return []
    notes = ["a phase is the median of the phase's slowest rank, so the sum of phases may differ from the step"]
    where_known: tuple[str, ...] = ("schedule", "idle", "other", "save", "load")
    if pipelines := [row for row in rows if known(row.get("schedule_s"))]:
        # A pipeline's schedule alternates forward and backward.
        where_known += ("forward", "backward")
        least = {units.percent_text(row["least_idle_share"]) for row in pipelines if known(row["least_idle_share"])}
        idle = "idle: share of the schedule (forward and backward) in which a rank works on no stage, mean over"
        at_least = f"; at least {', '.join(sorted(least))} for equally long stages" if least else ""
        notes.append(f"{idle} ranks{at_least}")
    notes += measured.attrs["sentences"]
    spread, spread_text = units.spread_of(rows)
    columns: TableColumns = (
        *(*VARIANT, *PHASE_TIMES),
        ("step", lambda row: units.time_text(row["median_s"])),
        (f"<step's {spread}", spread_text),
        ("rate", _rate_text),
        *VERDICT,
    )
    optional = ("load", "save", "optimizer", "rate", f"step's {spread}", "forward", "backward")
    check_notes = [*_about_memory(rows), "errors are relative to the same step on one device"]
    least_of_checks = ("stopped by", "samples", "state", "reserved", "worst gradient", "at", "predicted")
    checks = table_of(CHECKS_TITLE, CHECKS, rows, check_notes, (), least_of_checks, ("reserved", "state"))
    return _times_and_checks("step time", columns, rows, notes, optional, where_known, checks, full)


CHECKS_TITLE = "memory, and agreement with one device"


def _times_and_checks(
    title: str,
    columns: TableColumns,
    rows: Sequence[Row],
    notes: list[str],
    optional: tuple[str, ...],
    where_known: tuple[str, ...],
    checks: Table,
    full: bool,
) -> list[Table]:
    """The table of times, and if `full` the table `checks`. If not `full`, rows within noise are only counted."""
    shown_rows = [row for row in rows if full or row["verdict"] != WITHIN_NOISE]
    if num_left_out := len(rows) - len(shown_rows):
        notes = [f"{count_text(num_left_out, 'variant')} {WITHIN_NOISE} of the baseline: see --full", *notes]
    times = table_of(title, columns, shown_rows, notes, (), optional, where_known)
    return [capped(table, MAX_ROWS) for table in ((times, checks) if full else (times,))]


def _about_memory(rows: list[Row]) -> list[str]:
    notes = []
    if any(np.isfinite(row["peak_bytes"]) for row in rows):
        notes.append("peak memory: bytes allocated by torch's allocator, on the rank with the most")
    elif any(np.isfinite(row["peak_growth_bytes"]) for row in rows):
        notes.append(
            "peak memory is not shown, because this run has only the growth of resident memory, which "
            "depends on earlier cases"
        )
    if any(np.isfinite(row["predicted_peak_bytes"]) for row in rows):
        notes.append("predicted: bytes of live tensors by torch's tracker, without the batch")
    if any(known(row["state_bytes"]) for row in rows):
        notes.append("state: parameters, buffers and optimizer state that a rank saves")
    reasons = dict.fromkeys(row["memory_reason"] for row in rows if isinstance(row["memory_reason"], str))
    return [*notes, *(f"- in a memory column: {reason}" for reason in reasons)]


def _training_figures(reported: ReportedRun) -> Figures:
    """Step time by variant, with stacked phases, and median and interval of the whole step."""
    steps = steps_of(reported.frame)
    steps = steps[steps["mode"] != FORWARD_ONLY].head(MAX_BARS)
    if steps.empty:
        return
    figure, (axes,) = style.new_figure(1, 9, 1.7 + 0.55 * len(steps))
    spread, low, high = _interval(steps)
    limit = style.reach(high)
    scale, unit = (1.0, "s") if limit >= 1 else (1e-3, "ms")
    # In a pipeline, forward and backward are one phase, the schedule.
    phases = [phase for phase in (SCHEDULE, *PHASES) if f"{phase}_s" in steps]
    times = steps[[f"{phase}_s" for phase in phases]].fillna(0.0).set_axis(phases, axis=1)
    # The time of each phase is that of its slowest rank. The sum of phases may exceed the step, so bars are scaled to
    # end at the step's time.
    shares = (steps["median_s"] / times.sum(axis=1)).clip(upper=1.0).fillna(1.0)
    ends = np.zeros(len(steps))
    for phase in phases:
        widths = (times[phase] * shares / scale).to_numpy(float)
        if widths.any():
            shown = np.clip(ends + widths, 0, limit / scale) - np.clip(ends, 0, limit / scale)
            axes.barh(range(len(steps)), shown, left=ends, color=PHASE_COLORS[phase], height=BAR, label=phase)
            for at, (variant, seconds) in enumerate(zip(steps["variant"], times[phase], strict=True)):
                hover_text = f"{_breakable(variant)}\n{phase}: {units.brief_time_text(seconds)}"
                hover(axes, [Spot(ends[at], at - BAR / 2, hover_text, shown[at], BAR)] if shown[at] else [])
        ends = ends + widths
    _whole_steps(axes, steps, scale, limit, f"whole step, median and {spread}", low, high)
    title = f"{reported.run.scenario}: time of a step by phase"
    caption = "a phase is the median of the phase's slowest rank; a larger sum of phases is scaled to the step"
    caption += "; arrow: beyond the axis" * bool((high > limit).any())
    _label_bars(figure, steps["variant"].tolist(), 4, f"time per step ({unit})", title, caption)
    yield "step", figure


def _label_bars(
    figure: "Figure", variants: Sequence[str], num_in_legend: int, x_label: str, title: str, caption: str
) -> None:
    (axes,) = figure.axes
    style.name_bars(axes, [textwrap.fill(_breakable(variant), LABEL_WIDTH) for variant in variants])
    axes.set_xlabel(x_label)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=num_in_legend, borderaxespad=0.2, handlelength=1,
        columnspacing=1.4,
    )  # fmt: skip
    style.title(figure, title)
    style.caption(figure, caption)


def _breakable(variant: object) -> str:
    return str(variant).replace(",", ", ")


def _interval(steps: "pd.DataFrame") -> tuple[str, Floats, Floats]:
    """(name, lower ends, upper ends) of the intervals of medians in seconds."""
    has_ci = steps["ci_low_s"].notna().any()
    name, ends = (units.CONFIDENCE, ("ci_low_s", "ci_high_s")) if has_ci else (units.QUARTILES, ("q1_s", "q3_s"))
    low, high = (steps[end].fillna(steps["median_s"]).to_numpy(float) for end in ends)
    return name, low, high


def _whole_steps(
    axes: "Axes", steps: "pd.DataFrame", scale: float, limit: float, label: str, low: Floats, high: Floats
) -> None:
    """Draw medians, intervals and times, with an arrow if an interval exceeds `limit` (seconds)."""
    medians = steps["median_s"].to_numpy(float)
    left, places, right = (np.minimum(values, limit) / scale for values in (low, medians, high))
    near, rows = medians <= limit, np.arange(len(steps))
    errors = [np.maximum(places - left, 0)[near], np.maximum(right - places, 0)[near]]
    axes.errorbar(
        places[near], rows[near], xerr=errors, fmt="D", color=style.BLACK, markersize=4.5, capsize=3, linewidth=1.2,
        label=label,
    )  # fmt: skip
    for at, row in enumerate(records_of(steps)):
        hover(axes, [Spot(float(places[at]), at, _step_text(row))])
        end, text = max(right[at], places[at]), units.brief_time_text(row["median_s"])
        style.name_end(axes, (float(end), at), text, is_beyond=max(high[at], medians[at]) > limit)
    axes.set_xlim(0, limit / scale * 1.12)


def _step_text(row: Row) -> str:
    interval = units.time_ci_text(row["median_s"], row["ci_low_s"], row["ci_high_s"])
    time_line = f"whole step: {units.brief_time_text(row['median_s'])}{'' if interval == NOTHING else f' {interval}'}"
    against = f"{_times_text(row, 'its baseline')}: {row['verdict']}"
    if row["verdict"] == BASELINE:
        against = "the baseline of the other variants"
    return f"{_breakable(row['variant'])}\n{time_line}\n{against}"


TRAINING_STEPS = Section(_training_headline, _training_tables, _training_figures, _compared)


# Forward passes: percentiles of latency, throughput, and memory of the KV cache.

PERCENTS = tuple(MIN_FOR_PERCENTILE)
TAILS = {percent: f"p{percent} (slower)" for percent in PERCENTS[1:]}
MARKS = dict(zip(PERCENTS, (("D", style.BLUE), ("o", style.SKY), ("s", style.ORANGE)), strict=True))


def _percentile_s(row: Row, percent: int) -> float:
    """A percentile of a row's samples in seconds, or nan for too few samples, or if samples are means of several
    passes."""
    is_single = percent == PERCENTS[0] or row["pipelined"] == 1
    return float(row[f"p{percent}_s"]) if is_single else float("nan")


def _num_slower(row: Row, percent: int) -> int:
    """The number of a row's samples above the percentile."""
    return int(row["num_samples"]) * (100 - percent) // 100


def _tail_text(percent: int, row: Row) -> str:
    seconds = _percentile_s(row, percent)
    return f"{units.time_text(seconds)} ({_num_slower(row, percent)})" if known(seconds) else NOTHING


LATENCIES: TableColumns = (
    *VARIANT,
    ("p50", lambda row: units.time_text(_percentile_s(row, PERCENTS[0]))),
    *((name, partial(_tail_text, percent)) for percent, name in TAILS.items()),
    *NUM_SAMPLES,
    ("tokens/s", lambda row: units.short_count_text(row["tokens_per_s"])),
    ("samples/s", lambda row: units.short_count_text(row["samples_per_s"])),
    *VERDICT,
)
FORWARD_CHECKS: TableColumns = (
    *VARIANT,
    ("KV cache", lambda row: units.size_text(row["cache_bytes"])),
    *PEAK,
    ("output error", lambda row: units.error_text(row["output_rel_error"])),
    *STOPPED_BY,
)


def _forward_passes(measured: "pd.DataFrame") -> list[Row]:
    return records_of(measured[measured["mode"] == FORWARD_ONLY])


def _forward_headline(reported: ReportedRun) -> list[str]:
    """A line with the median and throughput of each variant."""
    rows = [row for row in _forward_passes(steps_of(reported.frame)) if not str(row["variant"]).endswith(AGAIN)]
    times = [f"{row['variant']} {units.brief_time_text(row['median_s'])}, {_rate_text(row)}" for row in rows]
    return [f"median latency: {'; '.join(times)}"] if times else []


def _forward_tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    measured = steps_of(reported.frame)
    rows = _forward_passes(measured)
    if not rows:
        return []
    notes = [*_about_percentiles(rows), *measured.attrs["sentences"]]
    # The rate is in samples if no row has a number of tokens.
    in_other_unit = "samples/s" if any(known(row["num_tokens"]) for row in rows) else "tokens/s"
    columns = [column for column in LATENCIES if column[0] != in_other_unit]
    tails = tuple(TAILS.values())
    optional = ("samples", *tails, "tokens/s", "samples/s")
    check_notes = [
        "KV cache: bytes of stored keys and values on the rank with the most, included in peak memory",
        *_about_memory(rows),
        "error: largest difference of a logit, relative to the largest logit on one device",
    ]
    least_of_checks = ("stopped by", "reserved", "at", "predicted")
    checks = table_of(CHECKS_TITLE, FORWARD_CHECKS, rows, check_notes, (), least_of_checks, ("reserved",))
    return _times_and_checks("latency of a forward pass", columns, rows, notes, optional, tails, checks, full)


def _about_percentiles(rows: list[Row]) -> list[str]:
    notes = [
        "a sample is one forward pass on its slowest rank; percentiles cover all samples (number of slower samples "
        "in brackets)"
    ]
    if any(row["pipelined"] != 1 for row in rows):
        return [*notes, "with --pipelined, a sample is a mean of several forward passes, so p90 and p99 are unknown"]
    fewest = min(int(row["num_samples"]) for row in rows)
    for percent, least in MIN_FOR_PERCENTILE.items():
        if any(not known(_percentile_s(row, percent)) for row in rows):
            # Each pass has at least one sample.
            more = f"measure with --passes {max(least, MIN_PASSES)}"
            notes.append(f"p{percent} needs {least} samples, but a row has only {fewest}; {more}")
    return notes


def _forward_figures(reported: ReportedRun) -> Figures:
    """Percentiles of each variant's latency."""
    rows = _forward_passes(steps_of(reported.frame))[:MAX_BARS]
    latencies = {
        (at, percent): seconds
        for at, row in enumerate(rows)
        for percent in PERCENTS
        if known(seconds := _percentile_s(row, percent))
    }
    if not latencies:
        return
    figure, (axes,) = style.new_figure(1, 9, 1.7 + 0.55 * len(rows))
    limit = style.reach([*latencies.values()])
    scale, unit = (1.0, "s") if limit >= 1 else (1e-3, "ms")
    for (at, percent), seconds in latencies.items():
        if seconds > limit:
            style.name_end(axes, (limit / scale, at), f"p{percent} {units.brief_time_text(seconds)}", is_beyond=True)
    for percent, (marker, color) in MARKS.items():
        points = [
            (seconds / scale, at)
            for (at, of_percent), seconds in latencies.items()
            if of_percent == percent and seconds <= limit
        ]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, marker=marker, color=color, s=46, label=f"p{percent}", zorder=3)
        for x, at in points:
            row, time = rows[at], units.brief_time_text(x * scale)
            of = f"{_num_slower(row, percent)} of {row['num_samples']:.0f} samples were slower"
            hover(axes, [Spot(x, at, f"{row['variant']}\np{percent}: {time}\n{of}")])
    for at in dict.fromkeys(at for at, _ in latencies):
        ends = [min(seconds, limit) / scale for (of_row, _), seconds in latencies.items() if of_row == at]
        axes.plot([ends[0], ends[-1]], [at, at], color=style.LIGHT, linewidth=3, zorder=1)
    axes.set_xlim(0, limit / scale * 1.12)
    title = f"{reported.run.scenario}: latency of a forward pass"
    caption = "percentiles of all samples, each on its slowest rank; percentiles that need more samples are left out"
    _label_bars(figure, [row["variant"] for row in rows], 3, f"latency of a forward pass ({unit})", title, caption)
    yield "latency", figure


FORWARD_PASSES = Section(_forward_headline, _forward_tables, _forward_figures)


# Simulated steps: predictions, hardware file, and memory of a step. Nothing here is measured.

MAX_ALIVE, MAX_LISTED = 8, 6


def _share_text(name: str, row: dict[str, Any]) -> str:
    part, whole = row.get(name), row.get("predicted_s")
    return f"{100 * part / whole:.1f} %" if known(part) and known(whole) and whole else NOTHING


def _device_rate_text(row: dict[str, Any]) -> str:
    """Tokens per second and device, or samples if the scenario has no number of tokens."""
    unit = "tokens" if known(row.get("num_tokens")) else "samples"
    amount, seconds = row.get("num_tokens") or row.get("batch_size"), row.get("predicted_s")
    if not (known(amount) and known(seconds) and seconds and row.get("world_size")):
        return NOTHING
    return f"{units.short_count_text(amount / seconds / row['world_size'])} {unit}/s"


def _is_tight(row: dict[str, Any]) -> bool:
    """Whether the step fits only because the allocator frees its cache."""
    return row.get("fits") is True and bool(row.get("num_retries"))


def _reserved_text(row: dict[str, Any]) -> str:
    return units.size_text(row.get("peak_reserved_bytes", math.nan))


SIMULATED_COLUMNS: TableColumns = (
    ("<variant", lambda row: str(row.get("variant") or row.get("scenario") or "step")),
    ("step", lambda row: units.time_text(row.get("predicted_s", math.nan))),
    *((name, partial(_share_text, f"{name}_s")) for name in ("compute", "exposed", "bubble", "idle")),
    ("per device", _device_rate_text),
    ("MFU", lambda row: f"{100 * row['mfu']:.1f} %" if known(row.get("mfu")) else NOTHING),
    ("reserved", _reserved_text),
    ("alive", lambda row: units.size_text(row.get("peak_bytes", math.nan))),
    ("<fits", lambda row: "(tight)" if _is_tight(row) else {True: "yes", False: "NO"}.get(row.get("fits"), NOTHING)),
)


def _simulated_rows(run: Run) -> list[dict[str, Any]]:
    world_size = run.about.environment.world_size
    return [
        {**(case["case"].get("params") or {}), **(case.get("counters") or {}), "world_size": world_size}
        for case in run.cases
        if case.get(SIMULATED) and case["status"] == "ok"
    ]


def _simulated_headline(reported: ReportedRun) -> Iterator[str]:
    about, rows = reported.run.about, _simulated_rows(reported.run)
    steps = [
        f"{row.get('variant') or 'a step'} {units.brief_time_text(row['predicted_s'])}, {_reserved_text(row)} reserved"
        + ("" if row.get("fits", True) else " (does not fit)")
        for row in sorted((row for row in rows if known(row.get("predicted_s"))), key=lambda row: row["predicted_s"])
    ]
    if steps:
        on = f"{about.environment.device_name} ({guesses_text(about.simulated)})"
        yield f"{SIMULATED} on {on}, not measured: {listed(steps, MAX_LISTED, '; ', '; and {} more')}"


def _simulated_tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    rows = _simulated_rows(reported.run)
    if not rows:
        return []
    notes = [
        f"{SIMULATED}, not measured: {_where(reported.run)}; percentages are shares of the step",
        *_assumed(reported.run),
    ]
    if any(map(_is_tight, rows)):
        notes.insert(1, "(tight): fits only because the allocator frees its cache; the time to free is not counted")
    title, optional = f"{SIMULATED} step time and memory", ("alive", "idle", "per device", "MFU")
    times = capped(table_of(title, SIMULATED_COLUMNS, rows, notes, (), optional, ("bubble",)), MAX_ROWS)
    fullest = max(rows, key=lambda row: row.get("peak_bytes") or 0)
    alive = sorted(fullest.get("alive") or (), key=lambda kind_owner_size: -kind_owner_size[2])
    if not alive:
        return [times]
    largest = [(kind, owner or "-", units.size_text(num_bytes)) for kind, owner, num_bytes in alive[:MAX_ALIVE]]
    more = [f"{len(alive) - MAX_ALIVE} more rows are in the run file"] if len(alive) > MAX_ALIVE else []
    of = fullest.get("variant") or fullest.get("scenario") or "the step"
    return [times, Table(f"{SIMULATED}: live memory at the peak of {of}", ("<what", "<owner", "bytes"), largest, more)]


def _where(run: Run) -> str:
    ranks, environment = run.about.simulated.get("ranks"), run.about.environment
    names = ", ".join(map(str, ranks)) if isinstance(ranks, list) and ranks else "0"
    of = f" of {environment.world_size}" if environment.world_size else ""
    several = ", with times of the slowest rank and memory of the fullest rank" if "," in names else ""
    return f"on {environment.device_name or 'unknown hardware'}, rank {names}{of}{several}"


def _assumed(run: Run) -> list[str]:
    sentences, simulated = [], run.about.simulated
    for basis, verb in (("guess", "guessed"), ("fitted", "fitted")):
        if isinstance(names := simulated.get(basis), list) and names:
            sentences.append(f"{verb} figures of the hardware file: {', '.join(map(str, names))}")
    if isinstance(extrapolated := simulated.get("extrapolated"), dict) and extrapolated:
        names = ", ".join(f"{name} ({instead})" for name, instead in sorted(extrapolated.items()))
        sentences.append(f"figures missing in the hardware file and extrapolated: {names}")
    not_simulated = simulated.get("not_simulated")
    return [*sentences, *map(str, not_simulated if isinstance(not_simulated, list) else ())]


SIMULATED_STEPS = Section(_simulated_headline, _simulated_tables)
