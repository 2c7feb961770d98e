"""How one tensor lies on one mesh axis: replicated, sharded along a dim, or partial.

The words are DTensor's. They are types of our own because the passes also need a shard of a dim that was
merged from two (``Shard(dim, outer)``), which DTensor keeps private, and because a graph's tags must be
hashable and print well on every torch version. `to_dtensor` converts at the boundary: state is DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed.tensor as dt


@dataclass(frozen=True)
class Replicate:
    """Every coordinate of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Coordinate r of N holds part r of dim `dim`.

    With ``outer > 1`` the dim is seen as ``(outer, size / outer)`` and the second factor is what is split:
    the local tensor is ``x.unflatten(dim, (outer, N, -1))[..., r, :].flatten(dim, dim + 1)``. That is what
    flattening ``(S, B)`` leaves when B was sharded (`outer` = S).

    Dims are global, also where other axes split the same dim: each splits a factor of its own, so that no order of
    axes is meant. See `fits`.
    """

    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}/{self.outer})"


@dataclass(frozen=True)
class Partial:
    """Every coordinate holds a term; the value is their sum (or max, min) over the axis."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement = Replicate | Shard | Partial

REPLICATE = Replicate()
PARTIAL = Partial()


def to_dtensor(placement: Placement) -> dt.Placement:
    """The same placement in DTensor's public types.

    Raises:
        TypeError: for a strided shard, which no state is ever left in.
    """
    match placement:
        case Replicate():
            return dt.Replicate()
        case Shard(dim, 1):
            return dt.Shard(dim)
        case Partial(op):
            return dt.Partial(op)
    raise TypeError(f"{placement} has no public DTensor counterpart")


def shard_length(size: int, ranks: int) -> int:
    """Elements of a dim of `size` that each of `ranks` holds, padding counted: ceil(size / ranks)."""
    return -(-size // ranks)


def shard_bounds(size: int, ranks: int, coordinate: int) -> tuple[int, int]:
    """The half-open range of a dim of `size` that `coordinate` owns, without padding (torch.chunk's rule)."""
    length = shard_length(size, ranks)
    return min(coordinate * length, size), min((coordinate + 1) * length, size)


def _on_dim(placements: Sequence[Placement], ranks: Sequence[int], dim: int) -> list[tuple[int, int]]:
    """(outer, ranks) of every axis that splits `dim`, slowest factor first."""
    return sorted((p.outer, n) for p, n in zip(placements, ranks, strict=True) if isinstance(p, Shard) and p.dim == dim)


def fits(shape: Sequence[int], placements: Sequence[Placement], ranks: Sequence[int]) -> bool:
    """Whether the axes that split one dim split factors of it that do not overlap and divide it."""
    for dim, size in enumerate(shape):
        taken = 1
        split = _on_dim(placements, ranks, dim)
        for outer, n in split:
            if outer % taken or (len(split) > 1 and size % (outer * n)):
                return False
            taken = outer * n
    return True


def local_outer(placements: Sequence[Placement], ranks: Sequence[int], axis: int) -> int:
    """The `outer` of the shard on `axis` as seen in a tensor that the other axes have split already."""
    own = placements[axis]
    assert isinstance(own, Shard)
    outer = own.outer
    for i, (other, n) in enumerate(zip(placements, ranks, strict=True)):
        if i != axis and isinstance(other, Shard) and other.dim == own.dim and other.outer < own.outer:
            outer //= n
    return outer


def local_shape(shape: Sequence[int], placements: Sequence[Placement], ranks: Sequence[int]) -> tuple[int, ...]:
    """What one rank holds of a tensor of global `shape`, padding counted."""
    found = list(shape)
    for placement, n in zip(placements, ranks, strict=True):
        if isinstance(placement, Shard):
            size = found[placement.dim]
            whole = size % n == 0
            found[placement.dim] = size // n if whole else placement.outer * shard_length(size // placement.outer, n)
    return tuple(found)
