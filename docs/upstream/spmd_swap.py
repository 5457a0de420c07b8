"""spmd_types: spmd_redistribute that swaps the axes of two tensor dims gives wrong values, without an error.

It moves dp to tensor dim 1, which tp shards, and then moves tp, which is no longer the last axis of tensor dim 1.
Needs: pip install spmd_types. Thread: none found.
Run: torchrun --nproc-per-node 4 spmd_swap.py
"""

import torch
import torch.distributed as dist
from spmd_types import TensorSharding, spmd_redistribute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
full = torch.arange(16.0).reshape(4, 4)
x = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
got = spmd_redistribute(x, TensorSharding("dp", "tp"), TensorSharding("tp", "dp")).to_local()
row, column = mesh.get_coordinate()
expected = full.chunk(2)[column].chunk(2, dim=1)[row]
if dist.get_rank() == 0:
    print(
        f"torch {torch.__version__}:", "right" if torch.equal(got, expected) else f"wrong: {got.tolist()}", flush=True
    )
dist.destroy_process_group()
