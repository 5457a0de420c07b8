"""A recording of one rank's step: what it issued to which stream, and what it allocated, in the order of the program.

docs/simulation.md says what each field means; `recording_file.py` writes and reads it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Of an operator: what its time depends on.
MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY = "matmul", "attention", "attention_backward", "memory"
KINDS_OF_OPERATORS = (MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY)
# Of a block of memory: what lies in it.
HELD = ("parameters", "gradients", "optimizer", "buffers", "batch", "cache", "fsdp", "activations", "backward", "other")
# Of a collective that is a message between two stages.
MESSAGES = ("send", "recv")
# The phase of a pipeline in which forward and backward take turns.
SCHEDULE = "schedule"
Touched = Sequence[Sequence[int]]


@dataclass(frozen=True)
class PipelineFacts:
    """Which pipeline a step is.

    Args:
        mesh_dim: along which ranks have different stages.
        schedule: as `spec.pipeline_plan` calls it.
        num_stages: over all ranks.
        microbatches: that a rank's batch goes through in.
        least_idle_share: of a step, where stages take as long and messages no time; None where that is not known.
    """

    mesh_dim: str
    schedule: str
    num_stages: int
    microbatches: int
    least_idle_share: float | None = None


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
        pipeline: of the stages on its ranks, where it is one; of its mesh dim all ranks are recorded.
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
    pipeline: "PipelineFacts | None" = None

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
    """A collective on a stream, or a message of a pipeline's stage, of kind "send" or "recv"; fields as
    `worker.tracing.communication.Communication` has them.

    Args:
        ranks: of its group, counted from the group's first, as (count, stride) of nested loops, outermost first: [[4,
            8], [8, 1]] is 0 to 31; a group that is not such loops lists its ranks as [[1, rank], ...].
        op: as torch calls it, such as "c10d._allgather_base_"; empty in recordings of version 1.
        peer: of a message, global rank of the other end; None of a collective. The nth one that a rank sends to another
            is the nth one that the other receives from it.
        batch: of a message, those of a rank with the same number begin and end together; they follow one another.
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
    peer: int | None = None
    batch: int = 0


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


def ranks_of_pipeline(mesh: Mapping[str, int], mesh_dim: str, rank: int) -> list[int]:
    """The ranks along a mesh dim that one of them is among; the mesh's last dim has neighbours.

    >>> ranks_of_pipeline({"pp": 2, "tp": 4}, "pp", 5)
    [1, 5]
    """
    names = list(mesh)
    stride = math.prod(mesh[name] for name in names[names.index(mesh_dim) + 1 :])
    first = rank - rank // stride % mesh[mesh_dim] * stride
    return [first + place * stride for place in range(mesh[mesh_dim])]


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
