"""The most common plan: tensor and sequence parallel within a host, FSDP2 across hosts."""

from functools import partial

import torch
from models import Llama, next_token_loss, token_batch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from distbench.spec import CompilePlan, FsdpPlan, ParallelPlan, Scenario, scenario

# Activations between the blocks are sharded on the sequence (tensor dim 1); each half of a block gathers them once.
GATHERED = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
TP_PLAN = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": GATHERED,
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward": GATHERED,
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    quick={"dim": 128, "hidden": 512, "num_layers": 2, "sequence": 64},
    tags=("tp", "fsdp"),
)
def llama_2d(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 4,
    sequence: int = 256,
    async_tp: bool = False,
) -> Scenario:
    """A llama-like stack under TP, SP and FSDP2. Tensor and sequence parallel inside, FSDP2 outside; forward, backward,
    optimizer.

    async_tp: compile the blocks with async TP, which overlaps TP's collectives with matmuls; CUDA only.
    """
    vocab_size = 1000
    return Scenario(
        build_model=partial(Llama, vocab_size, dim, num_layers, num_heads, hidden),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(
            tp=TP_PLAN,
            compile=CompilePlan(("layers.*",), async_tp=True) if async_tp else None,
            fsdp=FsdpPlan(wrap=("layers.*",)),
        ),
    )
