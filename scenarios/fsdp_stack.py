"""FSDP2 over a stack of transformer blocks, each block a unit that is gathered, used and freed."""

from functools import partial

import torch
from models import Llama, next_token_loss, token_batch

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


@scenario(
    mesh={"dp_shard": 4},
    axes={"reshard_after_forward": (True, False)},
    quick={"dim": 128, "hidden": 512, "num_layers": 2, "sequence": 64},
    tags=("fsdp", "further"),
)
def fsdp_stack(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 8,
    sequence: int = 256,
    reshard_after_forward: bool = True,
) -> Scenario:
    """FSDP2 with and without resharding after forward. A llama-like stack; parameters are freed after forward (and
    gathered again) or kept.
    """
    vocab_size = 1000
    fsdp = FsdpPlan(wrap=("layers.*",), reshard_after_forward=reshard_after_forward)
    return Scenario(
        build_model=partial(Llama, vocab_size, dim, num_layers, num_heads, hidden),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(fsdp=fsdp),
    )
