"""The models that every stage, backend and mesh is tried on.

Each case is what a stranger might hand over: a module written for one device, a batch, and perhaps a loss. All
are tiny (under 300,000 parameters), at least two layers deep and, where they have attention, at least four
heads wide; everything else is the library's default. Random parts are off, so that a run can be compared with
another to rounding, and what a library initialises to zero or nearly so is initialised randomly, since it would
hide the gradients behind it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

Batch = Any  # a pytree: a tensor, or tuples, lists and mappings of tensors
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class ModelCase:
    """One model of the zoo.

    Args:
        name: unique, a valid test id.
        build: makes the module; `model` seeds it and turns it to float64.
        batch: (global batch size, generator) -> a global batch, floats in float64, batch dimension first.
        loss: (model, batch) -> loss; None where the model returns its loss.
        tags: what is peculiar about it, for choosing and for exceptions.
        notes: why it is here.
        size: global batch size of one micro-batch, a multiple of 4.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Loss | None
    tags: frozenset[str]
    notes: str
    size: int = 4

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The module in training mode with its random parts off, equal on every call with the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.build()
        return without_randomness(module).to(dtype).train()

    @property
    def casts_to_float32(self) -> bool:
        """Whether it computes parts in float32 whatever its dtype, so that sums upstream may not move by a bit."""
        return bool(self.tags & {"float32_inside", "float32_loss", "float32_sums"})

    def in_double(self) -> ModelCase:
        """This case without its casts to float32; names of parameters begin with "model."."""
        tags = frozenset(tag for tag in self.tags if not tag.startswith("float32"))
        return dataclasses.replace(self, build=functools.partial(_in_double, self.build), tags=tags)

    def batches(self, steps: int, *, micro_batches: int = 1, seed: int = 0) -> list[Batch]:
        """`steps` different global batches of the same shapes, each of `micro_batches` x `size` samples."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return [self.batch(self.size * micro_batches, generator) for _ in range(steps)]


def without_randomness(module: nn.Module) -> nn.Module:
    """`module` with every dropout and stochastic depth probability set to zero."""
    for part in module.modules():
        if isinstance(part, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, torchvision.ops.StochasticDepth)):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    return module


def _tokens(batch: int, length: int, vocab: int, generator: torch.Generator) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=generator)


def _floats(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------- our own language models


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions and fewer key heads than query heads."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, heads: int, key_heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads, dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, key_heads * self.width, bias=False)
        self.value = nn.Linear(dim, key_heads * self.width, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        rates = 10000.0 ** (-torch.arange(0, self.width, 2) / self.width)
        angles = torch.outer(torch.arange(length), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos[:length], self.sin[:length]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.rotate(self.query(x).view(batch, length, self.heads, self.width).transpose(1, 2))
        key = self.rotate(self.key(x).view(batch, length, self.key_heads, self.width).transpose(1, 2))
        value = self.value(x).view(batch, length, self.key_heads, self.width).transpose(1, 2)
        repeats = self.heads // self.key_heads
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, key_heads: int, length: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim), GroupedAttention(dim, heads, key_heads, length)
        self.mlp_norm, self.mlp = RMSNorm(dim), SwiGLU(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, vocab: int = 64, dim: int = 32, layers: int = 2, heads: int = 4, length: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, heads // 2, length) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPTBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query, key, value = self.qkv(self.norm1(x)).split(dim, dim=-1)
        query, key, value = (
            part.view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for part in (query, key, value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Learned positions, biases, dropout, and a head tied to the embedding unless told otherwise."""

    def __init__(
        self, vocab: int = 64, dim: int = 32, layers: int = 2, heads: int = 4, length: int = 16, *, tied: bool = True
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(GPTBlock(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.positions(places))
        return self.head(self.norm(self.blocks(x)))


def _pair_batch(batch: int, generator: torch.Generator, length: int = 16, vocab: int = 64) -> Batch:
    tokens = _tokens(batch, length + 1, vocab, generator)
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


def _pair_loss(model: Any, batch: Any) -> Tensor:
    return _language_loss(model(batch["x"]), batch["y"])


def _ragged_batch(batch: int, generator: torch.Generator) -> Batch:
    """As `_pair_batch`, but each row keeps a different number of labels, one of them none; -100 marks the rest."""
    pair = _pair_batch(batch, generator)
    keep = torch.randint(1, 17, (batch, 1), generator=generator)
    keep[-1] = 0
    pair["y"] = pair["y"].masked_fill(torch.arange(16) >= keep, -100)
    return pair


def ragged_mean_loss(model: Any, batch: Any) -> Any:
    """Cross-entropy as an exact token mean, with the accuracy beside it as an extra."""
    from autoshard import Mean

    logits = model(batch["x"])
    valid = batch["y"] != -100
    total = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=-100, reduction="sum")
    hits = ((logits.argmax(-1) == batch["y"]) & valid).sum().double()
    return Mean(total, valid.sum()), {"accuracy": Mean(hits, valid.sum())}


def ignore_index_loss(model: Any, batch: Any) -> Tensor:
    """The mean over the valid tokens of the (global) micro-batch, as cross_entropy itself takes it."""
    return _language_loss(model(batch["x"]), batch["y"])


class Checkpointed(nn.Module):
    """Blocks under torch.utils.checkpoint, both kinds; one block is shared between the two."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        self.first, self.second = GPTBlock(dim, 4), GPTBlock(dim, 4)
        self.head = nn.Linear(dim, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.first, x, use_reentrant=False)
        x = checkpoint(self.second, x, use_reentrant=True)
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.head(x)


class MaskedAttention(nn.Module):
    """Attention written out by hand: scores, causal and padding masks, softmax, a learned bias per head."""

    causal: Tensor

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.randn(heads, length, length) * 0.1)
        self.register_buffer("causal", torch.tril(torch.ones(length, length, dtype=torch.bool)))

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.project(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = query @ key.transpose(-1, -2) / (dim // self.heads) ** 0.5 + self.bias
        allowed = self.causal[None, None] & present[:, None, None, :]
        allowed = allowed | torch.eye(length, dtype=torch.bool, device=x.device)
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class MaskedModel(nn.Module):
    def __init__(self, vocab: int = 64, dim: int = 32, length: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.layers = nn.ModuleList(MaskedAttention(dim, 4, length) for _ in range(2))
        self.head = nn.Linear(dim, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        present = tokens != 0
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, present)
        kept = present.unsqueeze(-1).to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1))


def _masked_batch(batch: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(1, 64, (batch, 12), generator=generator)
    lengths = torch.randint(2, 13, (batch, 1), generator=generator)
    return tokens.masked_fill(torch.arange(12) >= lengths, 0), torch.randint(5, (batch,), generator=generator)


class EncoderStack(nn.Module):
    """torch's own encoder in its default layout, sequence first, with a padding mask."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, nhead=4, dim_feedforward=64)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.embed, self.head = nn.Embedding(64, dim), nn.Linear(dim, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=tokens == 0)
        return self.head(x.mean(0))


class Siamese(nn.Module):
    """One encoder called twice before one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.cosine_similarity(self.encoder(left), self.encoder(right), dim=-1)


class Contrastive(nn.Module):
    """Two towers and a learned scalar temperature; every sample is every other's negative."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.scale.exp() * image @ text.t()


def _contrastive_loss(model: Any, batch: Any) -> Tensor:
    scores = model(*batch)
    labels = torch.arange(scores.shape[0], device=scores.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


# ---------------------------------------------------------------- small models with one peculiarity each


def _classify(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def _regress(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def _vectors(batch: int, generator: torch.Generator, width: int = 16, classes: int = 5) -> Batch:
    return _floats(generator, batch, width), torch.randint(classes, (batch,), generator=generator)


def _regression(batch: int, generator: torch.Generator) -> Batch:
    return _floats(generator, batch, 16), _floats(generator, batch, 4)


def _images(batch: int, generator: torch.Generator, side: int = 16) -> Batch:
    return _floats(generator, batch, 3, side, side), torch.randint(10, (batch,), generator=generator)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def _batch_norm_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32, affine=False),
        nn.ReLU(), nn.Linear(32, 5),
    )  # fmt: skip


class InPlace(nn.Module):
    """In-place arithmetic, writes through views and indices, and a buffer that forward counts up."""

    calls: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = F.relu_(self.first(x).mul_(0.5).add_(0.1))
        self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        out = torch.zeros(x.shape[0], 32, dtype=x.dtype, device=x.device)
        out[:, :16] = h[:, 16:]
        out[:, torch.tensor([16, 20, 24])] = h[:, :3]
        out[:, 28] += h.sum(-1)
        out[:, 30:].copy_(h[:, 4:6])
        return self.second(out.clamp_(max=3.0))


class DictModel(nn.Module):
    """Nested mappings in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict({"a": nn.Linear(8, 32), "b": nn.Linear(6, 32)})
        self.heads = nn.ModuleDict({"class": nn.Linear(32, 5), "value": nn.Linear(32, 1)})

    def forward(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        h = torch.tanh(self.trunk["a"](inputs["a"]) + self.trunk["b"](inputs["nested"]["b"]))
        return {"class": self.heads["class"](h), "more": {"value": self.heads["value"](h).squeeze(-1)}}


def _dict_batch(batch: int, generator: torch.Generator) -> Batch:
    return {
        "inputs": {"a": _floats(generator, batch, 8), "nested": {"b": _floats(generator, batch, 6)}},
        "targets": {
            "class": torch.randint(5, (batch,), generator=generator),
            "value": _floats(generator, batch),
        },
    }


def _dict_loss(model: Any, batch: Any) -> Any:
    out = model(batch["inputs"])
    classes = F.cross_entropy(out["class"], batch["targets"]["class"])
    value = F.huber_loss(out["more"]["value"], batch["targets"]["value"])
    return classes + 0.5 * value, {"classes": classes.detach(), "value": value.detach()}


class Unused(nn.Module):
    """A layer that forward never calls, and one whose result is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.head = nn.Linear(16, 32), nn.Linear(32, 5)
        self.never, self.dropped = nn.Linear(16, 16), nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.used(x))
        self.dropped(h)
        return self.head(h)


class Frozen(nn.Module):
    """A frozen trunk under low-rank adapters, as fine-tuning has it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(32, 32) for _ in range(2)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(32, 4, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(4, 32, bias=False) for _ in range(2))
        self.embed, self.head = nn.Linear(16, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for trunk, down, up in zip(self.trunk, self.down, self.up, strict=True):
            h = h + torch.tanh(trunk(h) + up(down(h)))
        return self.head(h)


ODD_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3,), (5, 7))


class OddShapes(nn.Module):
    """Parameters that no number of ranks divides: (), (0,), (1,), (3,), (5, 7)."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(ODD_SHAPES):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))
        self.register_buffer("odd", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        scalar, empty, one, three, matrix = (getattr(self, f"p{i}") for i in range(len(ODD_SHAPES)))
        h = torch.tanh(x[:, :5] @ matrix) * one
        h = h[:, :3] * three + h[:, 3:6] + self.odd
        return (h * scalar).sum(-1) + empty.sum()


def _odd_batch(batch: int, generator: torch.Generator) -> Batch:
    return _floats(generator, batch, 16), _floats(generator, batch)


class TopK(nn.Module):
    """A mixture whose two best experts of five are chosen per sample, and a sorted pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 5)
        self.experts = nn.Parameter(torch.randn(5, 16, 32) * 0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        mixed = torch.einsum("bi,eio->beo", x, self.experts)
        picked = mixed.gather(1, chosen.unsqueeze(-1).expand(-1, -1, mixed.shape[-1]))
        h = (picked * weights.unsqueeze(-1)).sum(1)
        highest = torch.sort(h, dim=-1, descending=True).values[:, :8]
        return self.head(highest)


class Recurrent(nn.Module):
    """A gated recurrence written as a Python loop: every parameter is used once per time step."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.ModuleList(nn.GRUCell(8 if i == 0 else dim, dim) for i in range(2))
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        states = [x.new_zeros(x.shape[0], self.dim) for _ in self.layers]
        for time in range(x.shape[1]):
            value = x[:, time]
            for index, layer in enumerate(self.layers):
                states[index] = value = layer(value, states[index])
        return self.head(states[-1])


class Causal(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, ((self.kernel_size[0] - 1) * self.dilation[0], 0)))


class TemporalConvolution(nn.Module):
    """Dilated causal convolutions with weight normalisation and a gated residual."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(Causal(dim, 2 * dim, 3, dilation=2**i)) for i in range(2)
        )
        self.head = nn.Conv1d(dim, 64, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        for layer in self.layers:
            x = x + F.glu(layer(x), dim=1)
        return self.head(x).transpose(1, 2)


class UNet(nn.Module):
    """Down and up with a skip, group norm, a transposed convolution and average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x)
        low = self.down2(F.avg_pool2d(skip, 2))
        return self.out(torch.cat((skip, self.up(low)), dim=1))


