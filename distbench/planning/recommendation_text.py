"""Output of `distbench redistribute`: which redistribution planner to use for a tensor on a mesh."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distbench.planning.layout_drawing import MAX_TEXT_RANKS, check_picture, diagram_of, drawing_of, save_picture
from distbench.planning.placement_states import State
from distbench.planning.recommendation import (
    Advice,
    PairRanking,
    advise,
    chosen_pairs,
    ranking_of,
    times_longer,
    verdict,
)
from distbench.planning.redistribution_plans import Plan, Setting, direct_line
from distbench.planning.redistribution_request import (
    TorchAnswers,
    ask_torch,
    every_pair,
    pair_of,
    prices_text,
    zero_filled,
)
from distbench.show.blocks import Block, Heading, Lines, Table
from distbench.show.terminal import text_of, width_here, wrap
from distbench.show.units import percent_text, size_text, time_text
from distbench.spec.errors import UserError
from distbench.spec.mesh import format_mesh
from distbench.spec.placements import PLANNERS, TORCH_PLANNERS
from distbench.spec.printable_text import count_text

MAX_ROWS = 40
PRICED_NOTE = "Bytes and peak are the busiest rank's; peak is the size of local tensors before and after a step."
DIRECT_NOTE = (
    "direct is priced as an all_to_all over each mesh dim that it crosses, one after the other. This is an estimate, "
    "because the profile has no line for direct."
)
ORDER_NOTE = "torch plans a given shard order by graph search, like min_cost, even if greedy is set."
UNMEASURED_NOTE = "No profile was given, so calibrated uses torch's own constants, like min_cost."


def plan_pair(setting: Setting, source: str, target: str, form: str, picture: Path | None = None) -> str:
    """Format one pair's plans as `form` "table" or "json", and draw `picture` if given; layouts are in torch's
    notation.

    Raises:
        UserError: a layout that cannot be read or redistributed to; a picture that cannot be written.
    """
    pair = pair_of(source, target, setting)
    if picture:
        check_picture(picture)
    torch = ask_torch(setting, [pair])
    if torch.no_zero_fill and zero_filled(*pair):
        raise UserError(
            f"{source} -> {target}: {torch.no_zero_fill}; write R or S(dim) on mesh dims that shard the source"
        )
    advice = advise(setting, *pair, torch)
    picture_lines = wrap(save_picture(setting, advice, picture), width_here(), "  ") if picture else []
    if form == "json":
        return json.dumps({**_setting_record(setting, torch), **_record(setting, advice)}, indent=1)
    drawing = drawing_of(setting, advice.use, MAX_TEXT_RANKS)
    texts = [pair_text(setting, advice, torch, drawing if isinstance(drawing, str) else diagram_of(drawing))]
    return "\n\n".join([*texts, "\n".join(picture_lines)] if picture_lines else texts)


def plan_all_pairs(setting: Setting, form: str, on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> str:
    """Format all ordered layout pairs as `form` "table" or "json".

    `on_event` gets events of `records/progress_events.py`.
    """
    all_pairs = list(every_pair(setting))
    pairs = chosen_pairs(setting, all_pairs)
    on_event({"event": "case", "id": "plan/paths of torch's planners"})
    torch = ask_torch(setting, pairs)
    on_event({"event": "plan", "num_cases": len(pairs)})
    on_event({"event": "case", "id": "plan/prices of all planners"})
    ranking = ranking_of(
        setting, pairs, torch, len(all_pairs), lambda: on_event({"event": "done", "id": "", "status": "ok"})
    )
    if form != "json":
        return ranking_text(setting, ranking, torch)
    counts = {"num_all": ranking.num_all, "num_used": ranking.num_used}
    records = [_record(setting, advice) for advice in ranking.advices]
    return json.dumps({**_setting_record(setting, torch), **counts, "pairs": records}, indent=1)


def pair_text(setting: Setting, advice: Advice, torch: TorchAnswers, diagram: str) -> str:
    """Format one pair's plans and steps, the recommended planner, and the diagram."""
    least = "unknown for this pair"
    if advice.least_bytes is not None:
        least = f"{size_text(advice.least_bytes)} (the target minus the source, on the rank with most missing bytes)"
    blocks: list[Block] = [
        Heading(f"{advice.source} -> {advice.target}", 1),
        Lines((*_setting_lines(setting, torch), f"Receive lower bound: {least}.")),
        _summary(setting, advice),
        Lines((verdict(setting, advice),)),
        _steps(advice),
    ]
    return text_of(blocks) + (f"\n\n{diagram}" if diagram else "")


