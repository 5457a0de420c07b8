"""A sweep by prediction: no rank is started."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distbench.search.child import Question, SweepChild
from distbench.search.explore import (
    ExploredPlans,
    Limits,
    Predictor,
    confirm,
    explore,
    look_for_option,
    no_plan_error,
    take_in,
)
from distbench.search.measured import Measurements
from distbench.search.prediction import FEW, layers_of, no_plan_fits
from distbench.search.ranking import RankedPlan, change_lines, changes_of, imports_of, layouts_of, plan_of
from distbench.search.space import Candidate, Setup, Space, count_of
from distbench.search.text import SweepResult
from distbench.simulate.hardware_file import Hardware
from distbench.spec import UserError
from distbench.spec.safe_text import count_text

MAX_LEFT_OUT = 3


def facts_of(setup: Setup, recorder: SweepChild, variant: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the child process says of the scenario's plan and model, or of one variant's."""
    facts: dict[str, Any] = recorder.one(Question("facts", [variant or setup.base], setup.mesh))
    return facts


def code_of(setup: Setup, recorder: SweepChild, candidate: Candidate) -> list[str]:
    """A candidate's mesh and plan as Python: all of it, or, where some value of it has no text, the changes alone."""
    facts = facts_of(setup, recorder, candidate.variant(setup.base))
    mesh = f"mesh = {candidate.mesh!r}"
    if facts["plan"] is not None:
        *imports, plan = facts["plan"]
        return [*imports, *([""] if imports else []), mesh, *plan.splitlines()]
    changes = change_lines(candidate.choices, {**facts, "is_selective": True})
    imports = imports_of(changes)
    as_it_is = f"# plan: as {setup.entry.file.name} has it, with a value that has no text of its own"
    return [*imports, *([""] if imports else []), mesh, as_it_is, *changes]


def predicted_sweep(
    setup: Setup,
    recorder: SweepChild,
    hardware: Hardware,
    limits: Limits,
    tell: Callable[[int, int], None],
    explored: ExploredPlans,
) -> None:
    """Search, and record the best whole; what is found is in `explored`, also where this is interrupted."""
    space, predictor = _begun(setup, recorder, hardware, tell, explored)
    explored.num_legal = count_of(space)
    explore(space, predictor, limits, explored)
    explored.layers = predictor.layers
    confirm(predictor, limits, explored)


def _begun(
    setup: Setup, recorder: SweepChild, hardware: Hardware, tell: Callable[[int, int], None], explored: ExploredPlans
) -> tuple[Space, Predictor]:
    """What there is to try, and what predicts it. Stages of a pipeline have layers each: all are recorded there."""
    explored.facts = facts_of(setup, recorder)
    space = setup.space(explored.facts)
    setup.require_meshes(space)
    explored.unsplit = setup.unsplit_text(space)
    layers = None if explored.facts["pipeline"] else layers_of(setup.base, setup.axes)
    explored.layers = layers
    return space, Predictor(recorder, setup.base, hardware, tell, setup.float8, layers)


def around_of(space: Space, written: Candidate) -> list[Candidate]:
    """The candidates that differ from the plan as written by one change, or by one factor of the mesh."""
    return [*space.neighbours(written), *space.moved_meshes(written)]


def predicted_around(
    setup: Setup,
    recorder: SweepChild,
    hardware: Hardware,
    limits: Limits,
    tell: Callable[[int, int], None],
    explored: ExploredPlans,
) -> None:
    """The plan as written and its neighbours."""
    space, predictor = _begun(setup, recorder, hardware, tell, explored)
    explored.written = setup.as_written(space)
    candidates = [explored.written, *around_of(space, explored.written)]
    explored.num_legal = len(candidates)
    if len(candidates) > limits.max_plans:
        candidates, explored.stopped = candidates[: limits.max_plans], limits.reached
    take_in(explored, predictor.outcomes(candidates[:1]))
    if explored.written not in explored.found:
        why, instead = explored.left_out[explored.written], ""
        if look_for_option(space, predictor, explored):
            instead = f"; it works with {explored.option}"
        raise UserError(f"the plan as written does not work: {why}{instead}")
    take_in(explored, predictor.outcomes(candidates[1:]))
    explored.layers = predictor.layers
    confirm(predictor, limits, explored)


def require_some(setup: Setup, explored: ExploredPlans, hardware: Hardware) -> None:
    """Refuse to recommend what does not fit."""
    if not explored.found:
        raise no_plan_error(setup.entry.name, explored, hardware)
    if explored.ranked[0].fits is False:
        raise no_plan_fits(setup.entry.name, setup.world, explored.ranked[0], hardware, explored.stopped)


def predicted_result(
    setup: Setup, code: Sequence[str], hardware: Hardware, explored: ExploredPlans, price: float | None
) -> SweepResult:
    """What there is to say.

    Args:
        code: of the best plan; empty where it was interrupted before it was written.
    """
    plans = [plan_of(prediction) for prediction in explored.ranked]
    best = explored.ranked[0]
    return SweepResult(
        title=f"{setup.entry.name} on {count_text(setup.world, 'device')}: {count_text(len(plans), 'plan')}, "
        f"predicted on {hardware.name}",
        plans=plans,
        where=f"predicted on {hardware.name}",
        world=setup.world,
        unit="tokens" if best.num_tokens else "samples",
        code=code,
        command=setup.command(best.candidate),
        capacity_bytes=hardware["memory_bytes"],
        reserve_bytes=hardware["memory_bytes"] - hardware.usable_bytes,
        price=price,
        notes=_notes(setup, explored),
        changes=changes_of(plans, explored.written, explored.facts),
        written_sizes=explored.written.sizes if explored.written else (),
        layouts=layouts_of(explored.found.get(explored.written)) if explored.written else (),
        estimates=explored.estimates,
    )


