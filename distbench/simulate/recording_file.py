"""The file of a recording: JSON line by line, the first its `Head`, each further one an event.

A reader of version N reads all older versions.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from distbench.simulate.recording import (
    HELD,
    KINDS_OF_OPERATORS,
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    Head,
    HostWaited,
    Operator,
    Recording,
    StepBegun,
)
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
MAX_LINES, MAX_LINE_BYTES = 5_000_000, 1 << 20
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
# Of any event, and what is read instead: recordings from before it was there have none.
_MAY_BE_LEFT_OUT = {"explicit": None, "attention": ()}
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


def save_recording(recording: Recording, path: Path) -> None:
    """Write it as JSON lines."""
    head = {"recording_version": VERSION, **asdict(recording.head)}
    lines = (json.dumps({"is": NAMES[type(event)], **event._asdict()}) for event in recording.events)
    write_whole(path, "\n".join([json.dumps(head), *lines]) + "\n")


def load_recording(path: Path) -> Recording:
    """Read what `save_recording` wrote.

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
    if wrong := wrong_field(record, kinds, [name for name in kind._fields if name not in _MAY_BE_LEFT_OUT]):
        raise _damaged(path, number, wrong)
    event: Event = kind(**{name: record.get(name, _MAY_BE_LEFT_OUT.get(name)) for name in kind._fields})
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
