"""The result of a sweep, as a person reads it: a recommendation, why, what else there is, what to paste, and the
picture."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from distbench.report.trace_tables import path_changes
from distbench.search.ranking import (
    MAX_REASONS,
    Change,
    RankedPlan,
    cost_a_billion,
    cost_a_step,
    is_tight,
    memory_text,
    reasons,
    record_of,
    takes_reserve,
    undominated,
)
from distbench.search.simulated_plan import CLOSE
from distbench.search.sweep_result import SweepResult
from distbench.show import plots as style
from distbench.show.blocks import Block, Code, Heading, Lines, Table, TableColumns, capped, table_of
from distbench.show.plots import Spot, hover
from distbench.show.units import brief_time_text, rate_text, ratio_text, size_text, time_text
from distbench.spec.printable_text import count_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS = 20
MAX_FRONT = 8
NUM_CHANGES = 10
# Estimated memory over that of all layers, less one, of the nine plans in docs/sweep.md.
SAMPLED = (-0.10, 0.11)


def recommendation(result: SweepResult) -> str:
    """One sentence."""
    best = result.best
    changes = f" with {best.candidate.changes_text}" if best.candidate.choices else ", the plan as written"
    rate = f"{rate_text(best.tokens_per_s / result.world)} {result.unit}/s a device"
    parts = [f"{brief_time_text(best.step_s)} a step {result.where} ({rate})"]
    if best.memory_bytes is not None:
        parts.append(_memory_of(best, result))
    if result.price is not None:
        step = cost_a_step(result.price, result.world, best.step_s)
        billion = cost_a_billion(result.price, result.world, best.tokens_per_s)
        parts.append(
            f"{step:.3g} a step and {billion:,.4g} a billion {result.unit} at {result.price:g} a device and hour"
        )
    return f"use --mesh {best.candidate.mesh_text}{changes}: {', '.join(parts)}"


def _memory_of(plan: RankedPlan, result: SweepResult) -> str:
    capacity_bytes = result.capacity_bytes
    if is_tight(plan) and capacity_bytes:
        need, room = size_text(plan.memory_bytes or 0), size_text(capacity_bytes - result.reserve_bytes)
        return f"{need} at the peak, squeezed into {room} because the allocator gives back what it cached"
    of = f" of {size_text(capacity_bytes)}" if capacity_bytes else ""
    reserve_text = f" ({size_text(result.reserve_bytes)} are kept free)" if of and result.reserve_bytes else ""
    return f"{memory_text(plan)}{of} at the peak{reserve_text}"


def why(result: SweepResult) -> list[str]:
    """How the next plan differs."""
    best, next_plan = result.best, result.runner_up
    if next_plan is None:
        return [
            "no other plan that was tried fits" if result.plans[1:] else "there is no other plan to hold it against"
        ]
    sentences = []
    if next_plan.measured is not None:
        sentences.append(
            f"next, {next_plan.candidate.text}: {ratio_text(*next_plan.measured)} times its time ({next_plan.verdict})"
        )
    else:
        more = next_plan.step_s / best.step_s - 1
        near = ", too near to tell: measure both" if abs(more) <= CLOSE else ""
        sentences.append(
            f"next, {next_plan.candidate.text}: {100 * more:+.1f} % time{near}{_more_memory(best, next_plan)}"
        )
    if differences := _other_paths(result, best, next_plan) or reasons(best, next_plan):
        sentences.append("against the recommended plan it has " + "; ".join(differences))
    return sentences


def _more_memory(best: RankedPlan, next_plan: RankedPlan) -> str:
    """What decides between plans whose times are too near to tell."""
    more = (next_plan.memory_bytes or 0) - (best.memory_bytes or 0)
    if next_plan.step_s > best.step_s or more <= 0 or not best.memory_bytes:
        return ""
    return f"; it takes {size_text(more)} more memory"


def _other_paths(result: SweepResult, best: RankedPlan, next_plan: RankedPlan) -> list[str]:
    """What the other one communicates more or less of, where both were traced."""
    if best.candidate not in result.traces or next_plan.candidate not in result.traces:
        return []
    return path_changes(result.traces[next_plan.candidate], result.traces[best.candidate])[:MAX_REASONS]


def record_of_result(result: SweepResult) -> dict[str, Any]:
    """All of it as plain data."""
    return {
        "title": result.title,
        "where": result.where,
        "world": result.world,
        "unit": result.unit,
        "capacity_bytes": result.capacity_bytes,
        "reserve_bytes": result.reserve_bytes,
        "price": result.price,
        "recommendation": recommendation(result),
        "why": why(result),
        "plans": [record_of(plan, result.world, result.price) for plan in result.plans],
        "predicted": [record_of(plan, result.world, result.price) for plan in result.predicted],
        "undominated": [result.plans.index(plan) for plan in undominated(result.plans)],
        "changes": [
            {"code": list(change.code), "time_share": change.time_share, "memory_bytes": change.memory_bytes}
            | {"mesh": change.plan.candidate.mesh, "changes": dict(change.plan.candidate.choices)}
            for change in result.changes
        ],
        "memory_estimates": list(result.estimates),
        "layouts": list(result.layouts),
        "code": list(result.code),
        "command": result.command,
        "notes": list(result.notes),
    }


def blocks_of(result: SweepResult) -> list[Block]:
    """Everything."""
    return [
        Heading(result.title),
        Lines((recommendation(result), *why(result))),
        *_changes(result),
        *_front(result),
        _table("plans", result, result.plans),
        *([_table("as predicted", result, result.predicted)] if result.predicted else []),
        Heading("to paste", 3),
        *([Code(tuple(result.code))] if result.code else []),
        Code((result.command,)),
        Lines(tuple(result.notes)),
    ]


def _changes(result: SweepResult) -> list[Block]:
    if not result.changes:
        return []
    rows = result.changes[:NUM_CHANGES]
    numbers = {id(change): number for number, change in enumerate(rows, start=1)}
    columns: TableColumns = (
        ("", lambda change: str(numbers[id(change)])),
        ("<change", lambda change: _called(change, result)),
        ("step", lambda change: f"{100 * change.time_share:+.1f} %"),
        ("memory", _memory_change),
        ("<verdict", lambda change: "does not fit" if change.plan.fits is False else change.plan.verdict or "-"),
    )
    title = f"{count_text(len(rows), 'change')} of the plan as written, each on its own, the most worth making first"
    table = table_of(title, columns, rows, (), (), ("verdict",))
    imports = dict.fromkeys(line for change in rows for line in change.imports)
    lines = [f"{line}  # {number}" for number, change in enumerate(rows, start=1) for line in change.code]
    code = [Code((*imports, *([""] if imports else []), *lines))] if lines else []
    return [table, *code, *([Lines(tuple(result.layouts))] if result.layouts else [])]


def _called(change: Change, result: SweepResult) -> str:
    """As the other tables call it: another mesh, or changes of the plan."""
    candidate = change.plan.candidate
    return candidate.mesh_text if candidate.sizes != result.written_sizes else candidate.changes_text


def _memory_change(change: Change) -> str:
    more = change.memory_bytes
    return "-" if more is None else f"{'-' if more < 0 else '+'}{size_text(abs(round(more)))}"


def _front(result: SweepResult) -> list[Block]:
    front = undominated(result.plans)
    if len(front) < 2:
        return []
    columns: TableColumns = (
        ("<mesh", lambda plan: plan.candidate.mesh_text),
        ("<changes", lambda plan: plan.candidate.changes_text),
        ("step", lambda plan: time_text(plan.step_s)),
        ("memory", memory_text),
    )
    title = "step time against memory: no plan is both faster and smaller than one of these"
    return [capped(table_of(title, columns, front), MAX_FRONT, "more: see the picture")]


def _of_estimates(estimates: Sequence[float]) -> str:
    """How far memory that was extended from few layers is off: on nine sampled plans, and on those of this sweep."""
    low, high = SAMPLED
    sampled = f"{100 * low:+.0f} to {100 * high:+.0f} % off on nine plans of Llama 3 8B"
    text = f"memory with ~ is extended from few layers: {sampled}"
    if estimates:
        own_range = f"{100 * (min(estimates) - 1):+.0f} to {100 * (max(estimates) - 1):+.0f} %"
        text += f", {own_range} on the {count_text(len(estimates), 'plan')} of this sweep that were recorded whole"
    return text


def _table(title: str, result: SweepResult, plans: Sequence[RankedPlan]) -> Table:
    best = plans[0]
    columns: list[tuple[str, object]] = [
        ("<mesh", lambda plan: plan.candidate.mesh_text),
        ("<changes", lambda plan: plan.candidate.changes_text),
        ("step", lambda plan: time_text(plan.step_s)),
        ("to best", lambda plan: f"{plan.step_s / best.step_s:.2f}"),
        (f"{result.unit}/s", lambda plan: rate_text(plan.tokens_per_s)),
        ("memory", memory_text),
    ]
    if result.price is not None:
        price = result.price
        columns.append(("a step", lambda plan: f"{cost_a_step(price, result.world, plan.step_s):.3g}"))
        columns.append(
            (f"a billion {result.unit}", lambda plan: f"{cost_a_billion(price, result.world, plan.tokens_per_s):,.4g}")
        )
    if any(plan.predicted_s for plan in plans):
        columns.append(("predicted", lambda plan: time_text(plan.predicted_s) if plan.predicted_s else "-"))
    if any(plan.verdict for plan in plans):
        columns.append(("<verdict", lambda plan: plan.verdict or "-"))
    notes = []
    if any(plan.memory_basis == "about" and plan.memory_bytes is not None for plan in plans):
        notes.append(_of_estimates(result.estimates))
    if {bool(plan.verdict) for plan in plans if plan.memory_basis == "measured" or plan.measured} == {False, True}:
        notes.append("without a verdict: times of an earlier, shorter round, which are not held against the last one's")
    if any(plan.fits is False and not takes_reserve(plan) for plan in plans):
        notes.append("(no): it does not fit")
    if any(map(takes_reserve, plans)):
        reserve = size_text(result.reserve_bytes)
        notes.append(f"(reserve): not recommended, it leaves less than the {reserve} that are kept free")
    if any(map(is_tight, plans)):
        notes.append("(tight): it fits because the allocator gives back what it cached, whose time is not counted")
    table = table_of(title, columns, plans, notes, (), (f"{result.unit}/s", "a step", "predicted", "to best"))  # type: ignore[arg-type]
    return capped(table, MAX_ROWS, "more rows: --format json")


GIB = 1 << 30
MAX_NAMED = 6


def pareto_figures(
    title: str, plans: Sequence[RankedPlan], best: RankedPlan, capacity_bytes: float | None
) -> "Iterator[tuple[str, Figure]]":
    """One figure, where the memory of some plan is known."""
    sized_plans = [plan for plan in plans if plan.memory_bytes is not None]
    if not sized_plans:
        return
    front = undominated(sized_plans)
    figure, (axes,) = style.new_figure(1, 9.5, 5.4)
    scale, unit = (1.0, "s") if best.step_s >= 1 else (1e-3, "ms")
    size, memory_unit = _memory_unit(max(float(plan.memory_bytes or 0) for plan in sized_plans))

    def place(plan: RankedPlan) -> tuple[float, float]:
        return float(plan.memory_bytes or 0) / size, plan.step_s / scale

    dominated = [plan for plan in sized_plans if plan not in front]
    beyond = [
        other_plan
        for other_plan in dominated
        if other_plan.fits is not False and float(other_plan.memory_bytes or 0) > (capacity_bytes or inf)
    ]
    layers: tuple[tuple[str, list[RankedPlan], dict[str, Any]], ...] = (
        (
            "does not fit",
            [other_plan for other_plan in dominated if other_plan.fits is False],
            {"marker": "x", "color": style.LIGHT, "s": 34},
        ),
        ("may not fit", beyond, {"marker": "x", "color": style.GREY, "s": 34}),
        (
            "dominated",
            [other_plan for other_plan in dominated if other_plan.fits is not False and other_plan not in beyond],
            {"color": style.GREY, "s": 26},
        ),
        ("none is both faster and smaller", front, {"color": style.BLUE, "s": 46}),
        ("recommended", [best], {"color": style.RED, "s": 130, "marker": "*", "zorder": 4}),
    )
    for label, chosen, look in layers:
        if chosen:
            x, y = zip(*map(place, chosen), strict=True)
            axes.scatter(x, y, label=f"{label} ({len(chosen)})", **look)
    hover(axes, [Spot(*place(plan), _said(plan)) for plan in sized_plans])
    steps = sorted(front, key=lambda plan: float(plan.memory_bytes or 0))
    if len(steps) > 1:
        x, y = zip(*map(place, steps), strict=True)
        axes.step(x, y, where="post", color=style.BLUE, linewidth=1, alpha=0.5, zorder=0)
    numbered = front[:MAX_NAMED]
    for number, plan in enumerate(numbered, start=1):
        axes.annotate(str(number), place(plan), xytext=(0, -15), textcoords="offset points", ha="center", fontsize=9)
    style.caption(
        figure, "\n".join(f"{number}: {plan.candidate.text}" for number, plan in enumerate(numbered, start=1))
    )
    if capacity_bytes is not None and max(x for x, _ in map(place, sized_plans)) > 0.6 * capacity_bytes / size:
        axes.axvline(capacity_bytes / size, color=style.ORANGE, linewidth=1.2, linestyle="--")
        axes.annotate(
            "memory", (capacity_bytes / size, 1), xycoords=("data", "axes fraction"), color=style.ORANGE, ha="right",
            va="top", rotation=90, fontsize=8.5,
        )  # fmt: skip
    axes.grid(visible=True)
    axes.set_xlabel(f"peak memory a device ({memory_unit})")
    axes.set_ylabel(f"time a step ({unit})")
    axes.set_xlim(left=0, right=axes.get_xlim()[1] * 1.15)
    if max(plan.step_s for plan in sized_plans) > 6 * best.step_s:
        axes.set_yscale("log")
        style.label_axis(axes.yaxis, lambda value: f"{value:g}")
    else:
        low, high = (choose(plan.step_s for plan in sized_plans) / scale for choose in (min, max))
        axes.set_ylim(bottom=max(low - max(0.15 * low, 0.12 * (high - low)), 0))  # room for the numbers
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, fontsize=8.5, handletextpad=0.3)
    style.title(figure, title)
    yield "plans", figure


def _memory_unit(most: float) -> tuple[float, str]:
    return (GIB, "GiB") if most >= GIB else (1 << 20, "MiB")


def _said(plan: RankedPlan) -> str:
    lines = [plan.candidate.mesh_text, plan.candidate.changes_text, f"step: {brief_time_text(plan.step_s)}"]
    return "\n".join([*lines, f"memory: {memory_text(plan)}"])
