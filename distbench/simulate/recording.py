"""A recording of one rank's step: what it issued to which stream, and what it allocated, in the order of the program.

docs/simulation.md says what each field means; `recording_file.py` writes and reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Of an operator: what its time depends on.
MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY = "matmul", "attention", "attention_backward", "memory"
KINDS_OF_OPERATORS = (MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY)
# Of a block of memory: what lies in it.
HELD = ("parameters", "gradients", "optimizer", "buffers", "batch", "cache", "fsdp", "activations", "backward", "other")
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
        rank: whose step it is.
        case_id: of the case that a measured run of the same step has; `params` are that case's.
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
    rank: int = 0
    case_id: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The scenario's name and, where there is one, the variant."""
        return f"{self.scenario}/{self.variant}" if self.variant else self.scenario


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
        attention: of attention, [queries, keys, whether it is causal (0 or 1)]; empty for others.
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
    attention: Sequence[int] = ()


class Collective(NamedTuple):
    """A collective on a stream; fields as `worker.tracing.communication.Communication` has them.

    Args:
        ranks: of its group, counted from the group's first, as (count, stride) of nested loops, outermost first: [[4,
            8], [8, 1]] is 0 to 31; a group that is not such loops lists its ranks as [[1, rank], ...].
        op: as torch calls it, such as "c10d._allgather_base_"; empty in recordings of version 1.
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
    op: str = ""


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
