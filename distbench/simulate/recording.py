"""A recording of one rank's step: what it issued to which stream, and what it allocated; as a file, JSON line by line.

The first line is the `Head`, each further one an event, in the order of the program. docs/simulation.md says what each
field means. A reader of version N reads all older versions.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from distbench.spec.errors import UserError
from distbench.spec.fields import (
    BYTES,
    COUNT,
    FLAG,
    NAME,
    SIZE,
    TEXT,
    Kind,
    Kinds,
    list_of,
    mapping_of,
    one_of,
    or_none,
    shown,
    wrong_field,
)
from distbench.spec.reading import opened, parse_json
from distbench.spec.writing import write_whole

VERSION = 1
# Of an operator: what its time depends on.
MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY = "matmul", "attention", "attention_backward", "memory"
KINDS_OF_OPERATORS = (MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY)
# Of a block of memory: what lies in it.
HELD = ("parameters", "gradients", "optimizer", "buffers", "batch", "fsdp", "activations", "backward", "other")
MAX_LINES, MAX_LINE_BYTES = 5_000_000, 1 << 20
Touched = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Head:
    """What was recorded.

    Args:
        variant: the axes of the scenario's variant, as its label has them; empty where nothing is swept.
        mesh: mesh dim name to ranks, outermost first; the last one's ranks are neighbours.
        torch: torch's version.
        num_parameters: of the whole model.
        batch_size: samples of the global batch.
        num_tokens: tokens of the global batch; None where the scenario names none.
        microbatches: parts that a rank's batch is split into.
        phases: of the step, in order.
        compiled: names of the modules that the plan compiles; their operators are recorded as they run uncompiled.
    """

    scenario: str
    variant: str
    mesh: dict[str, int]
    torch: str
    num_parameters: int
    batch_size: int
    num_tokens: int | None
    microbatches: int
    phases: tuple[str, ...]
    compiled: tuple[str, ...] = ()


class StepBegun(NamedTuple):
    """A step begins: number 1 sets things up, number 2 is recorded with its operators."""

    number: int


class Operator(NamedTuple):
    """An operator on a stream.

    Args:
        name: as torch dispatches it, such as "aten.mm.default".
        kind: out of KINDS_OF_OPERATORS.
        flops: floating point operations; causal attention counts half.
        dtype: of what it computes in.
        num_bytes: read and written.
        reads, writes: (block, bytes) of each tensor.
        phase: "forward", "backward" or "optimizer".
        owner: the module's name; empty for the root, and where none is known.
    """

    stream: int
    name: str
    kind: str
    flops: int
    dtype: str
    num_bytes: int
    reads: Touched
    writes: Touched
    phase: str
    owner: str


class Collective(NamedTuple):
    """A collective on a stream; fields as `worker.tracing.attribution.Communication` has them.

    Args:
        ranks: of the group of rank 0, as (count, stride) of nested loops, outermost first: [[4, 8], [8, 1]] is 0 to
            31; a group that is not such loops lists its ranks as [[1, rank], ...].
    """

    stream: int
    phase: str
    source: str
    kind: str
    mesh_dim: str
    group_size: int
    dtype: str
    payload_bytes: int
    owner: str
    owner_known: bool
    redistribution: str
    explicit: bool | None
    ranks: Touched


class EventRecorded(NamedTuple):
    """An event happens when all that was issued to the stream before has ended."""

    stream: int
    event: int


class EventWaited(NamedTuple):
    """What is issued to the stream from now on begins after the event."""

    stream: int
    event: int


class HostWaited(NamedTuple):
    """The host issues nothing before the stream is empty."""

    stream: int


class Allocated(NamedTuple):
    """A block of memory is asked for on a stream.

    Args:
        held: what lies in it, out of HELD.
        owner: the module's name; empty for the root, and where none is known.
    """

    block: int
    num_bytes: int
    stream: int
    held: str
    owner: str


class Freed(NamedTuple):
    """A block is given back to the allocator; its bytes were asked for by `Allocated`."""

    block: int


Event = StepBegun | Operator | Collective | EventRecorded | EventWaited | HostWaited | Allocated | Freed


@dataclass(frozen=True)
class Recording:
    """One rank's step."""

    head: Head
    events: Sequence[Event] = field(default_factory=list)

    @property
    def step(self) -> Sequence[Event]:
        """The events of the last step, which has its operators."""
        begun = [index for index, event in enumerate(self.events) if isinstance(event, StepBegun)]
        return self.events[begun[-1] :] if begun else self.events

    @property
    def collectives(self) -> list[Collective]:
        """Those of the last step, in the order of issue."""
        return [event for event in self.step if isinstance(event, Collective)]

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        found = 1
        for size in self.head.mesh.values():
            found *= size
        return found

    def save(self, path: Path) -> None:
        """Write it as JSON lines."""
        head = {"recording_version": VERSION, **asdict(self.head)}
        lines = (json.dumps({"is": NAMES[type(event)], **event._asdict()}) for event in self.events)
        write_whole(path, "\n".join([json.dumps(head), *lines]) + "\n")


