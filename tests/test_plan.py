"""A plan is checked when it is made; its errors name the field, what was found and what is valid."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from autoshard.errors import PlanError
from autoshard.plan import Mesh, Plan, Zero


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Plan(zero=4), ["Zero.stage", "4", "0, 1, 2 or 3"]),
        (lambda: Plan(zero={"stge": 1}), ["'stge'", "did you mean 'stage'"]),
        (lambda: Plan(zero=Zero(stage=0, persistence_threshold=5)), ["persistence_threshold", "stage 0"]),
        (lambda: Plan(accumulate=0), ["Plan.accumulate", "0", ">= 1"]),
        (lambda: Plan(accumulate=True), ["Plan.accumulate", "True"]),
        (lambda: Plan(clip_norm=-1.0), ["Plan.clip_norm", "-1.0"]),
        (lambda: Plan(clip_norm=float("nan")), ["Plan.clip_norm", "nan"]),
        (lambda: Plan(backend="eager"), ["Plan.backend", "'eager'", "'inductor' or 'debug'"]),
        (lambda: Plan(precision="bf16"), ["Plan.precision", "cannot do yet", "'model'"]),
        (lambda: Plan(precision="int3"), ["Plan.precision", "'int3'"]),
        (lambda: Plan(recompute="blocks"), ["Plan.recompute", "cannot do yet"]),
        (lambda: Plan(mesh={"tensor": 2}), ["tensor=2", "cannot do yet"]),
        (lambda: Plan(mesh={"dta": 2}), ["'dta'", "did you mean 'data'"]),
        (lambda: Plan(device="tpu"), ["Plan.device", "'tpu'"]),
        (lambda: Plan(max_compiles=0), ["Plan.max_compiles"]),
        (lambda: Plan(seed=-1), ["Plan.seed", "-1"]),
        (lambda: Plan(without="place"), ["Plan.without", "'place'", "zero"]),
        # What a type checker refuses as well: each "ignore" is needed.
        (lambda: Plan(acumulate=2), ["Plan has", "'acumulate'", "did you mean 'accumulate'?", "max_compiles"]),  # type: ignore[call-arg]
        (lambda: Plan(nothing=2), ["Plan has", "'nothing'; valid: mesh, zero"]),  # type: ignore[call-arg]
        (lambda: Zero(stge=1), ["Zero has", "did you mean 'stage'?", "persistence_threshold"]),  # type: ignore[call-arg]
        (lambda: Mesh(dta=1), ["Mesh has", "did you mean 'data'?", "pipeline"]),  # type: ignore[call-arg]
        (lambda: Zero(3), ["Zero was given 3", "stage"]),  # type: ignore[call-arg]
        (lambda: Mesh(data=0), ["Mesh.data", "0"]),
        (lambda: Mesh(data=-1, tensor=-1), ["-1", "at most one axis"]),
        (lambda: Mesh(data=3).resolve(4), ["needs 3 ranks", "has 4", "--nproc-per-node 3"]),
        (lambda: Mesh(tensor=3).resolve(4), ["multiple of 3", "[1, 2, 4]"]),
        (lambda: Mesh(data=2).coordinates(2), ["rank", "0 to 1"]),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_valid(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("kind", [Plan, Zero, Mesh])
def test_the_signature_names_every_field(kind: Any) -> None:
    assert [*inspect.signature(kind).parameters] == [field.name for field in dataclasses.fields(kind)]


def test_a_plan_is_frozen_hashable_and_equal_by_value() -> None:
    plan = Plan(zero=3, mesh={"data": 2})
    assert plan == Plan(zero=Zero(stage=3), mesh=Mesh(data=2))
    assert len({plan, Plan(zero=3, mesh=Mesh(data=2)), Plan(zero=2, mesh=Mesh(data=2))}) == 2
    with pytest.raises(AttributeError):
        plan.accumulate = 2  # type: ignore[misc]


def test_ranks_are_laid_out_with_the_pipeline_outermost_and_the_tensor_axis_innermost() -> None:
    mesh = Mesh(data=-1, tensor=2, pipeline=2).resolve(8)
    assert mesh.size == 8
    assert [mesh.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]
    assert [mesh.coordinates(rank)["data"] for rank in range(4)] == [0, 0, 1, 1]
    assert mesh.coordinates(7) == {"pipeline": 1, "data": 1, "tensor": 1}


def test_switching_zero_off_makes_it_stage_zero() -> None:
    assert Plan(zero=3, without=["zero"]).zero == Zero(stage=0)
