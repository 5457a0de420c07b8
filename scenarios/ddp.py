"""DistributedDataParallel: gradients averaged in buckets during backward, one option at a time."""

from dataclasses import replace
from functools import partial

import torch
from llama_2d import TP_PLAN
from models import Llama, next_token_loss, token_batch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario, UserError, scenario

KNOBS = {
    "plain": DdpPlan(),
    "small_buckets": DdpPlan(bucket_cap_mb=1),
    "bucket_view": DdpPlan(gradient_as_bucket_view=True),
    "static_graph": DdpPlan(static_graph=True),
    "find_unused": DdpPlan(find_unused_parameters=True),
    "accumulate": DdpPlan(sync_each_microbatch=False),
    "ignored": DdpPlan(ignored=("tok_embeddings",)),
    "bucket_list": DdpPlan(configure={"bucket_cap_mb_list": [1, 4]}),
    "lazy_buckets": DdpPlan(configure={"lazy_bucket_allocation": True}),
    "fp16_hook": DdpPlan(comm_hook=lambda group: (group, default_hooks.fp16_compress_hook)),
}
# Relative to one device; about twice the measured error from rounding the gradients.
TOLERANCES = {"fp16_hook": 2e-3}


def built(knob: str, *sizes: int) -> Llama:
    """The model for an option; the embedding is frozen where the option excludes it."""
    model = Llama(*sizes)
    model.tok_embeddings.requires_grad_(knob != "ignored")
    return model


@scenario(
    mesh={"dp_replicate": 4},
    axes={"knob": ("plain", "small_buckets", "bucket_view", "static_graph", "find_unused", "accumulate", "ignored")},
    quick={"dim": 128, "hidden": 512, "num_layers": 2, "sequence": 64},
    tags=("ddp", "further"),
)
def ddp(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 8,
    sequence: int = 256,
    knob: str = "plain",
) -> Scenario:
    """A llama-like stack under torch's replicate (DDP). Each bucket of gradients is an all-reduce of its own."""
    if knob not in KNOBS:
        raise UserError(f"--set knob={knob} is unknown; use {', '.join(KNOBS)}")
    vocab_size = 1000
    return Scenario(
        build_model=partial(built, knob, vocab_size, dim, num_layers, num_heads, hidden),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(ddp=KNOBS[knob], microbatches=2 if knob == "accumulate" else 1),
        tolerance=TOLERANCES.get(knob),
    )


REPLICAS = FsdpPlan(wrap=("layers.*",), mesh_dims=(), replicate_dims=("dp_replicate",))
TP_KNOBS = {
    "plain": REPLICAS,
    "accumulate": replace(REPLICAS, sync_each_microbatch=False),
    "ignored": replace(REPLICAS, ignored=("tok_embeddings.weight",)),
}


@scenario(
    mesh={"dp_replicate": 2, "tp": 2},
    axes={"knob": ("plain", "accumulate", "ignored")},
    quick={"dim": 64, "hidden": 128, "num_layers": 2, "sequence": 64},
    tags=("ddp", "tp", "further"),
)
def replicate_tp(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 8,
    sequence: int = 256,
    knob: str = "plain",
) -> Scenario:
    """A llama-like stack under TP and torch's replicate. Gradients are averaged unit by unit, nothing is sharded."""
    if knob not in TP_KNOBS:
        raise UserError(f"--set knob={knob} is unknown; use {', '.join(TP_KNOBS)}")
    vocab_size = 1000
    plan = ParallelPlan(tp=TP_PLAN, fsdp=TP_KNOBS[knob], microbatches=2 if knob == "accumulate" else 1)
    return Scenario(
        build_model=partial(built, knob, vocab_size, dim, num_layers, num_heads, hidden),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=plan,
    )
