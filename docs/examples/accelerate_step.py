"""A training loop of accelerate as a step. `distbench run docs/examples/accelerate_step.py`"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


def build(dim=64):
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, 8))


def samples():
    torch.manual_seed(0)
    return torch.randn(16, 64), torch.randint(8, (16,))


def make(model):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    return {"optimizer": accelerator.prepare(torch.optim.AdamW(model.parameters())), "accelerator": accelerator}


def step(model, batch, parts):
    accelerator, optimizer = parts["accelerator"], parts["optimizer"]
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss


@scenario(mesh={"dp_shard": 2})
def accelerate_step() -> Scenario:
    """Gradient accumulation and clipping of accelerate; a sample is two calls."""
    return Scenario(
        build_model=build,
        make_batch=samples,
        step=step,  # glue
        make_optimizers=make,  # glue
        period=2,  # glue
        plan=ParallelPlan(fsdp=FsdpPlan()),  # glue
    )
