"""A recording of one rank's step, its file, and the child that makes it.

A recording has the rank's work on each stream, and its allocations, in program order. docs/hardware-files.md
describes each field. The file is JSON line by line: the first line is its `Head`, each further line an event.
Recordings of several ranks are in sequence.

History of recording_version; a reader of version N also reads all older versions:
    1: first version.
    2: more ranks than rank 0, each with its own head and `rank`; `case_id` and `params`; a collective's `op`.
    3: pipelines: `pipeline` of the head; messages, which are collectives with a `peer` and a `batch`.
    4: copies between host and device, and operators on the host.
    5: several communicators of the same ranks.
    6: `recorded_layers` of the head.
"""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from distbench.processes import ask_child
from distbench.spec import Job
from distbench.spec.assumptions import Assumption
from distbench.spec.errors import UserError
from distbench.spec.file_io import no_garbage_collection, opened, parse_json, shown, write_whole
from distbench.spec.json_decoder import Amount, Count, Name, Size, among, decode

VERSION = 6
TIMEOUT_S = 1800.0
MAX_LINES, MAX_LINE_BYTES, MAX_RANKS = 5_000_000, 1 << 20, 64
MAX_WORLD_SIZE = 65_536  # as for --mesh
# Kinds of operators, which determine their time.
MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY = "matmul", "attention", "attention_backward", "memory"
COPIES = TO_DEVICE, TO_HOST = "to_device", "to_host"  # between the host's memory and the device's
ON_HOST = "on_host"  # The host runs this operator, and issues nothing else in the meantime.
# Content of a block of memory.
HELD = ("parameters", "gradients", "optimizer", "buffers", "batch", "cache", "fsdp", "activations", "backward", "other")
SCHEDULE = "schedule"  # the phase of a pipeline in which forward and backward alternate
Pair = Annotated[Sequence[Count], Meta(min_length=2, max_length=2, description="a pair of whole numbers")]
Touched = Sequence[Pair]
GroupSize = Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE, description=f"1 to {MAX_WORLD_SIZE}")]


@dataclass(frozen=True)
class PipelineFacts:
    """Properties of a step's pipeline.

    Args:
        mesh_dim: mesh dim along which ranks have different stages.
        schedule: name of the schedule in `spec.pipeline_plan`.
        num_stages: number of stages over all ranks.
        microbatches: number of parts of a rank's batch.
        least_idle_share: idle share of a step with stages of equal time and messages of no time; None if unknown.
    """

    mesh_dim: Name
    schedule: Name
    num_stages: Size
    microbatches: Size
    least_idle_share: Amount | None = None


@dataclass(frozen=True)
class Head:
    """Description of a recording.

    Args:
        variant: the axes of the scenario's variant, as in its label; empty without axes.
        mesh: mesh dim name to ranks, outermost first; ranks of the last mesh dim are neighbours.
        torch: torch's version.
        batch_size, num_tokens: samples and tokens of the global batch; tokens are None if the scenario sets none.
        microbatches: number of parts of a rank's batch.
        compiled: names of the modules that the plan compiles, and LOSS; their operators are recorded uncompiled.
        async_tp: whether the plan compiles with async TP; TP's collectives are recorded whole.
        rank: the recorded rank.
        case_id: id of the same step's case in a measured run, whose parameters are `params`.
        pipeline: properties of a pipeline, of which all ranks along its mesh dim are recorded; None without a pipeline.
        assumed: a phrase for each value that `--assume` gave, and for each part that the scenario omits.
        recorded_layers: number of recorded layers, whose events all other layers repeat; 0 if every layer is recorded.
    """

    scenario: Name
    variant: str
    mesh: dict[str, Size]
    torch: Name
    num_parameters: Size
    batch_size: Size
    num_tokens: Size | None
    microbatches: Size
    phases: tuple[str, ...]
    compiled: tuple[str, ...] = ()
    async_tp: bool = False
    rank: Count = 0
    case_id: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    pipeline: PipelineFacts | None = None
    assumed: tuple[str, ...] = ()
    recorded_layers: Count = 0

    @property
    def label(self) -> str:
        """The scenario's name, and the variant if the scenario has axes."""
        return f"{self.scenario}/{self.variant}" if self.variant else self.scenario


