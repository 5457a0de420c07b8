"""DistributedDataParallel: gradients averaged in buckets while backward still runs, by how large a bucket is."""

from functools import partial

import torch
from models import Llama, next_token_loss, token_batch

from distbench.spec import DdpPlan, ParallelPlan, Scenario, scenario


@scenario(
    mesh={"dp_replicate": 4},
    axes={"bucket_mb": (1, 25)},
    quick={"dim": 128, "hidden": 512, "num_layers": 2, "sequence": 64},
    tags=("ddp",),
)
def ddp(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 8,
    sequence: int = 256,
    bucket_mb: int = 25,
) -> Scenario:
    """A llama-like stack under torch's replicate (DDP): each bucket of gradients an all-reduce of its own."""
    vocab_size = 1000
    return Scenario(
        build_model=partial(Llama, vocab_size, dim, num_layers, num_heads, hidden),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(ddp=DdpPlan(bucket_cap_mb=bucket_mb)),
    )