def _denoise(model: Any, batch: Any) -> Tensor:
    clean, noise = batch
    return F.smooth_l1_loss(model(clean + 0.3 * noise), clean)


class Quantised(nn.Module):
    """A codebook: nearest entry by argmin, gradient passed straight through, two auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.codes = nn.Embedding(12, 8)
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encode(x)
        nearest = torch.cdist(h, self.codes.weight).argmin(-1)
        code = self.codes(nearest)
        extra = F.mse_loss(code, h.detach()) + 0.25 * F.mse_loss(h, code.detach())
        return self.decode(h + (code - h).detach()), extra


def _quantised_loss(model: Any, batch: Any) -> Tensor:
    out, extra = model(batch)
    return F.mse_loss(out, batch) + extra


class Bags(nn.Module):
    """Averaged embedding bags, with an attribute that only stores an auxiliary value."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(48, 16, mode="mean")
        self.hidden, self.head = nn.Linear(16, 32), nn.Linear(32, 5)

    def forward(self, words: Tensor) -> Tensor:
        h = torch.relu(self.hidden(self.bags(words)))
        self.last_activation = h.detach()
        return self.head(h)


class StatefulCentring(nn.Module):
    """Running statistics kept by hand and used in the same forward, over the whole batch."""

    centre: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(16, 32), nn.Linear(32, 5)
        self.register_buffer("centre", torch.zeros(1, 32))
        self.register_buffer("spread", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(h.mean(0, keepdim=True), 0.2)
                self.spread.copy_(0.8 * self.spread + 0.2 * h.std(0))
        return self.head((h - self.centre) / self.spread)


# ---------------------------------------------------------------- torchvision


class _NarrowResNet(torchvision.models.ResNet):
    """ResNet's own code with stages an eighth as wide (its stem is fixed at 64)."""

    def _make_layer(self, block: Any, planes: int, blocks: int, stride: int = 1, dilate: bool = False) -> nn.Sequential:
        return super()._make_layer(block, planes // 8, blocks, stride, dilate)


def _resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock

    model = _NarrowResNet(BasicBlock, [2, 2, 2, 2])
    model.fc = nn.Linear(64, 10)
    return model


def _vit() -> nn.Module:
    model = torchvision.models.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10
    )
    nn.init.normal_(model.heads.head.weight, std=0.2)  # zero by default, which hides every other gradient
    nn.init.normal_(model.class_token, std=0.2)
    return model


def _swin() -> nn.Module:
    return torchvision.models.SwinTransformer(
        patch_size=[2, 2], embed_dim=16, depths=[2, 2], num_heads=[4, 4], window_size=[4, 4], num_classes=10
    )


def _swin_v2() -> nn.Module:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    return torchvision.models.SwinTransformer(
        patch_size=[2, 2], embed_dim=16, depths=[2, 2], num_heads=[4, 4], window_size=[4, 4], num_classes=10,
        block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2,
    )  # fmt: skip


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlock, CNBlockConfig

    model = torchvision.models.ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], num_classes=10)
    for part in model.modules():
        if isinstance(part, CNBlock):
            nn.init.uniform_(part.layer_scale, 0.3, 0.7)  # 1e-6 by default: blocks would hardly count
    return model


