"""The file of a recording: JSON line by line, the first its `Head`, each further one an event; of several ranks, one
recording after another.

History of recording_version; a reader of version N reads all older ones:
    1: first version.
    2: more ranks than rank 0, each with a head of its own and its `rank`; `case_id` and `params`; a collective's `op`.
    3: pipelines: `pipeline` of the head; messages, which are collectives with a `peer` and a `batch`.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from distbench.simulate.recording import (
    HELD,
    KINDS_OF_OPERATORS,
    MESSAGES,
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    Head,
    HostWaited,
    Operator,
    PipelineFacts,
    Recording,
    StepBegun,
)
from distbench.spec.errors import UserError
from distbench.spec.fields import (
    AMOUNT,
    BYTES,
    COUNT,
    FLAG,
    NAME,
    RECORD,
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

VERSION = 3
MAX_LINES, MAX_LINE_BYTES, MAX_RANKS = 5_000_000, 1 << 20, 64
MAX_WORLD_SIZE = 65_536  # as --mesh has it
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
            "attention": list_of(COUNT),
        },
    ),
    "collective": (
        Collective,
        {
            **_COMMON,
            **dict.fromkeys(("source", "kind", "mesh_dim"), NAME),
            **dict.fromkeys(("owner", "redistribution"), TEXT),
            "group_size": Kind(lambda value: SIZE.fits(value) and value <= MAX_WORLD_SIZE, f"1 to {MAX_WORLD_SIZE}"),
            "payload_bytes": BYTES,
            "owner_known": FLAG,
            "explicit": or_none(FLAG),
            "ranks": _TOUCHED,
            "op": TEXT,
            "peer": or_none(COUNT),
            "batch": COUNT,
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
    "rank": COUNT,
    "num_events": COUNT,
    "case_id": TEXT,
    "params": RECORD,
    "pipeline": or_none(RECORD),
}
_PIPELINE: Kinds = {
    **dict.fromkeys(("mesh_dim", "schedule"), NAME),
    **dict.fromkeys(("num_stages", "microbatches"), SIZE),
    "least_idle_share": or_none(AMOUNT),
}
# Fields that older recordings lack, or that may be null.
_OPTIONAL = (
    "num_events",
    "num_tokens",
    "rank",
    "case_id",
    "params",
    "pipeline",
    "explicit",
    "op",
    "peer",
    "batch",
    "attention",
)


def save_recordings(recordings: Sequence[Recording], path: Path) -> None:
    """Write those of one step's ranks as JSON lines."""
    write_whole(path, "".join(line + "\n" for recording in recordings for line in _lines_of(recording)))


def _lines_of(recording: Recording) -> Iterator[str]:
    counted = {"recording_version": VERSION, "num_events": len(recording.events)}
    yield json.dumps({**counted, **asdict(recording.head)})
    yield from (json.dumps({"is": NAMES[type(event)], **event._asdict()}) for event in recording.events)


def load_recordings(path: Path) -> list[Recording]:
    """Read what `save_recordings` wrote: one recording a rank, of one step.

    Raises:
        UserError: the file cannot be read, is no recording, or a line of it is damaged.
    """
    found: list[tuple[int, Head, list[Event]]] = []
    counts: list[int | None] = []
    with opened(path, "recording") as file:
        for number, record in _lines(file, path):
            if found and "recording_version" not in record:
                found[-1][2].append(_event(record, path, number))
                continue
            found.append((number, _head(record, path, number), []))
            counts.append(record.get("num_events"))
            if len(found) > MAX_RANKS:
                raise _damaged(path, number, f"more than {MAX_RANKS} ranks")
    if not found:
        raise UserError(f"{path} {_NO_RECORDING}")
    first = found[0][1]
    for (number, head, events), count in zip(found, counts, strict=True):
        if count is not None and len(events) != count:
            raise _damaged(path, number, f"{len(events):,} of its {count:,} events are there: it was cut short")
        if (head.scenario, head.variant, head.mesh) != (first.scenario, first.variant, first.mesh):
            raise _damaged(path, number, f"{head.label} is another step than {first.label}, a file holds one")
        _require_order(events, path, number + 1)
    return [Recording(head, events) for _, head, events in found]


