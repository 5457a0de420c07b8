"""Inference under tensor parallel: a prompt (prefill), or the next token (decode), with a key-value cache sharded over
heads."""

from functools import partial
from typing import Any

import torch
from cached import CachedLlama, KvCache
from llama_2d import TP_PLAN
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from distbench.spec import CpPlan, FsdpPlan, ParallelPlan, Scenario, UserError, scenario

# Replicated activations: two all-reduces per block, in addition to those of the embedding and the logits.
WHOLE_PLAN = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(),
    "output": ColwiseParallel(output_layouts=Replicate()),
}


def tokens_of(batch: int, prompt: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Random token ids, equal on every rank: `prompt` (batch, prompt), and the next `token` (batch, 1)."""
    tokens = torch.randint(vocab_size, (batch, prompt + 1), generator=torch.Generator().manual_seed(0))
    return {"prompt": tokens[:, :-1].contiguous(), "token": tokens[:, -1:].contiguous()}


def prefill(model: Any, batch: dict[str, torch.Tensor], cache: KvCache) -> torch.Tensor:
    """Logits of every position of the prompt; its keys and values are written to the cache."""
    return model(batch["prompt"], cache, 0)


def decode(model: Any, batch: dict[str, torch.Tensor], cache: KvCache) -> torch.Tensor:
    """Logits of the token after the prompt; every call uses the same position of the cache."""
    return model(batch["token"], cache, batch["prompt"].shape[1])


def filled(cache_length: int, model: Any, batch: dict[str, torch.Tensor]) -> KvCache:
    """A cache with the prompt."""
    cache = KvCache(cache_length)
    prefill(model, batch, cache)
    return cache


def empty(cache_length: int, *_: Any) -> KvCache:
    """An empty cache."""
    return KvCache(cache_length)


@scenario(
    mesh={"tp": 4},
    axes={"phase": ("prefill", "decode"), "sequence_parallel": (False, True)},
    quick={"dim": 128, "hidden": 512, "num_layers": 2, "prompt": 64, "cache_length": 128},
    tags=("tp", "inference", "further"),
)
def llama_inference(
    *,
    phase: str = "prefill",
    sequence_parallel: bool = False,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    batch: int = 4,
    prompt: int = 256,
    cache_length: int = 512,
    fsdp: bool = False,
    rotate: str = "",
) -> Scenario:
    """Latency of a prompt and of the next token, under TP. Prefill (also with SP) and decode, with a KV cache over
    heads.

    rotate: context parallel of the prompt, by this rotation; with a mesh that has cp. Decode has no such variant.
    """
    phases = {"prefill": (prefill, empty), "decode": (decode, filled)}
    if phase not in phases:
        raise UserError(f"--set phase={phase} is unknown; use {', '.join(phases)}")
    if not 0 < prompt < cache_length:
        raise UserError(f"--set prompt={prompt} is too long for a cache of {cache_length}; use 1 to {cache_length - 1}")
    if phase == "decode" and (sequence_parallel or rotate):
        return Scenario()  # a single token cannot be split over ranks
    vocab_size = 1000
    run, make_cache = phases[phase]
    # Context parallel shards the table with the sequence, so the table has exactly the prompt's positions.
    num_positions = prompt if rotate else cache_length
    return Scenario(
        build_model=partial(CachedLlama, vocab_size, dim, num_layers, num_heads, num_kv_heads, hidden, num_positions),
        make_batch=partial(tokens_of, batch, prompt, vocab_size),
        inference=True,
        make_cache=partial(make_cache, cache_length),
        call=run,
        num_tokens=batch * (prompt if phase == "prefill" else 1),
        sequence_dims={"prompt": 1} if rotate else None,
        plan=ParallelPlan(
            tp=TP_PLAN if sequence_parallel else WHOLE_PLAN,
            cp=CpPlan(rotate=rotate, buffers={"rotations": 0}) if rotate else None,
            # Gathered layer by layer, including the root: no parameter remains gathered between two calls.
            fsdp=FsdpPlan(wrap=("layers.*",), reshard_after_forward=True) if fsdp else None,
        ),
    )
