"""Pipelining: `ScheduleInterleavedZeroBubble(defer_pp_recv=True)` gives wrong outputs.

Run: torchrun --nproc-per-node 2 deferred_receives.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [nn.Linear(8, 8) for _ in range(4)]
x, target = torch.randn(16, 8), torch.randn(16, 8)
expected = nn.Sequential(*layers)(x)
differences = []
for deferred in (False, True):
    stages = [PipelineStage(layers[index], index, 4, torch.device("cpu")) for index in (rank, rank + 2)]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss, defer_pp_recv=deferred)
    output = schedule.step(x) if rank == 0 else schedule.step(target=target)
    if rank == 1:
        differences.append((output - expected).abs().max().item())
if rank == 1:
    outcome = "right" if max(differences) < 1e-6 else "wrong"
    plain, with_deferred = differences
    text = f"largest difference from the model on one rank {plain:.2g}, with deferred receives {with_deferred:.2g}"
    print(f"torch {torch.__version__}: {outcome}: {text}", flush=True)
dist.barrier()
dist.destroy_process_group()