# Event in a file to its type, and what each field may hold.
_TOUCHED = Kind(
    lambda value: (
        isinstance(value, list)
        and all(isinstance(one, list) and len(one) == 2 for one in value)
        and all(type(number) is int and number >= 0 for one in value for number in one)
    ),
    "a list of pairs of whole numbers",
)
_STREAM: Kinds = {"stream": COUNT}
_COMMON: Kinds = {**_STREAM, **dict.fromkeys(("phase", "dtype", "name"), NAME), "owner": TEXT}
TYPES: dict[str, tuple[type[Any], Kinds]] = {
    "step": (StepBegun, {"number": COUNT}),
    "operator": (
        Operator,
        {
            **_COMMON,
            "kind": one_of(KINDS_OF_OPERATORS),
            "flops": BYTES,
            "num_bytes": BYTES,
            "reads": _TOUCHED,
            "writes": _TOUCHED,
        },
    ),
    "collective": (
        Collective,
        {
            **_COMMON,
            **dict.fromkeys(("source", "kind", "mesh_dim"), NAME),
            **dict.fromkeys(("owner", "redistribution"), TEXT),
            "group_size": SIZE,
            "payload_bytes": BYTES,
            "owner_known": FLAG,
            "explicit": or_none(FLAG),
            "ranks": _TOUCHED,
        },
    ),
    "record": (EventRecorded, {**_STREAM, "event": COUNT}),
    "wait": (EventWaited, {**_STREAM, "event": COUNT}),
    "host_wait": (HostWaited, _STREAM),
    "allocate": (
        Allocated,
        {**_STREAM, "block": COUNT, "num_bytes": BYTES, "held": one_of(HELD), "owner": TEXT},
    ),
    "free": (Freed, {"block": COUNT}),
}
NAMES = {kind: name for name, (kind, _) in TYPES.items()}
_HEAD: Kinds = {
    "scenario": NAME,
    "variant": TEXT,
    "mesh": mapping_of(SIZE),
    "torch": NAME,
    **dict.fromkeys(("num_parameters", "batch_size", "microbatches"), SIZE),
    "num_tokens": or_none(SIZE),
    **dict.fromkeys(("phases", "compiled"), list_of(TEXT)),
}


def load_recording(path: Path) -> Recording:
    """Read what `Recording.save` wrote.

    Raises:
        UserError: the file cannot be read, is no recording, or a line of it is damaged.
    """
    with opened(path, "recording") as file:
        lines = _lines(file, path)
        number, record = next(lines, (1, {}))
        version = record.get("recording_version")
        if type(version) is int and version > VERSION:
            raise UserError(f"recording {path} is newer than this distbench; update distbench")
        if version != VERSION:
            raise UserError(f"{path} is no recording; write one with distbench simulate SCENARIO --save FILE")
        events = []
        if wrong := wrong_field(record, _HEAD, [name for name in _HEAD if name != "num_tokens"]):
            raise _damaged(path, number, wrong)
        given: dict[str, Any] = {one.name: record.get(one.name) for one in fields(Head)}
        head = Head(**{**given, **{name: tuple(record[name]) for name in ("phases", "compiled")}})
        for number, record in lines:
            events.append(_event(record, path, number))
    _require_order(events, path)
    return Recording(head, events)


def _lines(file: Any, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if number > MAX_LINES or len(line) > MAX_LINE_BYTES:
            raise UserError(f"recording {path}, line {number}: it is longer than any recording; record the step anew")
        try:
            record = parse_json(line.rstrip(b"\n"))
        except ValueError as error:
            raise _damaged(path, number, str(error).removeprefix("line 1, ")) from error
        if not isinstance(record, dict):
            raise _damaged(path, number, f"it is {shown(record)}, not an object")
        yield number, record


def _event(record: dict[str, Any], path: Path, number: int) -> Event:
    found = TYPES.get(record.pop("is", None)) if isinstance(record.get("is"), str) else None
    if found is None:
        raise _damaged(path, number, "it is no event of a recording")
    kind, kinds = found
    needed = [name for name in kind._fields if name != "explicit"]
    if wrong := wrong_field(record, kinds, needed):
        raise _damaged(path, number, wrong)
    event: Event = kind(**{name: record.get(name) for name in kind._fields})
    return event


def _require_order(events: Sequence[Event], path: Path) -> None:
    """A block is freed once, after it was allocated, and there is a step."""
    alive: set[int] = set()
    for number, event in enumerate(events, start=2):
        if isinstance(event, Allocated):
            if event.block in alive:
                raise _damaged(path, number, f"block {event.block} is allocated already")
            alive.add(event.block)
        elif isinstance(event, Freed):
            if event.block not in alive:
                raise _damaged(path, number, f"block {event.block} is freed and not allocated")
            alive.remove(event.block)
    if not any(isinstance(event, StepBegun) for event in events):
        raise UserError(f"recording {path} has no step; record it anew")


def _damaged(path: Path, number: int, wrong: str) -> UserError:
    return UserError(f"recording {path}, line {number}: {wrong}; record the step anew")
