"""DTensor: S(0)S(0) -> RR of an uneven tensor gives wrong values if the two mesh dims were flattened into one.

Thread: https://github.com/pytorch/pytorch/pull/194457
Run: torchrun --nproc-per-node 4 flattened_uneven.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
mesh["a", "b"]._flatten("ab")
full = torch.arange(5.0)
row, column = mesh.get_coordinate()
# Nested chunks have 2, 1, 1, 1 elements, and chunks over the flattened mesh dim 2, 2, 1, 0.
local = full.chunk(2)[row].chunk(2)[column]
x = DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
got = x.redistribute(mesh, [Replicate(), Replicate()]).to_local()
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}:", "right" if torch.equal(got, full) else f"wrong: {got.tolist()}", flush=True)
dist.destroy_process_group()
