"""Every model of the zoo, under every ZeRO stage, on real ranks, computes what one device computes.

By default a pairwise part of the matrix runs: each model at stage 3 and at one other, each stage with many models,
several under Inductor. AUTOSHARD_FULL=1 runs all of it; `python -m tests.matrix` writes the table.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.multirank import zoo_run
from tests.multirank.runner import run_ranks
from tests.multirank.zoo_bounds import EXCEPTIONS, INEXACT, TENSOR_FAILS, cost_complaints
from tests.multirank.zoo_run import Combination, Measured
from tests.zoo import CASES, ZOO

STAGES = (0, 1, 2, 3)
# One of each kind, for the compiled backend: compiling costs a minute where interpreting costs seconds.
COMPILED = ("llama", "batch_norm_mlp", "odd_shapes", "unet")


def combinations() -> list[Combination]:
    """The combinations of this run: all with AUTOSHARD_FULL=1, else a pairwise part."""
    if os.environ.get("AUTOSHARD_FULL") == "1":
        debug = [Combination(case.name, stage) for case in ZOO for stage in STAGES]
        return debug + [Combination(name, stage, "inductor") for name in CASES for stage in (0, 3)]
    pairs = []
    for index, case in enumerate(ZOO):
        pairs += [Combination(case.name, index % 3), Combination(case.name, 3)]
    return pairs + [Combination(name, (2 * index + 1) % 4, "inductor") for index, name in enumerate(COMPILED)]


# Of the tensor axis: each model once, four ranks where that is cheap. Without a data axis all stages are one program.
TENSOR_STAGES = (0, 1, 3)
ON_FOUR_RANKS: dict[str, tuple[int, int, int]] = {  # data, tensor, stage
    "mlp": (2, 2, 0), "unused_parameter": (2, 2, 1), "frozen_parameter": (2, 2, 3), "odd_shapes": (2, 2, 3),
    "dict_io": (2, 2, 1), "embedding_bag": (2, 2, 0), "llama": (2, 2, 3), "in_place": (1, 4, 3),
    "running_statistics": (1, 4, 0), "topk": (1, 4, 1), "gpt": (1, 4, 3),
}  # fmt: skip
COMPILED_ON_TENSOR = ("mlp", "frozen_parameter", "llama")


def tensor_combinations() -> list[Combination]:
    """As `combinations`, on meshes with a tensor axis."""
    # Without its casts to float32, as all run there, hf_mamba is hf_mamba_in_double.
    names = [case.name for case in ZOO if case.name != "hf_mamba_in_double"]
    compiled = [Combination(name, 3, "inductor", data=1, tensor=2) for name in COMPILED_ON_TENSOR]
    if os.environ.get("AUTOSHARD_FULL") == "1":
        places = [(1, 2, 3), (1, 4, 3), *((2, 2, stage) for stage in TENSOR_STAGES)]
        return [Combination(name, s, data=d, tensor=t) for name in names for d, t, s in places] + compiled
    chosen = [(name, ON_FOUR_RANKS.get(name, (1, 2, TENSOR_STAGES[i % 3]))) for i, name in enumerate(names)]
    return [Combination(name, s, data=d, tensor=t, steps=2) for name, (d, t, s) in chosen] + compiled


_done: dict[Combination, list[Measured]] = {}


def measured(combination: Combination) -> list[Measured]:
    """Runs a combination once for all tests that ask."""
    if combination not in _done:
        _done[combination] = run_ranks(zoo_run.run_case, combination.ranks, combination, timeout=240.0)
    return _done[combination]


def _case(combination: Combination) -> Any:
    reason = TENSOR_FAILS.get(combination.name) if combination.tensor > 1 else INEXACT.get(combination.name)
    marks = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)] if reason else []
    return pytest.param(combination, id=str(combination), marks=marks)


def _by_model() -> list[Combination]:
    """All combinations, those of one model together: its ranks trace it once."""
    order = {name: i for i, name in enumerate(CASES)}
    return sorted([*combinations(), *tensor_combinations()], key=lambda c: (order[c.name], c.ranks))


@pytest.mark.parametrize("combination", list(map(_case, _by_model())))
def test_a_model_under_a_stage_computes_what_one_device_computes_and_costs_its_share(combination: Combination) -> None:
    ranks = measured(combination)
    errors = zoo_run.compare(combination, ranks)
    complaints = errors.complaints(combination.case)
    complaints += cost_complaints(combination, ranks)
    assert not complaints, "\n".join([*complaints, str(ranks[0].cost)])


def test_the_default_part_covers_each_model_twice_with_stage_3_and_each_stage_with_many_models() -> None:
    if os.environ.get("AUTOSHARD_FULL") == "1":
        pytest.skip("the full matrix covers everything")
    stages = {case.name: {c.stage for c in combinations() if c.name == case.name} for case in ZOO}
    assert all(3 in found and len(found) >= 2 for found in stages.values())
    for stage in STAGES:
        assert sum(stage in found for found in stages.values()) >= len(ZOO) // 4


def test_the_default_part_has_each_model_once_on_a_tensor_axis_and_each_mesh_and_stage_several_times() -> None:
    if os.environ.get("AUTOSHARD_FULL") == "1":
        pytest.skip("the full matrix covers everything")
    chosen = [c for c in tensor_combinations() if c.backend == "debug"]
    assert len({c.name for c in chosen}) == len(chosen) == len(ZOO) - 1
    for mesh in ("1x2", "2x2", "1x4"):
        for stage in TENSOR_STAGES:
            assert [c for c in chosen if (c.mesh, c.stage) == (mesh, stage)]


def test_exceptions_are_of_models_that_exist_and_have_a_reason() -> None:
    for table in EXCEPTIONS:
        for name, reason in table.items():
            assert name in CASES
            assert len(reason) > 20
