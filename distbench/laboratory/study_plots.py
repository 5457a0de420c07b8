"""Figures of the laboratory: what each choice costs, ratios by size, predicted against measured. One question each."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from distbench.compare.intervals import Floats
from distbench.laboratory.comparisons import CHOSEN, PlannerComparison
from distbench.laboratory.study import Study
from distbench.laboratory.study_verdict import regret_of
from distbench.render import plot_style as style
from distbench.render.units import percent_text
from distbench.spec.planner_names import BASELINE

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
MAX_MESHES = 3
MAX_SCATTERS = 8
PER_ROW = 4


def laboratory_figures(study: Study) -> "Iterator[tuple[str, Figure]]":
    """(name, figure) of whatever there is something to draw of, in the order of telling."""
    for name, figure in (
        ("cost-over-best", cost_figure(study)),
        ("ratio-by-size", ratio_figure(study)),
        ("predicted-against-measured", prediction_figure(study)),
    ):
        if figure is not None:
            yield name, figure


def cost_figure(study: Study) -> "Figure | None":
    """How much longer than the best measured planner of each pair every choice takes."""
    regrets = [regret for name in (*study.planner_table.planners, CHOSEN) if (regret := regret_of(study, name))]
    if not regrets:
        return None
    regrets.sort(key=lambda regret: regret.mean)
    figure, (axes,) = style.new_figure(1, 9, 1.5 + 0.42 * len(regrets))
    places = range(len(regrets))
    extra = [100 * (regret.mean - 1) for regret in regrets]
    axes.barh(places, extra, color=[COLORS.get(regret.planner, style.BLACK) for regret in regrets], height=0.66)
    for place, (regret, value) in enumerate(zip(regrets, extra, strict=True)):
        few = f"  (on {regret.num_pairs} of the {_most(study)} pairs)" if regret.num_pairs < _most(study) else ""
        axes.annotate(f"+{value:.0f} %{few}", (value, place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [regret.planner for regret in regrets])
    axes.invert_yaxis()
    axes.set_xlim(0, max(*extra, 5) * 1.3)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    style.label_axis(axes.xaxis, lambda value: f"+{value:g} %" if value else "0 %")
    axes.set_xlabel(f"time over the best planner of each pair (geometric mean over {_most(study)} pairs)")
    _title(figure, f"What each choice costs, pairs {study.focus_text}: shorter is better")
    return figure


def _most(study: Study) -> int:
    return max((regret.num_pairs for regret in study.regrets), default=0)


def ratio_figure(study: Study) -> "Figure | None":
    """Each planner's time over greedy's by size, one panel a mesh."""
    found = [matchup for matchup in study.planner_comparisons if matchup.baseline == BASELINE and matchup.mesh]
    meshes = list(dict.fromkeys(matchup.mesh for matchup in found))[:MAX_MESHES]
    if not meshes:
        return None
    width = 1.6 + max(2.6, 0.9 * max(len(_sizes(found, mesh)) for mesh in meshes)) * len(meshes) * 1.4
    figure, axes = style.new_figure(len(meshes), min(max(width, 8), 14), 4.4)
    bounds = [bound for matchup in found for bound in matchup.mean if np.isfinite(bound) and bound > 0]
    for panel, mesh in zip(axes, meshes, strict=True):
        _ratio_panel(panel, mesh, [matchup for matchup in found if matchup.mesh == mesh], study)
    low, high = min(*bounds, 0.9) / 1.1, max(*bounds, 1.1) * 1.1
    axes[0].set_yscale("log")
    axes[0].set_ylim(low, high)
    ticks = [
        tick for tick in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10) if low <= tick <= high
    ]
    axes[0].set_yticks(ticks)
    axes[0].set_yticks([], minor=True)
    style.label_axis(axes[0].yaxis, lambda value: f"{value:g}")
    axes[0].set_ylabel("time over greedy's")
    _title(figure, "Time over greedy's by size of the tensor: below the line is faster than greedy")
    what = "geometric mean over the pairs that communicate; bars: its 95 % CI over pairs"
    style.caption(
        figure, what + ("; direct: pairs without Partial" if "direct" in study.planner_table.planners else "")
    )
    return figure


def _sizes(found: list[PlannerComparison], mesh: str) -> list[str]:
    return list(dict.fromkeys(matchup.size for matchup in found if matchup.mesh == mesh))


def _ratio_panel(axes: "Axes", mesh: str, found: list[PlannerComparison], study: Study) -> None:
    sizes = [
        size for of_mesh, size, _ in study.planner_table.groups() if of_mesh == mesh and size in _sizes(found, mesh)
    ]
    planners = [planner for planner in study.planner_table.planners if any(m.planner == planner for m in found)]
    axes.axhline(1, color=style.GREY, linewidth=1.4, zorder=1)
    ends = []
    for number, planner in enumerate(planners):
        shift = (number - (len(planners) - 1) / 2) * 0.09
        points = sorted((sizes.index(m.size), m.mean) for m in found if m.planner == planner)
        places = [place + shift for place, _ in points]
        means = np.array([mean for _, mean in points])
        below, above = means[:, 0] - means[:, 1], means[:, 2] - means[:, 0]
        axes.errorbar(
            places, means[:, 0], yerr=np.nan_to_num([below, above]), color=COLORS.get(planner, style.BLACK),
            marker=MARKERS.get(planner, "o"), markersize=6, linewidth=1.4, capsize=2,
        )  # fmt: skip
        ends.append((planner, float(means[-1, 0])))
    axes.set_xticks(range(len(sizes)), [size.replace(" to ", " to\n") for size in sizes])
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.grid(visible=True, axis="y")
    axes.set_title(f"mesh {mesh}", fontweight="normal")
    _label_ends(axes, ends, study)


def _label_ends(axes: "Axes", ends: list[tuple[str, float]], study: Study) -> None:
    """Names at the right edge, moved apart, greedy's line at one among them."""
    lows = [mean for m in study.planner_comparisons if m.baseline == BASELINE for mean in m.mean if mean > 0]
    decades = math.log10(max(*lows, 1.1) * 1.1) - math.log10(min(*lows, 0.9) / 1.1)
    ends = [(BASELINE, 1.0), *ends]
    places = style.spread([math.log10(value) for _, value in ends], decades * 0.06)
    for (planner, value), place in zip(ends, places, strict=True):
        axes.annotate(
            planner, xy=(1, value), xycoords=("axes fraction", "data"), xytext=(1.015, 10**place),
            textcoords=("axes fraction", "data"), color=COLORS.get(planner, style.BLACK), va="center",
            annotation_clip=False,
        )  # fmt: skip


