"""What torch.compile changes in a recorded step, as rules: which operators are one kernel, and what is never in memory.

A run is what lies between two matmuls, attentions or collectives on the default stream: memory-bound operators of
compiled modules. The inductor makes a run one kernel; the partitioner keeps for backward what backward needs.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from distbench.simulate.recording import (
    MEMORY,
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    HostWaited,
    Operator,
    Recording,
    StepBegun,
)

# What may lie between two operators of one kernel.
_BETWEEN = (Allocated, Freed, EventRecorded, EventWaited, HostWaited)
DEFAULT_STREAM = 0
# Waits for the largest element of the whole tensor, so it is never part of the kernel that made the tensor.
OWN_KERNEL = "float8.cast"
# The inductor has no code for complex numbers and calls torch's own kernel: rotary embeddings are often written so.
COMPLEX = "complex"


def fused_bytes(events: Sequence[Event], compiled: Sequence[str]) -> Mapping[int, int]:
    """What each run touches as one kernel, bytes: it reads what it did not make, and writes what outlives it.

    Returns:
        Place in `events` to bytes, for every operator of a run: all of them at its last one, 0 at the others.
    """
    freed_at = {event.block: place for place, event in enumerate(events) if isinstance(event, Freed)}
    fused: dict[int, int] = {}
    for run in _runs(events, compiled):
        made_blocks: set[int] = set()
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for operator in (events[place] for place in run.places):
            assert isinstance(operator, Operator)
            for block, num_bytes in operator.reads:
                if block not in made_blocks:
                    reads[block] = max(reads.get(block, 0), num_bytes)
            for block, num_bytes in operator.writes:
                made_blocks.add(block)
                writes[block] = max(writes.get(block, 0), num_bytes)
        outliving = (num_bytes for block, num_bytes in writes.items() if freed_at.get(block, run.end + 1) > run.end)
        fused |= dict.fromkeys(run.places, 0)
        fused[run.places[-1]] = sum(reads.values()) + sum(outliving)
    return fused


def compiled_memory(recording: Recording) -> Sequence[Event]:
    """The allocations of a recording as they are once its modules are compiled; its own where none is.

    Of the compiled modules' activations, those are not there that are made and freed within one kernel. Those that
    nothing of backward reads (what selective checkpointing keeps and nobody asks for) go when forward is done with
    them. So do those that a kernel of backward can make again from what is kept anyway; where a matmul reads them,
    they are made again before it.

    The first step has no operators; it is taken to allocate what the second one does, and the optimizer's state.
    """
    if not recording.head.compiled:
        return recording.events
    begun = [place for place, event in enumerate(recording.events) if isinstance(event, StepBegun)]
    before, first = recording.events[: begun[0]], recording.events[begun[0] : begun[-1]]
    second = _compiled_step(recording.step, recording.head.compiled)
    return [*before, *_as_first(second, first), *second] if len(begun) > 1 else [*before, *second]


class _FusedRun(NamedTuple):
    places: Sequence[int]
    end: int


def _runs(events: Sequence[Event], compiled: Sequence[str]) -> Sequence[_FusedRun]:
    if not compiled:
        return ()
    inside = set(compiled)
    runs: list[_FusedRun] = []
    run: list[int] = []
    for place, event in enumerate(events):
        if isinstance(event, _BETWEEN):
            continue
        if _is_fusible(event, inside):
            run.append(place)
        elif run:
            runs.append(_FusedRun(run, place))
            run = []
    return [*runs, _FusedRun(run, len(events))] if run else runs


def _is_fusible(event: Event, compiled: Set[str]) -> bool:
    return (
        isinstance(event, Operator)
        and event.kind == MEMORY
        and event.stream == DEFAULT_STREAM
        and event.name != OWN_KERNEL
        and not event.dtype.startswith(COMPLEX)
        and is_within(event.owner, compiled)
    )


def is_within(owner: str, modules: Set[str]) -> bool:
    """Whether a module is one of those or a part of one."""
    parts = owner.split(".")
    return any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))


class _Uses(NamedTuple):
    """Of a block that a step allocates: the places where that is, of the operator that makes it, of the last one of
    forward that touches it, of those of backward that do, and where it is freed."""

    allocated: int
    maker: int
    forward: int
    backward: Sequence[int]
    freed: int


def _compiled_step(events: Sequence[Event], compiled: Sequence[str]) -> list[Event]:
    inside, runs = set(compiled), _runs(events, compiled)
    run_of = {place: run for run in runs for place in run.places}
    changes = _Changes(set(), defaultdict(list))
    uses_of = _uses(events)
    begins = next((at for at, event in enumerate(events) if _phase(event) == "backward"), len(events))
    dropped: set[int] = set()
    for block, uses in uses_of.items():
        maker = events[uses.maker]
        assert isinstance(maker, Operator)
        if maker.stream != DEFAULT_STREAM or not is_within(maker.owner, inside):
            continue
        run = run_of.get(uses.maker)
        if run is not None and uses.freed < run.end:
            changes.gone.update((uses.allocated, uses.freed))
        elif maker.phase == "forward" and uses.freed >= begins and _is_dispensable(uses, maker, run, uses_of, dropped):
            dropped.add(block)
            changes.drop(block, uses, events, [place for place in uses.backward if place not in run_of])
    compiled_events: list[Event] = []
    for place, event in enumerate(events):
        compiled_events += () if place in changes.gone else (event,)
        compiled_events += changes.added.get(place, ())
    return compiled_events


def _is_dispensable(
    uses: _Uses, maker: Operator, run: _FusedRun | None, uses_of: Mapping[int, _Uses], dropped: Set[int]
) -> bool:
    if not uses.backward:
        return True
    if run is None:
        return False
    last = uses.backward[-1]
    return all(block in dropped or block not in uses_of or uses_of[block].freed >= last for block, _ in maker.reads)


class _Changes(NamedTuple):
    """Places whose events are left out, and what follows which place instead."""

    gone: set[int]
    added: dict[int, list[Event]]

    def drop(self, block: int, uses: _Uses, events: Sequence[Event], readers: Sequence[int]) -> None:
        """Free a block when forward is done with it; make it again before what must read it from memory."""
        self.gone.add(uses.freed)
        done = uses.forward
        # A collective tells nothing of its blocks: what comes before the next operator may read this one.
        for place in range(done + 1, len(events)):
            if isinstance(events[place], Operator):
                break
            done = place if isinstance(events[place], Collective) else done
        self.added[done].append(Freed(block))
        if readers:
            self.added[readers[0] - 1].append(events[uses.allocated])
            self.added[uses.freed].append(Freed(block))


def _phase(event: Event) -> str:
    return event.phase if isinstance(event, Operator) else ""


def _uses(events: Sequence[Event]) -> dict[int, _Uses]:
    """Of the blocks that are allocated and freed here and that some operator writes first."""
    allocated = {event.block: place for place, event in enumerate(events) if isinstance(event, Allocated)}
    freed = {event.block: place for place, event in enumerate(events) if isinstance(event, Freed)}
    written_at: dict[int, int] = {}
    forward: dict[int, int] = {}
    backward: dict[int, list[int]] = defaultdict(list)
    for place, event in enumerate(events):
        if not isinstance(event, Operator):
            continue
        for block, _ in event.writes:
            written_at.setdefault(block, place)
        for block in dict.fromkeys(block for block, _ in (*event.reads, *event.writes)):
            if event.phase == "forward":
                forward[block] = place
            else:
                backward[block].append(place)
    return {
        block: _Uses(allocated[block], place, forward.get(block, place), backward[block], freed[block])
        for block, place in written_at.items()
        if block in allocated and block in freed
    }


def _as_first(second: Sequence[Event], first: Sequence[Event]) -> list[Event]:
    """The first step, allocating what the second one does: its blocks have other numbers, and what it leaves behind is
    what the first step left: all of it to begin with, the optimizer's state where the optimizer begins."""
    freed = {event.block for event in first if isinstance(event, Freed)}
    leftovers = [event for event in first if isinstance(event, Allocated) and event.block not in freed]
    new_events: list[Event] = [event for event in leftovers if event.held != "optimizer"]
    state: list[Event] = [event for event in leftovers if event.held == "optimizer"]
    numbers = itertools.count(max(event.block for event in (*first, *second) if isinstance(event, Allocated)) + 1)
    new_blocks: dict[int, int] = {}
    for event in second:
        if isinstance(event, Allocated):
            new_blocks[event.block] = next(numbers)
            new_events.append(event._replace(block=new_blocks[event.block]))
        elif isinstance(event, Freed) and event.block in new_blocks:
            new_events.append(Freed(new_blocks.pop(event.block)))
        elif _phase(event) == "optimizer":
            new_events, state = [*new_events, *state], []
    return [*new_events, *state, *(Freed(block) for block in new_blocks.values())]
