"""The peak of a step out of the record of allocations of some steps: plain data in, plain data out."""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from distbench.worker.torch_internals import Allocation
from distbench.worker.tracing.running_modules import RunningModules

STEP, MODULE = "distbench step ", "distbench module: "  # marks: a step's number and a phase, a module's name
# FSDP2's own marks, with the name of the module that it works for; none is the root.
OF_FSDP = re.compile(r"FSDP::(?:all_gather|pre_|post_)\w*(?: \(([\w.]+)\))?$")
GRADIENTS, OTHER, LOSS = "gradients", "other", "loss"
NEVER = sys.maxsize


@dataclass(frozen=True)
class Peak:
    """The moment of a call at which most was held.

    Args:
        num_bytes: held then, what was held when the call began included.
        by_kind: kind to bytes; "other" are activations, gathered parameters, and buffers of communication and
            operators.
        phase: of the call.
        owner: name of the module, empty for the model itself; "loss" for what was computed from its output; None for
            neither.
    """

    num_bytes: int
    by_kind: dict[str, int]
    phase: str
    owner: str | None

    def to_counters(self) -> dict[str, Any]:
        """For a row."""
        named = {"peak_bytes": self.num_bytes, "peak_phase": self.phase, "peak_owner": self.owner}
        return {**named, "peak_by_kind": self.by_kind}


@dataclass
class _HeldBlock:
    """Memory that was handed out: in a step, as the `start`th block of it, and taken back before the `end`th block
    since that step began; both from 0."""

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
    """The peak of the last of some steps.

    A thread of gloo may let go of a buffer long after the step has. When all steps hand out the same blocks, the
    earliest end of each is what the step itself does. What such threads take for themselves has no mark and is left
    out.

    Args:
        allocations: of all steps, in order, under marks as `_marked_phases` sets them.
        held: before the last step, pointer to kind and bytes.
        gradients: pointers of gradients when the last step's backward is over.
        modules: says which module a node of backward belongs to.
    """
    *before, last = _steps(allocations) or [[]]
    count = len(last)
    kept = dict(held)
    groups: dict[str, list[_HeldBlock]] = {OTHER: last}
    for block in before[-1] if before else ():
        if block.end > count:
            kind, _ = kept.pop(block.allocation.pointer, (OTHER, 0))
            carried = replace(block, start=0, end=block.end - count)
            groups.setdefault(kind, []).append(carried)
    last_backward = max((block.start for block in last if block.phase == "backward"), default=-1)
    is_gradient = [block.allocation.pointer in gradients and block.is_held(last_backward) for block in groups[OTHER]]
    groups[GRADIENTS] = [block for block, gradient in zip(groups[OTHER], is_gradient, strict=True) if gradient]
    groups[OTHER] = [block for block, gradient in zip(groups[OTHER], is_gradient, strict=True) if not gradient]
    place = _fullest(count, [block for blocks in groups.values() for block in blocks])
    by_kind = dict.fromkeys([*(kind for kind, _ in held.values()), *groups], 0)
    for kind, num_bytes in kept.values():
        by_kind[kind] += num_bytes
    for kind, blocks in groups.items():
        by_kind[kind] += sum(block.allocation.num_bytes for block in blocks if block.is_held(place))
    at_peak = last[place].phase if last else ""
    return Peak(sum(by_kind.values()), by_kind, at_peak, _owner(last[: place + 1], modules))


def _steps(allocations: Iterable[Allocation]) -> list[list[_HeldBlock]]:
    """Every block by the step that was handed it, where they agree each with its earliest end."""
    steps: list[list[_HeldBlock]] = []
    live: dict[int, _HeldBlock] = {}
    for one in allocations:
        if (block := live.pop(one.pointer, None)) is not None:
            block.end = sum(map(len, steps[block.step :]))
        if one.num_bytes <= 0 or (marked := _step_of(one.inside)) is None:
            continue
        number, phase = marked
        steps += [[] for _ in range(len(steps), number + 1)]
        live[one.pointer] = _HeldBlock(one, number, phase, len(steps[-1]), NEVER)
        steps[-1].append(live[one.pointer])
    sizes = {tuple(block.allocation.num_bytes for block in blocks) for blocks in steps}
    if len(sizes) == 1:
        for same in zip(*steps, strict=True):
            earliest = min(block.end for block in same)
            for block in same:
                block.end = earliest
    return steps


@lru_cache(maxsize=64)
def _step_of(inside: tuple[str | int, ...]) -> tuple[int, str] | None:
    """The number and the phase of the step that the marks around a block name; None where they name none."""
    mark = next((text for text in inside if isinstance(text, str) and text.startswith(STEP)), None)
    if mark is None:
        return None
    number, phase = mark.removeprefix(STEP).split()
    return int(number), phase


def _fullest(count: int, blocks: Iterable[_HeldBlock]) -> int:
    """The first of `count` places at which most is held."""
    change = [0] * (count + 1)
    for block in blocks:
        change[block.start] += block.allocation.num_bytes
        change[min(block.end, count)] -= block.allocation.num_bytes
    level = list(accumulate(change))
    return max(range(count), key=level.__getitem__, default=0)


def _owner(until_peak: Sequence[_HeldBlock], modules: RunningModules) -> str | None:
    """Who took the last of these, which is the peak: the innermost module, or the one of the node of backward."""
    if not until_peak:
        return None
    for mark in reversed(until_peak[-1].allocation.inside):
        if isinstance(mark, int):
            found = modules.owner(None, mark)
            return LOSS if found is None else found
        if mark.startswith(MODULE):
            return mark.removeprefix(MODULE)
        if of_fsdp := OF_FSDP.match(mark):
            return of_fsdp[1] or ""
    marks = [mark for block in until_peak for mark in block.allocation.inside if isinstance(mark, str)]
    after_model = until_peak[-1].phase == "forward" and any(mark.startswith(MODULE) for mark in marks)
    return LOSS if after_model else None
