"""Change of a recorded step by async TP of a plan's `CompilePlan`, as a rule.

Inductor decomposes an all-gather and the matmul that
reads it, or a matmul and the reduce-scatter that reads it, into one part per rank. A part of the matmul runs while the
next part is communicated, so one part remains exposed. A copy between the two, which arranges the tensor by rank, is
not needed.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from distbench.simulate.compile_float8 import CAST, DEFAULT_STREAM, LARGEST
from distbench.simulate.recording import MATMUL, Collective, Event, EventRecorded, EventWaited, Operator, Recording

COPY = "aten.cat.default"
ASYNC_TP_RULE = "async TP is simulated by a rule: TP collectives run in one part per rank next to their matmuls"
FLOAT8_CASTS = (CAST, LARGEST)  # torchao casts before the all-gather, so casts do not wait for it


def in_async_tp(recording: Recording) -> Recording:
    """Return the recording with the TP collectives next to a matmul decomposed."""
    events = list(recording.step)
    numbers = itertools.count(1 + max((event.event for event in events if isinstance(event, EventRecorded)), default=0))
    parts: dict[int, Sequence[Event]] = {}  # by index of the event that they replace
    for place, event in enumerate(events):
        if isinstance(event, Collective) and event.source == "tp" and event.peer is None:
            if event.kind == "all_gather":
                parts |= _before_matmul(events, place, numbers)
            elif event.kind == "reduce_scatter":
                parts |= _after_matmul(events, place, numbers)
    before = recording.events[: len(recording.events) - len(events)]
    step = (part for place, event in enumerate(events) for part in parts.get(place, (event,)))
    return replace(recording, events=[*before, *step])


def _before_matmul(events: Sequence[Event], place: int, numbers: Iterator[int]) -> dict[int, Sequence[Event]]:
    """Return the parts of the all-gather at `place` and its matmul, by index; {} if no matmul reads the all-gather."""
    gather = events[place]
    assert isinstance(gather, Collective)
    done = next((event for event in events[place:] if isinstance(event, EventRecorded)), None)
    if done is None or done.stream != gather.stream:
        return {}
    waits = EventWaited(DEFAULT_STREAM, done.event)
    wait = next((at for at in range(place, len(events)) if events[at] == waits), len(events))
    operators = [at for at in range(wait, min(wait + 20, len(events))) if _computes(events[at])]
    between = list(itertools.takewhile(lambda at: _name(events[at]) in (COPY, *FLOAT8_CASTS), operators))
    copies = [at for at in between if _name(events[at]) == COPY]
    matmul = next(iter(operators[len(between) :]), None)
    if matmul is None or not _is_matmul(events[matmul]):
        return {}
    ends = [next(numbers) for _ in range(gather.group_size)]
    gathers = [event for end in ends for event in (_part(gather), EventRecorded(gather.stream, end))]
    matmuls = [event for end in ends for event in (EventWaited(DEFAULT_STREAM, end), _part(events[matmul], gather))]
    return {place: gathers, wait: (), matmul: matmuls, **dict.fromkeys(copies, ())}


def _after_matmul(events: Sequence[Event], place: int, numbers: Iterator[int]) -> dict[int, Sequence[Event]]:
    """Return the parts of the reduce-scatter at `place` and its matmul, by index; {} if it reads no matmul."""
    scatter = events[place]
    assert isinstance(scatter, Collective)
    operators = [at for at in range(place, max(place - 20, -1), -1) if _computes(events[at])]
    copies = list(itertools.takewhile(lambda at: _name(events[at]) == COPY, operators))
    matmul = next(iter(operators[len(copies) :]), None)
    if matmul is None or not _is_matmul(events[matmul]):
        return {}
    parts: list[Event] = []
    for _ in range(scatter.group_size):
        end = next(numbers)
        parts += [_part(events[matmul], scatter), EventRecorded(DEFAULT_STREAM, end)]
        parts += [EventWaited(scatter.stream, end), _part(scatter)]
    return {matmul: parts, place: (), **dict.fromkeys(copies, ())}


def _part(event: Event, collective: Collective | None = None) -> Event:
    """Return one of a collective's parts, or of a matmul's parts for a collective."""
    if isinstance(event, Collective):
        return event._replace(payload_bytes=event.payload_bytes // event.group_size)
    assert isinstance(event, Operator) and collective is not None
    parts = collective.group_size
    return event._replace(
        flops=event.flops // parts,
        num_bytes=event.num_bytes // parts,
        reads=[(block, num_bytes // parts) for block, num_bytes in event.reads],
        writes=[(block, num_bytes // parts) for block, num_bytes in event.writes],
    )


def _computes(event: Event) -> bool:
    return isinstance(event, Operator) and event.stream == DEFAULT_STREAM


def _is_matmul(event: Event) -> bool:
    return isinstance(event, Operator) and event.kind == MATMUL


def _name(event: Event) -> str:
    return event.name if isinstance(event, Operator) else ""
