"""Two layers as DTensors on a mesh of three dims: replicated, sharded by FSDP and by tensor parallel."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, ShardParam, scenario

SIZE = 64


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)
        self.last = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(self.up(x).relu()))


def summed_at_once(model: nn.Module, mesh: object) -> None:
    """DTensor would carry the partial sums on."""

    def whole(_: nn.Module, given: object, output: DTensor) -> DTensor:
        return output.redistribute(placements=[Replicate() if one == Partial() else one for one in output.placements])

    model.down.register_forward_hook(whole)


@scenario(mesh={"dp_replicate": 2, "dp_shard": 2, "tp": 2}, tags=("test",))
def hybrid_spmd() -> Scenario:
    """A column-wise and a row-wise layer, and one that FSDP alone shards."""
    fsdp = FsdpPlan(wrap=("up", "down", "last"), replicate_dims=("dp_replicate",), spmd_mesh=True)
    return Scenario(
        build_model=Layers,
        make_batch=lambda: torch.randn(2, 8, SIZE, generator=torch.Generator().manual_seed(0)).unbind(),
        loss=F.mse_loss,
        parallelize=summed_at_once,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(shard_params={"up.weight": ShardParam(0), "down.weight": ShardParam(1)}, fsdp=fsdp),
    )
