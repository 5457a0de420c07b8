"""DTensor's all-to-all on CPU as an all-to-all: torch runs it there as an all-gather, and keeps a chunk."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from distbench.worker.torch_internals.probe import replaced, require


@contextlib.contextmanager
def native_all_to_all(enabled: bool = True) -> Iterator[None]:
    """Let DTensor use the backend's own all-to-all on CPU meshes too (other meshes use it already), where `enabled`.

    torch's substitute is from the time when gloo had none. All ranks enter and leave it together: a rank that gathers
    waits for ever for ranks that exchange.
    """
    if not enabled:
        yield
        return
    require("native all-to-all on CPU")
    # placement_types imports the function by name, so this is where it is looked up.
    from torch.distributed.tensor import placement_types as module

    with replaced(module, "shard_dim_alltoall", _shard_dim_alltoall):
        yield


def _shard_dim_alltoall(input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> torch.Tensor:
    group_name = mesh.get_group(mesh_dim).group_name
    return torch.ops._dtensor.shard_dim_alltoall(input, gather_dim, shard_dim, group_name)
