"""A small plain-PyTorch Llama-like decoder, its config, and the data that every engine trains on.

Nothing here knows about parallelism: an engine is given an ordinary `Transformer`, the same on every rank, and has
to make it parallel itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the decoder; the default has 29M parameters."""

    dim: int = 512
    n_layers: int = 8
    n_heads: int = 8
    hidden: int = 1024  # inner width of SwiGLU
    vocab: int = 8192
    seq: int = 256

    def n_params(self) -> int:
        per_layer = 4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim
        return self.n_layers * per_layer + 2 * self.vocab * self.dim + self.dim


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # -1 heads: under tensor parallelism a rank sees only its own.
        q = self.wq(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x (..., length, head_dim) by tables (length, head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.dim, eps=1e-5), nn.RMSNorm(config.dim, eps=1e-5)
        self.attn, self.mlp = Attention(config), MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # A pipeline stage keeps only its part: the others are then None.
        self.embed: nn.Module | None = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm: nn.Module | None = nn.RMSNorm(config.dim, eps=1e-5)
        self.head: nn.Module | None = nn.Linear(config.dim, config.vocab, bias=False)
        half = torch.arange(0, config.dim // config.n_heads, 2).float() / (config.dim // config.n_heads)
        angles = torch.outer(torch.arange(config.seq).float(), 1.0 / 10000**half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) if self.embed is not None else tokens
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        if self.norm is not None:
            x = self.norm(x)
        return self.head(x) if self.head is not None else x


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over tokens, always reduced in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def build_model(config: ModelConfig, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config)


def global_batch(config: ModelConfig, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels), each (size, seq), of the global batch of `step`: a noisy affine chain, so it can be learned."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.empty(size, config.seq + 1, dtype=torch.long)
    x[:, 0] = torch.randint(0, 64, (size,), generator=generator)
    noise = torch.randint(0, 4, (size, config.seq), generator=generator)
    for t in range(config.seq):
        x[:, t + 1] = (x[:, t] * 5 + 7 + noise[:, t]) % 509
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()