def _mobilenet() -> nn.Module:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    blocks = [
        InvertedResidualConfig(16, 3, 16, 16, True, "RE", 1, 1, 1),
        InvertedResidualConfig(16, 3, 32, 16, False, "HS", 1, 1, 1),
        InvertedResidualConfig(16, 5, 32, 24, True, "HS", 2, 1, 1),
    ]
    return MobileNetV3(blocks, last_channel=32, num_classes=10)


class _Features(nn.Module):
    """A two-level backbone that returns named feature maps, as torchvision's segmentation models want."""

    def __init__(self) -> None:
        super().__init__()
        self.low = torchvision.ops.Conv2dNormActivation(3, 16, stride=2)
        self.high = torchvision.ops.Conv2dNormActivation(16, 32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.low(x)
        return {"aux": low, "out": self.high(low)}


def _segmentation() -> nn.Module:
    from torchvision.models.segmentation.deeplabv3 import ASPP, DeepLabV3
    from torchvision.models.segmentation.fcn import FCNHead

    head = nn.Sequential(
        ASPP(32, [2, 4, 6], 16), nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 6, 1),
    )  # fmt: skip
    return DeepLabV3(_Features(), head, FCNHead(16, 6))


def _segmentation_batch(batch: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(-1, 6, (batch, 16, 16), generator=generator).masked_fill(torch.eye(16) > 0, -1)
    return {"image": _floats(generator, batch, 3, 16, 16), "labels": torch.where(labels < 0, 255, labels)}


def _segmentation_loss(model: Any, batch: Any) -> Tensor:
    out = model(batch["image"])
    main = F.cross_entropy(out["out"], batch["labels"], ignore_index=255)
    return main + 0.5 * F.cross_entropy(out["aux"], batch["labels"], ignore_index=255)


# ---------------------------------------------------------------- transformers, from a config, nothing downloaded

_HF: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_positions=32, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **_HF
        )
    )