class StepBegun(NamedTuple):
    """Start of a step: step 1 sets up streams, caches and the optimizer, step 2 is recorded with its operators."""

    number: Count


class Operator(NamedTuple):
    """An operator on a stream.

    Args:
        name: torch's dispatched operator, such as "aten.mm.default".
        flops: floating point operations; causal attention counts half.
        num_bytes: bytes read and written; of a copy between host and device, the copied bytes.
        reads, writes: (block, bytes) of each tensor read or written.
        phase: "forward", "backward" or "optimizer".
        owner: the module's name; empty for the root or an unknown module.
        attention: [queries, keys, 1 if causal else 0]; empty for other operators.
    """

    stream: Count
    name: Name
    kind: Annotated[str, among((MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY, *COPIES, ON_HOST))]
    flops: Count
    dtype: Name
    num_bytes: Count
    reads: Touched
    writes: Touched
    phase: Name
    owner: str
    attention: Sequence[Count] = ()


class Collective(NamedTuple):
    """A collective on a stream, or a message of a pipeline's stage, of kind "send" or "recv"; fields as in
    `observe.module_attribution.Communication`.

    Args:
        ranks: ranks of the group relative to the first, as (count, stride) of nested loops, outermost first: [[4, 8],
            [8, 1]] is 0 to 31; other groups list their ranks as [[1, rank], ...].
        op: torch's name, such as "c10d._allgather_base_"; empty in recordings of version 1.
        peer: for a message, global rank of the other end; None for a collective. The nth message from a rank to a peer
            is the nth message that the peer receives from this rank.
        batch: for a message, number of its batch; a rank's messages of one batch are consecutive, and start and end
            together.
        communicator: number of the collective's communicator among those of the same ranks, in the order of first use.
    """

    stream: Count
    phase: Name
    source: Name
    kind: Name
    mesh_dim: Name
    group_size: GroupSize
    dtype: Name
    payload_bytes: Count
    owner: str
    owner_known: bool
    redistribution: str
    explicit: bool | None
    ranks: Touched
    op: str = ""
    peer: Count | None = None
    batch: Count = 0
    communicator: Count = 0


class EventRecorded(NamedTuple):
    """An event that happens when all earlier work on the stream has ended."""

    stream: Count
    event: Count


class EventWaited(NamedTuple):
    """Wait of a stream for an event before all later work."""

    stream: Count
    event: Count


class HostWaited(NamedTuple):
    """Wait of the host, which issues no work until the stream is empty."""

    stream: Count


class Allocated(NamedTuple):
    """Allocation of a block of memory on a stream; `owner` as in `Operator`."""

    block: Count
    num_bytes: Count
    stream: Count
    held: Annotated[str, among(HELD)]
    owner: str


class Freed(NamedTuple):
    """Release of a block from `Allocated`, which has its bytes."""

    block: Count


Event = StepBegun | Operator | Collective | EventRecorded | EventWaited | HostWaited | Allocated | Freed


def ranks_of_pipeline(mesh: Mapping[str, int], mesh_dim: str, rank: int) -> list[int]:
    """Return the ranks along a mesh dim that include `rank`; the mesh's last mesh dim has neighbours.

    >>> ranks_of_pipeline({"pp": 2, "tp": 4}, "pp", 5)
    [1, 5]
    """
    names = list(mesh)
    stride = math.prod(mesh[name] for name in names[names.index(mesh_dim) + 1 :])
    first = rank - rank // stride % mesh[mesh_dim] * stride
    return [first + place * stride for place in range(mesh[mesh_dim])]


def ranks_of(loops: Touched) -> list[int]:
    """Return the ranks of `Collective.ranks`."""
    if loops and all(count == 1 for count, _ in loops):
        return [rank for _, rank in loops]
    ranks = [0]
    for count, stride in loops:
        ranks = [base + at * stride for base in ranks for at in range(count)]
    return ranks


