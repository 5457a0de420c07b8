"""Small models for several scenarios, in plain PyTorch without code for parallelism."""

import torch
import torch.nn.functional as F
from torch import nn


class FeedForward(nn.Module):
    """SwiGLU feed-forward: (batch, sequence, dim) to the same shape."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Attention(nn.Module):
    """Self-attention: (batch, sequence, dim) to the same shape; also works on a part of the heads."""

    def __init__(self, dim: int, num_heads: int, rotary: bool = True, causal: bool = True) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.rotary = rotary
        self.causal = causal
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        return self.wo(self.attend(self.wq(x), self.wk(x), self.wv(x), table))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of whole heads, concatenated in the last tensor dim of (batch, sequence, dim)."""
        query, key, value = (self._heads(each) for each in (query, key, value))
        if table is not None:
            query, key = rotate_by(query, table), rotate_by(key, table)
        elif self.rotary:
            query, key = rotate_positions(query), rotate_positions(key)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return out.transpose(1, 2).flatten(2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def rotate_positions(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (batch, heads, sequence, head); position 0 is the tensor's first."""
    return rotate_by(x, rotation_table(x.shape[-2], x.shape[-1], x.device))


def rotation_table(length: int, head_dim: int, device: torch.device | None = None) -> torch.Tensor:
    """Cosines and sines of rotary embedding, (length, head_dim), one row per position, so that CP can shard it."""
    half = head_dim // 2
    frequency = 10000.0 ** (-torch.arange(half, device=device) / half)
    angle = torch.arange(length, device=device)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def rotate_by(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (batch, heads, sequence, head) by a table with a row per position of x."""
    cos, sin = table[: x.shape[-2]].to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.ffn_norm = nn.RMSNorm(dim)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        # A plan for attention's inputs lists one layout per input.
        inputs = (self.attention_norm(x),) if table is None else (self.attention_norm(x), table)
        x = x + self.attention(*inputs)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A llama-like stack: token ids (batch, sequence) to logits (batch, sequence, vocabulary).

    With a `table_length`, the rotary table is a buffer of that many rows, and an argument of the blocks.
    """

    def __init__(
        self, vocab_size: int, dim: int, num_layers: int, num_heads: int, hidden: int, table_length: int = 0
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, num_heads, hidden) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        table = rotation_table(table_length, dim // num_heads) if table_length else None
        self.register_buffer("rotations", table, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotations)
        return self.output(self.norm(x))


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over every position."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def token_batch(batch: int, sequence: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids and their targets, each (batch, sequence); the same on every rank."""
    tokens = torch.randint(vocab_size, (batch, sequence + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def vector_batch(batch: int, sequence: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets, each (batch, sequence, dim); the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, sequence, dim, generator=generator), torch.randn(
        batch, sequence, dim, generator=generator
    )
