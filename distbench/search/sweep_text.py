"""The result of a sweep as text: a recommendation, the reasons, alternatives, code to paste, and the picture."""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from distbench.report.trace_tables import path_changes
from distbench.search.sweep_result import (
    BUBBLE,
    COMPUTE,
    IDLE,
    LEAST_SHARE,
    ON_HOST,
    Change,
    RankedPlan,
    SweepResult,
    SweepState,
    plan_of,
    undominated,
)
from distbench.show import plots as style
from distbench.show.blocks import Block, Code, Heading, Lines, Notes, Table, TableColumns, capped, table_of
from distbench.show.html import PageBlock, Picture, Verdict, page_of
from distbench.show.plots import Spot, hover
from distbench.show.terminal import without_shared
from distbench.show.units import NOTHING, brief_time_text, rate_text, size_text, time_text, times_text
from distbench.simulate.error_bars import Bar, bar_range
from distbench.simulate.simulation_text import range_text
from distbench.spec.printable_text import count_text
from distbench.statistics.verdicts import FASTER, SLOWER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROWS, MAX_FRONT, NUM_CHANGES, MAX_REASONS, MAX_NAMED = 20, 8, 10, 4, 7
HOUR_S = 3600.0
# Upper end of the picture's memory axis, as a multiple of a device's memory.
BEYOND = 1.3
MAX_LINEAR = 6.0  # ratio of longest to shortest step above which times are on a log axis
MIB, GIB = 1 << 20, 1 << 30


def cost_a_step(price: float, world: int, step_s: float) -> float:
    """Return the price of a step on all devices, in the currency of `price`, which is per device-hour."""
    return price * world * step_s / HOUR_S


def cost_a_billion(price: float, world: int, tokens_per_s: float) -> float:
    """Return the price of a billion tokens (or samples)."""
    return price * world / HOUR_S * 1e9 / tokens_per_s if tokens_per_s else inf


def recommendation(result: SweepResult) -> str:
    """Return a sentence with mesh, changes, step time, throughput, MFU and memory of the recommended plan."""
    best = result.best
    changes = best.candidate.changes_text if best.candidate.choices else "plan unchanged"
    parts = [
        f"{brief_time_text(best.step_s)} per step{_range(best.step_s, best.step_bar, brief_time_text)}",
        f"{rate_text(best.tokens_per_s / result.world)} {result.unit}/s/device",
    ]
    if best.prediction is not None and best.prediction.mfu and best.memory_basis != "measured":
        parts.append(f"MFU {100 * best.prediction.mfu:.0f} %")
    if best.memory_bytes is not None:
        parts.append(_memory_of(best, result))
    if result.price is not None:
        step = cost_a_step(result.price, result.world, best.step_s)
        billion = cost_a_billion(result.price, result.world, best.tokens_per_s)
        per_hour = f"at {result.price:g} per device-hour"
        parts.append(f"{step:.3g} per step and {billion:,.4g} per billion {result.unit} {per_hour}")
    return f"Recommended: {best.candidate.mesh_text}, {changes}. {', '.join(parts)} ({result.where})"


def best_so_far(state: SweepState, world: int) -> str:
    """Return a line with mesh, changes, step time and its range, throughput, MFU and memory of the best predicted
    plan."""
    best = plan_of(state.ranked_predictions[0])
    assert best.prediction is not None
    unit = "tokens" if best.prediction.num_tokens else "samples"
    figures = f"{rate_text(best.tokens_per_s / world)} {unit}/s/device, MFU {100 * best.prediction.mfu:.0f} %"
    tried = count_text(len(state.predictions), "plan")
    error_bar = _range(best.step_s, best.step_bar, brief_time_text)
    step = f"{brief_time_text(best.step_s)} per step{error_bar}, {figures}, peak {memory_text(best)}"
    return f"best of {tried} so far: {best.candidate.text}: {step}"


def _memory_of(plan: RankedPlan, result: SweepResult) -> str:
    capacity_bytes = result.capacity_bytes
    if plan.is_tight and capacity_bytes:
        need, usable = size_text(plan.memory_bytes or 0), size_text(capacity_bytes - result.reserve_bytes)
        return f"peak {need}, which fits into {usable} only because the allocator frees its cache"
    of = f" of {size_text(capacity_bytes)}" if capacity_bytes else ""
    reserve_text = f" ({size_text(result.reserve_bytes)} kept free)" if of and result.reserve_bytes else ""
    bar = _range(plan.memory_bytes or 0, plan.memory_bar, size_text)
    return f"peak {memory_text(plan)}{bar}{of}{reserve_text}"