_HF_LLAMA_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _hf_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_HF_LLAMA_SIZES, **_HF))


def _hf_qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_HF_LLAMA_SIZES, **_HF))


def _hf_qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(head_dim=8, tie_word_embeddings=True, **_HF_LLAMA_SIZES, **_HF))


def _hf_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _hf_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def _hf_mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2, **_HF))


class _FloatIsDouble(TorchFunctionMode):
    """Within, whoever asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = {torch.float32: torch.float64}
        args, kwargs = (wide.get(x, x) if isinstance(x, torch.dtype) else x for x in args), kwargs or {}
        return func(*args, **{k: wide.get(x, x) if isinstance(x, torch.dtype) else x for k, x in kwargs.items()})


class InDouble(nn.Module):
    """A model that casts to float32 on its way, without these casts: all of it in its parameters' float64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        with _FloatIsDouble():
            return self.model(**batch)


def _in_double(build: Callable[[], nn.Module]) -> nn.Module:
    return InDouble(build())


def _hf_mamba_in_double() -> nn.Module:
    return InDouble(_hf_mamba())


def _causal_batch(batch: int, generator: torch.Generator, length: int = 12) -> Batch:
    tokens = torch.randint(3, 64, (batch, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _causal_loss(model: Any, batch: Any) -> Tensor:
    """The next-token loss in the model's own dtype (transformers' own is in float32 whatever the model's)."""
    logits = model(input_ids=batch["input_ids"]).logits
    return _language_loss(logits[:, :-1], batch["labels"][:, 1:])


def _short_causal_batch(batch: int, generator: torch.Generator) -> Batch:
    return _causal_batch(batch, generator, length=6)


def _padded_causal_batch(batch: int, generator: torch.Generator) -> Batch:
    """Rows of unequal length: padded, masked, and without labels on the padding."""
    tokens = torch.randint(3, 64, (batch, 12), generator=generator)
    absent = torch.arange(12) >= torch.randint(4, 13, (batch, 1), generator=generator)
    return {
        "input_ids": tokens.masked_fill(absent, 0),
        "attention_mask": (~absent).long(),
        "labels": tokens.masked_fill(absent, -100),
    }


def _bert_batch(batch: int, generator: torch.Generator) -> Batch:
    full = _padded_causal_batch(batch, generator)
    asked = torch.rand(batch, 12, generator=generator) < 0.4
    asked[:, 0] = True
    full["labels"] = torch.where(asked, full["labels"], -100)
    full["token_type_ids"] = (torch.arange(12) >= 6).long().expand(batch, 12).contiguous()
    return full


def _t5_batch(batch: int, generator: torch.Generator) -> Batch:
    full = _padded_causal_batch(batch, generator)
    full["labels"] = torch.randint(3, 64, (batch, 8), generator=generator)
    return full


# ---------------------------------------------------------------- the list


def _case(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int, torch.Generator], Batch],
    loss: Loss | None,
    tags: str,
    notes: str,
    size: int = 4,
) -> ModelCase:
    return ModelCase(name, build, batch, loss, frozenset(tags.split()), notes, size)


