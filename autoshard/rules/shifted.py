"""Index ops on a rank that holds a range of the places that are counted (the dim with label V).

Reads of places that other ranks hold give 0, so that the results of all ranks sum to the whole; writes to them go
to a row past the end, which is then dropped. Each function is a rule's `shifted`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def _replaced(args: Args, changes: Mapping[int, Any]) -> Args:
    return tuple(changes.get(i, arg) for i, arg in enumerate(args))


def _here(places: Tensor, offset: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The places counted from this rank's first, and which of them it holds."""
    local = places - offset if places.dim() else places - offset.squeeze(0)
    return local, (local >= 0) & (local < length)


def _row(mask: Tensor, dim: int, rank: int) -> Tensor:
    """A mask of one dim as one of `rank` dims."""
    return mask.view([-1 if d == dim else 1 for d in range(rank)])


def _only(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def embedding(target: Any, args: Args, kwargs: Kwargs, offset: Tensor, length: int, size: int) -> Tensor:
    weight, words, *_ = args  # the rest is of the gradient only
    local, mine = _here(words, offset, length)
    return _only(target(weight, torch.where(mine, local, 0)), mine.unsqueeze(-1))


def embedding_gradient(target: Any, args: Args, kwargs: Kwargs, offset: Tensor, length: int, size: int) -> Tensor:
    gradient, words, _, padding, scaled = args
    local, mine = _here(words, offset, length)
    # One word more, whose gradient the kernel leaves out as that of padding.
    kept = torch.where(mine & (words != padding), local, length)
    return target(gradient, kept, length + 1, length, scaled).narrow(0, 0, length)


def gather(target: Any, args: Args, kwargs: Kwargs, offset: Tensor, length: int, size: int) -> Tensor:
    local, mine = _here(args[2], offset, length)
    return _only(target(*_replaced(args, {2: torch.where(mine, local, 0)}), **kwargs), mine)


def select(target: Any, args: Args, kwargs: Kwargs, offset: Tensor, length: int, size: int) -> Tensor:
    x, dim, places = args
    local, mine = _here(places, offset, length)
    found = target(x, dim, torch.where(mine, local, 0), **kwargs)
    return _only(found, _row(mine, dim % x.dim(), x.dim()))


def scatter(target: Any, args: Args, kwargs: Kwargs, offset: Tensor, length: int, size: int) -> Tensor:
    """`scatter` of a value or a tensor."""
    x, dim, places, given = args[:4]
    dim %= x.dim()
    if any(n != m for d, (n, m) in enumerate(zip(places.shape, x.shape, strict=True)) if d != dim):
        return write(target, args, kwargs, offset, length, size)
    if places.shape[dim] == 1 and not kwargs:  # one place in each row: no index op is needed
        here = _row(torch.arange(length, device=x.device), dim, x.dim()) == places - offset
        value = given if not isinstance(given, Tensor) else given.narrow(dim, 0, 1)
        if isinstance(value, Tensor):
            value = value[tuple(slice(n) for n in places.shape)]
        else:
            value = torch.full((), value, dtype=x.dtype, device=x.device)
        return torch.where(here, value, x)
    return write(target, args, kwargs, offset, length, size)


def write(target: Any, args: Args, kwargs: Kwargs, offset: Tensor, length: int, size: int) -> Tensor:
    """What writes into `args[0]` along dim `args[1]` at places `args[2]`."""
    x, dim, places = args[:3]
    dim %= x.dim()
    local, mine = _here(places, offset, length)
    longer = torch.cat([x, x.narrow(dim, 0, 1)], dim)
    written = target(*_replaced(args, {0: longer, 2: torch.where(mine, local, length)}), **kwargs)
    return written.narrow(dim, 0, length)


def _one(indices: Any) -> tuple[int, Tensor]:
    return next((d, index) for d, index in enumerate(indices) if index is not None)


def _put(indices: Any, dim: int, index: Tensor) -> list[Tensor | None]:
    return [index if d == dim else None for d in range(len(indices))]


def _counted(index: Tensor, size: int) -> Tensor:
    """Places counted from the start where they were counted from the end."""
    return torch.where(index < 0, index + size, index)


def index(target: Any, args: Args, kwargs: Kwargs, offset: Tensor, length: int, size: int) -> Tensor:
    """x[..., i, :] with one index tensor."""
    x, indices = args
    dim, places = _one(indices)
    local, mine = _here(_counted(places, size), offset, length)
    found = target(x, _put(indices, dim, torch.where(mine, local, 0)), **kwargs)
    return _only(found, mine.view((*mine.shape, *[1] * (x.dim() - dim - 1))))


def index_put(target: Any, args: Args, kwargs: Kwargs, offset: Tensor, length: int, size: int) -> Tensor:
    """x[..., i, :] = values with one index tensor."""
    x, indices, *rest = args
    dim, places = _one(indices)
    local, mine = _here(_counted(places, size), offset, length)
    longer = torch.cat([x, x.narrow(dim, 0, 1)], dim)
    written = target(longer, _put(indices, dim, torch.where(mine, local, length)), *rest, **kwargs)
    return written.narrow(dim, 0, length)
