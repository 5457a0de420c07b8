import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


@scenario(mesh={"dp_shard": 2, "tp": 2}, axes={"hidden": (1024, 4096)})
def mine(*, dim: int = 256, hidden: int = 1024) -> Scenario:
    """My feed-forward: tensor parallel inside, FSDP2 outside."""
    return Scenario(
        build_model=lambda: nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)),
        make_batch=lambda: (torch.ones(8, 64, dim), torch.zeros(8, 64, dim)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        plan=ParallelPlan(tp={"0": ColwiseParallel(), "2": RowwiseParallel()}, fsdp=FsdpPlan()),
    )
