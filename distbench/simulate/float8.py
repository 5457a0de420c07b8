"""What float8 changes in a recorded step, as a rule: torchao's tensorwise dynamic scaling of linear layers.

Every matmul of the chosen modules is done in float8. Each tensor that goes into one is cast before: its largest element
is looked for (by the kernel that made it, where that is compiled), then it is read and a float8 copy written, once for
all matmuls that read it. What the gradient of a weight is made from is copied once more, transposed: float8 matmuls
take one layout only. FSDP gathers weights in float8, so those are cast in their shards, which takes no time
here. What is kept for backward stays as it was: torchao keeps the high-precision tensor where a module is checkpointed.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from distbench.simulate.compiled import OWN_KERNEL, is_within
from distbench.simulate.operator_time import FLOAT8
from distbench.simulate.recording import (
    MATMUL,
    MEMORY,
    Allocated,
    Collective,
    Event,
    Freed,
    Operator,
    Recording,
    StepBegun,
)

LOW = ("bf16", "f16")
GATHERS = ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy")


def in_float8(recording: Recording, modules: Sequence[str]) -> Recording:
    """The recording with the linear layers of those modules in float8.

    Args:
        modules: names; what is in them belongs to them.
    """
    inside = set(modules)
    gathered = {
        block
        for event in recording.events
        if isinstance(event, Operator) and event.name.startswith(GATHERS) and is_within(event.owner, inside)
        for block, _ in (*event.reads, *event.writes)
    }
    found: list[Event] = []
    cast: set[int] = set()
    for event in recording.events:
        if isinstance(event, StepBegun):
            cast = set()
        elif isinstance(event, Freed):
            cast.discard(event.block)
        elif isinstance(event, Operator):
            cast -= {block for block, _ in event.writes}
        found += _changed(event, inside, gathered, cast)
    return replace(recording, events=found)


def _changed(event: Event, modules: Set[str], gathered: Set[int], cast: set[int]) -> Sequence[Event]:
    if isinstance(event, Allocated):
        is_gathered = event.block in gathered and event.held == "fsdp"
        return (event._replace(num_bytes=-(-event.num_bytes // 2)) if is_gathered else event,)
    if not isinstance(event, Operator | Collective) or not is_within(event.owner, modules):
        return (event,)
    if isinstance(event, Collective):
        is_gather = event.source == "fsdp" and event.kind == "all_gather" and event.dtype in LOW
        return (event._replace(payload_bytes=event.payload_bytes // 2, dtype=FLOAT8) if is_gather else event,)
    if event.name.startswith(GATHERS):
        return (event._replace(num_bytes=event.num_bytes // 2),)
    return _matmul(event, gathered, cast) if event.kind == MATMUL and event.dtype in LOW else (event,)


def _matmul(event: Operator, gathered: Set[int], cast: set[int]) -> Sequence[Event]:
    """A matmul in float8, after the casts of what it reads. The gradient of a weight reads no weight."""
    of_weight = not any(block in gathered for block, _ in event.reads)
    found: list[Event] = []
    for block, num_bytes in event.reads:
        if block not in gathered and block not in cast:
            cast.add(block)
            found += _casts(event, block, num_bytes)
        if of_weight:
            found.append(_kernel(event, num_bytes))  # read and written again, a byte an element
    read = sum(num_bytes for _, num_bytes in event.reads)
    return (*found, event._replace(dtype=FLOAT8, num_bytes=max(event.num_bytes - read // 2, 0)))


def _casts(matmul: Operator, block: int, num_bytes: int) -> Sequence[Operator]:
    largest = _kernel(matmul, num_bytes)._replace(name="float8.largest", reads=[(block, num_bytes)])
    return (largest, _kernel(matmul, num_bytes + num_bytes // 2))


def _kernel(matmul: Operator, num_bytes: int) -> Operator:
    return matmul._replace(name=OWN_KERNEL, kind=MEMORY, flops=0, num_bytes=num_bytes, reads=[], writes=[])
