"""A decoder-only transformer in Llama's layout: rotary positions, RMS norm, gated MLP, grouped key-value heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotary_table(context: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (arXiv:2104.09864), each (context, head_width) in float32."""
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + half) of the last dim of x (B, heads, T, head_width) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        if width % heads or heads % kv_heads or (width // heads) % 2:
            raise ValueError(
                f"width {width}, heads {heads}, kv_heads {kv_heads}: width must be a multiple of 2 * heads, "
                "and heads a multiple of kv_heads"
            )
        self.heads, self.kv_heads = heads, kv_heads
        head_width = width // heads
        self.q = nn.Linear(width, heads * head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2), cos, sin)
        k = rotate(self.k(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2), cos, sin)
        v = self.v(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens (B, T), integers below `vocabulary`, T <= `context`, to logits (B, T, vocabulary).

    Args:
        vocabulary: number of different tokens.
        context: the longest sequence, in tokens.
        layers, heads, width: number of blocks, attention heads in each, and channels.
        kv_heads: key and value heads, shared by heads / kv_heads query heads each.
        hidden: channels of the gated MLP; None takes 8/3 of the width, rounded up to a multiple of 16.
        rope_base: the base of the rotary frequencies.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 128,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 128,
        hidden: int | None = None,
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        hidden = -(-width * 8 // 3 // 16) * 16 if hidden is None else hidden
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, table in zip(("cos", "sin"), rotary_table(context, width // heads, rope_base), strict=True):
            self.register_buffer(name, table, persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"a sequence of {length} tokens exceeds the context of {self.context}")
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
