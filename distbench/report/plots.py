"""Plots of runs: busbw against size, step time by phase, planner against planner, latencies. A figure answers one
question."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.judge.links_text import link_figures
from distbench.records.dataframe import PHASES, Row, records_of
from distbench.records.launches import FORWARD_ONLY
from distbench.report.collectives import collectives_of, group_sizes_text, run_as_another
from distbench.report.inference import PERCENTS, forward_rows, num_slower, percentile_s
from distbench.report.overview import Contents
from distbench.report.redistributions import Bools, Comparison, comparisons, pair_verdict
from distbench.report.steps import steps_of
from distbench.report.study_plots import laboratory_figures
from distbench.report.timeline import timeline_figures
from distbench.report.trace_rows import SCHEDULE, traces_of
from distbench.show import plots as style
from distbench.show.plots import Spot, hover
from distbench.show.units import (
    CONFIDENCE,
    NOTHING,
    QUARTILES,
    brief_time_text,
    known,
    quartiles_text,
    ratio_text,
    size_text,
    time_ci_text,
)
from distbench.spec.placements import BASELINE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LATENCY_LABEL_WIDTH, MAX_ROWS = 40, 24
MARKS = dict(zip(PERCENTS, (("D", style.BLUE), ("o", style.SKY), ("s", style.ORANGE)), strict=True))


def latency_figures(name: str, frame: "pd.DataFrame") -> "Iterator[tuple[str, Figure]]":
    """The latency of each variant's forward pass; nothing where there are none."""
    rows = forward_rows(frame)[:MAX_ROWS]
    if not rows:
        return
    figure, (axes,) = style.new_figure(1, 9, 1.7 + 0.55 * len(rows))
    largest = max(percentile_s(row, percent) for row in rows for percent in PERCENTS if _is_known(row, percent))
    scale, unit = (1.0, "s") if largest >= 1 else (1e-3, "ms")
    for percent, (marker, color) in MARKS.items():
        told = [(at, row) for at, row in enumerate(rows) if _is_known(row, percent)]
        if told:
            seconds = [percentile_s(row, percent) / scale for _, row in told]
            axes.scatter(
                seconds, [at for at, _ in told], marker=marker, color=color, s=46, label=f"p{percent}", zorder=3
            )
            hover(axes, [Spot(x, at, _said(row, percent)) for x, (at, row) in zip(seconds, told, strict=True)])
    _spans(axes, rows, scale)
    axes.set_xlim(0, largest / scale * 1.12)
    style.name_bars(axes, [textwrap.fill(str(row["variant"]).replace(",", ", "), LATENCY_LABEL_WIDTH) for row in rows])
    axes.set_xlabel(f"latency of a forward pass ({unit})")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, handlelength=1, columnspacing=1.4)
    style.title(figure, f"{name}: latency of a forward pass")
    style.caption(
        figure, "of all samples, each on its slowest rank; a percentile that they are too few for is left out"
    )
    yield "latency", figure


def _is_known(row: Row, percent: int) -> bool:
    return known(percentile_s(row, percent))


def _spans(axes: "Axes", rows: list[Row], scale: float) -> None:
    """A line from each variant's first percentile to its last one."""
    for at, row in enumerate(rows):
        told = [percentile_s(row, percent) / scale for percent in PERCENTS if _is_known(row, percent)]
        if told:
            axes.plot([told[0], told[-1]], [at, at], color=style.LIGHT, linewidth=3, zorder=1)


def _said(row: Row, percent: int) -> str:
    of = f"{num_slower(row, percent)} of {row['num_samples']:.0f} samples were slower"
    return f"{row['variant']}\np{percent}: {brief_time_text(percentile_s(row, percent))}\n{of}"


# Plots of runs: busbw against size, step time by phase, planner against planner. A figure answers one question.

Drawn = Iterator[tuple[str, "Figure"]]
LABEL_WIDTH = 40
MAX_BARS = 24
MAX_PANELS = 4
PER_ROW = 2
PANEL_WIDTH = 5.2
BAR = 0.62  # of the room that a bar has


def figures_in(contents: Contents) -> Drawn:
    """(name, figure) of whatever there is something to draw of."""
    names = [run.scenario for run in contents.runs]
    for run, name, frame in zip(contents.runs, names, contents.frames, strict=True):
        stem = name if names.count(name) == 1 else run.path.stem
        drawn = (*figures_of(name, frame), *link_figures(run))
        yield from ((f"{kind}-{stem}", figure) for kind, figure in drawn)
    yield from timeline_figures(traces_of(contents.runs)[0])
    for study in contents.studies:
        yield from ((f"{kind}-{study.machine}", figure) for kind, figure in laboratory_figures(study))


def figures_of(name: str, frame: "pd.DataFrame") -> Drawn:
    """(kind, figure) of whatever one run's frame has something to draw of."""
    yield from busbw_figures(name, frame)
    yield from step_figures(name, frame)
    yield from latency_figures(name, frame)
    yield from planner_figures(name, frame)


