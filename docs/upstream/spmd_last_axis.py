"""spmd_types: spmd_redistribute gives wrong values, without an error, if an axis is not the last of its tensor dim.

It shards tensor dim 0 over dp, which tp shards, and then moves tp, which is no longer the last axis of tensor dim 0.
Needs: pip install spmd_types. Thread: none found.
Run: torchrun --nproc-per-node 4 spmd_last_axis.py
"""

import torch
import torch.distributed as dist
from spmd_types import TensorSharding, spmd_redistribute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
full = torch.arange(16.0).reshape(4, 4)
x = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
got = spmd_redistribute(x, TensorSharding("tp", None), TensorSharding("dp", "tp")).to_local()
row, column = mesh.get_coordinate()
expected = full.chunk(2)[row].chunk(2, dim=1)[column]
if dist.get_rank() == 0:
    print(
        f"torch {torch.__version__}:", "right" if torch.equal(got, expected) else f"wrong: {got.tolist()}", flush=True
    )
dist.destroy_process_group()
