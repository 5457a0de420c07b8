"""DTensor: the first call of a foreach operator takes time with the square of its tensors, because torch reads the
specs of all tensors for each tensor (`_propagate_use_strided_shard_flag`). The first step of AdamW has 13 such calls.

Run: torchrun --nproc-per-node 1 foreach_steps.py
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

FEW, MANY = 50, 400
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))
steps: dict[int, list[float]] = {}
for count in (FEW, MANY):
    parameters = [torch.nn.Parameter(DTensor.from_local(torch.ones(1), mesh, [Shard(0)])) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    steps[count] = []
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        began = time.perf_counter()
        optimizer.step()
        steps[count].append(time.perf_counter() - began)
text = "; ".join(f"{count} parameters: {first:.2f} s, then {second:.2f} s" for count, (first, second) in steps.items())
outcome = "slow" if steps[MANY][0] > 10 * steps[MANY][1] else "right"
print(f"torch {torch.__version__}: {outcome}: {text}", flush=True)
dist.destroy_process_group()