def prediction_figure(study: Study) -> "Figure | None":
    """Measured against predicted, one dot a plan, one panel a planner."""
    known = {planner: _points(study, planner) for planner in study.planner_table.planners}
    shown = [planner for planner, (predicted, _) in known.items() if predicted.size][:MAX_SCATTERS]
    if not shown:
        return None
    columns = min(len(shown), PER_ROW)
    rows = -(-len(shown) // columns)
    figure, axes = style.new_figure(columns, 0.8 + 3.1 * columns, 0.8 + 3.5 * rows, num_rows=rows)
    both = np.concatenate([part for planner in shown for part in known[planner]])
    low, high = float(both.min()) / 1.5, float(both.max()) * 1.5
    for panel, planner in zip(axes, shown, strict=False):
        _scatter(panel, planner, *known[planner], low, high)
        panel.set_xlabel("predicted")
    for row in range(rows):
        axes[row * columns].set_ylabel("measured")
    for unused in axes[len(shown) :]:
        unused.set_axis_off()
    style.caption(figure, "grey band: within 20 %; pairs of all sizes that communicate")
    _title(figure, "Predicted against measured, one dot a pair: on the line the prediction is right")
    return figure


def _points(study: Study, planner: str) -> tuple[Floats, Floats]:
    predicted, measured = study.planner_table.numbers["predicted_s"][planner], study.planner_table.times[planner].center
    keep = np.isfinite(predicted) & np.isfinite(measured) & (predicted > 0) & study.planner_table.communicates()
    return predicted[keep], measured[keep]


def _scatter(axes: "Axes", planner: str, predicted: Floats, measured: Floats, low: float, high: float) -> None:
    line = np.array([low, high])
    axes.fill_between(line, line / 1.2, line * 1.2, color=style.LIGHT, alpha=0.6, linewidth=0, zorder=0)
    axes.plot(line, line, color=style.GREY, linewidth=1.2, zorder=1)
    axes.scatter(predicted, measured, s=13, color=COLORS.get(planner, style.BLACK), alpha=0.55, linewidth=0, zorder=2)
    for axis in (axes.xaxis, axes.yaxis):
        style.time_axis(axis, low, high, max_ticks=4)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_box_aspect(1)
    error = float(np.median(np.abs(predicted / measured - 1)))
    axes.set_title(f"{planner}: off by {percent_text(error)}", fontweight="normal")
    axes.annotate(
        "slower than\npredicted", (0.05, 0.95), xycoords="axes fraction", va="top", fontsize=8, color="#606060"
    )
    axes.annotate(
        "faster than\npredicted", (0.95, 0.05), xycoords="axes fraction", ha="right", fontsize=8, color="#606060"
    )


def _title(figure: "Figure", text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold")
