"""Tensor and sequence parallel, context parallel, and (hybrid) FSDP2 together, on any mesh."""

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

from distbench.spec import CpPlan, FsdpPlan, ParallelPlan, Scenario, scenario

# A block has the rotary table as a second input; the table is not sharded.
GATHERED = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
TP_PLAN = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": GATHERED,
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@scenario(
    mesh={"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2},
    axes={"rotate": ("allgather", "alltoall", "ulysses")},
    quick={"dim": 64, "hidden": 256, "num_layers": 2, "sequence": 64, "rotate": "allgather"},
    quick_mesh={"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 2},
    tags=("tp", "cp", "fsdp", "further"),
)
def llama_3d(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 4,
    sequence: int = 512,
    rotate: str = "allgather",
    load_balance: bool = True,
    unshard_output: bool = False,
    checkpoint: bool = False,
) -> Scenario:
    """A llama-like stack under TP+SP, CP and FSDP2 on 2x2x2. A mesh dim of size 1 leaves its part out; dp_replicate=2
    makes FSDP2 hybrid.
    """
    vocab_size = 1000
    return Scenario(
        build_model=partial(Llama, vocab_size, dim, num_layers, num_heads, hidden, sequence),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(
            tp=TP_PLAN,
            cp=CpPlan(
                rotate=rotate,
                load_balance=None if load_balance else False,  # with ring attention
                buffers={"rotations": 0},
                unshard_output=unshard_output,
            ),
            checkpoint=("layers.*",) if checkpoint else (),
            # Context parallel ranks have the same parameters and different tokens, so FSDP shards over them too.
            fsdp=FsdpPlan(wrap=("layers.*",), mesh_dims=("dp_shard", "cp"), replicate_dims=("dp_replicate",)),
        ),
    )
