"""Measurements for this machine's hardware file; `distbench calibrate` runs them in addition to `calibrate`."""

from functools import partial

import torch
import torch.nn.functional as F
from llama_2d import TP_PLAN
from models import FeedForward, Llama, next_token_loss, token_batch, vector_batch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


@scenario(mesh={"tp": 4}, quick={"num_sizes": 2}, tags=("calibrate",))
def calibrate_operators(*, num_sizes: int = 5) -> Scenario:
    """Operators by dtype and size, for a hardware file. All ranks run them at once; also collectives in groups of every
    size.
    """
    return Scenario(compute=num_sizes)


@scenario(
    mesh={"tp": 4},
    axes={"part": ("host", "host_fsdp", "host_tp", "whole", "whole_bf16", "whole_tp")},
    quick={"layers": 1},
    tags=("calibrate",),
)
def calibrate_steps(*, part: str = "whole", num_heads: int = 8, layers: int = 3) -> Scenario:
    """Small and whole steps, for a hardware file. Small ones are the host's time alone (FSDP2 of one unit and of many,
    TP); whole ones are FSDP2 of a llama, also in bf16, and TP of feed-forwards.
    """
    if part == "whole_tp":
        return _feed_forwards(512, 256 * num_heads, layers)
    dim, sequence = 8 * num_heads, 2 * num_heads
    tiny = (dim, dim, layers, num_heads, 2 * dim)
    fsdp = {
        "host": FsdpPlan(mesh_dims=("tp",)),
        "host_fsdp": FsdpPlan(wrap=("layers.*", "layers.*.attention", "layers.*.feed_forward"), mesh_dims=("tp",)),
        "whole": FsdpPlan(wrap=("layers.*",), mesh_dims=("tp",)),
        "whole_bf16": FsdpPlan(
            wrap=("layers.*",), mesh_dims=("tp",), mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        ),
    }
    sizes = (1000, 48 * num_heads, layers, num_heads, 1024) if part.startswith("whole") else tiny
    if part.startswith("whole"):
        sequence = 128
    return Scenario(
        build_model=partial(Llama, *sizes),
        make_batch=partial(token_batch, 2, sequence, sizes[0]),
        num_tokens=2 * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(tp=TP_PLAN) if part == "host_tp" else ParallelPlan(fsdp=fsdp[part]),
    )


def _feed_forwards(dim: int, hidden: int, layers: int) -> Scenario:
    """TP without sequence parallel: few collectives, so operators take nearly all of the time."""
    wide, narrow = ColwiseParallel(), RowwiseParallel()
    return Scenario(
        build_model=lambda: torch.nn.Sequential(*(FeedForward(dim, hidden) for _ in range(layers))),
        make_batch=partial(vector_batch, 2, 128, dim),
        num_tokens=2 * 128,
        loss=F.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(tp={"*.w1": wide, "*.w2": narrow, "*.w3": wide}),
    )
