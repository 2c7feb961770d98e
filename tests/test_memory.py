"""The ZeRO paper's arithmetic (arXiv:1910.02054, figure 1 and table 1)."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.errors import PlanError
from autoshard.memory import RECIPES, Recipe, model_states


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_seven_and_a_half_billion_on_64_ranks_is_figure_1(stage: int, gigabytes: float) -> None:
    assert round(model_states(7_500_000_000, 64, stage).total / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("parameters", "ranks", "row"),
    [(7.5e9, 4, (52.5, 41.3, 30.0)), (128e9, 256, (520, 263.0, 8.0)), (1e12, 1024, (4011.7, 2013.7, 15.6))],
)
def test_other_sizes_are_table_1(parameters: float, ranks: int, row: tuple[float, ...]) -> None:
    found = [model_states(int(parameters), ranks, stage).total / 1e9 for stage in (1, 2, 3)]
    assert found == pytest.approx(row, rel=5e-3)


def test_each_stage_divides_one_state_more() -> None:
    found = [model_states(1000, 8, stage) for stage in range(4)]
    assert [(f.params, f.grads, f.optimizer) for f in found] == [
        (2000, 2000, 12000),
        (2000, 2000, 1500),
        (2000, 250, 1500),
        (250, 250, 1500),
    ]


def test_bytes_are_rounded_up_and_exact_beyond_float_precision() -> None:
    assert model_states(5, 2, 3, Recipe(1, 1, 0)).params == 3
    huge = 10**18 + 1
    assert model_states(huge, 1, 0).optimizer == 12 * huge


def test_every_named_recipe_and_ones_own_are_taken() -> None:
    assert model_states(10, 1, 0, "fp32_sgd").total == 80
    assert model_states(10, 1, 0, "fp32_momentum").total == 120
    assert model_states(10, 1, 0, "fp32_adam").total == 160
    assert model_states(10, 1, 0, Recipe(2, 4, 0.5)).total == 65
    assert all(model_states(10, 2, 3, name).total > 0 for name in RECIPES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 0), "parameters is -1"),
        ((1.5, 1, 0), "parameters is 1.5"),
        ((1, 0, 0), "ranks is 0; valid: an integer >= 1"),
        ((1, 1, 4), "stage is 4; valid: 0, 1, 2 or 3"),
        ((1, 1, True), "stage is True"),
        ((1, 1, 0, "adam"), "recipe is 'adam'; valid: a Recipe or one of .*mixed_adam"),
        ((1, 1, 0, []), "recipe is \\[\\]"),
    ],
)
def test_a_wrong_argument_is_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        model_states(*arguments)


def test_a_recipe_refuses_negative_bytes() -> None:
    with pytest.raises(PlanError, match=r"Recipe\.grad_bytes is -2"):
        Recipe(2, -2, 12)
