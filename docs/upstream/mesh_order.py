"""DTensor: S(0)R -> RR gives wrong values on a mesh whose ranks do not ascend, because torch sorts a group's ranks.

Thread: https://github.com/pytorch/pytorch/pull/193224 (DeviceMesh(preserve_rank_order=True) of torch 2.15)
Run: torchrun --nproc-per-node 4 mesh_order.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

dist.init_process_group("gloo")
mesh = DeviceMesh("cpu", [[3, 1], [2, 0]])
full = torch.arange(4.0)
local = full.chunk(2)[mesh.get_coordinate()[0]]
x = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
got = x.redistribute(mesh, [Replicate(), Replicate()]).to_local()
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}:", "right" if torch.equal(got, full) else f"wrong: {got.tolist()}", flush=True)
dist.destroy_process_group()
