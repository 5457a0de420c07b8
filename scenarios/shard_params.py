"""Parameters annotated as DTensors only: DTensor determines the communication of each operation."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import FeedForward, vector_batch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_module

from distbench.spec import ParallelPlan, Scenario, ShardParam, UserError, scenario

LAYOUTS = {
    "rows": {"w*.weight": ShardParam(0, ("tp",))},
    "rows_of_both": {"w*.weight": ShardParam(0, ("cp", "tp"))},
    "rows_then_columns": {"w*.weight": ShardParam(0, ("tp",)), "w[13].weight": ShardParam(1, ("cp",))},
    "rows_of_rows": {"w*.weight": ShardParam(0, ("tp",)), "w2.*": ShardParam(0, ("cp",))},
}


def dtensors_inside(model: nn.Module, mesh: Any) -> nn.Module:
    """Convert inputs to replicated DTensors and the output to a full tensor; parameters keep their annotation."""
    whole = [Replicate()] * mesh.ndim

    def enter(_: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: Any) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(given, mesh, whole, run_check=False) for given in inputs)

    def leave(_: nn.Module, output: DTensor, mesh: Any) -> torch.Tensor:
        return output.redistribute(mesh, whole).to_local()

    return distribute_module(model, mesh, None, enter, leave)


@scenario(
    mesh={"cp": 2, "tp": 2},
    axes={"layout": ("rows", "rows_of_both", "rows_then_columns", "rows_of_rows")},
    quick={"dim": 128, "hidden": 512, "sequence": 64},
    tags=("tp", "further"),
)
def shard_params(
    *, dim: int = 512, hidden: int = 2048, batch: int = 4, sequence: int = 256, layout: str = "rows"
) -> Scenario:
    """A feed-forward with weights annotated over mesh dims. Weights are over one or two mesh dims, two of them on one
    tensor dim included.
    """
    if layout not in LAYOUTS:
        raise UserError(f"--set layout={layout} is unknown; use {', '.join(LAYOUTS)}")
    return Scenario(
        build_model=partial(FeedForward, dim, hidden),
        make_batch=partial(vector_batch, batch, sequence, dim),
        num_tokens=batch * sequence,
        loss=F.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(shard_params=LAYOUTS[layout], tp=dtensors_inside, tp_dim=("cp", "tp")),
    )