@dataclass(frozen=True)
class Recording:
    """One rank's step."""

    head: Head
    events: Sequence[Event] = field(default_factory=list)

    @cached_property
    def step(self) -> Sequence[Event]:
        """The events of the last step, which includes operators."""
        begun = [index for index, event in enumerate(self.events) if isinstance(event, StepBegun)]
        return self.events[begun[-1] :] if begun else self.events

    @property
    def collectives(self) -> list[Collective]:
        """Collectives of the last step, in the order of issue."""
        return [event for event in self.step if isinstance(event, Collective)]

    @property
    def offloads(self) -> bool:
        """Whether the host runs operators, as the optimizer of offloaded parameters."""
        return any(isinstance(event, Operator) and event.kind == ON_HOST for event in self.step)

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole mesh."""
        return math.prod(self.head.mesh.values())


# Event in a file to its type.
TYPES: dict[str, type[Event]] = {
    "step": StepBegun,
    "operator": Operator,
    "collective": Collective,
    "record": EventRecorded,
    "wait": EventWaited,
    "host_wait": HostWaited,
    "allocate": Allocated,
    "free": Freed,
}
NAMES = {kind: name for name, kind in TYPES.items()}


class HeadLine(Struct):
    """Fields of a rank's first line in addition to its `Head`."""

    num_events: Count | None = None


def save_recordings(recordings: Sequence[Recording], path: Path) -> None:
    """Write the recordings of one step's ranks as JSON lines."""
    lines = []
    for recording in recordings:
        counts = {"recording_version": VERSION, "num_events": len(recording.events)}
        lines.append(json.dumps({**counts, **asdict(recording.head)}).encode())
        lines += [msgspec.json.encode({"is": NAMES[type(event)], **event._asdict()}) for event in recording.events]
    write_whole(path, b"\n".join([*lines, b""]))


def load_recordings(path: Path) -> list[Recording]:
    """Read a file of `save_recordings`: one recording per rank, of one step.

    Raises:
        UserError: the file cannot be read, is not a recording, or has a damaged line.
    """
    ranks: list[tuple[int, Head, int | None, list[Event]]] = []
    with opened(path, "recording") as file, no_garbage_collection():
        for number, record in _lines(file, path):
            try:
                if ranks and "recording_version" not in record:
                    ranks[-1][-1].append(_event(record))
                    continue
                ranks.append((number, _head(record, path), decode(record, HeadLine).num_events, []))
            except ValueError as error:
                raise _damaged(path, number, str(error)) from error
            if len(ranks) > MAX_RANKS:
                raise _damaged(path, number, f"more than {MAX_RANKS} ranks")
    if not ranks:
        raise UserError(f"{path} {_NO_RECORDING}")
    first = ranks[0][1]
    for number, head, count, events in ranks:
        if count is not None and len(events) != count:
            raise _damaged(path, number, f"the file ends after {len(events):,} of {count:,} events")
        if (head.scenario, head.variant, head.mesh) != (first.scenario, first.variant, first.mesh):
            raise _damaged(path, number, f"{head.label} is another step than {first.label}, but a file has one step")
        _require_order(events, path, number + 1)
    return [Recording(head, events) for _, head, _, events in ranks]


_NO_RECORDING = "is not a recording; write a recording with distbench simulate SCENARIO --save FILE"


def _head(record: dict[str, Any], path: Path) -> Head:
    version = record.get("recording_version")
    if type(version) is int and version > VERSION:
        raise UserError(f"recording {path} is newer than this distbench; update distbench")
    if type(version) is not int or version < 1:
        raise UserError(f"{path} {_NO_RECORDING}")
    head = decode(record, Head)
    if head.pipeline is not None and head.pipeline.mesh_dim not in head.mesh:
        raise ValueError("pipeline.mesh_dim is not a mesh dim of the mesh")
    if (world_size := math.prod(head.mesh.values())) > MAX_WORLD_SIZE:
        raise ValueError(f"its mesh has more than {MAX_WORLD_SIZE:,} ranks")
    if head.rank >= world_size:
        raise ValueError(f"rank {head.rank} is not in the mesh")
    return head


