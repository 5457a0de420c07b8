"""Changes of a recorded step by torch.compile and float8, as rules.

torch.compile: a run is a sequence of memory-bound operators of compiled modules, between two matmuls, attentions or
collectives on the default stream. The inductor makes a run one kernel; the partitioner keeps for backward the tensors
that backward needs.

float8: torchao's tensorwise dynamic scaling of linear layers. Every matmul of the chosen modules is done in float8.
Each input tensor is first cast: A kernel finds the largest element (in compiled code, the kernel that made the tensor).
Then the tensor is read and a float8 copy is written, once for all matmuls that read the tensor. The inputs of a
weight's gradient are copied once more, transposed, because float8 matmuls support one layout only. FSDP gathers weights
in float8, so weights are cast in their shards, which takes no time here. Tensor parallel also casts before gathers
(torchao's Float8ColwiseParallel, Float8RowwiseParallel and PrepareFloat8ModuleInput), which halves the bytes. Here, its
casts and its memory are still computed for the whole tensor. Tensors kept for backward do not change: torchao keeps the
high-precision tensor if a module is checkpointed. A copy has memory until the last matmul of its phase that reads the
copy; backward casts kept tensors again.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distbench.simulate.hardware_file import Hardware
from distbench.simulate.recording import (
    MATMUL,
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
    Touched,
)
from distbench.spec.errors import UserError, nearest
from distbench.spec.plan import LOSS, folded, matching

DEFAULT_STREAM = 0
FLOAT8_RATES = {"peak_fp8_flops", "matmul_fp8_flops"}  # figures of a machine with float8
FLOAT8, HALF = "float8", ("bf16", "f16")
# The cast waits for the largest element of the whole tensor, so it cannot be part of the kernel that made the tensor.
CAST, LARGEST = "float8.cast", "float8.largest"
GATHERS = ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy")
FLOAT8_RULE = (
    "float8 is simulated by rules of torchao's tensorwise scaling; tensors kept for backward do not change ({patterns})"
)


def fused_bytes(events: Sequence[Event], compiled: Sequence[str]) -> Mapping[int, int]:
    """Return the bytes that each run reads and writes as one kernel: inputs from outside, and outputs used outside.

    Returns:
        Bytes by index in `events`, for every operator of a run: all bytes at the last operator, 0 at other operators.
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
    """Return the allocations of a recording with its modules compiled; unchanged without compiled modules.

    Activations of compiled modules that are made and freed within one kernel are not allocated. Activations that
    backward never reads (such as those kept by selective checkpointing without use) are freed at the end of their use
    in forward. Activations that a kernel of backward can recompute from kept tensors are freed too; if a matmul reads
    such an activation, it is recomputed before the matmul.

    The first step has no operators; its allocations are assumed to be the second step's plus the optimizer's state.
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
        # Events that may occur between two operators of one kernel.
        if isinstance(event, Allocated | Freed | EventRecorded | EventWaited | HostWaited):
            continue
        if (
            isinstance(event, Operator)
            and event.kind == MEMORY
            and event.stream == DEFAULT_STREAM
            and event.name != CAST
            # The inductor calls torch's own kernel for complex numbers, in which rotary embeddings are often written.
            and not event.dtype.startswith("complex")
            and _is_within(event.owner, inside)
        ):
            if run and _phase(events[run[-1]]) != event.phase:  # from the loss to its backward
                runs.append(_FusedRun(run, place))
                run = []
            run.append(place)
        elif run:
            runs.append(_FusedRun(run, place))
            run = []
    return [*runs, _FusedRun(run, len(events))] if run else runs


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _is_within(owner: str, modules: Set[str]) -> bool:
    return any(name in modules for name in _with_parents(owner))


class _Uses(NamedTuple):
    """Indices of a block's events in a step: its allocation, the operator that makes it, the last use in forward, all
    uses in backward, and its release.
    """

    allocated: int
    maker: int
    forward: int
    backward: Sequence[int]
    freed: int


def _compiled_step(events: Sequence[Event], compiled: Sequence[str]) -> list[Event]:
    inside, runs = set(compiled), _runs(events, compiled)
    run_of = {place: run for run in runs for place in run.places}
    gone: set[int] = set()  # indices of removed events
    added: dict[int, list[Event]] = defaultdict(list)  # index to events that follow it
    uses_of = _uses(events)
    begins = next((at for at, event in enumerate(events) if _phase(event) == "backward"), len(events))
    dropped: set[int] = set()
    for block, uses in uses_of.items():
        maker = events[uses.maker]
        assert isinstance(maker, Operator)
        if maker.stream != DEFAULT_STREAM or not _is_within(maker.owner, inside):
            continue
        run = run_of.get(uses.maker)
        if run is not None and uses.freed < run.end:
            gone.update((uses.allocated, uses.freed))
        elif maker.phase == "forward" and uses.freed >= begins and _is_dispensable(uses, maker, run, uses_of, dropped):
            # Freed after the last use in forward, and recomputed before an operator that must read it from memory.
            dropped.add(block)
            gone.add(uses.freed)
            added[_done_with(uses, events)].append(Freed(block))
            if readers := [place for place in uses.backward if place not in run_of]:
                added[readers[0] - 1].append(events[uses.allocated])
                added[uses.freed].append(Freed(block))
    compiled_events: list[Event] = []
    for place, event in enumerate(events):
        compiled_events += () if place in gone else (event,)
        compiled_events += added.get(place, ())
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


def _done_with(uses: _Uses, events: Sequence[Event]) -> int:
    """Return the index after a block's last use in forward.

    A collective does not list its blocks, so a collective before the next operator may read this block.
    """
    done = uses.forward
    for place in range(done + 1, len(events)):
        if isinstance(events[place], Operator):
            break
        done = place if isinstance(events[place], Collective) else done
    return done


def _phase(event: Event) -> str:
    return event.phase if isinstance(event, Operator) else ""


def _uses(events: Sequence[Event]) -> dict[int, _Uses]:
    """Return the uses of blocks that are allocated and freed in this step and first written by an operator."""
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
    """Return the first step with the second step's allocations.

    Its blocks get other numbers. Remaining memory is the first step's, at the start of the step, and for the
    optimizer's state at the start of the optimizer.
    """
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


def in_compiled_loss(recording: Recording) -> Recording:
    """Return the recording with inputs of the loss kept for backward instead of larger tensors that the loss makes.

    The partitioner keeps the smaller side of a cut: logits in their own dtype instead of the logarithm of the softmax
    in fp32, which the kernel of backward computes again. `fused_bytes` and `compiled_memory` make kernels of the
    operators.
    """
    start = max(place for place, event in enumerate(recording.events) if isinstance(event, StepBegun))
    before, step = recording.events[:start], recording.events[start:]
    sizes = {event.block: event.num_bytes for event in step if isinstance(event, Allocated)}
    freed = {event.block: place for place, event in enumerate(step) if isinstance(event, Freed)}
    inputs: dict[int, dict[int, int]] = {}  # of blocks that the loss makes in forward: block to bytes
    last: dict[int, int] = {}  # index of a block's last use
    for place, event in enumerate(step):
        if not isinstance(event, Operator):
            continue
        if event.phase == "forward" and event.owner == LOSS:
            outside: dict[int, int] = {}
            for block, num_bytes in event.reads:
                outside |= inputs.get(block, {block: num_bytes})
            inputs |= {block: outside for block, _ in event.writes}
        last |= dict.fromkeys((block for block, _ in event.reads), place)
    instead = {
        block: outside
        for block, outside in inputs.items()
        if block in sizes.keys() & freed.keys() & last.keys()
        and _phase(step[last[block]]) == "backward"
        and sum(outside.values()) < sizes[block]
    }
    until: dict[int, int] = {}  # input to the end of the kernel that reads it instead
    for block, outside in instead.items():
        own = itertools.takewhile(lambda at: _is_of_loss(at[1]), enumerate(step[last[block] :], start=last[block]))
        end = max(place for place, event in own if isinstance(event, Operator))
        until |= {part: max(end, until.get(part, 0)) for part in outside if part in freed}
    ends: dict[int, list[int]] = defaultdict(list)
    for part, place in until.items():
        ends[max(place, freed[part])].append(part)

    def replaced(touched: Touched, keeps: bool) -> Touched:
        blocks: dict[int, int] = {}
        for block, num_bytes in touched:
            blocks |= instead[block] if keeps and block in instead else {} if block in instead else {block: num_bytes}
        return [*blocks.items()]

    new_events: list[Event] = []
    for place, event in enumerate(step):
        is_replaced = isinstance(event, Allocated | Freed) and event.block in instead
        if isinstance(event, Operator):
            reads, writes = replaced(event.reads, True), replaced(event.writes, False)
            new_events.append(event._replace(reads=reads, writes=writes))
        elif not is_replaced and not (isinstance(event, Freed) and event.block in until):
            new_events.append(event)
        new_events += map(Freed, ends.get(place, ()))
    return replace(recording, events=[*before, *new_events])


def _is_of_loss(event: Event) -> bool:
    """Return whether an event may be between two operators of the loss."""
    return not isinstance(event, Operator) or event.owner == LOSS


def patterns_of(text: str, hardware: Hardware) -> tuple[str, ...]:
    """Return the glob patterns of `--float8`, for hardware with a float8 rate.

    Raises:
        UserError: a pattern is empty, or the machine has no rate for float8.
    """
    patterns = tuple(part.strip() for part in text.split(","))
    if not all(patterns):
        raise UserError(f"--float8 {text!r} has no modules; give glob patterns, such as --float8 'layers.*'")
    if not hardware.figures.keys() & FLOAT8_RATES:
        problem = f"hardware file {hardware.name} has no float8 rate (peak_fp8_flops)"
        raise UserError(f"{problem}; leave --float8 out, or use --hardware with a float8 rate, such as h100")
    return patterns


def in_float8_by(recording: Recording, patterns: Sequence[str]) -> Recording:
    """Return the recording with linear layers of matching modules in float8.

    Raises:
        UserError: the patterns match no module that computes in a dtype that float8 replaces.
    """
    matmuls = [event for event in recording.step if isinstance(event, Operator) and event.kind == MATMUL]
    names = {name for event in matmuls for name in _with_parents(event.owner)}
    modules = {name for pattern in patterns for name in matching(pattern, names)}
    chosen = [event for event in matmuls if _is_within(event.owner, modules)]
    if not chosen:
        near = nearest(patterns[0], sorted({folded(name) for name in names if name}))
        raise UserError(f"--float8 {','.join(patterns)} matches no module with a matmul ({near})")
    if not any(event.dtype in HALF for event in chosen):
        problem = f"--float8 {','.join(patterns)} matches modules that compute in {chosen[0].dtype}"
        raise UserError(f"{problem}, but float8 replaces {' or '.join(HALF)}; use mixed precision in the plan")
    return in_float8(recording, sorted(modules))


def in_float8(recording: Recording, modules: Sequence[str]) -> Recording:
    """Return the recording with the linear layers of the given modules in float8.

    Args:
        modules: names of modules, whose submodules are included.
    """
    inside = set(modules)
    gathered = {
        block
        for event in recording.events
        if isinstance(event, Operator) and event.name.startswith(GATHERS) and _is_within(event.owner, inside)
        for block, _ in (*event.reads, *event.writes)
    }
    first = 1 + max((event.block for event in recording.events if isinstance(event, Allocated)), default=0)
    copies = _Copies(itertools.count(first))
    new_events: list[Event] = []
    for event in recording.events:
        if isinstance(event, StepBegun):
            copies.of.clear()
        elif isinstance(event, Freed):
            copies.of.pop(event.block, None)
        elif isinstance(event, Operator):
            for block, _ in event.writes:
                copies.of.pop(block, None)
        new_events += _changed(event, inside, gathered, copies)
    return replace(recording, events=list(_with_memory(new_events, first)))


@dataclass
class _Copies:
    """Existing float8 copies by block, with phase and block of the copy, and numbers for further blocks."""

    numbers: Iterator[int]
    of: dict[int, tuple[str, int]] = field(default_factory=dict)


def _changed(event: Event, modules: Set[str], gathered: Set[int], copies: _Copies) -> Sequence[Event]:
    if isinstance(event, Allocated):
        is_gathered = event.block in gathered and event.held == "fsdp"
        return (event._replace(num_bytes=-(-event.num_bytes // 2)) if is_gathered else event,)
    if not isinstance(event, Operator | Collective) or not _is_within(event.owner, modules):
        return (event,)
    if isinstance(event, Collective):
        is_gather = event.source in ("fsdp", "tp") and event.kind == "all_gather" and event.dtype in HALF
        return (event._replace(payload_bytes=event.payload_bytes // 2, dtype=FLOAT8) if is_gather else event,)
    if event.name.startswith(GATHERS):
        return (event._replace(num_bytes=event.num_bytes // 2),)
    return _matmul(event, gathered, copies) if event.kind == MATMUL and event.dtype in HALF else (event,)


def _matmul(event: Operator, gathered: Set[int], copies: _Copies) -> Sequence[Event]:
    """Return a matmul in float8, after the casts of its inputs. A weight's gradient reads no weight."""
    of_weight = not any(block in gathered for block, _ in event.reads)
    operators: list[Event] = []
    reads: list[Sequence[int]] = []

    def add_kernel(name: str, num_bytes: int, reads: Touched, writes: Touched) -> None:
        operators.append(
            event._replace(name=name, kind=MEMORY, flops=0, num_bytes=num_bytes, reads=reads, writes=writes)
        )

    for block, num_bytes in event.reads:
        copy, half = block, num_bytes // 2
        if block not in gathered:
            phase, copy = copies.of.get(block, ("", 0))
            if phase != event.phase:
                copy = next(copies.numbers)
                copies.of[block] = event.phase, copy
                add_kernel(LARGEST, num_bytes, [(block, num_bytes)], [])
                add_kernel(CAST, num_bytes + half, [(block, num_bytes)], [(copy, half)])
        if of_weight:
            transposed = next(copies.numbers)
            add_kernel(CAST, num_bytes, [(copy, half)], [(transposed, half)])  # one byte per element each way
            copy = transposed
        reads.append((copy, half))
    read_bytes = sum(num_bytes for _, num_bytes in event.reads)
    return (*operators, event._replace(dtype=FLOAT8, num_bytes=max(event.num_bytes - read_bytes // 2, 0), reads=reads))


def _with_memory(events: Sequence[Event], first: int) -> Iterator[Event]:
    """Yield the events, with memory for blocks from `first` on: from the first write until the last use."""
    last = {
        block: place
        for place, event in enumerate(events)
        if isinstance(event, Operator)
        for block, _ in (*event.reads, *event.writes)
        if block >= first
    }
    ends: dict[int, list[int]] = defaultdict(list)
    for block, place in last.items():
        ends[place].append(block)
    for place, event in enumerate(events):
        if isinstance(event, Operator) and event.name == CAST:
            kind = "activations" if event.phase == "forward" else "backward"
            for block, num_bytes in event.writes:
                yield Allocated(block, num_bytes, event.stream, kind, event.owner)
        yield event
        yield from (Freed(block) for block in ends.get(place, ()))
