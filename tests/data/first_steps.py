"""Steps of which the second differs from the first, or an optimizer that cannot step twice after one backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


class Dropping(torch.optim.Optimizer):
    """Drops each gradient that it has applied."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None


class SetUpOnce(nn.Module):
    """Scales its input by the deviation of the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.is_set_up = nn.Parameter(torch.ones(8)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set_up:
            with torch.no_grad():
                self.scale.copy_(x.std(dim=0))
            self.is_set_up = True
        return x * self.scale


@scenario(mesh={"dp_shard": 2}, axes={"differs": ("optimizer", "module")})
def first_steps(*, differs: str = "optimizer") -> Scenario:
    """One of them."""
    in_module = differs == "module"
    return Scenario(
        build_model=lambda: nn.Sequential(nn.Linear(8, 8), SetUpOnce() if in_module else nn.Identity()),
        make_batch=lambda: (torch.randn(4, 8), torch.randn(4, 8)),
        loss=F.mse_loss,
        optimizer=(lambda parameters: torch.optim.SGD(parameters, lr=0.1)) if in_module else Dropping,
        plan=ParallelPlan(fsdp=FsdpPlan()),
    )