def _setting_lines(setting: Setting, torch: TorchAnswers) -> tuple[str, str]:
    """Return the tensor on its mesh, and the source of the prices."""
    mesh = f"{format_mesh(setting.mesh)} ({count_text(setting.num_ranks, 'rank')})"
    torch_note = f"; greedy and min_cost from torch {torch.torch}" if torch.torch else ""
    return (
        f"{setting.tensor}, {size_text(setting.problem.num_bytes)}, on mesh {mesh}.",
        f"Times are predicted from {prices_text(setting)}{torch_note}.",
    )


def _summary(setting: Setting, advice: Advice) -> Table:
    rows = [_summary_row(advice, planner) for planner in PLANNERS]
    notes = [PRICED_NOTE]
    if setting.profile is None:
        notes.append(UNMEASURED_NOTE)
    direct = advice.plans.get("direct")
    if direct and direct.num_collectives and direct_line(setting) is None:
        notes.append(DIRECT_NOTE)
    if "greedy" in advice.plans and any("[" in str(state) for state in (advice.source, advice.target)):
        notes.append(ORDER_NOTE)
    columns = ("<planner", "time", "collectives", "sent per rank", "peak", "received/bound", "<")
    return Table("Plans", columns, rows, notes, optional=("peak", "received/bound", "sent per rank"))


def _summary_row(advice: Advice, planner: str) -> tuple[str, ...]:
    if planner in advice.missing:
        return (planner, "-", "-", "-", "-", "-", advice.missing[planner])
    plan = advice.plans[planner]
    mark = "<- use" if plan is advice.use and advice.source != advice.target else ""
    ratio = advice.received_ratio(plan)
    return (
        planner,
        _time(plan.seconds, plan.error),
        str(plan.num_collectives),
        size_text(plan.sent_bytes),
        size_text(plan.peak_bytes),
        "-" if ratio is None else f"{ratio:.2f}",
        mark,
    )


def _time(seconds: float, error: float | None) -> str:
    text = time_text(seconds) if seconds else "0 us"
    return text if error is None or not seconds else f"{text} +-{percent_text(error)}"


def _steps(advice: Advice) -> Table:
    """Return the table of steps with each path once; the direct exchange has its own rows."""
    rows: list[tuple[str, ...]] = []
    breaks: set[int] = set()
    notes = []
    firsts: dict[tuple[State, ...], str] = {}
    for planner, plan in advice.plans.items():
        first = planner if planner == "direct" else firsts.setdefault(plan.states, planner)
        if first != planner:
            notes.append(f"{planner} uses {first}'s path.")
            continue
        breaks.add(len(rows))
        rows += _step_rows(plan)
    columns = ("<planner", "<step", "<layout", "sent per rank", "time", "peak")
    return Table("Steps", columns, rows, notes, frozenset(breaks - {0}), ("peak", "sent per rank"))


def _step_rows(plan: Plan) -> list[tuple[str, ...]]:
    layouts = plan.path.split("->")
    rows: list[tuple[str, ...]] = [(plan.planner, "start", layouts[0], "", "", "")]
    for step, layout in zip(plan.steps, layouts[1:], strict=False):
        sent, peak = size_text(step.sent_bytes), size_text(step.held_bytes)
        rows.append(("", step.text, f"-> {layout}", sent, _time(step.seconds, step.error), peak))
    return rows


