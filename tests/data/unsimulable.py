"""Steps that cannot be simulated, each for a reason of its own; one that can."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


class Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.linear = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.fault == "item" and y.sum().item() > 0:
            return y
        if self.fault == "mask":
            y = y * y[y > 0].mean()
        if self.fault == "flex":
            y = flex_attention(*3 * [y[None, None]])[0, 0]
        return y


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8, 64), torch.zeros(8, 32)


@scenario(
    mesh={"dp_shard": 4},
    axes={"fault": ("none", "item", "mask", "pattern", "offload", "flex", "loss", "declared")},
    tags=("tests",),
)
def unsimulable(*, fault: str = "none") -> Scenario:
    """One fault a variant."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    if fault == "declared":
        raise ValueError("no such model")
    offload = CPUOffloadPolicy() if fault == "offload" else None
    return Scenario(
        build_model=partial(Model, fault),
        make_batch=batch,
        loss=F.mse_loss if fault != "loss" else lambda output, target: output[:, :3] @ target,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(
            checkpoint=("layers",) if fault == "pattern" else (),
            fsdp=FsdpPlan(offload=offload),
        ),
    )
