"""How one tensor lies on one mesh axis: replicated, sharded along a dim, or partial.

The words are DTensor's. They are types of our own because the passes also need a shard of a dim that was
merged from two (``Shard(dim, outer)``), which DTensor keeps private, and because a graph's tags must be
hashable and print well on every torch version. `to_dtensors` converts at the boundary: state is DTensors.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed.tensor as dt
from torch import Tensor

from autoshard import compat


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
Ranges = tuple[tuple[int, int], ...]  # half-open, of one dim

REPLICATE = Replicate()
PARTIAL = Partial()


def to_dtensors(placements: Sequence[Placement], ranks: Sequence[int]) -> list[dt.Placement]:
    """The same placements in DTensor's types, which split a dim axis by axis, the first axis first."""
    found: list[dt.Placement] = []
    for axis, placement in enumerate(placements):
        match placement:
            case Replicate():
                found.append(dt.Replicate())
            case Partial(op):
                found.append(dt.Partial(op))
            case Shard(dim):
                outer = local_outer(placements[: axis + 1], ranks[: axis + 1], axis)
                found.append(dt.Shard(dim) if outer == 1 else compat.strided_shard(dim, outer))
    return found


def shard_length(size: int, ranks: int) -> int:
    """Elements of a dim of `size` that each of `ranks` holds, padding counted: ceil(size / ranks)."""
    return -(-size // ranks)


def shard_bounds(size: int, ranks: int, coordinate: int) -> tuple[int, int]:
    """The half-open range of a dim of `size` that `coordinate` owns, without padding (torch.chunk's rule)."""
    length = shard_length(size, ranks)
    return min(coordinate * length, size), min((coordinate + 1) * length, size)


def local_outer(placements: Sequence[Placement], ranks: Sequence[int], axis: int) -> int:
    """The `outer` of `axis` within what is left of its dim where the other axes have split it."""
    own = placements[axis]
    assert isinstance(own, Shard)
    coarser = [
        n
        for i, (p, n) in enumerate(zip(placements, ranks, strict=True))
        if i != axis and isinstance(p, Shard) and p.dim == own.dim and p.outer < own.outer
    ]
    return own.outer // math.prod(coarser)


def splits_of(placements: Sequence[Placement], ranks: Sequence[int], dim: int) -> list[int]:
    """The axes that split `dim`, the coarsest first."""
    found = [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim and ranks[i] > 1]
    return sorted(found, key=lambda i: placements[i].outer)  # type: ignore[union-attr]


def fits(shape: Sequence[int], placements: Sequence[Placement], ranks: Sequence[int]) -> bool:
    """Whether the axes that split one dim split factors of it that do not overlap and divide it."""
    for dim, size in enumerate(shape):
        taken = 1
        axes = splits_of(placements, ranks, dim)
        for i in axes:
            outer = placements[i].outer  # type: ignore[union-attr]
            if outer % taken or (len(axes) > 1 and size % (outer * ranks[i])):
                return False
            taken = outer * ranks[i]
    return True


def local_shape(shape: Sequence[int], placements: Sequence[Placement], ranks: Sequence[int]) -> tuple[int, ...]:
    """What one rank holds of a tensor of global `shape`, padding counted."""
    found = list(shape)
    for dim, size in enumerate(shape):
        axes = splits_of(placements, ranks, dim)
        found[dim] = shard_length(size, math.prod(ranks[i] for i in axes))
    return tuple(found)


def owned(
    shape: Sequence[int], placements: Sequence[Placement], ranks: Sequence[int], coordinates: Sequence[int]
) -> list[Ranges]:
    """Per dim, the half-open ranges of the global tensor that a rank holds, in the order in which it holds them."""
    found = []
    for dim, size in enumerate(shape):
        axes = splits_of(placements, ranks, dim)
        splits = tuple((placements[i].outer, ranks[i], coordinates[i]) for i in axes)  # type: ignore[union-attr]
        found.append(_ranges(size, splits))
    return found


@functools.lru_cache(maxsize=4096)
def _ranges(size: int, splits: tuple[tuple[int, int, int], ...]) -> Ranges:
    """Ranges of a dim that is split by (outer, ranks, coordinate), the coarsest first."""
    found = [(0, size)]
    for outer, ranks, coordinate in splits:
        if len(splits) == 1 and outer == 1:
            return (shard_bounds(size, ranks, coordinate),)
        step, rest = divmod(size, outer * ranks)
        if rest:
            raise ValueError(f"a dim of {size} is not split evenly by outer {outer} x {ranks} ranks")
        starts = [(i * ranks + coordinate) * step for i in range(outer)]
        found = [(start, start + step) for start in starts if any(a <= start < b for a, b in found)]
    return tuple(found)


def take(whole: Tensor, ranges: Sequence[Ranges]) -> Tensor:
    """The part of a whole tensor that lies in `ranges` of each dim; a view where every dim has one."""
    for dim, found in enumerate(ranges):
        parts = [whole.narrow(dim, start, end - start) for start, end in found]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def put(whole: Tensor, ranges: Sequence[Ranges], part: Tensor) -> None:
    """The reverse of `take`: writes `part`, which may be padded, to where it lies in `whole`."""
    for there, here in blocks(ranges):
        narrowed(whole, there).copy_(narrowed(part, here))


def without_padding(local: Tensor, ranges: Sequence[Ranges]) -> Tensor:
    """The view of a padded local shard that is not padding."""
    for dim, found in enumerate(ranges):
        local = local.narrow(dim, 0, sum(end - start for start, end in found))
    return local


Block = tuple[tuple[int, int], ...]  # per dim, a half-open range


def blocks(ranges: Sequence[Ranges]) -> Iterator[tuple[Block, Block]]:
    """Where each contiguous block that a rank holds lies in the whole tensor, and where in the rank's own."""
    per_dim = []
    for found in ranges:
        ends = list(itertools.accumulate(end - start for start, end in found))
        per_dim.append([(r, (last - r[1] + r[0], last)) for r, last in zip(found, ends, strict=True)])
    for chosen in itertools.product(*per_dim):
        yield tuple(there for there, _ in chosen), tuple(here for _, here in chosen)


def narrowed(x: Tensor, block: Block) -> Tensor:
    """The view of `x` that `block` says."""
    for dim, (start, end) in enumerate(block):
        x = x.narrow(dim, start, end - start)
    return x


def neutral(op: str, dtype: torch.dtype) -> float | int | bool:
    """What changes nothing when it is joined with other values by `op`: "sum", "max" or "min"."""
    if dtype == torch.bool:
        return op == "min"
    if op == "sum":
        return 0
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max
