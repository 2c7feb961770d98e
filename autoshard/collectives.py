"""Placement changes on local tensors, as plain functions that trace to functional collectives.

All shards of one tensor are padded to the same local shape, so that every rank runs one program. Rank
coordinates are tensors, groups are named by mesh and axis: the traced graph is the same on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.placement import Partial, Placement, Replicate, Shard, shard_length

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Axis:
    """One mesh axis as a graph sees it.

    Args:
        name: the axis.
        ranks: its size.
        group: the name under which its process group is registered, the same on every rank.
        emulate_reduce_scatter: exchange and sum instead of the backend's reduce-scatter (gloo's is a clone and
            an all-reduce, with twice the bytes).
    """

    name: str
    ranks: int
    group: str
    emulate_reduce_scatter: bool = False


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    if x.is_complex():  # backends know real numbers only
        return torch.view_as_complex(all_reduce(torch.view_as_real(x), axis, op))
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, axis.group))


def all_gather(x: Tensor, axis: Axis, shard: Shard, size: int) -> Tensor:
    """Shards of a dim of global `size` to the whole dim on every rank."""
    if x.is_complex():
        return torch.view_as_complex(all_gather(torch.view_as_real(x), axis, shard, size))
    dim, outer, n = shard.dim, shard.outer, axis.ranks
    if x.dim() == 1 or (dim == 0 and outer == 1):
        whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), n, axis.group))
    else:
        parts = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), n, axis.group))
        parts = parts.view(n, *x.shape).unflatten(dim + 1, (outer, -1))
        whole = parts.movedim(0, dim + 1).flatten(dim, dim + 2)
    if outer > 1 and x.dim() == 1:
        whole = whole.view(n, outer, -1).movedim(0, 1).flatten()
    return whole if whole.shape[dim] == size else whole.narrow(dim, 0, size).contiguous()


def _parts(x: Tensor, axis: Axis, shard: Shard) -> Tensor:
    """(ranks, *local shape): the padded shards of a whole tensor, stacked."""
    dim, n = shard.dim, axis.ranks
    size = x.shape[dim] // shard.outer
    padding = shard_length(size, n) * n - size
    if padding:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, padding])
    x = x.unflatten(dim, (shard.outer, n, -1))
    return x.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def reduce_scatter(x: Tensor, axis: Axis, shard: Shard) -> Tensor:
    """Partial sums to the shard of their sum that this rank holds."""
    if x.is_complex():
        return torch.view_as_complex(reduce_scatter(torch.view_as_real(x), axis, shard))
    parts = _parts(x, axis, shard).contiguous()
    n = axis.ranks
    if axis.emulate_reduce_scatter:
        rows = parts.view(n, -1)
        sent = _c10d.wait_tensor(_c10d.all_to_all_single(rows, [1] * n, [1] * n, axis.group))
        return sent.sum(0).view(parts.shape[1:])
    flat = parts.flatten(0, 1) if parts.dim() > 1 else parts
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(flat, "sum", n, axis.group))


def take_shard(x: Tensor, axis: Axis, shard: Shard, coordinate: Tensor) -> Tensor:
    """This rank's padded shard of a whole tensor; `coordinate` is int64 of shape (1,)."""
    return _parts(x, axis, shard).index_select(0, coordinate).squeeze(0)


def redistribute(
    x: Tensor, axis: Axis, source: Placement, target: Placement, size: tuple[int, ...], coordinate: Tensor
) -> Tensor:
    """A local tensor of global shape `size` from one placement to another on `axis`."""
    if source == target:
        return x
    match source, target:
        case Partial(op), Replicate():
            return all_reduce(x, axis, op)
        case Partial("sum"), Shard():
            return reduce_scatter(x, axis, target)
        case Shard(), Replicate():
            return all_gather(x, axis, source, size[source.dim])
        case Replicate(), Shard():
            return take_shard(x, axis, target, coordinate)
        case Replicate(), Partial("sum"):
            return torch.where(coordinate.reshape(()) == 0, x, torch.zeros((), dtype=x.dtype, device=x.device))
        case _, Shard():
            whole = redistribute(x, axis, source, Replicate(), size, coordinate)
            return take_shard(whole, axis, target, coordinate)
    raise NotImplementedError(f"no collective changes {source} to {target}")


def cost(source: Placement, target: Placement, nbytes: int, ranks: int) -> float:
    """Bytes that each rank sends for a placement change of a tensor of `nbytes` global bytes."""
    if source == target or ranks == 1:
        return 0.0
    share = nbytes * (ranks - 1) / ranks
    match source, target:
        case Partial(), Replicate():
            return 2 * share
        case Partial("sum"), Shard():
            return share
        case Shard(), Replicate():
            return share
        case Replicate(), Shard() | Partial("sum"):
            return 0.0
        case Shard(), Shard():
            return share
    return math.inf