def _range(value: float, bar: Bar | None, text_of: Callable[[float], str]) -> str:
    return "" if bar is None else f" {range_text(value, bar, text_of)}"


def best_text(result: SweepResult) -> list[str]:
    """Return a line on the probability that the recommended plan is the fastest; [] without error bars."""
    probability, count = result.best_probability, sum(plan.fits is not False for plan in result.plans)
    if probability is None or count < 2:
        return []
    ties = sum(result.is_tie(plan) for plan in result.plans[1:] if plan.fits is not False)
    tied = f"; ties: {count_text(ties, 'plan')}" if ties else ""
    return [f"Fastest of {count} predicted plans with a probability of {100 * probability:.0f} %{tied}"]


def memory_text(plan: RankedPlan) -> str:
    """Return a text such as `61.2 GiB`, with ~ for an estimate, and a word if the plan does not fit or leaves no
    reserve.
    """
    if plan.memory_bytes is None:
        return NOTHING
    word = " (tight)" if plan.is_tight else ""
    if plan.fits is False:
        word = " (reserve)" if plan.takes_reserve else " (no)"
    return f"{size_text(plan.memory_bytes)}{word}"


def why(result: SweepResult) -> list[str]:
    """Return lines on the next plan and its differences."""
    best, next_plan = result.best, result.runner_up
    if next_plan is None:
        return ["No other tried plan fits." if result.plans[1:] else "No other plan was tried."]
    name = next_plan.candidate.text
    if next_plan.measured is not None:
        ratio, low, high = next_plan.measured
        verdict = "" if next_plan.verdict in (SLOWER, FASTER) else f": {next_plan.verdict}"
        text = f"Next best: {name}, {times_text(ratio, 'the recommended plan', low, high)}{verdict}"
    else:
        more = next_plan.step_s / best.step_s - 1
        more_bytes = (next_plan.memory_bytes or 0) - (best.memory_bytes or 0)
        memory = f", {size_text(more_bytes)} more memory" if more <= 0 < more_bytes and best.memory_bytes else ""
        label, advice = ("Tie", ". Measure both") if result.is_tie(next_plan) else ("Next best", "")
        text = f"{label}: {name} ({100 * more:+.1f} % time{memory}){advice}"
    theirs, ours = result.traces.get(next_plan.candidate), result.traces.get(best.candidate)
    differences = path_changes(theirs, ours)[:MAX_REASONS] if theirs is not None and ours is not None else []
    differences = differences or reasons(best, next_plan)
    return [text, *(["Compared with the recommended plan: " + "; ".join(differences)] if differences else [])]


def outside_search(result: SweepResult) -> list[str]:
    """Return a line on options that the search does not try, and that make the recommended plan faster."""
    parts = [
        f"{option} ({100 * (prediction.step_s / result.best.step_s - 1):+.1f} % time, peak "
        f"{memory_text(plan_of(prediction))})"
        for option, prediction in result.faster_outside.items()
    ]
    return [f"Faster, but not part of the search: {'; '.join(parts)}"] if parts else []


def reasons(best: RankedPlan, other_plan: RankedPlan) -> list[str]:
    """Return the parts of a step in which the other plan needs more or less time, the largest differences first."""
    ours, theirs = best.prediction, other_plan.prediction
    if ours is None or theirs is None or not (ours.exposed_s or theirs.exposed_s or ours.parts_s):
        return []
    parts = {
        COMPUTE: "compute",
        IDLE: "idle time (host-bound)",
        BUBBLE: "bubble (waits for another stage)",
        ON_HOST: "operators on the host",
    }
    changes = [(theirs.parts_s.get(name, 0.0) - ours.parts_s.get(name, 0.0), called) for name, called in parts.items()]
    for key in {*ours.exposed_s, *theirs.exposed_s}:
        mesh_dim, kind, owner = key
        change = theirs.exposed_s.get(key, 0.0) - ours.exposed_s.get(key, 0.0)
        changes.append((change, f"exposed {kind} over {mesh_dim} of {owner or 'the root module'}"))
    changes.sort(key=lambda item: -abs(item[0]))
    return [
        f"{brief_time_text(abs(change))} {'more' if change > 0 else 'less'} {called}"
        for change, called in changes[:MAX_REASONS]
        if abs(change) > LEAST_SHARE * best.step_s
    ]


