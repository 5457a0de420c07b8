"""Context parallel: the sequence is split over ranks, keys and values travel round the ring."""

from functools import partial

import torch
import torch.nn.functional as F
from models import Attention, vector_batch

from distbench.spec import CpPlan, FsdpPlan, ParallelPlan, Scenario, scenario


@scenario(
    mesh={"cp": 4},
    axes={"rotate": ("allgather", "alltoall"), "load_balance": (True, False)},
    quick={"dim": 128, "sequence": 512},
    tags=("cp", "attention"),
)
def cp_attention(
    *,
    dim: int = 512,
    num_heads: int = 8,
    batch: int = 1,
    sequence: int = 4096,
    rotate: str = "allgather",
    load_balance: bool = True,
) -> Scenario:
    """Causal ring attention: all-gather and all-to-all rotation, with and without load balance."""
    # FSDP over the same ranks averages the gradients of the parameters, which every rank uses on its own tokens.
    plan = ParallelPlan(
        cp=CpPlan(rotate=rotate, load_balance=load_balance),
        fsdp=FsdpPlan(mesh_dims=("cp",), reshard_after_forward=False),
    )
    return Scenario(
        build_model=partial(Attention, dim, num_heads, rotary=False),
        make_batch=partial(vector_batch, batch, sequence, dim),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=plan,
    )
