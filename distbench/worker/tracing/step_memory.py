"""What a rank holds at the peak of a step, measured and predicted: bytes, of which kind, in which phase and module.

On CPU it comes from the allocator's record of a few steps: exact, whatever ran before in the same process, and of
compiled modules too. Nothing is added to the step but marks.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from distbench.spec.devices import known_device
from distbench.spec.pipeline_plan import SCHEDULES
from distbench.worker.models.trees import tensors_of
from distbench.worker.plans.training_step import SCHEDULE, TrainingStep, state_of
from distbench.worker.rank.device import allocator_peak
from distbench.worker.rank.failure import one_line
from distbench.worker.rank.measure import no_stamp
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import (
    Unsupported,
    cpu_allocations,
    nothing_sent,
    storages_of,
    tracked_peak_bytes,
)
from distbench.worker.tracing.memory_peak import MODULE, OTHER, STEP, Peak, peak_of
from distbench.worker.tracing.running_modules import running_modules

NO_PREDICTION = "torch's memory tracker cannot follow this step"
NOT_IN_STAGES = "torch's memory tracker follows neither several stages on a rank nor a backward in parts"
NOT_COMPILED = "torch's memory tracker runs compiled modules uncompiled"
UNCHECKED = "nothing was checked, nor was the peak predicted (--check none)"
NUM_STEPS = 3


def memory_counters(step: TrainingStep, context: RankContext) -> dict[str, Any]:
    """The counters of a step's row about memory, of the rank that holds most; runs untimed steps, all ranks together.

    `peak_bytes` (what torch's allocator has handed out), `peak_phase`, `peak_rank`, `predicted_peak_bytes`; on CPU also
    `peak_owner` and `peak_by_kind` (as in `Peak`), on accelerators `peak_reserved_bytes`. What is not known is None or
    missing, and `memory_reason` says why.
    """
    own: dict[str, Any] = {}
    reason = None
    try:
        if known_device(context.device.type).waits_on_host:
            own = measured_step_peak(step).to_counters()
        else:
            own = allocator_peak(context.device, step, step.phases)
    except Unsupported as error:
        reason = str(error)
    of_ranks = context.gather((own.get("peak_bytes", 0), own))
    rank = max(range(len(of_ranks)), key=lambda one: of_ranks[one][0])
    # Of that rank alone: its CPU is the others' too, and it sends nothing meanwhile.
    foretold: tuple[int | None, str | None] = (None, UNCHECKED)
    if context.check != "none":
        foretold = prediction_of(step) if context.rank == rank else (None, None)
    predicted, no_prediction = context.gather(foretold)[rank]
    found = {**of_ranks[rank][1], "predicted_peak_bytes": predicted}
    if found.get("peak_bytes") is not None:
        found["peak_rank"] = rank
    why = reason or no_prediction
    return found | ({"memory_reason": why} if why else {})


def prediction_of(step: TrainingStep, of_compiled: bool = False) -> tuple[int | None, str | None]:
    """What torch's tracker predicts for this rank, bytes, or why it does not; the step must have run before.

    A compiled step runs uncompiled from then on, so it is not tried unless nothing is measured afterwards.
    """
    if step.plan.is_compiled and not of_compiled:
        return None, NOT_COMPILED
    if not _can_be_followed(step):
        return None, NOT_IN_STAGES
    try:
        # A thread of gloo may let go of a tensor late, and would add it to the prediction.
        with nothing_sent():
            predicted = predicted_peak_bytes(step)
    except Exception as error:
        return None, f"torch's memory tracker: {one_line(error)}"
    return predicted, None if predicted is not None else NO_PREDICTION


def _can_be_followed(step: TrainingStep) -> bool:
    # Where the tracker fails, what it hooked into gradients stays there, and raises in later steps.
    pipeline = step.plan.pipeline
    return pipeline is None or SCHEDULES[pipeline.schedule].stages_per_rank == 1


def predicted_peak_bytes(step: TrainingStep) -> int | None:
    """Bytes of the tensors alive at the peak of one step on this rank, as torch's memory tracker counts them.

    None where it cannot follow the step, which must have run before.
    """
    if not _can_be_followed(step):
        return None
    # torch's tracker follows what its own optimizers keep; of any other it is given the tensors.
    own = isinstance(step.optimizer, torch.optim.Optimizer)
    kept = [step.optimizer] if own else [tensor for _, tensor in tensors_of(state_of(step.optimizer))]
    return tracked_peak_bytes(lambda: step(no_stamp), step.model, *kept, *step.cache_tensors)


def largest_known(of_ranks: Sequence[int | None]) -> int | None:
    """The largest; None unless all ranks know theirs."""
    known = [theirs for theirs in of_ranks if theirs is not None]
    return max(known) if len(known) == len(of_ranks) else None


def measured_step_peak(step: TrainingStep) -> Peak:
    """The peak of a step on this rank, from the record of NUM_STEPS of them; all ranks do this together."""
    step.model.zero_grad(set_to_none=True)
    held: dict[int, tuple[str, int]] = {}
    gradients: set[int] = set()

    def some_steps() -> None:
        for number in range(NUM_STEPS):
            # Of the last step in the end.
            held.clear()
            held.update(_held_by(step))
            with _marked_phases(step, number, gradients) as stamp:
                step(stamp)

    with running_modules(step.model) as modules, _marked_modules(step.model):
        allocations = cpu_allocations(some_steps)
    return peak_of(allocations, held, gradients, modules)


@contextlib.contextmanager
def _marked_phases(step: TrainingStep, number: int, gradients: set[int]) -> Iterator[Callable[[], None]]:
    """Each phase of a step in a mark of its own; yields the stamp that ends one, and reads off the gradients' pointers
    when backward is over."""
    names = list(step.phases)
    with contextlib.ExitStack() as phase:
        phase.enter_context(record_function(f"{STEP}{number} {names[0]}"))

        def stamp() -> None:
            phase.close()
            if names.pop(0) in ("backward", SCHEDULE):
                gradients.clear()
                gradients.update(storages_of([parameter.grad for parameter in step.model.parameters()]))
            if names:
                phase.enter_context(record_function(f"{STEP}{number} {names[0]}"))

        yield stamp


def _held_by(step: TrainingStep) -> dict[int, tuple[str, int]]:
    """What a step holds between two runs: pointer to kind and bytes."""
    kinds: dict[str, Any] = {
        # A module may keep tensors of its own, a mask say, that are neither parameters nor buffers.
        OTHER: [dict(vars(module)) for module in step.model.modules()],
        "batch": [tensor for _, tensor in tensors_of(step.microbatches)],
        "buffers": list(step.model.buffers()),
        "optimizer": state_of(step.optimizer),
        "parameters": list(step.model.parameters()),
    }
    if step.cache_tensors:
        kinds["cache"] = step.cache_tensors
    return {pointer: (kind, size) for kind, found in kinds.items() for pointer, size in storages_of(found).items()}


@contextlib.contextmanager
def _marked_modules(model: nn.Module) -> Iterator[None]:
    """Every module's forward in a mark, with its hooks: what FSDP gathers for it is its own."""
    marks: list[record_function] = []

    def enter(name: str, *_: object) -> None:
        marks.append(record_function(MODULE + name))
        marks[-1].__enter__()

    def leave(*_: object) -> None:
        marks.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name), prepend=True))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield
