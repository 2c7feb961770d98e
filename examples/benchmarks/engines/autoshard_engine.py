"""autoshard at ZeRO stages 0 to 3, and with every rank on the tensor axis.

Options: {"backend": "inductor" | "debug", "persistence_threshold": elements}.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from harness import RunConfig
from model import Transformer, token_loss

from engines import Batch, Build, Built, Data, engine


def preload() -> None:
    import autoshard  # noqa: F401


def built(model: Transformer, config: RunConfig, axis: str, stage: int = 0) -> Built:
    """The model with every rank on one mesh axis."""
    import autoshard

    plan = autoshard.Plan(
        mesh={"data": 1, axis: config.ranks},
        zero=autoshard.Zero(stage=stage, persistence_threshold=config.opts.get("persistence_threshold", 0)),
        precision="bf16" if config.dtype == "bf16" else "model",
        backend=config.opts.get("backend", "inductor"),
        device="cpu",
    )
    trained = autoshard.parallelize(
        model,
        plan,
        loss=lambda model, batch: token_loss(model(batch[0]), batch[1]),
        optimizer=functools.partial(
            torch.optim.AdamW, lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.95), eps=1e-8
        ),
    )
    state: Any = None

    def step(batch: Batch) -> torch.Tensor:
        nonlocal state
        if state is None:  # compiling counts as the first step, as for the other engines
            state = trained.init(batch)
        state, metrics = trained(state, batch)
        return metrics["loss"]

    def held() -> dict[str, Sequence[Any]]:
        """No gradients: they do not outlive a step."""
        slots = [t for slots in state.optimizer.values() for t in slots.values()] if state is not None else []
        return {"params": list(state.params.values()) if state is not None else [], "grads": [], "optim": slots}

    return Built(step, held)


def _at(stage: int) -> Build:
    return lambda model, config: built(model, config, "data", stage)


for _stage in range(4):
    engine(f"autoshard_zero{_stage}", preload=preload)(_at(_stage))


@engine("autoshard_tp", data=Data.ALL, preload=preload)
def tp(model: Transformer, config: RunConfig) -> Built:
    return built(model, config, "tensor")
