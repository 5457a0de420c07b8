"""The smallest tensor parallel model: one feed-forward, Colwise then Rowwise, one all-reduce per direction."""

from functools import partial

import torch
import torch.nn.functional as F
from models import FeedForward, vector_batch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInputOutput, RowwiseParallel

from distbench.spec import ParallelPlan, Scenario, scenario


@scenario(
    mesh={"tp": 4},
    axes={"sequence_parallel": (False, True)},
    quick={"dim": 256, "hidden": 1024, "sequence": 128},
    tags=("tp",),
)
def tp_mlp(
    *, dim: int = 1024, hidden: int = 4096, batch: int = 4, sequence: int = 512, sequence_parallel: bool = False
) -> Scenario:
    """A SwiGLU feed-forward, Colwise then Rowwise. With and without the sequence sharded outside."""
    plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
    if sequence_parallel:
        plan = {
            "": PrepareModuleInputOutput(
                input_layouts=Replicate(),
                desired_input_layouts=Shard(1),
                output_layouts=Shard(1),
                desired_output_layouts=Replicate(),
            ),
            "w1": ColwiseParallel(input_layouts=Shard(1)),
            "w2": RowwiseParallel(output_layouts=Shard(1)),
            "w3": ColwiseParallel(input_layouts=Shard(1)),
        }
    return Scenario(
        build_model=partial(FeedForward, dim, hidden),
        make_batch=partial(vector_batch, batch, sequence, dim),
        num_tokens=batch * sequence,
        loss=F.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(tp=plan),
    )
