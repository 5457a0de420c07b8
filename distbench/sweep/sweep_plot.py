"""The picture of a sweep: step time against peak memory, dominated plans grey."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from distbench.render import plot_style as style
from distbench.render.hover import Spot, hover
from distbench.render.units import brief_time_text
from distbench.sweep.ranking import RankedPlan, memory_text, undominated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 1 << 30
MAX_NAMED = 6


def pareto_figures(
    title: str, plans: Sequence[RankedPlan], best: RankedPlan, capacity_bytes: float | None
) -> "Iterator[tuple[str, Figure]]":
    """One figure, where the memory of some plan is known."""
    known = [plan for plan in plans if plan.memory_bytes is not None]
    if not known:
        return
    front = undominated(known)
    figure, (axes,) = style.new_figure(1, 9.5, 5.4)
    scale, unit = (1.0, "s") if best.step_s >= 1 else (1e-3, "ms")
    size, memory_unit = _memory_unit(max(float(plan.memory_bytes or 0) for plan in known))

    def place(plan: RankedPlan) -> tuple[float, float]:
        return float(plan.memory_bytes or 0) / size, plan.step_s / scale

    others = [plan for plan in known if plan not in front]
    beyond = [one for one in others if one.fits is not False and float(one.memory_bytes or 0) > (capacity_bytes or inf)]
    layers: tuple[tuple[str, list[RankedPlan], dict[str, Any]], ...] = (
        ("does not fit", [one for one in others if one.fits is False], {"marker": "x", "color": style.LIGHT, "s": 34}),
        ("may not fit", beyond, {"marker": "x", "color": style.GREY, "s": 34}),
        (
            "dominated",
            [one for one in others if one.fits is not False and one not in beyond],
            {"color": style.GREY, "s": 26},
        ),
        ("none is both faster and smaller", front, {"color": style.BLUE, "s": 46}),
        ("recommended", [best], {"color": style.RED, "s": 130, "marker": "*", "zorder": 4}),
    )
    for label, chosen, look in layers:
        if chosen:
            x, y = zip(*map(place, chosen), strict=True)
            axes.scatter(x, y, label=f"{label} ({len(chosen)})", **look)
    hover(axes, [Spot(*place(plan), _said(plan)) for plan in known])
    steps = sorted(front, key=lambda plan: float(plan.memory_bytes or 0))
    if len(steps) > 1:
        x, y = zip(*map(place, steps), strict=True)
        axes.step(x, y, where="post", color=style.BLUE, linewidth=1, alpha=0.5, zorder=0)
    named = front[:MAX_NAMED]
    for number, plan in enumerate(named, start=1):
        axes.annotate(str(number), place(plan), xytext=(0, -15), textcoords="offset points", ha="center", fontsize=9)
    style.caption(figure, "\n".join(f"{number}: {plan.candidate.text}" for number, plan in enumerate(named, start=1)))
    if capacity_bytes is not None and max(x for x, _ in map(place, known)) > 0.6 * capacity_bytes / size:
        axes.axvline(capacity_bytes / size, color=style.ORANGE, linewidth=1.2, linestyle="--")
        axes.annotate(
            "memory", (capacity_bytes / size, 1), xycoords=("data", "axes fraction"), color=style.ORANGE, ha="right",
            va="top", rotation=90, fontsize=8.5,
        )  # fmt: skip
    axes.grid(visible=True)
    axes.set_xlabel(f"peak memory a device ({memory_unit})")
    axes.set_ylabel(f"time a step ({unit})")
    axes.set_xlim(left=0, right=axes.get_xlim()[1] * 1.15)
    if max(plan.step_s for plan in known) > 6 * best.step_s:
        axes.set_yscale("log")
        style.label_axis(axes.yaxis, lambda value: f"{value:g}")
    else:
        low, high = (choose(plan.step_s for plan in known) / scale for choose in (min, max))
        axes.set_ylim(bottom=max(low - max(0.15 * low, 0.12 * (high - low)), 0))  # room for the numbers
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, fontsize=8.5, handletextpad=0.3)
    style.title(figure, title)
    yield "plans", figure


def _memory_unit(most: float) -> tuple[float, str]:
    return (GIB, "GiB") if most >= GIB else (1 << 20, "MiB")


def _said(plan: RankedPlan) -> str:
    lines = [plan.candidate.mesh_text, plan.candidate.changes_text, f"step: {brief_time_text(plan.step_s)}"]
    return "\n".join([*lines, f"memory: {memory_text(plan)}"])
