"""Random numbers as a pure function of (seed, counter, call, global position).

One op, ``autoshard::uniform``, stands for every random draw in a graph. Its value at a position does not
depend on how the tensor is sharded, so dropout is the same on every mesh. The bits come from a 32-bit
multiply-xorshift mixer (three rounds of the murmur3 finalizer's form) held in int64, whose products stay
below 2**63 so that every backend computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoshard.placement import shard_length

_library = torch.library.Library("autoshard", "DEF")
_library.define(
    "uniform(Tensor key, int call, int[] shape, ScalarType dtype, Tensor[] coordinates, int[] dims, int[] outers, "
    "int[] ranks) -> Tensor"
)
_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x46CA68B5) & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x45D9F3B) & _MASK
    return x ^ (x >> 16)


def uniform_reference(
    key: Tensor,
    call: int,
    shape: list[int],
    dtype: torch.dtype,
    coordinates: list[Tensor],
    dims: list[int],
    outers: list[int],
    ranks: list[int],
) -> Tensor:
    """Uniform in [0, 1) with 24 bits; the local shard of a tensor of global `shape`.

    Args:
        key: int64 (2,), seed and counter.
        call: which draw of the graph this is.
        coordinates: per sharded dim, this rank's coordinate, int64 (1,).
        dims, outers, ranks: per sharded dim, its index, outer factor and number of shards.
    """
    position: Tensor = torch.zeros((), dtype=torch.int64, device=key.device)
    stride = 1
    for d in reversed(range(len(shape))):
        split = [n for n, dim in zip(ranks, dims, strict=True) if dim == d]
        padded = shard_length(shape[d], math.prod(split)) * math.prod(split)
        index = torch.arange(padded, dtype=torch.int64, device=key.device)
        for i in sorted((i for i, dim in enumerate(dims) if dim == d), key=lambda i: -outers[i]):
            index = index.view(outers[i], ranks[i], -1).index_select(1, coordinates[i]).flatten()
        position = position + (index * stride).view(-1, *[1] * (len(shape) - 1 - d))
        stride *= shape[d]
    seed, counter = key[0], key[1]
    state = _mix((seed & _MASK) ^ 0x2545F491)
    state = _mix(state ^ ((seed >> 32) & _MASK))
    state = _mix(state ^ (counter & _MASK))
    state = _mix(state ^ (call & _MASK))
    bits = _mix(_mix((position & _MASK) ^ state) ^ ((position >> 32) & _MASK))
    return ((bits >> 8).to(torch.float32) * (1.0 / (1 << 24))).to(dtype)


_library.impl("uniform", uniform_reference, "CompositeExplicitAutograd")
uniform_op = torch.ops.autoshard.uniform.default


@torch.library.register_fake("autoshard::uniform", lib=_library)
def _uniform_fake(
    key: Tensor, call: int, shape: Any, dtype: Any, coordinates: Any, dims: Any, outers: Any, ranks: Any
) -> Tensor:
    local = list(shape)
    for dim, n in zip(dims, ranks, strict=True):
        local[dim] = shard_length(local[dim], n)
    return key.new_empty(local, dtype=dtype)


def decompositions(key: Callable[[], Tensor]) -> dict[Any, Callable[..., Any]]:
    """Random aten ops written with ``autoshard::uniform`` of `key()`, each call with a number of its own."""
    calls = iter(range(1 << 31))
    aten = torch.ops.aten

    def uniform(shape: Any, dtype: torch.dtype) -> Tensor:
        return uniform_op(key(), next(calls), list(shape), dtype, [], [], [], [])

    def wide(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32

    def normal(shape: Any, dtype: torch.dtype) -> Tensor:
        radius = (-2.0 * torch.log1p(-uniform(shape, wide(dtype)))).sqrt()
        return (radius * torch.cos(6.283185307179586 * uniform(shape, wide(dtype)))).to(dtype)

    def bernoulli_p(x: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
        return (uniform(x.shape, wide(x.dtype)) < p).to(x.dtype)

    def bernoulli(x: Tensor, generator: Any = None) -> Tensor:
        return (uniform(x.shape, wide(x.dtype)) < x).to(x.dtype)

    def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = uniform(x.shape, wide(x.dtype)) >= p
        return x * mask * (0.0 if p == 1 else 1.0 / (1.0 - p)), mask

    def _dtype(dtype: torch.dtype | None) -> torch.dtype:
        return dtype or torch.get_default_dtype()

    def rand(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return uniform(size, _dtype(dtype))

    def randn(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return normal(size, _dtype(dtype))

    def rand_like(x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
        return uniform(x.shape, dtype or x.dtype)

    def randn_like(x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
        return normal(x.shape, dtype or x.dtype)

    def _integers(low: int, high: int, shape: Any, dtype: torch.dtype | None) -> Tensor:
        return (uniform(shape, torch.float64) * (high - low)).floor().to(dtype or torch.int64) + low

    def randint(high: int, size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return _integers(0, high, size, dtype)

    def randint_low(low: int, high: int, size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return _integers(low, high, size, dtype)

    def randint_like(x: Tensor, high: int, *, dtype: Any = None, **_: Any) -> Tensor:
        return _integers(0, high, x.shape, dtype or x.dtype)

    def randperm(n: int, **_: Any) -> Tensor:
        return torch.argsort(uniform([n], torch.float64))

    def uniform_(x: Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Tensor:
        return uniform(x.shape, wide(x.dtype)).to(x.dtype) * (high - low) + low

    def normal_(x: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Tensor:
        return normal(x.shape, x.dtype) * std + mean

    def exponential(x: Tensor, lambd: float = 1.0, generator: Any = None) -> Tensor:
        return (-torch.log1p(-uniform(x.shape, wide(x.dtype))) / lambd).to(x.dtype)

    return {
        aten.bernoulli.p: bernoulli_p,
        aten.bernoulli.default: bernoulli,
        aten.native_dropout.default: native_dropout,
        aten.rand.default: rand,
        aten.randn.default: randn,
        aten.rand_like.default: rand_like,
        aten.randn_like.default: randn_like,
        aten.randint.default: randint,
        aten.randint.low: randint_low,
        aten.randint_like.default: randint_like,
        aten.randperm.default: randperm,
        aten.uniform.default: uniform_,
        aten.normal_functional.default: normal_,
        aten.exponential.default: exponential,
    }
