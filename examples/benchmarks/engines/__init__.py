"""The engines: each makes the plain model of model.py parallel and trains it one step at a time.

An engine is one function::

    @engine("mine")                              # data=Data.ALL: step gets the whole global batch, not a slice
    def mine(model, config):                     # a plain nn.Module, the same on every rank
        def step(batch): ...                     # one optimizer step on (tokens, labels); this rank's mean loss or None
        return Built(step, lambda: {"params": [...], "grads": [...], "optim": [...]})

So that numbers can be compared: gradients are cleared at the start of a step, so that what lives between steps is
parameters, gradients and optimizer state, as in the ZeRO paper; gradients are means over the global batch; `adamw` is
used unless the framework has its own. To add one, write a module here and name it in MODULES, or run "module:name".
"""

from __future__ import annotations

import contextlib
import enum
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from harness import RunConfig
from model import Transformer
from torch import nn

MODULES = ("torch_native", "deepspeed_engine", "autoshard_engine")

Batch = tuple[torch.Tensor, torch.Tensor]
State = Callable[[], dict[str, Sequence[Any]]]


class Data(enum.Enum):
    """What a rank is handed of the global batch."""

    SLICE = "slice"
    ALL = "all"


@dataclass(frozen=True)
class Built:
    """An engine ready to run: one step, and what it holds between steps (None: not declared)."""

    step: Callable[[Batch], Any]
    state: State | None = None


Build = Callable[[Transformer, RunConfig], Built]
_B = TypeVar("_B", bound=Build)


@dataclass(frozen=True)
class Engine:
    """How to build one, and what it needs: a gloo process group before, heavy imports."""

    name: str
    build: Build
    data: Data
    needs_group: bool
    preload: Callable[[], None] | None


_registry: dict[str, Engine] = {}


def engine(
    name: str, *, data: Data = Data.SLICE, needs_group: bool = True, preload: Callable[[], None] | None = None
) -> Callable[[_B], _B]:
    """Register a function as the engine `name`."""

    def register(build: _B) -> _B:
        _registry[name] = Engine(name, build, data, needs_group, preload)
        return build

    return register


def load(name: str) -> Engine:
    """The engine of that name, or "module:name".

    Raises:
        KeyError: there is none; the message has those that there are.
    """
    if ":" in name:
        module, name = name.split(":")
        importlib.import_module(module)
    for module in MODULES:
        if name not in _registry:
            importlib.import_module(f"engines.{module}")
    if name not in _registry:
        raise KeyError(f"unknown engine {name}; known: {', '.join(sorted(_registry))}")
    return _registry[name]


def adamw_options(config: RunConfig) -> dict[str, Any]:
    flavour = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "forloop": {"foreach": False, "fused": False},
    }[config.optimizer]
    return {"lr": config.lr, "weight_decay": config.weight_decay, "betas": (0.9, 0.95), "eps": 1e-8, **flavour}


def adamw(parameters: Iterable[Any], config: RunConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **adamw_options(config))


def autocast(config: RunConfig) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if config.dtype == "bf16" else contextlib.nullcontext()


def torch_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """What any nn.Module and torch optimizer hold."""

    def state() -> dict[str, Sequence[Any]]:
        parameters = list(model.parameters())
        return {
            "params": parameters,
            "grads": [p.grad for p in parameters if p.grad is not None],
            "optim": [t for slots in optimizer.state.values() for t in slots.values()],
        }

    return state
