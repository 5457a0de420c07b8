"""A llama-like stack with a key-value cache, in plain PyTorch without code for parallelism."""

import torch
import torch.nn.functional as F
from models import FeedForward, rotate_by, rotation_table
from torch import nn


class KvCache:
    """Keys and values of every layer, each (batch, heads, length, head), for this rank's heads.

    Args:
        length: capacity in positions per layer; memory is allocated at a layer's first write.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def put(
        self, layer: int, position: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (batch, heads, sequence, head) from a position on; return all keys and values up to the last one."""
        end = position + key.shape[2]
        for kept, new in ((self.keys, key), (self.values, value)):
            if layer not in kept:
                kept[layer] = new.new_zeros((*new.shape[:2], self.length, new.shape[3]))
            kept[layer][:, :, position:end] = new
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


class CachedAttention(nn.Module):
    """Grouped-query self-attention with a key-value cache: (batch, sequence, dim) to the same shape.

    It also works on a part of the heads.
    """

    def __init__(self, layer: int, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.heads_a_kv = layer, dim // num_heads, num_heads // num_kv_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor, cache: KvCache, position: int) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        keys, values = cache.put(self.layer, position, rotate_by(key, table), value)
        keys, values = (tensor.repeat_interleave(self.heads_a_kv, dim=1) for tensor in (keys, values))
        # A prompt fills an empty cache; each later token attends to the whole cache.
        out = F.scaled_dot_product_attention(rotate_by(query, table), keys, values, is_causal=query.shape[2] > 1)
        return self.wo(out.transpose(1, 2).flatten(2))


class CachedBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, layer: int, dim: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = CachedAttention(layer, dim, num_heads, num_kv_heads)
        self.ffn_norm = nn.RMSNorm(dim)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: torch.Tensor, table: torch.Tensor, cache: KvCache, position: int) -> torch.Tensor:
        # By keyword, so that a plan for attention's inputs lists x only.
        x = x + self.attention(self.attention_norm(x), table=table, cache=cache, position=position)
        return x + self.feed_forward(self.ffn_norm(x))


class CachedLlama(nn.Module):
    """Token ids (batch, sequence) at the positions from `position` on, to logits (batch, sequence, vocabulary)."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        hidden: int,
        cache_length: int,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            CachedBlock(layer, dim, num_heads, num_kv_heads, hidden) for layer in range(num_layers)
        )
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.register_buffer("rotations", rotation_table(cache_length, dim // num_heads), persistent=False)

    def forward(self, tokens: torch.Tensor, cache: KvCache, position: int) -> torch.Tensor:
        table = self.rotations[position : position + tokens.shape[1]]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, table, cache, position)
        return self.output(self.norm(x))
