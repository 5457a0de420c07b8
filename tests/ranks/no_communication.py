"""The worker with communication replaced by local copies: what a benchmark that checks nothing would not notice.

Collectives, redistributions (DTensor's and the direct exchange) and what a step's plan communicates: each rank is left
with its own shard or part. What the checks themselves communicate is left alone. The environment variable REMOVED names
one kind of collective to remove; without it all are removed.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from distbench.cases import collective, step
from distbench.torch_private import planners
from distbench.worker.__main__ import main


def local_copy(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> None:
    """Of a collective with an output of its own: what this rank gives, over and over."""
    if input.numel():
        output.copy_(input.flatten().repeat(-(-output.numel() // input.numel()))[: output.numel()].view_as(output))


def gathered(tensor: torch.Tensor, gather_dim: int, group: Any, *_: Any, **__: Any) -> torch.Tensor:
    return torch.cat([tensor] * position(group)[1], gather_dim)


def scattered(tensor: torch.Tensor, op: str, scatter_dim: int, group: Any, *_: Any, **__: Any) -> torch.Tensor:
    rank, size = position(group)
    return tensor.chunk(size, scatter_dim)[rank].contiguous()


class Done:
    """Work that has ended."""

    def wait(self) -> None:
        pass


def nothing_sent(group: dist.ProcessGroup, tensors: list[torch.Tensor], *_: Any) -> Done:
    return Done()


def nothing_received(group: dist.ProcessGroup, tensors: list[torch.Tensor], *_: Any) -> Done:
    # What happens to lie there could be right.
    for tensor in tensors:
        tensor.zero_()
    return Done()


def kept(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor.clone()


def exchanged(tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> torch.Tensor:
    return scattered(gathered(tensor, gather_dim, (mesh, mesh_dim)), "", shard_dim, (mesh, mesh_dim))


def position(group: Any) -> tuple[int, int]:
    """(rank, size) of this rank in a group, a mesh or a (mesh, mesh dim)."""
    if isinstance(group, tuple):
        group = group[0].get_group(group[1])
    elif not isinstance(group, dist.ProcessGroup):
        group = group.get_group()
    return dist.get_rank(group), dist.get_world_size(group)


REPLACED: dict[str, list[tuple[Any, str, Any]]] = {
    "all_gather": [
        *((functional, name, gathered) for name in ("all_gather_tensor", "all_gather_single")),
        *((dist, name, local_copy) for name in ("all_gather_into_tensor", "all_gather_single")),
    ],
    "reduce_scatter": [
        *((functional, name, scattered) for name in ("reduce_scatter_tensor", "reduce_scatter_single")),
        *((dist, name, local_copy) for name in ("reduce_scatter_tensor", "reduce_scatter_single")),
    ],
    "all_reduce": [(functional, "all_reduce", kept)],
    "all_to_all": [(dist, "all_to_all_single", local_copy), (planners, "_shard_dim_alltoall", exchanged)],
    "messages": [(dist.ProcessGroup, "send", nothing_sent), (dist.ProcessGroup, "recv", nothing_received)],
    "permute": [(functional, "permute_tensor", kept)],
}

for kind in [os.environ["REMOVED"]] if "REMOVED" in os.environ else REPLACED:
    for module, name, replacement in REPLACED[kind]:
        if hasattr(module, name):
            setattr(module, name, replacement)
for name in collective.OPERATIONS:
    collective.OPERATIONS[name] = local_copy

# As long as a check, and nothing to it.
step.memory_counters = lambda *_: {}

if __name__ == "__main__":
    main(sys.argv[1])
