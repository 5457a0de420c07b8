"""Pipeline parallel as a plan: which of torch's schedules, which stages are on which rank, and what is idle at best."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distbench.spec.declared import Declared


@dataclass(frozen=True)
class PipelineSchedule:
    """One of torch.distributed.pipelining's schedules.

    Args:
        torch_name: what `get_schedule_class` knows it by.
        stages_per_rank: how many it takes unless told otherwise.
        is_fixed: whether it takes no other number.
        is_v: whether a rank's second stage is as far from the end as its first one is from the start (a V over the
            ranks), so that rank 0 has the first and the last stage; else stages go round the ranks again and again.
        splits_backward: whether gradients of inputs and of weights are computed apart (zero bubble).
    """

    torch_name: str
    stages_per_rank: int = 1
    is_fixed: bool = True
    is_v: bool = False
    splits_backward: bool = False


SCHEDULES: Mapping[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule("GPipe"),
    "1f1b": PipelineSchedule("1F1B"),
    "looped_bfs": PipelineSchedule("LoopedBFS", 2, is_fixed=False),
    "interleaved_1f1b": PipelineSchedule("Interleaved1F1B", 2, is_fixed=False),
    "interleaved_zero_bubble": PipelineSchedule("InterleavedZeroBubble", 2, is_fixed=False, splits_backward=True),
    "zbv": PipelineSchedule("ZBVZeroBubble", 2, is_v=True, splits_backward=True),
    "dualpipev": PipelineSchedule("DualPipeV", 2, is_v=True, splits_backward=True),
}


@dataclass(frozen=True)
class PipelinePlan(Declared):
    """Pipeline parallel over one mesh dim: the model's layers in stages, by torch's own `PipelineStage` and schedules.

    A rank's batch goes through in `ParallelPlan.microbatches` parts. What else the plan has (TP, FSDP, activation
    checkpointing) is applied to each stage.

    Args:
        schedule: a name out of SCHEDULES.
        mesh_dim: the mesh dim whose ranks have different stages and the same part of the batch.
        stages_per_rank: stages on each rank; None for as many as the schedule takes.
        first_layers: index of the layer that each stage after the first begins with; () for even shares, of which the
            first ones are larger by a layer where they do not divide.
        split: `(model, stage, num_stages) -> module`, a stage of a copy of the model (on the meta device) that is its
            own to change; parameters keep their names. None splits the model's `ModuleList` or `ModuleDict` of layers:
            other layers hand on what they are given, what the model has before its layers is the first stage's, what
            it has after them the last one's.
        activation_shards: mesh dim to the tensor dim of which its ranks hold a part each of what stages pass on:
            {"tp": 1} for sequence parallel; every rank passes on all of it where this is empty.
    """

    schedule: str = "1f1b"
    mesh_dim: str = "pp"
    stages_per_rank: int | None = None
    first_layers: tuple[int, ...] = ()
    split: Callable[[Any, int, int], Any] | None = None
    activation_shards: Mapping[str, int] = field(default_factory=dict)

    @property
    def stages_of_a_rank(self) -> int:
        """`stages_per_rank`, or the schedule's own; 1 of a schedule that is unknown."""
        known = SCHEDULES.get(self.schedule, PipelineSchedule(""))
        return known.stages_per_rank if self.stages_per_rank is None else self.stages_per_rank

    def stages_on(self, position: int, size: int) -> tuple[int, ...]:
        """The stages of the rank at a position among `size`, in the model's order."""
        if SCHEDULES[self.schedule].is_v:
            return (position, 2 * size - 1 - position)
        return tuple(position + turn * size for turn in range(self.stages_of_a_rank))

    def least_bubble(self, size: int, microbatches: int) -> float | None:
        """Share of a step that each of `size` ranks has nothing to compute, where all stages take as long and passing
        on takes none: (p-1)/(v m + p-1) with v stages a rank; None for zero-bubble schedules, whose share depends on
        how long the parts of backward take.

        Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", 2.2, as a share
        of the whole step and not of its ideal length.
        """
        if SCHEDULES[self.schedule].splits_backward:
            return None
        return (size - 1) / (self.stages_of_a_rank * microbatches + size - 1)


def layers_of_stages(num_layers: int, num_stages: int, first_layers: tuple[int, ...] = ()) -> list[range]:
    """The layers of each stage, by index."""
    if first_layers:
        begins = [0, *first_layers, num_layers]
    else:
        share, more = divmod(num_layers, num_stages)
        begins = [stage * share + min(stage, more) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(begins)]
