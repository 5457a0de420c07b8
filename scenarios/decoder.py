"""Decoders of any size, for published training runs: llama-like, or GPT-like with MPT's and GPT-3's layers.

Sizes are choices. The plan is that of llama3.py: TP with sequence parallel and a sharded loss, activation
checkpointing, FSDP2 in bf16, foreach AdamW.
"""

from functools import partial

import torch
import torch.nn.functional as F
from llama3 import TP_PLAN, GroupedAttention, keep_some, make_norm, rotation_numbers
from models import FeedForward, next_token_loss, token_batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from distbench.spec import CompilePlan, FsdpPlan, ParallelPlan, Scenario, UserError, scenario

GPT_TP_PLAN = {
    **TP_PLAN,
    "pos_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.attention.wqkv": ColwiseParallel(),
    "layers.*.feed_forward.w1": ColwiseParallel(),
}
LEFT_OUT_OF_GPT = ("layers.*.attention.w[qkv]", "layers.*.feed_forward.w[13]")
REDUCTIONS = {"f32": torch.float32, "bf16": torch.bfloat16}


class GptAttention(nn.Module):
    """Self-attention with one projection: (batch, sequence, dim) to the same shape; also for a part of the heads."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.wqkv = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.wqkv(x).unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(*heads.unbind(3), is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class GptFeedForward(nn.Module):
    """Two projections with GELU between them: (batch, sequence, dim) to the same shape."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x)))


class DecoderBlock(nn.Module):
    """Pre-norm transformer block; GPT's has no rotations."""

    def __init__(self, is_gpt: bool, dim: int, num_heads: int, num_kv_heads: int, hidden: int, norm: str) -> None:
        super().__init__()
        norms = [nn.LayerNorm(dim) if is_gpt else make_norm(norm, dim) for _ in range(2)]
        self.attention_norm, self.ffn_norm = norms
        self.attention = GptAttention(dim, num_heads) if is_gpt else GroupedAttention(dim, num_heads, num_kv_heads)
        self.feed_forward = GptFeedForward(dim, hidden) if is_gpt else FeedForward(dim, hidden)

    def forward(self, x: torch.Tensor, *rotations: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *rotations)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(
        self,
        is_gpt: bool,
        vocab: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        hidden: int,
        sequence: int,
        norm: str,
        tied: bool,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.pos_embeddings = nn.Embedding(sequence, dim) if is_gpt else None
        sizes = (dim, num_heads, num_kv_heads, hidden, norm)
        self.layers = nn.ModuleList(DecoderBlock(is_gpt, *sizes) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim) if is_gpt else make_norm(norm, dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight
        rotations = None if is_gpt else rotation_numbers(sequence, dim // num_heads)
        self.register_buffer("rotations", rotations, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        if self.pos_embeddings is not None:
            x = x + self.pos_embeddings(torch.arange(tokens.shape[1], device=tokens.device)[None])
        for layer in self.layers:
            x = layer(x) if self.rotations is None else layer(x, self.rotations)
        return self.output(self.norm(x))


@scenario(mesh={"dp_replicate": 1, "dp_shard": 8}, tags=("tp", "fsdp", "real-size"))
def decoder(
    *,
    family: str = "llama",
    vocab: int = 32_000,
    dim: int = 4096,
    num_layers: int = 32,
    num_heads: int = 32,
    num_kv_heads: int = 0,
    hidden: int = 11_008,
    tied: bool = False,
    batch: int = 16,
    sequence: int = 4096,
    checkpoint: str = "none",
    norm: str = "written_out",
    compiled: bool = False,
    reduce: str = "f32",
    reshard: bool = True,
    microbatches: int = 1,
) -> Scenario:
    """A decoder of any size, default Llama 2 7B. Family is llama or gpt; checkpoint: none, selective, alternate, full.

    alternate recomputes every second layer. num_kv_heads=0 means num_heads. reduce is the dtype in which FSDP reduces
    gradients, f32 or bf16.
    """
    kept = {"none": (), "alternate": tuple(f"layers.{number}" for number in range(0, num_layers, 2))}
    if family not in ("llama", "gpt") or checkpoint not in (*kept, "selective", "full") or reduce not in REDUCTIONS:
        raise UserError(
            f"family={family}, checkpoint={checkpoint}, reduce={reduce} cannot be used; family is llama or gpt, "
            "checkpoint none, selective, alternate or full, reduce f32 or bf16"
        )
    is_gpt = family == "gpt"
    tp = {name: style for name, style in GPT_TP_PLAN.items() if name not in LEFT_OUT_OF_GPT} if is_gpt else TP_PLAN
    sizes = (vocab, dim, num_layers, num_heads, num_kv_heads or num_heads, hidden, sequence, norm, tied)
    return Scenario(
        build_model=partial(Decoder, is_gpt, *sizes),
        make_batch=partial(token_batch, batch, sequence, vocab),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-4, foreach=True),
        plan=ParallelPlan(
            tp=tp,
            loss_parallel=True,
            checkpoint=kept.get(checkpoint, ("layers.*",)),
            checkpoint_context=keep_some if checkpoint == "selective" else None,
            compile=CompilePlan(("layers.*",)) if compiled else None,
            microbatches=microbatches,
            fsdp=FsdpPlan(
                wrap=("layers.*",),
                mesh_dims=("dp_shard",),
                replicate_dims=("dp_replicate",),
                reshard_after_forward=reshard,
                mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=REDUCTIONS[reduce]),
            ),
        ),
    )
