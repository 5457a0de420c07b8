"""Figures of the laboratory: what each choice costs, ratios by size, predicted against measured. One question each."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.report.planner_study import CHOSEN, NEAR_BEST, Regret, Study
from distbench.report.planner_table import PlannerTable
from distbench.show import plots as style
from distbench.show.plots import Spot, hover
from distbench.show.units import brief_time_text, percent_text, ratio_text
from distbench.spec.placements import BASELINE
from distbench.statistics.intervals import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    "greedy": style.GREY,
    "greedy+native": style.BLACK,
    "min_cost": style.ORANGE,
    "min_cost+native": style.RED,
    "calibrated": style.SKY,
    "calibrated+native": style.BLUE,
    "direct": style.GREEN,
    CHOSEN: style.PURPLE,
}
MARKERS = {"min_cost": "s", "min_cost+native": "D", "calibrated": "o", "calibrated+native": "^", "direct": "v"}
TICKS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10)
MAX_MESHES = 3
MAX_SCATTERS = 8
PER_ROW = 4


def laboratory_figures(study: Study) -> "Iterator[tuple[str, Figure]]":
    """(name, figure) of whatever there is something to draw of, in the order of telling."""
    parts = {
        "cost-over-best": cost_figure,
        "ratio-by-size": ratio_figure,
        "predicted-against-measured": prediction_figure,
    }
    yield from ((name, figure) for name, part in parts.items() if (figure := part(study)))


def cost_figure(study: Study) -> "Figure | None":
    """How much longer than the best measured planner of each pair every choice takes."""
    if not study.regrets:
        return None
    regrets = sorted(study.regrets.items(), key=lambda planner_regret: planner_regret[1].mean)
    most = max(regret.num_pairs for _, regret in regrets)
    figure, (axes,) = style.new_figure(1, 9, 1.5 + 0.42 * len(regrets))
    places = range(len(regrets))
    extra = [100 * (regret.mean - 1) for _, regret in regrets]
    axes.barh(places, extra, color=[COLORS.get(planner, style.BLACK) for planner, _ in regrets], height=0.66)
    for place, ((_, regret), value) in enumerate(zip(regrets, extra, strict=True)):
        few = f"  (on {regret.num_pairs} of the {most} pairs)" if regret.num_pairs < most else ""
        axes.annotate(f"+{value:.0f} %{few}", (value, place), xytext=(6, 0), textcoords="offset points", va="center")
    texts = [_regret_said(*planner_regret) for planner_regret in regrets]
    hover(axes, [Spot(0, at - 0.33, texts[at], value, 0.66) for at, value in enumerate(extra)])
    style.name_bars(axes, [planner for planner, _ in regrets])
    axes.set_xlim(0, max(*extra, 5) * 1.3)
    style.label_axis(axes.xaxis, lambda value: f"+{value:g} %" if value else "0 %")
    axes.set_xlabel(f"time over the best planner of each pair (geometric mean over {most} pairs)")
    style.title(figure, f"What each choice costs, pairs {study.focus_text}: shorter is better")
    return figure


def _regret_said(planner: str, regret: Regret) -> str:
    near = f"within {percent_text(NEAR_BEST)} of it on {percent_text(regret.share_near)} of {regret.num_pairs} pairs"
    return f"{planner}: {regret.mean:.2f} times the best's time, at worst {regret.worst:.2f} times\n{near}"


def ratio_figure(study: Study) -> "Figure | None":
    """Each planner's time over greedy's by size, one panel a mesh."""
    means = {place: tally.mean for place, tally in study.tallies.items() if place[1] == BASELINE}
    meshes = list(dict.fromkeys(mesh for _, _, mesh, _ in means if mesh))[:MAX_MESHES]
    if not meshes:
        return None
    width = 1.6 + max(2.6, 0.9 * max(len(_sizes(study, mesh)) for mesh in meshes)) * len(meshes) * 1.4
    figure, axes = style.new_figure(len(meshes), min(max(width, 8), 14), 4.4)
    bounds = [bound for (_, _, mesh, _), mean in means.items() if mesh for bound in mean if bound > 0]
    low, high = min(*bounds, 0.9) / 1.1, max(*bounds, 1.1) * 1.1
    axes[0].set_yscale("log")
    axes[0].set_ylim(low, high)
    for panel, mesh in zip(axes, meshes, strict=True):
        _ratio_panel(panel, mesh, study)
    axes[0].set_yticks([tick for tick in TICKS if low <= tick <= high])
    axes[0].set_yticks([], minor=True)
    style.label_axis(axes[0].yaxis, lambda value: f"{value:g}")
    axes[0].set_ylabel("time over greedy's")
    style.title(figure, "Time over greedy's by size of the tensor: below the line is faster than greedy")
    caption = "geometric mean over the pairs that communicate; bars: its 95 % CI over pairs"
    style.caption(figure, caption + ("; direct: the pairs that it moved" if "direct" in study.table.planners else ""))
    return figure


def _sizes(study: Study, mesh: str) -> list[str]:
    """The size classes of a mesh on which some planner is compared with greedy."""
    sizes = {size for _, baseline, on, size in study.tallies if (baseline, on) == (BASELINE, mesh)}
    return [size for on, size, _ in study.table.groups() if on == mesh and size in sizes]


def _ratio_panel(axes: "Axes", mesh: str, study: Study) -> None:
    sizes = _sizes(study, mesh)
    by_planner = {
        planner: [(place, tally.mean) for place, size in enumerate(sizes)
                  if (tally := study.tallies.get((planner, BASELINE, mesh, size)))]
        for planner in study.table.planners
    }  # fmt: skip
    by_planner = {planner: points for planner, points in by_planner.items() if points}
    axes.axhline(1, color=style.GREY, linewidth=1.4, zorder=1)
    for number, (planner, points) in enumerate(by_planner.items()):
        shift = (number - (len(by_planner) - 1) / 2) * 0.09
        means = np.array([mean for _, mean in points])
        below, above = means[:, 0] - means[:, 1], means[:, 2] - means[:, 0]
        axes.errorbar(
            [place + shift for place, _ in points], means[:, 0], yerr=np.nan_to_num([below, above]),
            color=COLORS.get(planner, style.BLACK), marker=MARKERS.get(planner, "o"), markersize=6, linewidth=1.4,
            capsize=2,
        )  # fmt: skip
        texts = [f"{planner} over {BASELINE}, {sizes[place]} on {mesh}\n{ratio_text(*mean)}" for place, mean in points]
        spots = zip(points, texts, strict=True)
        hover(axes, [Spot(place + shift, mean[0], text) for (place, mean), text in spots])
    axes.set_xticks(range(len(sizes)), [size.replace(" to ", " to\n") for size in sizes])
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.grid(visible=True, axis="y")
    axes.set_title(f"mesh {mesh}", fontweight="normal")
    ends = {BASELINE: 1.0} | {planner: points[-1][1][0] for planner, points in by_planner.items()}
    style.label_ends(axes, ends, COLORS)


def prediction_figure(study: Study) -> "Figure | None":
    """Measured against predicted, one dot a plan, one panel a planner."""
    predictions = {planner: study.predicted_pairs(planner) for planner in study.table.planners}
    planners = [planner for planner, (pairs, _, _) in predictions.items() if pairs.size][:MAX_SCATTERS]
    if not planners:
        return None
    figure, axes = style.panels(len(planners), PER_ROW, (3.1, 3.5), (0.8, 0.8))
    times = np.concatenate([part for planner in planners for part in predictions[planner][1:]])
    low, high = float(times.min()) / 1.5, float(times.max()) * 1.5
    for panel, planner in zip(axes, planners, strict=True):
        pairs, predicted, measured = predictions[planner]
        _scatter(panel, planner, predicted, measured, low, high)
        places = zip(pairs.tolist(), predicted.tolist(), measured.tolist(), strict=True)
        hover(panel, [Spot(x, y, _prediction_said(study.table, planner, pair, x, y)) for pair, x, y in places])
        panel.set_xlabel("predicted")
    for panel in axes[::PER_ROW]:
        panel.set_ylabel("measured")
    style.caption(figure, "grey band: within 20 %; pairs of all sizes that communicate")
    style.title(figure, "Predicted against measured, one dot a pair: on the line the prediction is right")
    return figure


def _prediction_said(table: PlannerTable, planner: str, pair: int, predicted_s: float, measured_s: float) -> str:
    facts, path = table.pairs.iloc[pair], table.paths[table.at(planner), pair]
    lines = [f"{facts['source']} -> {facts['target']}", path, f"predicted {brief_time_text(predicted_s)}"]
    where = f"{facts['dtype']}[{facts['shape'].replace('x', ',')}] on {facts['mesh_shape']}"
    return "\n".join(filter(None, [f"{planner}, {where}", *lines, f"measured {brief_time_text(measured_s)}"]))


def _scatter(axes: "Axes", planner: str, predicted: Floats, measured: Floats, low: float, high: float) -> None:
    line = np.array([low, high])
    axes.fill_between(line, line / 1.2, line * 1.2, color=style.LIGHT, alpha=0.6, linewidth=0, zorder=0)
    axes.plot(line, line, color=style.GREY, linewidth=1.2, zorder=1)
    axes.scatter(predicted, measured, s=13, color=COLORS.get(planner, style.BLACK), alpha=0.55, linewidth=0, zorder=2)
    style.square_time_axes(axes, low, high, max_ticks=4)
    axes.set_box_aspect(1)
    error = float(np.median(np.abs(predicted / measured - 1)))
    axes.set_title(f"{planner}: off by {percent_text(error)}", fontweight="normal")
    look: Any = {"xycoords": "axes fraction", "fontsize": 8, "color": style.NOTE}
    axes.annotate("slower than\npredicted", (0.05, 0.95), va="top", **look)
    axes.annotate("faster than\npredicted", (0.95, 0.05), ha="right", **look)
