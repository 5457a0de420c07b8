"""Replacements of FSDP2's collectives: custom all-gather and reduce-scatter objects, and an all-reduce hook."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class FreshBuffers:
    """Allocates a new buffer for each call, like FSDP2's default."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An empty buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class BroadcastGather(FreshBuffers):
    """Gathers by one broadcast per rank; each rank receives as many bytes as by an all-gather."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Fill the output with every rank's input, in the order of ranks."""
        own = dist.get_rank(group)
        for rank, part in enumerate(output_tensor.chunk(dist.get_world_size(group))):
            if rank == own:
                part.copy_(input_tensor)
            dist.broadcast(part, dist.get_global_rank(group, rank), group=group)


class AllToAllScatter(FreshBuffers):
    """Reduce-scatters by an all-to-all and a local sum in the order of ranks."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output with the sum, or the average, of all ranks' parts for this rank."""
        num_ranks = dist.get_world_size(group)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(num_ranks, -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(num_ranks)


def averaged_over_replicas(_: str, mesh: Any) -> Callable[[torch.Tensor], None]:
    """A hook for an FSDP2 unit that averages scattered gradients over the replicas, if the mesh has replicas."""
    if "dp_replicate" not in mesh.mesh_dim_names:
        return lambda gradients: None
    replicas = mesh["dp_replicate"]
    group, num_replicas = replicas.get_group(), replicas.size()

    def average(gradients: torch.Tensor) -> None:
        dist.all_reduce(gradients, group=group)
        gradients.div_(num_replicas)

    return average
