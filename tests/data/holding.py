"""Variants of one small model that hold known bytes more than the first, and compute the same."""

from typing import Any

import torch
from torch import nn

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario

EXTRA = {"plain": 0, "holds": 1000, "again": 0, "holds_more": 3000}


class Holding(nn.Module):
    """Two layers; keeps float32 elements of its own from its first step on."""

    def __init__(self, num_extra: int) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.num_extra = num_extra
        self.extra: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_extra and self.extra is None:
            self.extra = torch.ones(self.num_extra)
        return self.down(torch.relu(self.up(x)))


@scenario(mesh={"dp_shard": 2}, axes={"variant": ("plain", "holds", "again", "holds_more")})
def holding(*, variant: str = "plain") -> Scenario:
    """Bytes that a module keeps."""
    return Scenario(
        build_model=lambda: Holding(EXTRA[variant]),
        make_batch=lambda: (torch.ones(8, 32), torch.zeros(8, 32)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        plan=ParallelPlan(fsdp=FsdpPlan(wrap=("up", "down"))),
    )
