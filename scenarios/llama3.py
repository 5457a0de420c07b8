"""Llama 3 at its real sizes with torchtitan's plan: simulate it on any machine, or run it on GPUs.

Sizes are those of the model cards (arXiv:2407.21783, table 3); the plan is torchtitan's (arXiv:2410.06511): TP with
sequence parallel and a sharded loss, activation checkpointing, FSDP2 in bf16 with fp32 reductions, foreach AdamW.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import FeedForward, next_token_loss, token_batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distbench.spec import CompilePlan, CpPlan, FsdpPlan, ParallelPlan, Scenario, scenario

VOCAB_SIZE = 128_256
TP_PLAN = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


# FSDP's units. Since 2025, torchtitan wraps the embedding and the output separately (issue 1091).
UNITS = {"layers": ("layers.*",), "separate": ("tok_embeddings", "layers.*", "output")}


class GroupedAttention(nn.Module):
    """Grouped-query self-attention: (batch, sequence, dim) to the same shape."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim, self.heads_a_kv = dim // num_heads, num_heads // num_kv_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        query, key, value = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        query, key = rotated(query, rotations), rotated(key, rotations)
        key, value = (repeated(tensor, self.heads_a_kv) for tensor in (key, value))
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (batch, sequence, heads, head) by (sequence, head/2) complex rotations, in fp32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * rotations[None, : x.shape[1], None, :]
    return torch.view_as_real(turned).flatten(3).type_as(x)


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat each head of (batch, sequence, heads, head)."""
    return x if times == 1 else x[:, :, :, None, :].expand(-1, -1, -1, times, -1).flatten(2, 3)


def rotation_numbers(length: int, head_dim: int, base: float = 500_000.0) -> torch.Tensor:
    """Rotations of rotary embedding as complex numbers of length 1, (length, head_dim / 2)."""
    frequency = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(length).float(), frequency)
    return torch.polar(torch.ones_like(angle), angle)


class WrittenOutNorm(nn.Module):
    """RMSNorm operator by operator, like torch's own before its kernel for accelerators (torch 2.9)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(1e-5))
        return wide.mul(scale).type_as(x).mul(self.weight)


def make_norm(kind: str, dim: int) -> nn.Module:
    """RMSNorm by torch's kernel, or operator by operator."""
    return nn.RMSNorm(dim, eps=1e-5) if kind == "fused" else WrittenOutNorm(dim)