def best_measured(
    setup: Setup,
    code: Sequence[str],
    hardware: Hardware,
    explored: ExploredPlans,
    measured: Measurements,
    price: float | None,
) -> SweepResult:
    """What there is to say where the best predicted plans were then measured here."""
    predictions = {plan.candidate: plan for plan in map(plan_of, explored.ranked)}
    plans = [
        replace(plan, predicted_s=predictions[plan.candidate].step_s, prediction=predictions[plan.candidate].prediction)
        for plan in measured.final
    ]
    best = plans[0].candidate
    best_of = "it" if len(predictions) == 1 else f"the best {len(plans)}"
    said = f"{count_text(len(predictions), 'plan')} predicted, {best_of} measured on this machine"
    files = [*(f"run file: {file}" for file in measured.run_files), *_reused(measured)]
    if measured.interrupted:
        files.insert(0, "it was interrupted while it measured; --resume goes on")
    return SweepResult(
        title=f"{setup.entry.name} on {count_text(setup.world, 'rank')}: {said}",
        plans=plans,
        where="measured here",
        world=setup.world,
        unit="tokens" if explored.ranked[0].num_tokens else "samples",
        code=code,
        command=setup.command(best),
        price=price,
        notes=[*_notes(setup, explored), *files],
        changes=changes_of([*predictions.values()], explored.written, explored.facts),
        written_sizes=explored.written.sizes if explored.written else (),
        traces=measured.traces,
        predicted=[*predictions.values()],
        estimates=explored.estimates,
    )


def measured_result(
    setup: Setup,
    code: Sequence[str],
    space: Space,
    measured: Measurements,
    written: Candidate | None,
    price: float | None,
) -> SweepResult:
    """What there is to say of what was measured."""
    plans = measured.ranked
    unit = "tokens" if space.facts["num_tokens"] else "samples"
    notes = [
        f"every plan takes the same global batch a step ({count_text(space.facts['batch_size'], 'sample')}): step "
        "times rank them",
        f"measured: {len(plans)} of {count_text(count_of(space), 'plan')}, the best third of each round in the next; "
        "those with a verdict took turns in the last",
        *(f"left out: {candidate.text}: {why}" for candidate, why in list(measured.left_out.items())[:MAX_LEFT_OUT]),
        *(f"run file of a round: {file}" for file in measured.run_files),
        *_reused(measured),
    ]
    if measured.interrupted:
        notes.insert(0, "it was interrupted: this is what was known; --resume goes on")
    elif not measured.final:
        notes.insert(
            0, "no plan of the last round, which checks them, came out right: the one recommended is unchecked"
        )
    return SweepResult(
        title=f"{setup.entry.name} on {count_text(setup.world, 'rank')}: {count_text(len(plans), 'plan')}, measured on "
        "this machine",
        plans=plans,
        where="measured here",
        world=setup.world,
        unit=unit,
        code=code,
        command=setup.command(plans[0].candidate),
        price=price,
        notes=notes,
        changes=changes_of(_neighbours(plans, space, written), written, space.facts) if written else (),
        written_sizes=written.sizes if written else (),
        traces=measured.traces,
    )


def _reused(measured: Measurements) -> list[str]:
    """What --resume took."""
    return [] if measured.num_reused is None else [f"rounds that --resume took: {measured.num_reused}"]


def _neighbours(plans: Sequence[RankedPlan], space: Space, written: Candidate) -> list[RankedPlan]:
    """The plan as written and those of its neighbours; two changes together are none."""
    near = {written, *around_of(space, written)}
    return [plan for plan in plans if plan.candidate in near]


def _notes(setup: Setup, explored: ExploredPlans) -> list[str]:
    best = explored.ranked[0]
    tokens = count_text(best.num_tokens, "token") if best.num_tokens else count_text(best.batch_size, "sample")
    which = "meshes as written, those that need the fewest fast links first, and changes of the best, one at a time"
    if explored.written is not None:
        which = "the plan as written, and those that differ from it by one change or by one factor of the mesh"
    notes = [
        f"every plan takes the same global batch a step ({tokens}), so step times rank them",
        f"tried: {len(explored.found) + len(explored.left_out)} of {count_text(explored.num_legal, 'plan')}: {which}"
        + (f"; {explored.stopped}" if explored.stopped else ""),
    ]
    if setup.note:
        notes.append(setup.note)
    if explored.refused:
        notes.append(
            f"meshes that were refused unrecorded, since their shards alone do not fit: {len(explored.refused)}"
        )
    notes += [f"left out: {candidate.text}: {why}" for candidate, why in list(explored.left_out.items())[:MAX_LEFT_OUT]]
    if len(explored.left_out) > MAX_LEFT_OUT:
        notes.append(f"left out: {len(explored.left_out) - MAX_LEFT_OUT} more: --format json")
    if explored.layers:
        notes.append(f"times are extended linearly from {FEW[0]} and {FEW[1]} layers ({explored.layers})")
    if setup.float8:
        notes.append("--float8 is a rule of predictions: distbench run measures the plan without it")
    return [*notes, *best.assumed]
