"""A sweep by prediction: no rank is started."""

from collections.abc import Callable, Mapping
from typing import Any

from distbench.simulate.hardware.hardware_file import Hardware
from distbench.simulate.simulation import NOT_SIMULATED
from distbench.sweep.candidates import Candidate, count_of
from distbench.sweep.prediction import FEW, layers_of, no_plan_fits
from distbench.sweep.ranking import plan_of
from distbench.sweep.recorder import Question, Recorder
from distbench.sweep.search import Explored, Limits, Predictor, confirm, explore, nothing_found
from distbench.sweep.setup import Setup
from distbench.sweep.sweep_text import Found

MAX_LEFT_OUT = 3


def facts_of(setup: Setup, recorder: Recorder, variant: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the child process says of the scenario's plan and model, or of one variant's."""
    facts: dict[str, Any] = recorder.one(Question("facts", [variant or setup.base], setup.mesh))
    return facts


def code_of(setup: Setup, recorder: Recorder, candidate: Candidate) -> list[str]:
    """A candidate's mesh and plan as Python."""
    plan = facts_of(setup, recorder, candidate.variant(setup.base))["plan"]
    return [f"mesh = {candidate.mesh!r}", *f"plan = {plan}".splitlines()]


def predicted_sweep(
    setup: Setup,
    recorder: Recorder,
    hardware: Hardware,
    limits: Limits,
    tell: Callable[[int, int], None],
    explored: Explored,
) -> Predictor:
    """Search, and record the best whole; what is found is in `explored`, also where this is interrupted."""
    space = setup.space(facts_of(setup, recorder))
    setup.require_meshes(space)
    predictor = Predictor(recorder, setup.base, hardware, tell)
    explored.num_legal = count_of(space)
    explore(space, predictor, limits, explored)
    confirm(predictor, limits, explored)
    return predictor


def require_some(setup: Setup, explored: Explored, hardware: Hardware) -> None:
    """Refuse to recommend what does not fit."""
    capacity = hardware["memory_bytes"]
    if not explored.found:
        raise nothing_found(setup.entry.name, explored, capacity)
    if explored.ranked[0].fits is False:
        raise no_plan_fits(setup.entry.name, setup.world, explored.ranked[0], capacity)


def found_of(setup: Setup, recorder: Recorder, hardware: Hardware, explored: Explored, price: float | None) -> Found:
    """What there is to say."""
    plans = [plan_of(prediction) for prediction in explored.ranked]
    best = explored.ranked[0]
    return Found(
        title=f"{setup.entry.name} on {setup.world} devices: {len(plans)} plans, predicted on {hardware.name}",
        plans=plans,
        where=f"predicted on {hardware.name}",
        world=setup.world,
        unit="tokens" if best.num_tokens else "samples",
        code=code_of(setup, recorder, best.candidate),
        command=setup.command(best.candidate),
        capacity_bytes=hardware["memory_bytes"],
        price=price,
        notes=_notes(setup, hardware, explored),
    )


def _notes(setup: Setup, hardware: Hardware, explored: Explored) -> list[str]:
    best = explored.ranked[0]
    tokens = f"{best.num_tokens:,} tokens" if best.num_tokens else f"{best.batch_size:,} samples"
    notes = [
        f"every plan takes the same global batch a step ({tokens}), so step times rank them",
        f"tried: {len(explored.found) + len(explored.left_out)} of {explored.num_legal:,} plans: every mesh as "
        "written, then changes of the best, one at a time" + (f"; {explored.stopped}" if explored.stopped else ""),
    ]
    if setup.note:
        notes.append(setup.note)
    if explored.refused:
        notes.append(f"{len(explored.refused)} meshes were refused unrecorded: their shards alone do not fit")
    notes += [f"left out: {candidate.text}: {why}" for candidate, why in list(explored.left_out.items())[:MAX_LEFT_OUT]]
    if len(explored.left_out) > MAX_LEFT_OUT:
        notes.append(f"left out: {len(explored.left_out) - MAX_LEFT_OUT} more: --format json")
    if layers := layers_of(setup.base):
        notes.append(f"times are extended linearly from {FEW[0]} and {FEW[1]} layers ({layers})")
    for basis, verb in (("guess", "guessed"), ("fitted", "fitted")):
        if names := ", ".join(sorted(hardware.of_basis(basis))):
            notes.append(f"{verb} in hardware file {hardware.name}: {names}")
    return [*notes, *NOT_SIMULATED]