def record_of_result(result: SweepResult) -> dict[str, Any]:
    """Return the result as plain data."""
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
        "best_probability": result.best_probability,
        "plans": [record_of(plan, result.world, result.price) for plan in result.plans],
        "predicted": [record_of(plan, result.world, result.price) for plan in result.predicted],
        "undominated": [result.plans.index(plan) for plan in undominated(result.plans)],
        "changes": [
            {"code": list(change.code), "time_share": change.time_share, "memory_bytes": change.memory_bytes}
            | {"mesh": change.plan.candidate.mesh, "changes": dict(change.plan.candidate.choices)}
            for change in result.changes
        ],
        "faster_outside": [
            {"options": options, "step_s": prediction.step_s, "memory_bytes": prediction.reserved_bytes}
            for options, prediction in result.faster_outside.items()
        ],
        "layouts": list(result.layouts),
        "code": list(result.code),
        "command": result.command,
        "notes": list(result.notes),
    }


def record_of(plan: RankedPlan, world: int, price: float | None) -> dict[str, Any]:
    """Return a plan as plain data."""
    record: dict[str, Any] = {
        "mesh": plan.candidate.mesh,
        "changes": dict(plan.candidate.choices),
        "step_s": plan.step_s,
        "step_range_s": bar_range(plan.step_s, plan.step_bar),
        "tokens_per_s": plan.tokens_per_s,
        "memory_bytes": plan.memory_bytes,
        "memory_range_bytes": bar_range(plan.memory_bytes or 0, plan.memory_bar),
        "memory_basis": plan.memory_basis,
        "fits": plan.fits,
        "is_tight": plan.is_tight,
        "takes_reserve": plan.takes_reserve,
        "verdict": plan.verdict,
        "ratio": plan.measured,
        "predicted_s": plan.predicted_s,
    }
    if plan.prediction is not None:
        record["mfu"] = plan.prediction.mfu
        record["parts_s"] = dict(plan.prediction.parts_s)
        record["exposed_s"] = [
            {"mesh_dim": mesh_dim, "kind": kind, "owner": owner, "exposed_s": seconds}
            for (mesh_dim, kind, owner), seconds in plan.prediction.exposed_s.items()
        ]
    if price is not None:
        record["cost_a_step"] = cost_a_step(price, world, plan.step_s)
        record["cost_a_billion"] = cost_a_billion(price, world, plan.tokens_per_s)
    return record


def blocks_of(result: SweepResult) -> list[Block]:
    """Return the result as blocks of text, with the recommendation and the next command at the end."""
    code: list[Block] = [Heading("to paste", 3), Code(tuple(result.code))] if result.code else []
    return [
        Heading(result.title),
        *_changes(result),
        *_front(result),
        _table("plans", result, result.plans),
        *([_table("as predicted", result, result.predicted)] if result.predicted else []),
        *code,
        Notes(tuple(result.notes)),
        Lines((*answer(result)[1:], recommendation(result), "Next:")),
        Code((result.command,)),
    ]


def answer(result: SweepResult) -> tuple[str, ...]:
    """Return the recommendation, and the differences of the next plan."""
    return (recommendation(result), *best_text(result), *why(result), *outside_search(result))


def page_of_result(result: SweepResult) -> str:
    """Return the result as HTML: the recommendation first, then the picture."""
    _, *rest, notes, _, command = blocks_of(result)
    with style.styled():
        figures = pareto_figures(result.title, result.plans, result.best, result.capacity_bytes)
        pictures: list[PageBlock] = [Picture(figure) for _, figure in figures]
        head = (Heading(result.title, 1), Heading("Recommended plan"), Verdict(answer(result)))
        return page_of(result.title, [*head, *pictures, *rest, command, notes])


