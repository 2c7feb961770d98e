"""What a loss may return, and the one form that the rest of the package sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import CaptureError

_METRICS = {"loss", "grad_norm", "lr", "samples", "tokens"}


@dataclass(frozen=True)
class Mean:
    """A mean kept as its two parts, so that it stays exact over micro-batches and ranks of unequal count.

    Totals and counts are each summed over micro-batches and ranks before the division.

    Args:
        total: 0-dim tensor, the sum of the terms.
        count: how many terms; a 0-dim tensor of any dtype or a number. It is detached.
    """

    total: Tensor
    count: Tensor | float

    @property
    def value(self) -> Tensor:
        """total / count, 0-dim: the mean on one device."""
        return self.total / self.count

    def __add__(self, other: Mean | Terms | Tensor) -> Terms:
        return Terms((self,)) + other

    __radd__ = __add__


@dataclass(frozen=True)
class Terms:
    """A sum of means, each with a count of its own."""

    means: tuple[Mean, ...]

    @property
    def value(self) -> Tensor:
        """The sum of the means, 0-dim."""
        return torch.stack([mean.value for mean in self.means]).sum()

    def __add__(self, other: Mean | Terms | Tensor) -> Terms:
        if isinstance(other, Terms):
            return Terms(self.means + other.means)
        return Terms((*self.means, other if isinstance(other, Mean) else Mean(other, 1)))

    __radd__ = __add__


@dataclass(frozen=True)
class Objective:
    """A loss in its one form: a sum of means, and named extras that are means too."""

    terms: tuple[Mean, ...]
    extras: Mapping[str, Mean]


def as_objective(returned: Any) -> Objective:
    """What a loss, or a model that returns its loss, returned.

    Raises:
        CaptureError: it is not a 0-dim tensor, a `Mean`, a sum of those, an object with ``.loss``, or a tuple
            whose first item is one; or an extra is not 0-dim.
    """
    extras: dict[str, Mean] = {}
    value = returned
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping) and _is_loss(value[0]):
        value, named = value
        taken = sorted(_METRICS & named.keys())
        if taken:
            raise CaptureError(f"extra {taken[0]!r} has the name of a metric that every step returns; choose another")
        extras = {name: _as_mean(f"extra {name!r}", extra) for name, extra in named.items()}
    elif not _is_loss(value) and getattr(value, "loss", None) is not None:
        value = value.loss
    elif isinstance(value, Sequence) and value and not isinstance(value, (str, bytes)):
        value = value[0]
    means = value.means if isinstance(value, Terms) else (value,)
    return Objective(tuple(_as_mean("the loss", mean) for mean in means), extras)


def _is_loss(value: Any) -> bool:
    return isinstance(value, (Tensor, Mean, Terms))


def _as_mean(what: str, value: Any) -> Mean:
    mean = value if isinstance(value, Mean) else Mean(value, 1)
    if not isinstance(mean.total, Tensor):
        raise CaptureError(
            f"{what} is of type {type(mean.total).__name__}; valid: a 0-dim tensor, autoshard.Mean(total, count), "
            "a model output with .loss, or a tuple whose first item is the loss (pass loss= to compute one)"
        )
    for part, tensor in (("", mean.total), (" count", mean.count)):
        if isinstance(tensor, Tensor) and tensor.dim() != 0:
            raise CaptureError(
                f"{what}{part} has shape {tuple(tensor.shape)}; valid: a scalar of shape (). "
                "Reduce it (.mean(), .sum()) or return autoshard.Mean(total, count)"
            )
    count = mean.count.detach() if isinstance(mean.count, Tensor) else mean.count
    return Mean(mean.total, count)
