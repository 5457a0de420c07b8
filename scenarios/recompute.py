"""Changes of a block's forward before FSDP2 wraps it: activation checkpointing and torch.compile."""

from functools import partial

import torch
from models import Llama, next_token_loss, token_batch

from distbench.spec import CompilePlan, FsdpPlan, ParallelPlan, Scenario, UserError, scenario

CHECKPOINTED = {"none": (), "blocks": ("layers.*",), "attention": ("layers.*.attention",)}


@scenario(
    mesh={"dp_shard": 4},
    axes={"checkpoint": ("none", "blocks", "attention"), "compile_backend": ("none", "aot_eager", "inductor")},
    quick={"dim": 64, "hidden": 128, "num_layers": 2, "sequence": 32, "compile_backend": "aot_eager"},
    tags=("fsdp", "checkpoint", "compile", "further"),
)
def recompute(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 8,
    sequence: int = 256,
    checkpoint: str = "none",
    compile_backend: str = "none",
) -> Scenario:
    """Activation checkpointing and torch.compile under FSDP2. Activations are kept or computed again, blocks compiled
    or not.
    """
    if checkpoint not in CHECKPOINTED:
        raise UserError(f"--set checkpoint={checkpoint} is unknown; use {', '.join(CHECKPOINTED)}")
    vocab_size = 1000
    compiled = None if compile_backend == "none" else CompilePlan(("layers.*",), compile_backend)
    return Scenario(
        build_model=partial(Llama, vocab_size, dim, num_layers, num_heads, hidden, sequence),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(checkpoint=CHECKPOINTED[checkpoint], compile=compiled, fsdp=FsdpPlan(wrap=("layers.*",))),
    )
