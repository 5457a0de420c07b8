"""The peak memory of a step on a rank, measured and predicted: bytes by kind, phase and module.

On CPU the measured peak is from the allocator's record of a few steps. The peak is exact, independent of earlier work
in the process, and valid for compiled modules.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any

from torch import nn
from torch.profiler import record_function

from distbench.observe.module_attribution import RunningModules, running_modules
from distbench.plans.model import tensors_of
from distbench.plans.training_step import SCHEDULE, TrainingStep, state_of
from distbench.ranks.context import RankContext
from distbench.ranks.device import allocator_peak
from distbench.ranks.failure import one_line
from distbench.ranks.measure import no_stamp
from distbench.spec.devices import known_device
from distbench.torch_private import (
    Allocation,
    Unsupported,
    cpu_allocations,
    nothing_sent,
    peak_of_live_tensors,
    storages_of,
)

# Computation of a step's peak from the record of allocations of some steps: plain data in, plain data out.

STEP, MODULE = "distbench step ", "distbench module: "  # marks: a step's number and a phase, a module's name
# FSDP2's marks, with the name of the module; without a name for the root.
OF_FSDP = re.compile(r"FSDP::(?:all_gather|pre_|post_)\w*(?: \(([\w.]+)\))?$")
GRADIENTS, OTHER, LOSS = "gradients", "other", "loss"
NEVER = sys.maxsize


@dataclass(frozen=True)
class Peak:
    """The peak memory of a call.

    Args:
        num_bytes: allocated bytes at the peak, including memory from before the call.
        by_kind: bytes per kind. "other" means activations, gathered parameters, and buffers of communication and
        operators.
        owner: name of the module that allocated at the peak, empty for the model, "loss" for tensors after the model,
        None for other memory.
    """

    num_bytes: int
    by_kind: dict[str, int]
    phase: str
    owner: str | None


@dataclass
class _HeldBlock:
    """A block allocated as number `start` of a step, and freed before block number `end`, counted from 0."""

    allocation: Allocation
    step: int
    phase: str
    start: int
    end: int

    def is_held(self, place: int) -> bool:
        return self.start <= place < self.end


def peak_of(
    allocations: Sequence[Allocation],
    held: Mapping[int, tuple[str, int]],
    gradients: Collection[int],
    modules: RunningModules,
) -> Peak:
    """Return the peak of the last step, from the record of several steps.

    A thread of gloo may free a buffer long after the step. If all steps allocate the same blocks, each block's earliest
    end over the steps is used. Blocks that threads of gloo allocate have no mark and are left out.

    Args:
        allocations: allocations of all steps, in order, with the marks of `_marked_phases`.
        held: kind and bytes by pointer, of memory before the last step.
        gradients: pointers of gradients at the end of the last step's backward.
        modules: maps nodes of backward to modules.
    """
    *before, last = _steps(allocations) or [[]]
    count = len(last)
    alive = dict(held)
    groups: dict[str, list[_HeldBlock]] = {OTHER: last}
    for block in before[-1] if before else ():
        if block.end > count:
            kind, _ = alive.pop(block.allocation.pointer, (OTHER, 0))
            carried = replace(block, start=0, end=block.end - count)
            groups.setdefault(kind, []).append(carried)
    last_backward = max((block.start for block in last if block.phase == "backward"), default=-1)
    is_gradient = [block.allocation.pointer in gradients and block.is_held(last_backward) for block in groups[OTHER]]
    groups[GRADIENTS] = [block for block, gradient in zip(groups[OTHER], is_gradient, strict=True) if gradient]
    groups[OTHER] = [block for block, gradient in zip(groups[OTHER], is_gradient, strict=True) if not gradient]
    # The first point with the most memory.
    change = [0] * (count + 1)
    for block in chain.from_iterable(groups.values()):
        change[block.start] += block.allocation.num_bytes
        change[min(block.end, count)] -= block.allocation.num_bytes
    place = max(range(count), key=list(accumulate(change)).__getitem__, default=0)
    by_kind = dict.fromkeys([*(kind for kind, _ in held.values()), *groups], 0)
    for kind, num_bytes in alive.values():
        by_kind[kind] += num_bytes
    for kind, blocks in groups.items():
        by_kind[kind] += sum(block.allocation.num_bytes for block in blocks if block.is_held(place))
    at_peak = last[place].phase if last else ""
    return Peak(sum(by_kind.values()), by_kind, at_peak, _owner(last[: place + 1], modules))


def _steps(allocations: Iterable[Allocation]) -> list[list[_HeldBlock]]:
    """Return the blocks of each step. If all steps have the same blocks, each block has its earliest end."""
    steps: list[list[_HeldBlock]] = []
    live: dict[int, _HeldBlock] = {}
    for allocation in allocations:
        if (block := live.pop(allocation.pointer, None)) is not None:
            block.end = sum(map(len, steps[block.step :]))
        if allocation.num_bytes <= 0 or (marked := _step_of(allocation.inside)) is None:
            continue
        number, phase = marked
        steps += [[] for _ in range(len(steps), number + 1)]
        live[allocation.pointer] = _HeldBlock(allocation, number, phase, len(steps[-1]), NEVER)
        steps[-1].append(live[allocation.pointer])
    sizes = {tuple(block.allocation.num_bytes for block in blocks) for blocks in steps}
    if len(sizes) == 1:
        for counterparts in zip(*steps, strict=True):
            earliest = min(block.end for block in counterparts)
            for block in counterparts:
                block.end = earliest
    return steps


@lru_cache(maxsize=64)
def _step_of(inside: tuple[str | int, ...]) -> tuple[int, str] | None:
    """Return the number and the phase of the step in the marks around a block; None without such a mark."""
    mark = next((text for text in inside if isinstance(text, str) and text.startswith(STEP)), None)
    if mark is None:
        return None
    number, phase = mark.removeprefix(STEP).split()
    return int(number), phase


def _owner(until_peak: Sequence[_HeldBlock], modules: RunningModules) -> str | None:
    """Return the owner of the last block, which causes the peak: the innermost module, or the backward node's
    module."""
    if not until_peak:
        return None
    for mark in reversed(until_peak[-1].allocation.inside):
        if isinstance(mark, int):
            owner = modules.owner(None, mark)
            return LOSS if owner is None else owner
        if mark.startswith(MODULE):
            return mark.removeprefix(MODULE)
        if of_fsdp := OF_FSDP.match(mark):
            return of_fsdp[1] or ""
    marks = [mark for block in until_peak for mark in block.allocation.inside if isinstance(mark, str)]
    after_model = until_peak[-1].phase == "forward" and any(mark.startswith(MODULE) for mark in marks)
    return LOSS if after_model else None


NOT_COMPILED = "tensors of compiled modules cannot be tracked"
UNCHECKED = "no check and no prediction of the peak (--check none)"
NUM_STEPS = 3


def memory_counters(step: TrainingStep, context: RankContext) -> dict[str, Any]:
    """Return the memory counters of a step from the rank with the most memory. Runs untimed steps on all ranks.

    The counters are `peak_bytes` (allocated by torch), `peak_phase`, `peak_rank` and `predicted_peak_bytes`, on CPU
    also `peak_owner` and `peak_by_kind` (as in `Peak`), on accelerators also `peak_reserved_bytes`. Unknown values are
    None or missing, with the reason in `memory_reason`.
    """
    own_counters: dict[str, Any] = {}
    reason = None
    try:
        if known_device(context.device.type).waits_on_host:
            peak = measured_step_peak(step)
            own_counters = {"peak_bytes": peak.num_bytes, "peak_phase": peak.phase, "peak_owner": peak.owner}
            own_counters["peak_by_kind"] = peak.by_kind
        else:
            own_counters = allocator_peak(context.device, step, step.phases)
    except Unsupported as error:
        reason = str(error)
    of_ranks = context.gather((own_counters.get("peak_bytes", 0), own_counters))
    rank = max(range(len(of_ranks)), key=lambda candidate: of_ranks[candidate][0])
    # Only on that rank, because ranks share CPUs. The prediction sends nothing to other ranks.
    prediction: tuple[int | None, str | None] = (None, UNCHECKED)
    if context.check != "none":
        prediction = prediction_of(step) if context.rank == rank else (None, None)
    predicted, no_prediction = context.gather(prediction)[rank]
    counters = {**of_ranks[rank][1], "predicted_peak_bytes": predicted}
    counters |= {"peak_rank": rank} if counters.get("peak_bytes") is not None else {}
    why = reason or no_prediction
    return counters | ({"memory_reason": why} if why else {})


def prediction_of(step: TrainingStep, of_compiled: bool = False) -> tuple[int | None, str | None]:
    """Return the predicted peak of this rank in bytes, or the reason for no prediction. The step must have run before.

    With `of_compiled`, the peak of a compiled step is predicted as for an uncompiled step.
    """
    if step.plan.compiles and not of_compiled:
        return None, NOT_COMPILED
    try:
        # A thread of gloo may free a tensor late, which would add it to the prediction.
        with nothing_sent():
            return predicted_peak_bytes(step), None
    except Exception as error:
        return None, f"the tensors of this step cannot be tracked: {one_line(error)}"


def predicted_peak_bytes(step: TrainingStep) -> int:
    """Return the bytes of live tensors at the peak of one step on this rank. The step must have run before."""
    held = state_of(step.optimizer), step.cache_tensors
    return peak_of_live_tensors(lambda: step(no_stamp), step.model, *held)


def largest_known(of_ranks: Sequence[int | None]) -> int | None:
    """Return the largest value, or None if a rank has no value."""
    sizes = [theirs for theirs in of_ranks if theirs is not None]
    return max(sizes) if len(sizes) == len(of_ranks) else None


def measured_step_peak(step: TrainingStep) -> Peak:
    """Return the peak of a step on this rank, from the record of NUM_STEPS steps. All ranks must call this."""
    step.model.zero_grad(set_to_none=True)
    resident: dict[int, tuple[str, int]] = {}
    gradients: set[int] = set()

    def some_steps() -> None:
        for number in range(NUM_STEPS):
            # After the loop, storages before the last step.
            resident.clear()
            resident.update(_held_by(step))
            with _marked_phases(step, number, gradients) as stamp:
                step(stamp)

    with running_modules(step.model) as modules, _marked_modules(step.model):
        allocations = cpu_allocations(some_steps)
    return peak_of(allocations, resident, gradients, modules)


@contextlib.contextmanager
def _marked_phases(step: TrainingStep, number: int, gradients: set[int]) -> Iterator[Callable[[], None]]:
    """Mark each phase of a step. Yields a function that ends a phase, and reads the gradients' pointers after
    backward."""
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
    """Return kind and bytes by pointer, of storages that exist between two runs of a step."""
    kinds: dict[str, Any] = {
        # A module may keep tensors that are neither parameters nor buffers, such as a mask.
        OTHER: [dict(vars(module)) for module in step.model.modules()],
        "batch": [tensor for _, tensor in tensors_of(step.microbatches)],
        "buffers": list(step.model.buffers()),
        "optimizer": state_of(step.optimizer),
        "parameters": list(step.model.parameters()),
    }
    if step.cache_tensors:
        kinds["cache"] = step.cache_tensors
    return {pointer: (kind, size) for kind, holders in kinds.items() for pointer, size in storages_of(holders).items()}


@contextlib.contextmanager
def _marked_modules(model: nn.Module) -> Iterator[None]:
    """Mark every module's forward with its hooks, because FSDP gathers parameters in hooks."""
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
