"""What float8 changes in a recorded step, as a rule: torchao's tensorwise dynamic scaling of linear layers.

Every matmul of the chosen modules is done in float8. Each tensor that goes into one is cast before: its largest element
is looked for (by the kernel that made it, where that is compiled), then it is read and a float8 copy written, once for
all matmuls that read it. What the gradient of a weight is made from is copied once more, transposed: float8 matmuls
take one layout only. FSDP gathers weights in float8, so those are cast in their shards, which takes no time here.
Tensor parallel casts before it gathers, too (torchao's Float8ColwiseParallel, Float8RowwiseParallel and
PrepareFloat8ModuleInput): half the bytes. Its casts are taken to be of the whole tensor all the same, as is its memory.
What is kept for backward stays as it was: torchao keeps the high-precision tensor where a module is checkpointed. A
copy has memory until the last matmul of its phase that reads it; backward casts what it was kept again.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from distbench.simulate.compiled import OWN_KERNEL, is_within
from distbench.simulate.hardware_file import Hardware
from distbench.simulate.operator_costs import FLOAT8
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
    Touched,
)
from distbench.spec.errors import UserError, nearest
from distbench.spec.plan import folded, matching

LOW = ("bf16", "f16")
IS_A_RULE = (
    "float8 is a rule here: torchao's tensorwise scaling; what is kept for backward stays as it was ({patterns})"
)
GATHERS = ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy")


def patterns_of(text: str, hardware: Hardware) -> tuple[str, ...]:
    """The glob patterns of `--float8`, on a machine that has float8.

    Raises:
        UserError: there is an empty one, or the machine has no rate for float8.
    """
    patterns = tuple(part.strip() for part in text.split(","))
    if not all(patterns):
        raise UserError(f"--float8 {text!r} names no modules; give glob patterns, such as --float8 'layers.*'")
    if not hardware.figures.keys() & {"peak_fp8_flops", "matmul_fp8_flops"}:
        problem = f"hardware file {hardware.name} has no float8 rate (peak_fp8_flops)"
        raise UserError(f"{problem}; leave --float8 out, or give --hardware that has one, such as h100")
    return patterns


def in_float8_by(recording: Recording, patterns: Sequence[str]) -> Recording:
    """The recording with the linear layers of the modules that any of the patterns matches in float8.

    Raises:
        UserError: they match none that computes in a type which float8 takes the place of.
    """
    matmuls = [event for event in recording.step if isinstance(event, Operator) and event.kind == MATMUL]
    names = {name for event in matmuls for name in _with_parents(event.owner)}
    modules = {name for pattern in patterns for name in matching(pattern, names)}
    chosen = [event for event in matmuls if is_within(event.owner, modules)]
    if not chosen:
        near = nearest(patterns[0], sorted({folded(name) for name in names if name}))
        raise UserError(f"--float8 {','.join(patterns)} matches no module with a matmul ({near})")
    if not any(event.dtype in LOW for event in chosen):
        problem = f"--float8 {','.join(patterns)}: those modules compute in {chosen[0].dtype}"
        raise UserError(f"{problem}, and float8 takes the place of {' or '.join(LOW)}; give the plan mixed precision")
    return in_float8(recording, sorted(modules))


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


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
    copies = _Copies(1 + max((event.block for event in recording.events if isinstance(event, Allocated)), default=0))
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
    return replace(recording, events=list(_with_memory(new_events, copies.first)))


@dataclass
class _Copies:
    """Float8 copies that are there now.

    Args:
        first: the number of the first one's block.
        of: a block to the phase that its copy was made in, and the copy's block.
    """

    first: int
    of: dict[int, tuple[str, int]] = field(default_factory=dict)
    num_made: int = 0

    def next(self) -> int:
        """A block for one more."""
        self.num_made += 1
        return self.first + self.num_made - 1


def _changed(event: Event, modules: Set[str], gathered: Set[int], copies: _Copies) -> Sequence[Event]:
    if isinstance(event, Allocated):
        is_gathered = event.block in gathered and event.held == "fsdp"
        return (event._replace(num_bytes=-(-event.num_bytes // 2)) if is_gathered else event,)
    if not isinstance(event, Operator | Collective) or not is_within(event.owner, modules):
        return (event,)
    if isinstance(event, Collective):
        is_gather = event.source in ("fsdp", "tp") and event.kind == "all_gather" and event.dtype in LOW
        return (event._replace(payload_bytes=event.payload_bytes // 2, dtype=FLOAT8) if is_gather else event,)
    if event.name.startswith(GATHERS):
        return (event._replace(num_bytes=event.num_bytes // 2),)
    return _matmul(event, gathered, copies) if event.kind == MATMUL and event.dtype in LOW else (event,)


def _matmul(event: Operator, gathered: Set[int], copies: _Copies) -> Sequence[Event]:
    """A matmul in float8, after the casts of what it reads. The gradient of a weight reads no weight."""
    of_weight = not any(block in gathered for block, _ in event.reads)
    operators: list[Event] = []
    reads: list[Sequence[int]] = []
    for block, num_bytes in event.reads:
        copy, half = block, num_bytes // 2
        if block not in gathered:
            phase, copy = copies.of.get(block, ("", 0))
            if phase != event.phase:
                copy = copies.next()
                copies.of[block] = event.phase, copy
                operators += _casts(event, block, num_bytes, copy)
        if of_weight:
            transposed = copies.next()
            operators.append(
                _kernel(event, num_bytes, [(copy, half)], [(transposed, half)])
            )  # a byte an element each way
            copy = transposed
        reads.append((copy, half))
    read_bytes = sum(num_bytes for _, num_bytes in event.reads)
    return (*operators, event._replace(dtype=FLOAT8, num_bytes=max(event.num_bytes - read_bytes // 2, 0), reads=reads))


def _casts(matmul: Operator, block: int, num_bytes: int, copy: int) -> Sequence[Operator]:
    reads, half = [(block, num_bytes)], num_bytes // 2
    largest = _kernel(matmul, num_bytes, reads, [])._replace(name="float8.largest")
    return (largest, _kernel(matmul, num_bytes + half, reads, [(copy, half)]))


def _kernel(matmul: Operator, num_bytes: int, reads: Touched, writes: Touched) -> Operator:
    return matmul._replace(name=OWN_KERNEL, kind=MEMORY, flops=0, num_bytes=num_bytes, reads=reads, writes=writes)


def _with_memory(events: Sequence[Event], first: int) -> Iterator[Event]:
    """The events, and the memory of blocks from `first` on: from what writes one until the last that touches it."""
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
        if isinstance(event, Operator) and event.name == OWN_KERNEL:
            kind = "activations" if event.phase == "forward" else "backward"
            for block, num_bytes in event.writes:
                yield Allocated(block, num_bytes, event.stream, kind, event.owner)
        yield event
        yield from (Freed(block) for block in ends.get(place, ()))