def load_recording(path: Path) -> Recording:
    """The first rank's. Raises as `load_recordings`."""
    return load_recordings(path)[0]


_NO_RECORDING = "is no recording; write one with distbench simulate SCENARIO --save FILE"


def _head(record: dict[str, Any], path: Path, number: int) -> Head:
    version = record.get("recording_version")
    if type(version) is int and version > VERSION:
        raise UserError(f"recording {path} is newer than this distbench; update distbench")
    if type(version) is not int or version < 1:
        raise UserError(f"{path} {_NO_RECORDING}")
    if wrong := wrong_field(record, _HEAD, [name for name in _HEAD if name not in _OPTIONAL]):
        raise _damaged(path, number, wrong)
    given = {one.name: record[one.name] for one in fields(Head) if record.get(one.name) is not None}
    if (pipeline := given.get("pipeline")) is not None:
        given["pipeline"] = _pipeline(pipeline, record["mesh"], path, number)
    head = Head(**{"num_tokens": None, **given, **{name: tuple(record[name]) for name in ("phases", "compiled")}})
    if math.prod(head.mesh.values()) > MAX_WORLD_SIZE:
        raise _damaged(path, number, f"its mesh has more than {MAX_WORLD_SIZE:,} ranks")
    if math.prod(head.mesh.values()) <= head.rank:
        raise _damaged(path, number, f"rank is {head.rank}, not one of the mesh's")
    return head


def _pipeline(record: dict[str, Any], mesh: dict[str, int], path: Path, number: int) -> PipelineFacts:
    wrong = wrong_field(record, _PIPELINE, [name for name in _PIPELINE if name != "least_idle_share"])
    if wrong or record["mesh_dim"] not in mesh:
        raise _damaged(path, number, f"pipeline: {wrong or 'mesh_dim is not one of the mesh'}")
    given: dict[str, Any] = {name: record.get(name) for name in _PIPELINE}
    return PipelineFacts(**given)


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
    needed = [name for name in kind._fields if name not in _OPTIONAL]
    if wrong := wrong_field(record, kinds, needed):
        raise _damaged(path, number, wrong)
    given = {name: record.get(name) for name in kind._fields}
    given |= {name: default for name, default in kind._field_defaults.items() if given[name] is None}
    event: Event = kind(**given)
    if isinstance(event, Collective) and _num_ranks(event) != event.group_size:
        raise _damaged(path, number, f"ranks has {_num_ranks(event)} ranks, not group_size, {event.group_size}")
    if isinstance(event, Collective) and event.peer is not None and event.kind not in MESSAGES:
        raise _damaged(path, number, f"peer is {event.peer}, and a message is a {' or a '.join(MESSAGES)}")
    return event


def _num_ranks(event: Collective) -> int:
    counts = [count for count, _ in event.ranks]
    return len(counts) if counts and set(counts) == {1} else math.prod(counts)


def _require_order(events: Sequence[Event], path: Path, first_line: int) -> None:
    """A block is freed once, after it was allocated, and there is a step behind the one that sets things up."""
    alive: set[int] = set()
    for number, event in enumerate(events, start=first_line):
        if isinstance(event, Allocated):
            if event.block in alive:
                raise _damaged(path, number, f"block {event.block} is allocated already")
            alive.add(event.block)
        elif isinstance(event, Freed):
            if event.block not in alive:
                raise _damaged(path, number, f"block {event.block} is freed and not allocated")
            alive.remove(event.block)
    if not any(isinstance(event, StepBegun) and event.number > 1 for event in events):
        raise UserError(f"recording {path} has no step; record it anew")


def _damaged(path: Path, number: int, wrong: str) -> UserError:
    return UserError(f"recording {path}, line {number}: {wrong}; record the step anew")
