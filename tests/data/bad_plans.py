"""Plans that cannot work, each for a reason of its own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from distbench.spec import ParallelPlan, Scenario, scenario


class Model(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(8, hidden)
        self.down_proj = nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x))


def declared(hidden: int, up: str) -> Scenario:
    return Scenario(
        build_model=lambda: Model(hidden),
        make_batch=lambda: (torch.ones(2, 8), torch.ones(2, 8)),
        loss=F.mse_loss,
        plan=ParallelPlan(tp={up: ColwiseParallel(), "down_proj": RowwiseParallel()}),
    )


@scenario(mesh={"tp": 2})
def unmatched(*, hidden: int = 16) -> Scenario:
    """A pattern with a typing error."""
    return declared(hidden, "up_prj")


@scenario(mesh={"tp": 2})
def undividable(*, hidden: int = 15) -> Scenario:
    """15 rows cannot be halved."""
    return declared(hidden, "up_proj")
