"""The result of a sweep: its plans in order, the code to paste, and what a reader must know of the figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distbench.report.trace_rows import Trace
from distbench.search.ranking import Change, RankedPlan, changes_of, layouts_of, plan_of
from distbench.search.simulated_plan import FEW
from distbench.search.space import Candidate, Setup, count_of
from distbench.search.sweep_child import PlanCode
from distbench.search.sweep_state import SweepState
from distbench.simulate.hardware_file import Hardware
from distbench.spec.printable_text import count_text

MAX_LEFT_OUT = 3
EQUAL = 0.001  # of the time: plans that are nearer are not told apart


@dataclass(frozen=True)
class SweepResult:
    """What a sweep ends with.

    Args:
        title: of the whole.
        plans: the best first; what does not fit last.
        where: "predicted on h100", "measured on this machine".
        world: devices.
        capacity_bytes: memory of one, where it counts.
        reserve_bytes: of that, what is left free.
        unit: what is counted a second: "tokens" or "samples".
        code: Python to paste.
        command: to measure the recommended plan.
        notes: what was assumed, tried and left out.
        changes: of the plan as written, each on its own, where that was asked for.
        written_sizes: of the mesh of the plan as written, where that was asked for.
        layouts: what else could be changed in it.
        traces: what measured plans communicate, where that was traced.
        estimates: estimated memory over that of all layers, of each plan for which both are known.
        predicted: where `plans` are the best of predicted ones, measured: all of those.
    """

    title: str
    plans: Sequence[RankedPlan]
    where: str
    world: int
    unit: str
    code: Sequence[str]
    command: str
    capacity_bytes: float | None = None
    reserve_bytes: float = 0.0
    price: float | None = None
    notes: Sequence[str] = field(default_factory=list)
    changes: Sequence[Change] = ()
    written_sizes: tuple[tuple[str, int], ...] = ()
    layouts: Sequence[str] = ()
    traces: Mapping[Candidate, Trace] = field(default_factory=dict)
    predicted: Sequence[RankedPlan] = ()
    estimates: Sequence[float] = ()

    @property
    def best(self) -> RankedPlan:
        """The recommended plan."""
        return self.plans[0]

    @property
    def runner_up(self) -> RankedPlan | None:
        """The next one that may be used, one that is told apart before others."""
        usable = [plan for plan in self.plans[1:] if plan.fits is not False]
        distinct = (plan for plan in usable if plan.verdict or abs(plan.step_s / self.best.step_s - 1) > EQUAL)
        return next(distinct, usable[0] if usable else None)


def plans_of(state: SweepState, hardware: Hardware | None) -> list[RankedPlan]:
    """The plans that are ranked: those of the last measured round where there is one, else all that were predicted;
    without a hardware file all that were measured."""
    if hardware is None:
        return state.ranked_measured
    if not state.final:
        return [plan_of(prediction) for prediction in state.ranked_predictions]
    return [
        replace(
            plan, predicted_s=state.predictions[plan.candidate].step_s, prediction=state.predictions[plan.candidate]
        )
        for plan in state.final
    ]


def result_of(
    setup: Setup,
    state: SweepState,
    hardware: Hardware | None,
    codes: Mapping[Candidate, PlanCode],
    price: float | None,
) -> SweepResult:
    """The result of a sweep that has predicted or measured a plan.

    Args:
        hardware: None where all plans were measured.
        codes: of the best plan, and of changes of the plan as written; empty where it was interrupted before.
    """
    plans = plans_of(state, hardware)
    predicted = [plan_of(prediction) for prediction in state.ranked_predictions]
    is_measured = hardware is None or bool(state.final)
    scenario, ranks, num_plans = setup.entry.name, count_text(setup.world, "rank"), count_text(len(plans), "plan")
    if hardware is None:
        title = f"{scenario} on {ranks}: {num_plans}, measured on this machine"
    elif is_measured:
        best_of = "it" if len(predicted) == 1 else f"the best {len(plans)}"
        num_predicted = count_text(len(predicted), "plan")
        title = f"{scenario} on {ranks}: {num_predicted} predicted, {best_of} measured on this machine"
    else:
        title = f"{scenario} on {count_text(setup.world, 'device')}: {num_plans}, predicted on {hardware.name}"
    compared = predicted
    if hardware is None and state.written:  # two changes together are no neighbour of the plan as written
        near = {state.written, *state.space.around(state.written)}
        compared = [plan for plan in plans if plan.candidate in near]
    best, memory = plans[0].candidate, hardware if hardware is not None and not is_measured else None
    return SweepResult(
        title=title,
        plans=plans,
        where="measured here" if memory is None else f"predicted on {memory.name}",
        world=setup.world,
        unit="tokens" if state.space.facts["num_tokens"] else "samples",
        code=codes[best].plan if best in codes else (),
        command=setup.command(best),
        capacity_bytes=memory["memory_bytes"] if memory else None,
        reserve_bytes=memory["memory_bytes"] - memory.usable_bytes if memory else 0.0,
        price=price,
        notes=_notes(setup, state, hardware),
        changes=changes_of(compared, state.written, codes),
        written_sizes=state.written.sizes if state.written else (),
        layouts=layouts_of(state.predictions.get(state.written)) if state.written and memory else (),
        traces=state.traces,
        predicted=predicted if is_measured else (),
        estimates=state.estimates,
    )


def _notes(setup: Setup, state: SweepState, hardware: Hardware | None) -> list[str]:
    facts, left_out = state.space.facts, list(state.left_out.items())
    amount = count_text(*((facts["num_tokens"], "token") if facts["num_tokens"] else (facts["batch_size"], "sample")))
    notes = [f"every plan takes the same global batch a step ({amount}), so step times rank them"]
    if hardware is None:
        if state.interrupted:
            notes.insert(0, "it was interrupted: this is what was known; --resume goes on")
        elif not state.final:
            notes.insert(
                0, "no plan of the last round, which checks them, came out right: the one recommended is unchecked"
            )
        notes.append(
            f"measured: {len(state.measured)} of {count_text(count_of(state.space), 'plan')}, the best third of each "
            "round in the next; those with a verdict took turns in the last"
        )
    else:
        tried_text = (
            "meshes as written, those that need the fewest fast links first, and changes of the best, one at a time"
        )
        if state.written is not None:
            tried_text = "the plan as written, and those that differ from it by one change or by one factor of the mesh"
        num_tried = len({*state.predictions, *state.left_out})
        stopped = f"; {state.stopped}" if state.stopped else ""
        notes.append(f"tried: {num_tried} of {count_text(state.num_legal, 'plan')}: {tried_text}{stopped}")
        notes += [setup.note] if setup.note else []
    if state.refused:
        notes.append(f"meshes that were refused unrecorded, since their shards alone do not fit: {len(state.refused)}")
    notes += [f"left out: {candidate.text}: {why}" for candidate, why in left_out[:MAX_LEFT_OUT]]
    if len(left_out) > MAX_LEFT_OUT:
        notes.append(f"left out: {len(left_out) - MAX_LEFT_OUT} more: --format json")
    if state.layers:
        notes.append(f"times are extended linearly from {FEW[0]} and {FEW[1]} layers ({state.layers})")
    if setup.float8:
        notes.append("--float8 is a rule of predictions: distbench run measures the plan without it")
    if state.predictions:
        notes += state.ranked_predictions[0].assumed
    if state.final and state.interrupted and hardware is not None:
        notes.append("it was interrupted while it measured; --resume goes on")
    notes += [f"run file of a round: {file}" for file in state.run_files]
    if state.num_reused is not None:
        notes.append(f"rounds that --resume took: {state.num_reused}")
    return notes
