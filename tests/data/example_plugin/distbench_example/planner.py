"""A planner: the placements that a tensor passes through."""

from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement


def gather_first(source: DTensor, target: tuple[Placement, ...]) -> list[tuple[Placement, ...]]:
    """Make the tensor whole on every rank, then let each rank keep its shard."""
    return [(Replicate(),) * source.device_mesh.ndim, target]
