"""Bytes of parameters, gradients and optimizer state that each rank holds: the arithmetic of the ZeRO paper.

arXiv:1910.02054, sections 3.1 and 5 and figure 1. Activations, gathered parameters and buffers in flight are
not model states and not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from autoshard.errors import PlanError


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter (the element, not the tensor) of each model state.

    Args:
        param_bytes: of the parameters that forward and backward compute with.
        grad_bytes: of the gradients.
        optimizer_bytes: of the optimizer state, an fp32 master copy counted where there is one.
    """

    param_bytes: float
    grad_bytes: float
    optimizer_bytes: float

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise PlanError(f"Recipe.{item.name} is {value!r}; valid: a number >= 0, in bytes per parameter")


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "mixed_adam": Recipe(2, 2, 12),  # the paper's: fp32 master, momentum and variance
        "mixed_momentum": Recipe(2, 2, 8),
        "mixed_sgd": Recipe(2, 2, 4),
        "fp32_adam": Recipe(4, 4, 8),
        "fp32_momentum": Recipe(4, 4, 4),
        "fp32_sgd": Recipe(4, 4, 0),
        "fp64_adam": Recipe(8, 8, 16),
    }
)


@dataclass(frozen=True)
class ModelStates:
    """Bytes per rank, integers, each rounded up."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        """The three together, in bytes per rank."""
        return self.params + self.grads + self.optimizer

    def __str__(self) -> str:
        parts = (("params", self.params), ("grads", self.grads), ("optimizer", self.optimizer), ("total", self.total))
        return ", ".join(f"{name} {value / 1e9:.2f} GB" for name, value in parts)


def model_states(parameters: int, ranks: int, stage: int, recipe: str | Recipe = "mixed_adam") -> ModelStates:
    """What one rank holds at rest, padding of uneven shards not counted.

    Stage 1 divides the optimizer state by `ranks`, stage 2 also the gradients, stage 3 also the parameters.
    7.5e9 parameters on 64 ranks, mixed Adam: 120, 31.4, 16.6 and 1.9 GB (GB = 1e9 bytes) at stages 0 to 3.

    Args:
        parameters: elements in the model, >= 0.
        ranks: size of the data axis, >= 1.
        stage: ZeRO stage, 0 to 3.
        recipe: a name in `RECIPES`, or a `Recipe`.

    Raises:
        PlanError: an argument is out of its range; the message names it.
    """
    known = isinstance(recipe, Recipe) or (isinstance(recipe, str) and recipe in RECIPES)
    for name, value, ok, valid in (
        ("parameters", parameters, _is_int(parameters) and parameters >= 0, "an integer >= 0, in elements"),
        ("ranks", ranks, _is_int(ranks) and ranks >= 1, "an integer >= 1"),
        ("stage", stage, _is_int(stage) and 0 <= stage <= 3, "0, 1, 2 or 3"),
        ("recipe", recipe, known, f"a Recipe or one of {sorted(RECIPES)}"),
    ):
        if not ok:
            raise PlanError(f"model_states: {name} is {value!r}; valid: {valid}")
    per = recipe if isinstance(recipe, Recipe) else RECIPES[recipe]

    def held(per_parameter: float, shard_from: int) -> int:
        numerator, denominator = float(per_parameter).as_integer_ratio()
        return -(-parameters * numerator // (denominator * (ranks if stage >= shard_from else 1)))

    return ModelStates(held(per.param_bytes, 3), held(per.grad_bytes, 2), held(per.optimizer_bytes, 1))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