class Llama3Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, hidden: int, norm: str) -> None:
        super().__init__()
        self.attention_norm = make_norm(norm, dim)
        self.attention = GroupedAttention(dim, num_heads, num_kv_heads)
        self.ffn_norm = make_norm(norm, dim)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama3(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(
        self, dim: int, num_layers: int, num_heads: int, num_kv_heads: int, hidden: int, sequence: int, norm: str
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB_SIZE, dim)
        self.layers = nn.ModuleList(Llama3Block(dim, num_heads, num_kv_heads, hidden, norm) for _ in range(num_layers))
        self.norm = make_norm(norm, dim)
        self.output = nn.Linear(dim, VOCAB_SIZE, bias=False)
        self.register_buffer("rotations", rotation_numbers(sequence, dim // num_heads), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotations)
        return self.output(self.norm(x))


def keep_some(keeps_attention: bool = True) -> Any:
    """torchtitan's selective checkpointing by operator: keep attention, every second matmul and reduced tensors.

    Before December 2025, torchtitan did not keep the output of cuDNN's attention, which Blackwell uses.
    """
    aten = torch.ops.aten
    kept = {
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        *([aten._scaled_dot_product_efficient_attention.default] if keeps_attention else []),
        *([aten._scaled_dot_product_flash_attention.default] if keeps_attention else []),
    }
    num_matmuls = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator is aten.mm.default:
            num_matmuls[context.is_recompute] += 1
            keep = num_matmuls[context.is_recompute] % 2 == 1
        else:
            keep = operator in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def resharded(unit: str, _: Any) -> dict[str, bool]:
    """Keep the output's parameters gathered from forward to backward, which needs them first."""
    return {"reshard_after_forward": unit not in ("", "output"), "recurse": False}


def _llama3(
    sizes: dict[str, int],
    *,
    num_layers: int,
    batch: int,
    sequence: int,
    checkpoint: str,
    norm: str,
    compiled: bool,
    async_tp: bool,
    microbatches: int,
    units: str,
) -> Scenario:
    contexts: dict[str, Callable[[], Any] | None] = {
        "selective": keep_some,
        "selective_matmuls": partial(keep_some, keeps_attention=False),
        "full": None,
        "none": None,
    }
    return Scenario(
        build_model=partial(Llama3, num_layers=num_layers, sequence=sequence, norm=norm, **sizes),
        make_batch=partial(token_batch, batch, sequence, VOCAB_SIZE),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-4, foreach=True),
        plan=ParallelPlan(
            tp=TP_PLAN,
            loss_parallel=True,
            cp=CpPlan(buffers={"rotations": 0}),
            checkpoint=() if checkpoint == "none" else ("layers.*",),
            checkpoint_context=contexts[checkpoint],
            compile=CompilePlan(("layers.*",), async_tp=async_tp) if compiled or async_tp else None,
            microbatches=microbatches,
            fsdp=FsdpPlan(
                wrap=UNITS[units],
                configure={"set_reshard_after_forward": resharded} if units == "separate" else {},
                mesh_dims=("dp_shard", "cp"),
                replicate_dims=("dp_replicate",),
                mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            ),
        ),
    )


@scenario(mesh={"dp_replicate": 1, "dp_shard": 8, "cp": 1}, tags=("tp", "cp", "fsdp", "real-size"))
def llama3_8b(
    *,
    num_layers: int = 32,
    batch: int = 16,
    sequence: int = 8192,
    checkpoint: str = "selective",
    norm: str = "fused",
    compiled: bool = False,
    async_tp: bool = False,
    microbatches: int = 1,
    units: str = "layers",
) -> Scenario:
    """Llama 3 8B at its real size under torchtitan's plan. Checkpoint is selective, selective_matmuls,
    full or none; FSDP units are layers or separate.
    """
    sizes = {"dim": 4096, "num_heads": 32, "num_kv_heads": 8, "hidden": 14336}
    return _llama3(
        sizes,
        num_layers=num_layers,
        batch=batch,
        sequence=sequence,
        checkpoint=checkpoint,
        norm=norm,
        compiled=compiled,
        async_tp=async_tp,
        microbatches=microbatches,
        units=units,
    )


@scenario(mesh={"dp_replicate": 1, "dp_shard": 32, "cp": 1, "tp": 8}, tags=("tp", "cp", "fsdp", "real-size"))
def llama3_70b(
    *,
    num_layers: int = 80,
    batch: int = 512,
    sequence: int = 8192,
    checkpoint: str = "full",
    norm: str = "fused",
    compiled: bool = False,
    async_tp: bool = False,
    microbatches: int = 1,
    units: str = "layers",
) -> Scenario:
    """Llama 3 70B at its real size under torchtitan's plan. Checkpoint is selective, selective_matmuls,
    full or none; FSDP units are layers or separate.
    """
    sizes = {"dim": 8192, "num_heads": 64, "num_kv_heads": 8, "hidden": 28672}
    return _llama3(
        sizes,
        num_layers=num_layers,
        batch=batch,
        sequence=sequence,
        checkpoint=checkpoint,
        norm=norm,
        compiled=compiled,
        async_tp=async_tp,
        microbatches=microbatches,
        units=units,
    )


@scenario(mesh={"dp_replicate": 1, "dp_shard": 64, "cp": 1, "tp": 8}, tags=("tp", "cp", "fsdp", "real-size"))
def llama3_405b(
    *,
    num_layers: int = 126,
    batch: int = 128,
    sequence: int = 8192,
    checkpoint: str = "full",
    norm: str = "fused",
    compiled: bool = False,
    async_tp: bool = False,
    microbatches: int = 1,
    units: str = "layers",
) -> Scenario:
    """Llama 3.1 405B at its real size, without pipeline stages. Checkpoint is selective, selective_matmuls,
    full or none; FSDP units are layers or separate.
    """
    sizes = {"dim": 16384, "num_heads": 128, "num_kv_heads": 8, "hidden": 53248}
    return _llama3(
        sizes,
        num_layers=num_layers,
        batch=batch,
        sequence=sequence,
        checkpoint=checkpoint,
        norm=norm,
        compiled=compiled,
        async_tp=async_tp,
        microbatches=microbatches,
        units=units,
    )
