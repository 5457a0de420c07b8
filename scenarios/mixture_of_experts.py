"""Mixtures of experts at real sizes, sharded by FSDP2: simulate them on any machine, or run them on GPUs.

Sizes are those of the model cards: Qwen3-30B-A3B (arXiv:2505.09388, table 2) and DeepSeek-V2-Lite (arXiv:2405.04434,
appendix B). Routing is fixed and even: each expert has the same number of tokens, and the router's scores only weigh
the results. So shapes are static, and a step takes the time of a perfectly balanced step.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from llama3 import GroupedAttention, repeated, rotated, rotation_numbers
from models import FeedForward, next_token_loss, token_batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from distbench.spec import CompilePlan, FsdpPlan, ParallelPlan, Scenario, scenario


class Experts(nn.Module):
    """SwiGLU experts: (experts, tokens, dim) to the same shape, with a batched matmul for each of the three weights."""

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden, dim) * hidden**-0.5)
        self.w3 = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3), self.w2)


class MixtureOfExperts(nn.Module):
    """A mixture with even routing to `chosen` experts per token and shared experts; (batch, sequence, dim) to the same.

    Args:
        shared: total hidden size of the shared experts, which process every token; 0 without shared experts.
    """

    def __init__(self, dim: int, hidden: int, num_experts: int, chosen: int, shared: int) -> None:
        super().__init__()
        self.num_experts, self.chosen = num_experts, chosen
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = Experts(num_experts, dim, hidden)
        self.shared = FeedForward(dim, shared) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).float().softmax(-1).topk(self.chosen).values.type_as(x)
        # A copy of each token for each of its experts, sorted by expert.
        sent = tokens.repeat_interleave(self.chosen, 0).unflatten(0, (-1, self.num_experts)).transpose(0, 1)
        back = self.experts(sent.contiguous()).transpose(0, 1).reshape(len(tokens), self.chosen, -1)
        out = (back * scores[..., None]).sum(1).view_as(x)
        return out if self.shared is None else out + self.shared(x)


class NormedAttention(GroupedAttention):
    """Llama 3's attention with heads of any size, and queries and keys normalized per head, as in Qwen3."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        nn.Module.__init__(self)
        self.head_dim, self.heads_a_kv = head_dim, num_heads // num_kv_heads
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        query, key, value = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        query, key = rotated(self.q_norm(query), rotations), rotated(self.k_norm(key), rotations)
        key, value = (repeated(tensor, self.heads_a_kv) for tensor in (key, value))
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return self.wo(F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1): keys and values are computed from one small vector
    per token, and a separate part of the head has the positions."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, rotary_dim: int, latent: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.rotary_dim = num_heads, head_dim, rotary_dim
        self.wq = nn.Linear(dim, num_heads * (head_dim + rotary_dim), bias=False)
        self.down = nn.Linear(dim, latent + rotary_dim, bias=False)
        self.norm = nn.RMSNorm(latent)
        self.up = nn.Linear(latent, num_heads * 2 * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        query, turning = self.wq(x).unflatten(-1, (self.num_heads, -1)).split([self.head_dim, self.rotary_dim], -1)
        small, place = self.down(x).split([self.norm.normalized_shape[0], self.rotary_dim], -1)
        key, value = self.up(self.norm(small)).unflatten(-1, (self.num_heads, -1)).chunk(2, -1)
        place = rotated(place[:, :, None], rotations).expand(-1, -1, self.num_heads, -1)
        query = torch.cat([query, rotated(turning, rotations)], -1)
        # Fused attention requires heads of equal size.
        heads_first = (
            tensor.transpose(1, 2)
            for tensor in (query, torch.cat([key, place], -1), F.pad(value, (0, self.rotary_dim)))
        )
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True)[..., : self.head_dim]
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(self, vocab_size: int, dim: int, layers: list[nn.Module], sequence: int, rotary_dim: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.register_buffer("rotations", rotation_numbers(sequence, rotary_dim), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotations)
        return self.output(self.norm(x))


def _qwen3(num_layers: int, sequence: int) -> nn.Module:
    layers: list[nn.Module] = [
        Block(2048, NormedAttention(2048, 32, 4, 128), MixtureOfExperts(2048, 768, 128, 8, shared=0))
        for _ in range(num_layers)
    ]
    return Decoder(151_936, 2048, layers, sequence, 128)


def _deepseek(num_layers: int, sequence: int) -> nn.Module:
    layers: list[nn.Module] = [
        Block(
            2048,
            LatentAttention(2048, 16, 128, 64, 512),
            MixtureOfExperts(2048, 1408, 64, 6, shared=2 * 1408) if number else FeedForward(2048, 10944),
        )
        for number in range(num_layers)
    ]
    return Decoder(102_400, 2048, layers, sequence, 64)


def _scenario(
    build: Any, vocab_size: int, num_layers: int, batch: int, sequence: int, checkpoint: bool, compiled: bool
) -> Scenario:
    return Scenario(
        build_model=partial(build, num_layers, sequence),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-4, foreach=True),
        plan=ParallelPlan(
            checkpoint=("layers.*",) if checkpoint else (),
            compile=CompilePlan(("layers.*",)) if compiled else None,
            fsdp=FsdpPlan(
                wrap=("layers.*",),
                replicate_dims=("dp_replicate",),
                mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            ),
        ),
    )


@scenario(mesh={"dp_replicate": 1, "dp_shard": 64}, tags=("fsdp", "real-size"))
def qwen3_30b_a3b(
    *, num_layers: int = 48, batch: int = 64, sequence: int = 4096, checkpoint: bool = True, compiled: bool = False
) -> Scenario:
    """A model of Qwen3-30B-A3B's shape under FSDP2. It has 128 experts, 8 per token, evenly routed."""
    return _scenario(_qwen3, 151_936, num_layers, batch, sequence, checkpoint, compiled)


@scenario(mesh={"dp_replicate": 1, "dp_shard": 32}, tags=("fsdp", "real-size"))
def deepseek_v2_lite(
    *, num_layers: int = 27, batch: int = 64, sequence: int = 4096, checkpoint: bool = True, compiled: bool = False
) -> Scenario:
    """A model of DeepSeek-V2-Lite's shape under FSDP2. It has latent attention and 64 experts, 6 per token, evenly
    routed, 2 shared.
    """
    return _scenario(_deepseek, 102_400, num_layers, batch, sequence, checkpoint, compiled)