def _changes(result: SweepResult) -> list[Block]:
    if not result.changes:
        return []

    def changed(change: Change) -> str:
        candidate = change.plan.candidate
        return candidate.mesh_text if candidate.sizes != result.written_sizes else candidate.changes_text

    def more_memory(change: Change) -> str:
        more = change.memory_bytes
        return NOTHING if more is None else f"{'-' if more < 0 else '+'}{size_text(abs(round(more)))}"

    rows = list(enumerate(result.changes[:NUM_CHANGES], start=1))
    columns: TableColumns = (
        ("", lambda row: str(row[0])),
        ("<change", lambda row: changed(row[1])),
        ("step", lambda row: f"{100 * row[1].time_share:+.1f} %"),
        ("memory", lambda row: more_memory(row[1])),
        ("<verdict", lambda row: "does not fit" if row[1].plan.fits is False else row[1].plan.verdict or NOTHING),
    )
    title = f"{count_text(len(rows), 'change')} of the plan as written, each alone, the largest gain first"
    table = table_of(title, columns, rows, (), (), ("verdict",))
    imports = dict.fromkeys(line for _, change in rows for line in change.imports)
    lines = [f"{line}  # {number}" for number, change in rows for line in change.code]
    code = [Code((*imports, *([""] if imports else []), *lines))] if lines else []
    return [table, *code, *([Lines(tuple(result.layouts))] if result.layouts else [])]


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
    title = "Pareto front: step time vs memory"
    return [capped(table_of(title, columns, front), MAX_FRONT, "more: see the picture")]


def _table(title: str, result: SweepResult, plans: Sequence[RankedPlan]) -> Table:
    price, world, unit = result.price, result.world, result.unit
    costs: TableColumns = ()
    if price is not None:
        costs = (
            ("per step", lambda plan: f"{cost_a_step(price, world, plan.step_s):.3g}"),
            (f"per billion {unit}", lambda plan: f"{cost_a_billion(price, world, plan.tokens_per_s):,.4g}"),
        )
    columns: TableColumns = (
        ("<mesh", lambda plan: plan.candidate.mesh_text),
        ("<changes", lambda plan: plan.candidate.changes_text),
        ("step", lambda plan: time_text(plan.step_s)),
        ("vs best", lambda plan: f"{plan.step_s / plans[0].step_s:.2f}"),
        (f"{unit}/s", lambda plan: rate_text(plan.tokens_per_s)),
        ("MFU", lambda plan: f"{100 * plan.prediction.mfu:.0f} %" if plan.prediction else NOTHING),
        ("memory", memory_text),
        *costs,
        ("predicted", lambda plan: time_text(plan.predicted_s) if plan.predicted_s else NOTHING),
        ("<verdict", lambda plan: plan.verdict or NOTHING),
    )
    notes = []
    if {bool(plan.verdict) for plan in plans if plan.memory_basis == "measured" or plan.measured} == {False, True}:
        notes.append(
            "without a verdict: times of an earlier, shorter round, not comparable with times of the last round"
        )
    if any(plan.fits is False and not plan.takes_reserve for plan in plans):
        notes.append("(no): does not fit")
    if any(plan.takes_reserve for plan in plans):
        reserve = size_text(result.reserve_bytes)
        notes.append(f"(reserve): not recommended, leaves less than the reserve of {reserve}")
    if any(plan.is_tight for plan in plans):
        notes.append("(tight): fits only because the allocator frees its cache; its time for this is not counted")
    optional = (f"{unit}/s", "MFU", "per step", "predicted", "vs best")
    table = table_of(title, columns, plans, notes, (), optional, where_known=("predicted", "<verdict", "MFU"))
    return capped(table, MAX_ROWS, "more rows: --format json")


