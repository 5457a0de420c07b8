"""Context parallel: ranks split the sequence, and pass keys and values around a ring or exchange heads (Ulysses)."""

from functools import partial

import torch
import torch.nn.functional as F
from models import Attention, vector_batch

from distbench.spec import CpPlan, FsdpPlan, ParallelPlan, Scenario, UserError, scenario

# Relative to one device in bf16 too, which rounds differently because its matmuls are larger.
BF16_TOLERANCE = 5e-2


def built(dim: int, num_heads: int, causal: bool, dtype: torch.dtype) -> Attention:
    """One attention layer without position embeddings, which would have to be sharded with the sequence."""
    return Attention(dim, num_heads, rotary=False, causal=causal).to(dtype)


@scenario(
    mesh={"cp": 4},
    axes={
        "rotate": ("allgather", "alltoall", "ulysses"),
        "load_balance": (True, False),
        "unshard_output": (False, True),
    },
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
    unshard_output: bool = False,
    causal: bool = True,
    kernel: str = "",
    bf16: bool = False,
) -> Scenario:
    """Ring attention and Ulysses over cp. Both rotations, with and without load balance; output left sharded or
    gathered.

    causal: False for full attention, which has no load balance.
    kernel: flash, efficient or cudnn; torch chooses by default. flash and cudnn require bf16=True and CUDA.
    bf16: parameters and activations in bf16 instead of fp32.
    """
    if load_balance and not causal:
        raise UserError("torch has no load balance for full attention; add --set load_balance=False to causal=False")
    dtype = torch.bfloat16 if bf16 else torch.float32
    # FSDP over the same ranks averages the parameters' gradients, because each rank has other tokens.
    plan = ParallelPlan(
        cp=CpPlan(rotate=rotate, load_balance=load_balance, unshard_output=unshard_output, kernel=kernel or None),
        fsdp=FsdpPlan(mesh_dims=("cp",), reshard_after_forward=False),
    )
    return Scenario(
        build_model=partial(built, dim, num_heads, causal, dtype),
        make_batch=lambda: tuple(tensor.to(dtype) for tensor in vector_batch(batch, sequence, dim)),
        num_tokens=batch * sequence,
        loss=F.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=plan,
        tolerance=BF16_TOLERANCE if bf16 else None,
    )
