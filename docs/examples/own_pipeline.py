"""Blocks in stages, under torch's own pipeline schedules. `distbench run docs/examples/own_pipeline.py`"""

import torch
import torch.nn.functional as F
from torch import nn

from distbench.spec import ParallelPlan, PipelinePlan, Scenario, scenario


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, dim=64, num_layers=8, num_classes=8):
        super().__init__()
        self.inputs = nn.Linear(16, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch():
    torch.manual_seed(0)
    return torch.randn(32, 16), torch.randint(8, (32,))


@scenario(mesh={"pp": 4}, axes={"schedule": ("1f1b", "interleaved_1f1b")})
def own_pipeline(*, schedule: str = "1f1b") -> Scenario:
    """A model's layers in stages; its forward runs as it is."""
    return Scenario(
        build_model=Stack,
        make_batch=batch,
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(pipeline=PipelinePlan(schedule), microbatches=8),  # glue
    )
