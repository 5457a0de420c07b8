"""Plans by time and by memory: which dominate, what they cost, which is recommended, and why not the next one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distbench.search.simulated_plan import BUBBLE, COMPUTE, IDLE, Prediction
from distbench.search.space import Candidate
from distbench.search.sweep_child import PlanCode
from distbench.show.units import brief_time_text, size_text
from distbench.statistics.pass_comparison import as_table, compare_passes

HOUR_S = 3600.0
MAX_REASONS = 4
LEAST_SHARE = 0.002  # of the step: a smaller difference is no reason
TIGHT, RESERVE = " (tight)", " (reserve)"


@dataclass(frozen=True)
class RankedPlan:
    """One row of what a sweep found.

    Args:
        memory_bytes: at the peak; None where nobody knows.
        memory_basis: "whole", "about" or "measured".
        verdict: a measured plan's, against the recommended one; empty for a predicted one.
        prediction: where there is one.
        measured: bounds of the ratio of its time to the recommended one's, where it was measured.
    """

    candidate: Candidate
    step_s: float
    tokens_per_s: float
    memory_bytes: float | None
    memory_basis: str = "about"
    fits: bool | None = None
    verdict: str = ""
    prediction: Prediction | None = None
    measured: tuple[float, float, float] | None = None
    predicted_s: float | None = None


def plan_of(prediction: Prediction) -> RankedPlan:
    """A predicted one."""
    basis = "whole" if prediction.is_whole else "about"
    return RankedPlan(
        prediction.candidate,
        prediction.step_s,
        prediction.tokens_per_s,
        prediction.reserved_bytes,
        basis,
        prediction.fits,
        prediction=prediction,
    )


def judged(plans: Sequence[RankedPlan], passes: Sequence[Any]) -> list[RankedPlan]:
    """The fastest first, the others each with its verdict against that one."""
    best = int(np.argmin([plan.step_s for plan in plans]))
    comparison = compare_passes(as_table(passes), [best] * len(plans))
    bounds = zip(comparison.ratio.tolist(), comparison.low.tolist(), comparison.high.tolist(), strict=True)
    other_plans = [
        replace(plan, verdict=verdict, measured=bound)
        for place, (plan, verdict, bound) in enumerate(zip(plans, comparison.verdict, bounds, strict=True))
        if place != best
    ]
    return [replace(plans[best], verdict="recommended"), *sorted(other_plans, key=lambda plan: plan.step_s)]


def undominated(plans: Sequence[RankedPlan]) -> list[RankedPlan]:
    """Those that fit and that no other one beats in both time and memory, the fastest first."""
    sized_plans = [plan for plan in plans if plan.memory_bytes is not None and plan.fits is not False]
    front: list[RankedPlan] = []
    for plan in sorted(sized_plans, key=lambda sized_plan: (sized_plan.step_s, sized_plan.memory_bytes)):
        if not front or float(plan.memory_bytes or 0) < float(front[-1].memory_bytes or 0):
            front.append(plan)
    return front


def cost_a_step(price: float, world: int, step_s: float) -> float:
    """Of all devices, in the price's unit; the price is an hour's of one."""
    return price * world * step_s / HOUR_S


def cost_a_billion(price: float, world: int, tokens_per_s: float) -> float:
    """Of a billion tokens (or samples)."""
    return price * world / HOUR_S * 1e9 / tokens_per_s if tokens_per_s else math.inf


def reasons(best: RankedPlan, other_plan: RankedPlan) -> list[str]:
    """Where the other one spends more or less, the largest differences first."""
    if best.prediction is None or other_plan.prediction is None:
        return []
    ours, theirs = best.prediction, other_plan.prediction
    if not ours.exposed_s and not theirs.exposed_s and not ours.parts_s:
        return []
    parts = {
        COMPUTE: "compute",
        IDLE: "idle time, in which the host has issued nothing yet",
        BUBBLE: "bubble, in which another stage is waited for",
    }
    changes = [(theirs.parts_s.get(name, 0.0) - ours.parts_s.get(name, 0.0), called) for name, called in parts.items()]
    for key in {*ours.exposed_s, *theirs.exposed_s}:
        mesh_dim, kind, owner = key
        change = theirs.exposed_s.get(key, 0.0) - ours.exposed_s.get(key, 0.0)
        changes.append((change, f"exposed {kind} over {mesh_dim} of {owner or 'the root'}"))
    ranked = sorted(changes, key=lambda item: -abs(item[0]))
    least = LEAST_SHARE * best.step_s
    return [
        f"{brief_time_text(abs(change))} {'more' if change > 0 else 'less'} {called}"
        for change, called in ranked[:MAX_REASONS]
        if abs(change) > least
    ]


def memory_text(plan: RankedPlan) -> str:
    """`61.2 GiB`, with ~ where it is an estimate, and a word where it does not fit or leaves no reserve."""
    if plan.memory_bytes is None:
        return "-"
    about = "~" if plan.memory_basis == "about" else ""
    refused = RESERVE if takes_reserve(plan) else " (no)"
    return f"{about}{size_text(plan.memory_bytes)}" + (
        refused if plan.fits is False else TIGHT if is_tight(plan) else ""
    )


def takes_reserve(plan: RankedPlan) -> bool:
    """Whether a plan is not recommended only because it leaves no reserve."""
    return plan.fits is False and plan.prediction is not None and plan.prediction.takes_reserve


def is_tight(plan: RankedPlan) -> bool:
    """Whether a plan that fits needs more than is there, were nothing given back."""
    return plan.fits is not False and plan.prediction is not None and plan.prediction.is_tight


def record_of(plan: RankedPlan, world: int, price: float | None) -> dict[str, Any]:
    """A plan as plain data."""
    prediction = plan.prediction
    record: dict[str, Any] = {
        "mesh": plan.candidate.mesh,
        "changes": dict(plan.candidate.choices),
        "step_s": plan.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "memory_bytes": plan.memory_bytes,
        "memory_basis": plan.memory_basis,
        "fits": plan.fits,
        "is_tight": is_tight(plan),
        "takes_reserve": takes_reserve(plan),
        "verdict": plan.verdict,
        "ratio": plan.measured,
        "predicted_s": plan.predicted_s,
    }
    if prediction is not None:
        record["parts_s"] = dict(prediction.parts_s)
        record["exposed_s"] = [
            {"mesh_dim": key[0], "kind": key[1], "owner": key[2], "exposed_s": seconds}
            for key, seconds in prediction.exposed_s.items()
        ]
    if price is not None:
        record["cost_a_step"] = cost_a_step(price, world, plan.step_s)
        record["cost_a_billion"] = cost_a_billion(price, world, plan.tokens_per_s)
    return record


@dataclass(frozen=True)
class Change:
    """One change of the plan as written, and what it does.

    Args:
        imports, code: lines that make it, after the plan as written; none where they could not be asked for.
        time_share: of the step as written that it adds; negative where it is faster.
        memory_bytes: that it adds; None where that is not known.
    """

    imports: Sequence[str]
    code: Sequence[str]
    time_share: float
    memory_bytes: float | None
    plan: RankedPlan


def changes_of(
    plans: Sequence[RankedPlan], as_written: Candidate | None, codes: Mapping[Candidate, PlanCode]
) -> list[Change]:
    """Every plan but the one as written, compared with that one, the most worth making first."""
    written_plan = next((plan for plan in plans if plan.candidate == as_written), None)
    if written_plan is None:
        return []
    changes = []
    for plan in plans:
        if plan is not written_plan:
            is_known = plan.memory_bytes is not None and written_plan.memory_bytes is not None
            more = float(plan.memory_bytes or 0) - float(written_plan.memory_bytes or 0) if is_known else None
            code = codes.get(plan.candidate, PlanCode([], [], []))
            lines = code.changes
            if plan.candidate.sizes != written_plan.candidate.sizes:
                lines = [f"mesh = {plan.candidate.mesh!r}"]
            changes.append(Change(code.imports, lines, plan.step_s / written_plan.step_s - 1, more, plan))
    return sorted(changes, key=lambda change: (change.plan.fits is False, change.time_share))


def layouts_of(prediction: Prediction | None) -> list[str]:
    """Redistributions that nobody asked for, and what could be saved at most by keeping what they undo."""
    if prediction is None:
        return []
    ranked = sorted(prediction.implicit_s.items(), key=lambda item: -item[1])
    return [
        f"{owner or 'the root'}: {moved or 'a redistribution'} is implicit; at most "
        f"{100 * seconds / prediction.step_s:.1f} % of the step could be saved by keeping the layout between the two "
        "modules (use_local_output=False)"
        for (owner, moved), seconds in ranked[:3]
        if seconds > LEAST_SHARE * prediction.step_s
    ]