def pareto_figures(
    title: str, plans: Sequence[RankedPlan], best: RankedPlan, capacity_bytes: float | None
) -> "Iterator[tuple[str, Figure]]":
    """Yield one figure, if the memory of any plan is known."""
    sized_plans = [plan for plan in plans if plan.memory_bytes is not None]
    if not sized_plans:
        return
    figure, (axes,) = style.new_figure(1, 9.5, 5.0)
    scale, unit = (1.0, "s") if best.step_s >= 1 else (1e-3, "ms")
    memories = [plan.memory_bytes or 0 for plan in sized_plans]
    size, memory_unit = (GIB, "GiB") if max(memories) >= GIB else (MIB, "MiB")
    front = undominated(sized_plans)
    # A plan far above the capacity, or above all others, is an arrow at the edge.
    limit = BEYOND * capacity_bytes if capacity_bytes else style.reach(memories)
    limit = max(limit, *(plan.memory_bytes or 0 for plan in (*front, best)))

    def place(plan: RankedPlan) -> tuple[float, float]:
        return min(plan.memory_bytes or 0, limit) / size, plan.step_s / scale

    far = [plan for plan in sized_plans if (plan.memory_bytes or 0) > limit]
    beaten = [plan for plan in sized_plans if plan not in front and plan not in far]
    refused = [plan for plan in beaten if plan.fits is False]
    fitting = [plan for plan in beaten if plan.fits is not False]
    beyond = [plan for plan in fitting if (plan.memory_bytes or 0) > (capacity_bytes or inf)]
    within = [plan for plan in fitting if plan not in beyond]
    layers: tuple[tuple[str, list[RankedPlan], dict[str, Any]], ...] = (
        ("beyond the axis", far, {"marker": ">", "color": style.GREY, "s": 34, "clip_on": False}),
        ("does not fit", refused, {"marker": "x", "color": style.LIGHT, "s": 34}),
        ("fits if the cache is freed", beyond, {"marker": "x", "color": style.GREY, "s": 34}),
        ("slower or larger", within, {"color": style.GREY, "s": 26}),
        ("Pareto front", front, {"color": style.BLUE, "s": 46}),
        ("recommended", [best], {"color": style.RED, "s": 130, "marker": "*", "zorder": 4}),
    )
    for label, chosen, look in layers:
        if chosen:
            x, y = zip(*map(place, chosen), strict=True)
            axes.scatter(x, y, label=f"{label} ({len(chosen)})", **look)
    hover(axes, [Spot(*place(plan), _hover_text(plan)) for plan in sized_plans])
    if len(front) > 1:
        x, y = zip(*map(place, reversed(front)), strict=True)
        axes.step(x, y, where="post", color=style.BLUE, linewidth=1, alpha=0.5, zorder=0)
    if capacity_bytes is not None and max(memories) > 0.6 * capacity_bytes:
        axes.axvline(capacity_bytes / size, color=style.ORANGE, linewidth=1.2, linestyle="--")
        axes.annotate(
            "memory of a device", (capacity_bytes / size, 0), xytext=(-3, 4), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=style.NOTE, ha="right", va="bottom", rotation=90, fontsize=8.5,
        )  # fmt: skip
    axes.grid(visible=True)
    axes.set_xlabel(f"peak memory per device ({memory_unit})")
    axes.set_ylabel(f"time per step ({unit})")
    _set_limits(axes, [min(memory, limit) / size for memory in memories], [plan.step_s / scale for plan in sized_plans])
    named = [best, *(plan for plan in front if plan is not best)][:MAX_NAMED]
    names, shared = without_shared([plan.candidate.text.replace("; ", ",") for plan in named])
    style.label_points(axes, dict(zip(names, map(place, named), strict=True)))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, fontsize=8.5, handletextpad=0.3, columnspacing=1.2)
    style.title(figure, title)
    notes = [f"names without {', '.join(shared)}"] if shared else []
    notes += ["slower or larger: another plan is at least as fast and as small"] if within else []
    if notes:
        style.caption(figure, "; ".join(notes))
    yield "plans", figure


def _set_limits(axes: "Axes", memories: Sequence[float], times: Sequence[float]) -> None:
    """Set limits a little beyond the values; very different times are on a log axis."""
    margin = 0.08 * (max(memories) - min(memories)) or 0.1 * max(memories)
    axes.set_xlim(max(min(memories) - margin, 0), max(memories) + margin)
    low, high = min(times), max(times)
    if high > MAX_LINEAR * low:
        axes.set_yscale("log")
        style.label_axis(axes.yaxis, lambda value: f"{value:g}")
        axes.set_ylim(low / 1.15, high * 1.15)
    else:
        margin = 0.12 * (high - low) or 0.1 * high
        axes.set_ylim(max(low - margin, 0), high + margin)


def _hover_text(plan: RankedPlan) -> str:
    step, memory = f"step: {brief_time_text(plan.step_s)}", f"memory: {memory_text(plan)}"
    return "\n".join([plan.candidate.mesh_text, plan.candidate.changes_text, step, memory])