def _lines(file: Any, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if number > MAX_LINES or len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"recording {path}, line {number}: the line is longer than any recording's; record the step again"
            )
        try:
            record = _parsed(line.rstrip(b"\n"))
        except ValueError as error:
            raise _damaged(path, number, str(error).removeprefix("line 1, ")) from error
        if not isinstance(record, dict):
            raise _damaged(path, number, f"it is {shown(record)}, not an object")
        yield number, record


def _parsed(line: bytes) -> Any:
    if b'"recording_version"' in line:
        return parse_json(line)  # checks also the parameters of the case, which have no types
    try:
        return msgspec.json.decode(line)  # several times as fast
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return parse_json(line)


def _event(record: dict[str, Any]) -> Event:
    kind = TYPES.get(name) if isinstance(name := record.get("is"), str) else None
    if kind is None:
        raise ValueError("it is not an event of a recording")
    values = [record.get(name, kind._field_defaults.get(name)) for name in kind._fields]
    event = decode(values, kind)
    if isinstance(event, Collective):
        counts = [count for count, _ in event.ranks]
        num_ranks = len(counts) if {*counts} == {1} else math.prod(counts)
        if num_ranks != event.group_size:
            raise ValueError(f"ranks lists {num_ranks} ranks, but group_size is {event.group_size}")
        if event.peer is not None and event.kind not in ("send", "recv"):
            raise ValueError(f"peer is {event.peer}, but a message is a send or a recv")
    return event


def _require_order(events: Sequence[Event], path: Path, first_line: int) -> None:
    """Check that blocks are freed once, after their allocation, and that a second step follows the first."""
    alive: set[int] = set()
    for number, event in enumerate(events, start=first_line):
        if isinstance(event, Allocated):
            if event.block in alive:
                raise _damaged(path, number, f"block {event.block} is allocated already")
            alive.add(event.block)
        elif isinstance(event, Freed):
            if event.block not in alive:
                raise _damaged(path, number, f"block {event.block} is freed, but not allocated")
            alive.remove(event.block)
    if not any(isinstance(event, StepBegun) and event.number > 1 for event in events):
        raise UserError(f"recording {path} has no step; record the step again")


def _damaged(path: Path, number: int, wrong: str) -> UserError:
    return UserError(f"recording {path}, line {number}: {wrong}; record the step again")


class RecordedSteps(NamedTuple):
    """The recordings of the ranks of each variant of a job, or by label the reason why a variant has no recording."""

    recordings: list[Recording]
    left_out: dict[str, str]


def record_steps(
    jobs: Sequence[Job],
    timeout_s: float = TIMEOUT_S,
    ranks: Sequence[int] | None = (0,),
    assume: Mapping[str, Assumption] | None = None,
) -> list[RecordedSteps]:
    """Record a step of every variant of each job on the given ranks; all jobs run in one process, one after another.

    Args:
        ranks: recorded ranks; None for rank 0 and ranks whose step may differ, for example in shards.
        assume: see `assumptions_of`.

    Raises:
        UserError: no variant of a job can be simulated (it has no step, its plan cannot work, or its model needs
            values), or the process failed.
    """
    names = ", ".join(job.scenario for job in jobs)
    with tempfile.TemporaryDirectory() as folder:
        answer = ask_child(
            "recordings",
            (folder, json.dumps(ranks), json.dumps(assume or {})),
            given=[job.to_record() for job in jobs],
            timeout_s=timeout_s,
            failure=f"no step of {names} was recorded ({{why}}); check with distbench check",
        )
        steps = []
        for of_job in answer:
            left_out = {variant["label"]: variant["left_out"] for variant in of_job if "left_out" in variant}
            files = [Path(variant["file"]) for variant in of_job if "file" in variant]
            if not files:
                raise UserError("; ".join(_reasons(left_out)))
            steps.append(RecordedSteps([ranks for file in files for ranks in load_recordings(file)], left_out))
        return steps


def _reasons(left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield each reason once, with its first variant and the number of other variants."""
    for reason, count in Counter(left_out.values()).items():
        first = next(label for label in left_out if left_out[label] == reason)
        yield f"{first}{f' (and {count - 1} more)' if count > 1 else ''}: {reason}"
