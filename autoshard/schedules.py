"""Learning-rate schedules: `schedule(n)` is the factor on the base learning rate for update n + 1.

`n` counts the updates done so far. Given an int the factor is a float; given a 0-dim tensor it is a 0-dim
float64 tensor made by torch operations only, so that the factor is part of the compiled update. Each schedule
is a frozen dataclass: hashable, printable, checked when made.

A warm-up of `warmup` updates rises through 1/warmup, 2/warmup, ... to 1, so no update is wasted at factor 0.
A decay that ends at `total` would reach `final` at update total + 1, and stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.errors import PlanError

N = TypeVar("N", float, Tensor)
Schedule = Callable[[int], float] | Callable[[Tensor], Tensor]


def _number(n: float | Tensor) -> float | Tensor:
    return n.to(torch.float64) if isinstance(n, Tensor) else float(n)


def _where(condition: bool | Tensor, yes: float | Tensor, no: float | Tensor) -> float | Tensor:
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else (yes if condition else no)


def _clamp(x: float | Tensor) -> float | Tensor:
    return x.clamp(0.0, 1.0) if isinstance(x, Tensor) else min(max(x, 0.0), 1.0)


def _cos(x: float | Tensor) -> float | Tensor:
    return x.cos() if isinstance(x, Tensor) else math.cos(x)


def _floor(x: float | Tensor) -> float | Tensor:
    return x.floor() if isinstance(x, Tensor) else float(math.floor(x))


def _power(base: float, x: float | Tensor) -> float | Tensor:
    return torch.pow(base, x) if isinstance(x, Tensor) else base**x


def _warmed(n: float | Tensor, warmup: int, after: float | Tensor) -> float | Tensor:
    return _where(n < warmup, (n + 1) / max(warmup, 1), after)


def _progress(n: float | Tensor, start: int, end: int) -> float | Tensor:
    return _clamp((n - start) / (end - start))


class _Checked:
    """Counts are in updates, `final` and `factor` are factors on the base learning rate."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            kind = type(self).__name__
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if item.name in ("final", "factor"):
                if not number or not 0 <= value <= 1:
                    raise PlanError(f"{kind}.{item.name} is {value!r}; valid: a number from 0 to 1")
                continue
            least = 1 if item.name in ("total", "every", "decay") or kind == "InverseSqrt" else 0
            if not number or not isinstance(value, int) or value < least:
                raise PlanError(f"{kind}.{item.name} is {value!r}; valid: an integer >= {least}, in updates")
        if hasattr(self, "total") and hasattr(self, "warmup") and self.total <= self.warmup:
            raise PlanError(
                f"{type(self).__name__}.total is {self.total} but warmup is {self.warmup}; valid: total > warmup"
            )


@dataclass(frozen=True)
class Constant(_Checked):
    """1 for every update."""

    def __call__(self, n: N) -> N:
        return _number(n) * 0 + 1  # type: ignore[return-value]


@dataclass(frozen=True)
class WarmupCosine(_Checked):
    """Linear warm-up, then half a cosine from 1 to `final` (arXiv:1608.03983 equation 5, without restarts)."""

    warmup: int
    total: int
    final: float = 0.0

    def __call__(self, n: N) -> N:
        x = _number(n)
        fall = (1 + _cos(math.pi * _progress(x, self.warmup, self.total))) / 2
        return _warmed(x, self.warmup, self.final + (1 - self.final) * fall)  # type: ignore[return-value]


@dataclass(frozen=True)
class WarmupLinear(_Checked):
    """Linear warm-up, then a line from 1 to `final`."""

    warmup: int
    total: int
    final: float = 0.0

    def __call__(self, n: N) -> N:
        x = _number(n)
        return _warmed(x, self.warmup, 1 - (1 - self.final) * _progress(x, self.warmup, self.total))  # type: ignore[return-value]


@dataclass(frozen=True)
class InverseSqrt(_Checked):
    """Linear warm-up, then sqrt(warmup / (n + 1)) (arXiv:1706.03762 equation 3, scaled to a peak of 1)."""

    warmup: int

    def __call__(self, n: N) -> N:
        x = _number(n)
        return _warmed(x, self.warmup, (self.warmup / (x + 1)) ** 0.5)  # type: ignore[return-value]


@dataclass(frozen=True)
class WarmupStableDecay(_Checked):
    """Linear warm-up, `stable` updates at 1, then a line to `final` over `decay` updates (arXiv:2404.06395)."""

    warmup: int
    stable: int
    decay: int
    final: float = 0.0

    def __call__(self, n: N) -> N:
        x, start = _number(n), self.warmup + self.stable
        return _warmed(x, self.warmup, 1 - (1 - self.final) * _progress(x, start, start + self.decay))  # type: ignore[return-value]


@dataclass(frozen=True)
class StepDecay(_Checked):
    """Multiplied by `factor` after every `every` updates."""

    every: int
    factor: float = 0.1

    def __call__(self, n: N) -> N:
        return _power(self.factor, _floor(_number(n) / self.every))  # type: ignore[return-value]


constant = Constant
warmup_cosine = WarmupCosine
warmup_linear = WarmupLinear
inverse_sqrt = InverseSqrt
wsd = WarmupStableDecay
step_decay = StepDecay


def trace_check(schedule: Schedule) -> None:
    """Checks that `schedule` can be part of the compiled update.

    Args:
        schedule: called with a 0-dim int64 tensor; returns a 0-dim tensor, or a number if it is the same always.

    Raises:
        PlanError: it reads the value of the tensor in Python, or returns something else.
    """
    advice = (
        "schedule(n) gets the count of updates so far as a 0-dim tensor and is traced once: write conditions as "
        "torch.where(n < 100, a, b), bounds as torch.clamp, and use torch.cos or n ** 0.5 instead of math functions; "
        "or take one of autoshard.schedules"
    )
    found: list[object] = []

    def traced(n: Tensor) -> Tensor:
        found.append(schedule(n))  # type: ignore[arg-type]
        return n

    name = getattr(schedule, "__qualname__", None) or repr(schedule)
    try:
        make_fx(traced, tracing_mode="fake")(torch.zeros((), dtype=torch.int64))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise PlanError(f"schedule {name} cannot be traced ({type(error).__name__}: {reason}); {advice}") from error
    factor = found[0]
    if isinstance(factor, Tensor) and factor.dim() == 0:
        return
    if isinstance(factor, (int, float)) and not isinstance(factor, bool):
        return
    shape = f"a tensor of shape {tuple(factor.shape)}" if isinstance(factor, Tensor) else repr(factor)
    raise PlanError(f"schedule {name} returned {shape}; valid: a 0-dim tensor; {advice}")
