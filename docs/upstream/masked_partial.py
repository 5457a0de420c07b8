"""DTensor: the planner min_cost has no path for the output of an embedding whose rows are sharded.

Thread: none found.
Run: torchrun --nproc-per-node 2 masked_partial.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
table, ids = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 3, 1])
out = F.embedding(distribute_tensor(ids, mesh, [Replicate()]), distribute_tensor(table, mesh, [Shard(0)]))
result = "right"
try:
    with use_min_cost_redistribution_plan():
        got = out.redistribute(mesh, [Replicate()]).to_local()
    if not torch.equal(got, table[ids]):
        result = f"wrong: {got.tolist()}"
except Exception as error:
    result = f"raises {type(error).__name__}: {error}"
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}: {result}", flush=True)
dist.destroy_process_group()
