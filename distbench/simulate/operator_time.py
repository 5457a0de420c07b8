"""How long an operator takes on a hardware file's device; and which of them torch.compile would make one kernel."""

from collections.abc import Mapping, Sequence

from distbench.simulate.hardware.hardware_file import Hardware
from distbench.simulate.recording import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MATMUL,
    MEMORY,
    Allocated,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    HostWaited,
    Operator,
)

# What may lie between two operators of one kernel.
_BETWEEN = (Allocated, Freed, EventRecorded, EventWaited, HostWaited)
DEFAULT_STREAM = 0


def operator_s(operator: Operator, hardware: Hardware, fused: int | None = None) -> float:
    """Seconds that an operator runs: its floating point operations, or its bytes, whichever take longer.

    Args:
        fused: bytes of the one kernel that it became with others, 0 where another one stands for it; None for its own.
    """
    num_bytes = operator.num_bytes if fused is None else fused
    bytes_s = num_bytes / (hardware["memory_bytes_per_s"] * hardware["memory_share"])
    if operator.kind == MATMUL:
        rate = hardware["matmul_bf16_flops" if operator.dtype in ("bf16", "f16") else "matmul_f32_flops"]
        return max(operator.flops / rate, bytes_s)
    if operator.kind == ATTENTION:
        return operator.flops / hardware["attention_flops"]
    if operator.kind == ATTENTION_BACKWARD:
        return operator.flops / hardware["attention_backward_flops"]
    return bytes_s + hardware["operator_s"] if num_bytes else 0.0


def fused_bytes(events: Sequence[Event], compiled: Sequence[str]) -> Mapping[int, int]:
    """What each run of memory-bound operators of compiled modules touches as one kernel, bytes.

    A run goes from one matmul, attention or collective to the next on the default stream. It reads what it did not
    make, and writes what outlives it; what is made and freed within it never reaches memory.

    Returns:
        Place in `events` to bytes, for every operator of a run: all of them at its last one, 0 at the others.
    """
    if not compiled:
        return {}
    freed_at = {event.block: place for place, event in enumerate(events) if isinstance(event, Freed)}
    found: dict[int, int] = {}
    run: list[int] = []
    for place, event in enumerate(events):
        if isinstance(event, _BETWEEN):
            continue
        if _is_fusible(event, compiled):
            run.append(place)
            continue
        _close(run, place, events, freed_at, found)
        run = []
    _close(run, len(events), events, freed_at, found)
    return found


def _is_fusible(event: Event, compiled: Sequence[str]) -> bool:
    return (
        isinstance(event, Operator)
        and event.kind == MEMORY
        and event.stream == DEFAULT_STREAM
        and any(f"{event.owner}.".startswith(f"{module}.") for module in compiled)
    )


def _close(
    run: Sequence[int], end: int, events: Sequence[Event], freed_at: Mapping[int, int], found: dict[int, int]
) -> None:
    made: set[int] = set()
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for place in run:
        operator = events[place]
        assert isinstance(operator, Operator)
        for block, num_bytes in operator.reads:
            if block not in made:
                reads[block] = max(reads.get(block, 0), num_bytes)
        for block, num_bytes in operator.writes:
            made.add(block)
            writes[block] = max(writes.get(block, 0), num_bytes)
        found[place] = 0
    if run:
        outliving = (num_bytes for block, num_bytes in writes.items() if freed_at.get(block, end + 1) > end)
        found[run[-1]] = sum(reads.values()) + sum(outliving)
