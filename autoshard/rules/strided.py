"""`as_strided` and `as_strided_scatter` written by elements instead of places in memory.

A shard, and what a collective returns, lie in memory otherwise than the tensor of the global program does, so
places in memory mean nothing on a rank. Where the call stays within the elements of its input and these fill a
block of memory, it is a gather of elements, with the dims that both have in front left apart:

    as_strided(x: [8, 5], [8, 3], [5, 1], 1)        ->  index_select(x, 1, [1, 2, 3])
    as_strided(t(x): [5, 8], [8, 5], [5, 1])        ->  t(t(x))

Any other call is refused while the model is traced, when its source line is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.errors import CaptureError

aten = torch.ops.aten
READS = (aten.as_strided.default, aten.as_strided_copy.default)
WRITES = (aten.as_strided_scatter.default,)


class LayoutError(CaptureError):
    """A call depends on how its input lies in memory."""


def _order(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Dims from the slowest to the fastest in memory."""
    return sorted(range(len(size)), key=lambda d: -stride[d])


def _fills(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill a block of memory, each place once."""
    expected = 1
    for d in reversed(_order(size, stride)):
        if size[d] != 1 and stride[d] != expected:
            return False
        expected *= size[d]
    return True


def _start(layout: Tensor, offset: int | None) -> int:
    """Where a view starts, counted from the first element of the tensor that it is of."""
    return 0 if offset is None else offset - int(layout.storage_offset())


def check(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> None:
    """Refuse a strided view or write that cannot be said by the elements of `x`.

    Raises:
        LayoutError: `x` does not fill a block of memory, or the view leaves it.
    """
    if 0 in size:
        return
    start = _start(x, offset)
    last = start + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if _fills(x.shape, x.stride()) and start >= 0 and last < x.numel():
        return
    raise LayoutError(
        f"as_strided to size {tuple(size)}, stride {tuple(stride)}, offset {offset} reads memory by place, of a tensor "
        f"of shape {tuple(x.shape)}, stride {tuple(x.stride())}, offset {x.storage_offset()}; valid: a view that stays "
        "within the elements of a tensor without gaps. Call .contiguous() on the tensor first and count from its "
        "start, or use slicing, expand or unfold"
    )


def by_elements(node: fx.Node) -> Callable[..., Any] | None:
    """What computes the same as an `as_strided` or `as_strided_scatter` node, whatever its input's layout is then."""
    if node.target not in (*READS, *WRITES):
        return None
    source: Any = node.args[0]
    layout: Tensor = source.meta["val"]
    if node.target in WRITES:
        return lambda x, given, size, stride, offset=None: _write(layout, x, given, size, stride, offset)
    return lambda x, size, stride, offset=None: _read(layout, x, size, stride, offset)


def _permuted(x: Tensor, order: list[int]) -> Tensor:
    return x if order == sorted(order) else x.permute(order)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _kept(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], start: int) -> int:
    """How many leading dims a contiguous tensor of `shape` and its view have in common."""
    kept = 0
    for length, wanted, step in zip(shape, size, stride, strict=False):
        if length != wanted or step != math.prod(shape[kept + 1 :]):
            break
        kept += 1
    while kept and start + sum((n - 1) * s for n, s in zip(size[kept:], stride[kept:], strict=True)) >= math.prod(
        shape[kept:]
    ):
        kept -= 1
    return kept


def _places(size: Sequence[int], stride: Sequence[int], start: int, device: torch.device) -> Tensor:
    """Where the elements of a view lie, flattened: int64 (prod(size),)."""
    places = torch.full((1,) * len(size), start, dtype=torch.int64, device=device)
    for d, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [length if other == d else 1 for other in range(len(size))]
        places = places + (torch.arange(length, device=device) * step).view(shape)
    return places.reshape(-1)


def _read(layout: Tensor, x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    if 0 in size:
        return torch.full(tuple(size), 0, dtype=x.dtype, device=x.device)
    check(layout, size, stride, offset)
    lying = _permuted(x, _order(x.shape, layout.stride()))
    start = _start(layout, offset)
    if math.prod(size) == x.numel() and _fills(size, stride):
        order = _order(size, stride)
        return _permuted(lying.reshape([size[d] for d in order]), _inverse(order))
    kept = _kept(lying.shape, size, stride, start)
    rows = lying.reshape(*lying.shape[:kept], -1)
    return rows.index_select(kept, _places(size[kept:], stride[kept:], start, x.device)).reshape(tuple(size))


def _write(
    layout: Tensor, x: Tensor, given: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> Tensor:
    if 0 in size:
        return x.clone()
    check(layout, size, stride, offset)
    given = given.to(x.dtype).expand(tuple(size))
    order = _order(x.shape, layout.stride())
    lying = _permuted(x, order)
    start = _start(layout, offset)
    if math.prod(size) == x.numel() and _fills(size, stride):
        written = _permuted(given, _order(size, stride)).reshape(lying.shape)
    else:
        kept = _kept(lying.shape, size, stride, start)
        rows = lying.reshape(*lying.shape[:kept], -1)
        places = _places(size[kept:], stride[kept:], start, x.device)
        written = rows.index_copy(kept, places, given.reshape(*rows.shape[:kept], -1)).reshape(lying.shape)
    return _permuted(written, _inverse(order))
