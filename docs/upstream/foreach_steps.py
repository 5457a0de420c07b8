"""DTensor: the first call of a foreach operator takes time with the square of its tensors, because it reads the specs of
all tensors for each tensor (`_propagate_use_strided_shard_flag`). An AdamW's first step has 13 such calls.

Run: python foreach_steps.py (without ranks, on a fake process group)
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
mesh = init_device_mesh("cpu", (8,))
print(f"torch {torch.__version__}: seconds of AdamW's steps 1 to 4")
for count in (100, 200, 400, 800):
    parameters = [torch.nn.Parameter(DTensor.from_local(torch.ones(1), mesh, [Shard(0)])) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    seconds = []
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    print(f"{count} parameters: {', '.join(f'{step:.2f}' for step in seconds)}")
dist.destroy_process_group()