def ranking_text(setting: Setting, ranking: PairRanking, torch: TorchAnswers) -> str:
    """Format the table of all pairs, largest difference first, at most MAX_ROWS rows."""
    used = ", ".join(f"{planner} {count}" for planner, count in ranking.num_used.items() if count)
    count = len(ranking.advices)
    pairs_text = (
        count_text(count, "ordered pair")
        if count == ranking.num_all
        else f"A random {count} of {ranking.num_all} pairs"
    )
    lines = [*_setting_lines(setting, torch), f"{pairs_text}; recommended planner: {used}."]
    if ranking.num_unasked:
        reasons = {why for advice in ranking.advices for name, why in advice.missing.items() if name in TORCH_PLANNERS}
        lines.append(f"{ranking.num_unasked} pairs have no path from torch: {sorted(reasons)[0]}.")
    rows = [_ranking_row(advice) for advice in ranking.advices[:MAX_ROWS]]
    notes = ["greedy/best: predicted time of DTensor's default divided by the best planner's. Bytes sent are per rank."]
    if direct_line(setting) is None and any("direct" in advice.plans for advice in ranking.advices):
        notes.append(DIRECT_NOTE)
    if setting.profile is None:
        notes.append(UNMEASURED_NOTE)
    if (more := count - MAX_ROWS) > 0:
        notes.insert(0, f"... {more} more rows: --format json")
    sent = tuple(f"{planner} sends" for planner in PLANNERS)
    columns = ("<source", "<target", "bound", *PLANNERS, "greedy/best", "<use", *sent)
    table = Table("Largest difference first", columns, rows, notes, optional=(*reversed(sent), "bound", "greedy/best"))
    return text_of([Heading("All pairs", 1), Lines(tuple(lines)), table])


def _ranking_row(advice: Advice) -> tuple[str, ...]:
    plans = [advice.plans.get(planner) for planner in PLANNERS]
    longer = times_longer(advice)
    return (
        str(advice.source),
        str(advice.target),
        "-" if advice.least_bytes is None else size_text(advice.least_bytes),
        *(_time(plan.seconds, None) if plan else "-" for plan in plans),
        f"{longer:.2f}" if longer else "-",
        advice.use.planner,
        *(size_text(plan.sent_bytes) if plan else "-" for plan in plans),
    )


def _setting_record(setting: Setting, torch: TorchAnswers) -> dict[str, Any]:
    """Return the head of the JSON output, with times in seconds and sizes in bytes."""
    return {
        "shape": list(setting.problem.shape),
        "dtype": setting.dtype,
        "mesh": dict(setting.mesh),
        "prices": prices_text(setting),
        "devices_per_host": setting.devices_per_host,
        "torch": torch.torch,
    }


def _record(setting: Setting, advice: Advice) -> dict[str, Any]:
    return {
        "source": str(advice.source),
        "target": str(advice.target),
        "least_received_bytes": advice.least_bytes,
        "use": advice.use.planner,
        "why": verdict(setting, advice),
        "plans": {planner: _plan_record(advice, plan) for planner, plan in advice.plans.items()},
        "no_plan": dict(advice.missing),
    }


def _plan_record(advice: Advice, plan: Plan) -> dict[str, Any]:
    fields = ("op", "over", "seconds", "error", "sent_bytes", "held_bytes")
    return {
        "path": plan.path,
        "predicted_s": plan.seconds,
        "error": plan.error,
        "num_collectives": plan.num_collectives,
        "sent_bytes": plan.sent_bytes,
        "received_bytes": plan.received_bytes,
        "peak_bytes": plan.peak_bytes,
        "received_ratio": advice.received_ratio(plan),
        "steps": [
            {**{name: getattr(step, name) for name in fields}, "target": str(step.target)} for step in plan.steps
        ],
    }
