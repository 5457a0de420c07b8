"""Models as other people write them, for bench_right_models: Llama, Qwen3 and ViT as transformers has them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Sizes:
    """Of a stack: kv_heads below heads is grouped-query attention; `sharpness` multiplies what softmax is taken of."""

    dim: int = 64
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 160
    layers: int = 4
    sequence: int = 32
    vocabulary: int = 128
    sharpness: float = 1.0


class Norm(nn.Module):
    """RMSNorm as transformers has it: in f32 whatever it is given."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (batch, heads, sequence, head) by angles (sequence, half a head), the head cut in halves."""
    table = table[: x.shape[-2]]
    cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (table.cos(), table.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal; with `normed`, queries and keys have an RMSNorm over each head (Qwen3)."""

    def __init__(self, sizes: Sizes, normed: bool) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.heads * 2
        self.scale = sizes.sharpness / self.head_dim**0.5
        self.groups = sizes.heads // sizes.kv_heads
        self.q_proj = nn.Linear(sizes.dim, sizes.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(sizes.dim, sizes.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.dim, sizes.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * self.head_dim, sizes.dim, bias=False)
        self.q_norm = Norm(self.head_dim) if normed else nn.Identity()
        self.k_norm = Norm(self.head_dim) if normed else nn.Identity()

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (one.transpose(1, 2) for one in (self.q_norm(query), self.k_norm(key)))
        query, key = rotated(query, table), rotated(key, table)
        key, value = (one.repeat_interleave(self.groups, dim=1) for one in (key, value.transpose(1, 2)))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm."""

    def __init__(self, sizes: Sizes, normed: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(sizes.dim)
        self.self_attn = Attention(sizes, normed)
        self.post_attention_layernorm = Norm(sizes.dim)
        self.mlp = Mlp(sizes.dim, sizes.hidden)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), table)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Llama or, `normed`, Qwen3: token ids (batch, sequence) to logits; `tied`: one matrix embeds and unembeds."""

    def __init__(self, sizes: Sizes, normed: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleList(DecoderLayer(sizes, normed) for _ in range(sizes.layers))
        self.norm = Norm(sizes.dim)
        self.lm_head = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        half = sizes.dim // sizes.heads
        frequency = 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(sizes.sequence)[:, None] * frequency, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.lm_head(self.norm(x))


class ImageLayer(nn.Module):
    """Pre-norm encoder block; queries, keys and values each have a bias, of which the keys' changes nothing."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.dense = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layernorm_before(x)
        heads = (
            linear(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        x = x + self.dense(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.layernorm_after(x))))


class ImageClassifier(nn.Module):
    """ViT: images (batch, 3, side, side) in patches of 4 x 4 to the logits of a class token."""

    def __init__(self, dim: int = 64, heads: int = 4, layers: int = 4, side: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, (side // 4) ** 2 + 1, dim))
        self.layers = nn.ModuleList(ImageLayer(dim, heads) for _ in range(layers))
        self.layernorm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.layernorm(x)[:, 0])


def text_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over every position, in f32 as transformers has it."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def image_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over images, in f32."""
    return F.cross_entropy(logits.float(), targets)


def text_batch(sizes: Sizes, seed: int, batch: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids and the next ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(sizes.vocabulary, (batch, sizes.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def image_batch(dtype: torch.dtype, seed: int, batch: int = 8, side: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 3, side, side, generator=generator).to(dtype)
    return images, torch.randint(10, (batch,), generator=generator)
