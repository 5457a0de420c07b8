"""Pipeline parallel by torch's schedules: the layers in stages, plain, or with FSDP2 or TP inside each stage."""

from functools import partial
from typing import Any

import torch
from models import Llama, next_token_loss, token_batch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from distbench.spec import FsdpPlan, ParallelPlan, PipelinePlan, Scenario, UserError, scenario

# A block's inputs and outputs are replicated, so that stages send plain tensors.
TP_PLAN = {
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(),
}
# With parameters freed after forward, each micro-batch would gather each unit; zero-bubble schedules lose gradients.
FSDP = FsdpPlan(wrap=("layers.*",), reshard_after_forward=False)
# Options of schedules with several stages per rank; "per_edge" is one of `torch.distributed.config`, for any schedule.
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "active_stages": {"max_active_stages": 2},
    "lookahead": {"unshard_lookahead": "auto"},
    "per_edge": {"pipeline_per_edge_p2p": True},
}
INSIDE = {"plain": {}, "fsdp": {"fsdp": FSDP}, "tp": {"tp": TP_PLAN}}


@scenario(
    mesh={"pp": 4},
    axes={"schedule": ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")},
    quick={"dim": 64, "hidden": 256, "sequence": 32},
    tags=("pp", "further"),
)
def pipeline(
    *,
    dim: int = 256,
    hidden: int = 1024,
    num_layers: int = 8,
    num_heads: int = 4,
    batch: int = 16,
    sequence: int = 128,
    microbatches: int = 8,
    schedule: str = "1f1b",
    inside: str = "plain",
    defer_recv: bool = False,
    option: str = "none",
) -> Scenario:
    """Pipeline stages over pp, one schedule per variant. Give inside=fsdp with --mesh pp=2,dp_shard=2, inside=tp with
    --mesh pp=2,tp=2.

    defer_recv: post receives when their stage needs them (schedules of several stages per rank, torch 2.13).
    option: active_stages, lookahead (gathers of FSDP2, schedules of several stages per rank) or per_edge (own
        communicators); torch 2.15.
    """
    if option not in OPTIONS:
        raise UserError(f"--set option={option} is unknown; use {', '.join(OPTIONS)}")
    if inside not in INSIDE:
        raise UserError(f"--set inside={inside} is unknown; use {', '.join(INSIDE)}")
    vocab_size = 1000
    return Scenario(
        build_model=partial(Llama, vocab_size, dim, num_layers, num_heads, hidden),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(
            pipeline=PipelinePlan(
                schedule=schedule, configure=OPTIONS[option] | ({"defer_pp_recv": True} if defer_recv else {})
            ),
            microbatches=microbatches,
            **INSIDE[inside],
        ),
    )