ZOO: tuple[ModelCase, ...] = (
    _case("llama", Llama, _pair_batch, _pair_loss, "own attention", "RMSNorm, RoPE buffers, grouped heads, SwiGLU"),
    _case("gpt", GPT, _pair_batch, _pair_loss, "own attention tied dropout", "learned positions, tied head, dropout"),
    _case(
        "gpt_ragged_mean",
        functools.partial(GPT, tied=False),
        _ragged_batch,
        ragged_mean_loss,
        "own attention mean extras ragged",
        "Mean(total, count) with unequal token counts, an extra beside it",
    ),
    _case(
        "gpt_ignore_index",
        GPT,
        _ragged_batch,
        ignore_index_loss,
        "own attention tied ragged",
        "cross_entropy's own mean over valid tokens of the global micro-batch",
    ),
    _case("mlp", _mlp, _regression, _regress, "own", "the smallest; tuple batch", size=8),
    _case(
        "batch_norm_mlp",
        _batch_norm_mlp,
        _vectors,
        _classify,
        "own batchnorm buffers",
        "BatchNorm1d, one without affine",
        size=8,
    ),
    _case(
        "in_place", InPlace, _vectors, _classify, "own buffers inplace", "in-place ops, index writes, a counter buffer"
    ),
    _case(
        "dict_io", DictModel, _dict_batch, _dict_loss, "own dict extras", "nested mappings in and out; scalar extras"
    ),
    _case(
        "siamese",
        Siamese,
        lambda n, g: (_floats(g, n, 12), _floats(g, n, 12), _floats(g, n)),
        lambda model, batch: F.mse_loss(model(batch[0], batch[1]), batch[2]),
        "own shared",
        "two forwards of one module before one backward",
    ),
    _case("unused_parameter", Unused, _vectors, _classify, "own unused", "parameters with no path to the loss"),
    _case("frozen_parameter", Frozen, _vectors, _classify, "own frozen", "requires_grad False under adapters"),
    _case("odd_shapes", OddShapes, _odd_batch, _regress, "own scalar odd buffers", "(), (0,), (1,), (3,), (5, 7)"),
    _case(
        "contrastive",
        Contrastive,
        lambda n, g: (_floats(g, n, 12), _floats(g, n, 20)),
        _contrastive_loss,
        "own scalar global",
        "in-batch negatives over the global batch, scalar temperature",
        size=8,
    ),
    _case(
        "checkpointed",
        Checkpointed,
        _pair_batch,
        _pair_loss,
        "own attention checkpoint shared",
        "torch.utils.checkpoint, reentrant and not, with a shared block",
    ),
    _case(
        "masked_attention", MaskedModel, _masked_batch, _classify, "own attention", "masks written by hand, padding_idx"
    ),
    _case(
        "torch_encoder",
        EncoderStack,
        _masked_batch,
        _classify,
        "torch attention",
        "nn.TransformerEncoder in its default sequence-first layout",
    ),
    _case("topk", TopK, _vectors, _classify, "own", "topk, gather and sort"),
    _case(
        "recurrent",
        Recurrent,
        lambda n, g: (_floats(g, n, 6, 8), torch.randint(5, (n,), generator=g)),
        _classify,
        "torch shared",
        "GRU cells in a Python loop",
    ),
    _case(
        "temporal_convolution",
        TemporalConvolution,
        _pair_batch,
        _pair_loss,
        "own convolution",
        "dilated causal conv1d under weight_norm parametrisation",
    ),
    _case(
        "unet",
        UNet,
        lambda n, g: (_floats(g, n, 3, 8, 8), _floats(g, n, 3, 8, 8)),
        _denoise,
        "own convolution",
        "skip connection, GroupNorm, ConvTranspose2d",
    ),
    _case(
        "quantised",
        Quantised,
        lambda n, g: _floats(g, n, 16),
        _quantised_loss,
        "own",
        "cdist, argmin, straight-through gradient; the batch is one tensor",
        size=8,
    ),
    _case(
        "embedding_bag",
        Bags,
        lambda n, g: (_tokens(n, 7, 48, g), torch.randint(5, (n,), generator=g)),
        _classify,
        "torch",
        "EmbeddingBag; an attribute that stores an auxiliary value",
    ),
    _case(
        "running_statistics",
        StatefulCentring,
        _vectors,
        _classify,
        "own buffers global",
        "hand-kept running statistics over the global batch",
        size=8,
    ),
    _case(
        "resnet",
        _resnet,
        functools.partial(_images, side=32),
        _classify,
        "torchvision convolution batchnorm buffers",
        "torchvision ResNet-18, stages an eighth as wide",
    ),
    _case(
        "vit",
        _vit,
        _images,
        _classify,
        "torchvision attention",
        "torchvision ViT, its zero-initialised head made random",
    ),
    _case("swin", _swin, _images, _classify, "torchvision attention", "torchvision Swin with shifted windows"),
    _case("swin_v2", _swin_v2, _images, _classify, "torchvision attention", "torchvision Swin v2: cosine attention"),
    _case(
        "convnext", _convnext, _images, _classify, "torchvision convolution", "torchvision ConvNeXt, layer scale raised"
    ),
    _case(
        "mobilenet_v3",
        _mobilenet,
        functools.partial(_images, side=32),
        _classify,
        "torchvision convolution batchnorm buffers",
        "torchvision MobileNetV3: depthwise, squeeze-excite, in-place",
    ),
    _case(
        "deeplab",
        _segmentation,
        _segmentation_batch,
        _segmentation_loss,
        "torchvision convolution batchnorm buffers dict ragged",
        "torchvision DeepLabV3 with ASPP and auxiliary head",
    ),
    _case(
        "hf_gpt2",
        _gpt2,
        _causal_batch,
        None,
        "transformers attention tied model_loss float32_loss",
        "GPT-2; returns its loss",
    ),
    _case("hf_llama", _hf_llama, _causal_batch, _causal_loss, "transformers attention float32_inside", "Llama"),
    _case(
        "hf_llama_padded",
        _hf_llama,
        _padded_causal_batch,
        None,
        "transformers attention model_loss float32_loss float32_inside ragged",
        "Llama with attention_mask and -100 labels",
    ),
    _case("hf_bert", _hf_bert, _bert_batch, None, "transformers attention tied model_loss ragged", "BERT masked LM"),
    _case(
        "hf_t5", _hf_t5, _t5_batch, None, "transformers attention tied model_loss float32_inside", "T5 encoder-decoder"
    ),
    _case("hf_qwen2", _hf_qwen2, _causal_batch, _causal_loss, "transformers attention float32_inside", "Qwen2"),
    _case(
        "hf_qwen3",
        _hf_qwen3,
        _causal_batch,
        _causal_loss,
        "transformers attention tied float32_inside",
        "Qwen3: query and key norms, tied here",
    ),
    _case(
        "hf_mamba",
        _hf_mamba,
        _short_causal_batch,
        None,
        "transformers tied model_loss float32_loss state_space float32_inside float32_sums",
        "Mamba, the sequential scan in plain torch",
    ),
    _case(
        "hf_mamba_in_double",
        _hf_mamba_in_double,
        _short_causal_batch,
        None,
        "transformers tied model_loss state_space",
        "Mamba without its casts to float32, so that the bounds for float64 hold",
    ),
)

CASES: Mapping[str, ModelCase] = {case.name: case for case in ZOO}


def find_case(name: str) -> ModelCase:
    """The case of that name.

    Raises:
        KeyError: there is none; the message lists those that exist.
    """
    if name not in CASES:
        raise KeyError(f"the zoo has no model {name!r}; it has {', '.join(CASES)}")
    return CASES[name]