def busbw_figures(name: str, frame: "pd.DataFrame") -> Drawn:
    """busbw against size, one figure a dtype, one panel a mesh dim, one line a collective."""
    measured = collectives_of(frame)
    measured = measured[(measured["busbw_gb_per_s"] > 0) & (measured["payload_bytes"] > 0)]
    for dtype, of_dtype in measured.groupby("dtype", sort=False):
        panels = list(of_dtype.groupby("mesh_dim", sort=False))[:MAX_PANELS]
        colors = dict(zip(sorted(of_dtype["op"].unique()), style.CYCLE * 3, strict=False))
        figure, axes = _panels(len(panels), 1.2, 4.6)
        ends = [
            _busbw_panel(panel, str(mesh_dim), of_dim, colors)
            for panel, (mesh_dim, of_dim) in zip(axes, panels, strict=True)
        ]
        # Panels share their y axis, whose limits stand when all lines are drawn.
        for panel, of_panel in zip(axes, ends, strict=True):
            style.label_ends(panel, of_panel, colors)
        for panel in axes[::PER_ROW]:
            panel.set_ylabel("busbw (GB/s)")
        style.title(figure, f"{name}: bus bandwidth by message size, {dtype}")
        notes = [f"{op} runs as {backend_op} on {backend}" for op, backend_op, backend in run_as_another(of_dtype)]
        style.caption(figure, "; ".join(["bands: quartiles", *notes]))
        yield f"busbw-{dtype}", figure


def _panels(number: int, more_width: float, height: float, share: bool = True) -> "tuple[Figure, list[Axes]]":
    """A figure with that many panels, PER_ROW side by side; sizes are inches, `height` that of a row."""
    columns, rows = min(number, PER_ROW), -(-number // PER_ROW)
    figure, axes = style.new_figure(columns, more_width + PANEL_WIDTH * columns, height * rows, share, rows)
    for unused in axes[number:]:
        unused.set_axis_off()
    return figure, axes[:number]


def _busbw_panel(axes: "Axes", mesh_dim: str, measured: "pd.DataFrame", colors: dict[str, str]) -> dict[str, float]:
    """One line an op; op to the y of its last point."""
    ends: dict[str, float] = {}
    for op, of_op in measured.groupby("op", sort=False):
        points = of_op.sort_values("payload_bytes")
        columns = ("payload_bytes", "busbw_gb_per_s", "busbw_low_gb_per_s", "busbw_high_gb_per_s")
        sizes, busbw, low, high = (points[name].to_numpy(float) for name in columns)
        axes.fill_between(sizes, low, high, color=colors[str(op)], alpha=0.15, linewidth=0)
        axes.plot(sizes, busbw, color=colors[str(op)], marker="o", markersize=4, linewidth=1.8)
        ends[str(op)] = float(busbw[-1])
        hover(axes, map(_busbw_spot, records_of(points)))
    axes.set_yscale("log")
    axes.grid(visible=True, axis="y")
    style.size_ticks(axes, measured["payload_bytes"].tolist())
    style.label_axis(axes.yaxis, lambda value: f"{value:g}")
    axes.tick_params(labelleft=True)
    axes.set_title(f"mesh dim {mesh_dim}, groups of {group_sizes_text(measured)}", fontweight="normal")
    axes.set_xlabel("message size S")
    return ends


def _busbw_spot(row: Row) -> Spot:
    low, high = (f"{row[f'busbw_{end}_gb_per_s']:.3g}" for end in ("low", "high"))
    text = f"{row['op']} over {row['mesh_dim']}, {size_text(row['payload_bytes'])}\n"
    text += f"busbw {row['busbw_gb_per_s']:.3g} GB/s [{low}, {high}]\n"
    text += f"median {brief_time_text(row['median_s'])} {quartiles_text(row)}"
    return Spot(row["payload_bytes"], row["busbw_gb_per_s"], text)


def step_figures(name: str, frame: "pd.DataFrame") -> Drawn:
    """Step time by variant: phases stacked, the whole step's median and interval over them."""
    steps = steps_of(frame)
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
                said = f"{variant}\n{phase}: {brief_time_text(width * scale)}"
                hover(axes, [Spot(end, at - BAR / 2, said, width, BAR)] if width else [])
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    _whole_steps(axes, steps, scale)
    style.name_bars(axes, [textwrap.fill(name, LABEL_WIDTH) for name in names])
    axes.set_xlabel(f"time a step ({unit})")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2, handlelength=1, columnspacing=1.4)
    style.title(figure, f"{name}: where a step's time goes")
    parts = "each bar part is the median of that phase's slowest rank, so parts need not add up to the step"
    style.caption(figure, parts)
    yield "step", figure


def _phases_in(steps: "pd.DataFrame") -> dict[str, str]:
    """Phases in the order of a step, each with its colour; a pipeline's forward and backward are one, its schedule."""
    colors = dict(zip((SCHEDULE, *PHASES), (style.BLUE, style.BLUE, style.SKY, style.ORANGE), strict=True))
    return {phase: color for phase, color in colors.items() if f"{phase}_s" in steps}


def _whole_steps(axes: "Axes", steps: "pd.DataFrame", scale: float) -> None:
    medians, rows = (steps["median_s"] / scale).to_numpy(float), records_of(steps)
    spread, ends = (CONFIDENCE, "ci_low_s ci_high_s") if steps["ci_low_s"].notna().any() else (QUARTILES, "q1_s q3_s")
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
        text = brief_time_text(median * scale)
        axes.annotate(text, (end, place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(reached) * 1.12)


def _spaced(variant: object) -> str:
    """A variant's name with room to be broken in."""
    return str(variant).replace(",", ", ")


def _step_said(row: Row) -> str:
    taken = f"whole step: {brief_time_text(row['median_s'])}"
    interval = time_ci_text(row["median_s"], row["ci_low_s"], row["ci_high_s"])
    ratio = ratio_text(row["speedup"], row["speedup_low"], row["speedup_high"])
    against = f"{ratio} times as fast as its baseline: {row['verdict']}"
    if row["verdict"] == "baseline":
        against = "the baseline of the others"
    return f"{_spaced(row['variant'])}\n{taken}{'' if interval == NOTHING else f' {interval}'}\n{against}"


def planner_figures(name: str, frame: "pd.DataFrame") -> Drawn:
    """Each planner's median against greedy's on the same pair, one figure a planner, one panel a shape."""
    found = comparisons(frame)
    for planner in dict.fromkeys(comparison.planner for comparison in found):
        panels = [comparison for comparison in found if comparison.planner == planner][:MAX_PANELS]
        figure, axes = _panels(len(panels), 0.6, 6.2, share=False)
        for panel, comparison in zip(axes, panels, strict=True):
            _planner_panel(panel, comparison)
        for panel in axes[::PER_ROW]:
            panel.set_ylabel(f"{planner}, median time")
        style.title(figure, f"{name}: {planner} against {BASELINE}, one dot a pair")
        style.caption(figure, f"below the diagonal {planner} is faster; coloured where the difference is beyond noise")
        yield f"{planner}-against-{BASELINE}", figure


def _planner_panel(axes: "Axes", comparison: Comparison) -> None:
    planner, side, differing = comparison.planner, comparison.ratios.side, ~comparison.ratios.same
    times, greedys = (comparison.table.times[comparison.table.at(name)] for name in (planner, BASELINE))
    layers: tuple[tuple[str, Bools, dict[str, Any]], ...] = (
        ("same path", ~differing, {"facecolors": "none", "edgecolors": style.LIGHT, "s": 22}),
        ("no difference beyond noise", differing & (side == 0), {"color": style.GREY, "s": 22}),
        (f"{BASELINE} faster", differing & (side > 0), {"color": style.RED, "s": 34, "marker": "^"}),
        (f"{planner} faster", differing & (side < 0), {"color": style.BLUE, "s": 34, "marker": "v"}),
    )
    for label, layer, look in layers:
        rows = comparison.rows[layer[comparison.rows]]
        axes.scatter(greedys[rows], times[rows], label=f"{label} ({len(rows)})", **look)
    hover(axes, [_pair_spot(comparison, pair) for pair in comparison.rows.tolist()])
    both = np.concatenate([greedys[comparison.rows], times[comparison.rows]])
    low, high = float(both.min()) / 1.25, float(both.max()) * 1.25
    axes.plot([low, high], [low, high], color=style.GREY, linewidth=1, linestyle="--", zorder=0)
    style.square_time_axes(axes, low, high)
    axes.set_aspect("equal")
    axes.grid(visible=True)
    axes.set_xlabel(f"{BASELINE}, median time")
    size = size_text(comparison.payload_bytes)
    axes.set_title(f"{comparison.dtype} {comparison.shape} ({size})", fontweight="normal")
    axes.legend(loc="upper left", fontsize=8.5, handletextpad=0.3, borderaxespad=0.2)


def _pair_spot(comparison: Comparison, pair: int) -> Spot:
    """A pair's placements, what each planner took on which path, and who won."""
    table, lines = comparison.table, []
    facts = table.pairs.iloc[pair]
    at = {name: (table.at(name), pair) for name in (BASELINE, comparison.planner)}
    for name, place in at.items():
        path = f"\n  {table.paths[place]}" if table.paths[place] else ""
        lines.append(f"{name}: {brief_time_text(float(table.times[place]))}{path}")
    greedys, times = (float(table.times[place]) for place in at.values())
    head = f"{facts['source']} -> {facts['target']}"
    return Spot(greedys, times, "\n".join([head, *lines, pair_verdict(comparison, pair)]))
