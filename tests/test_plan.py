"""A plan is checked when it is made; its errors name the field, what was found and what is valid."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from autoshard.errors import PlanError
from autoshard.placement import REPLICATE, Shard
from autoshard.plan import Mesh, Plan, Tensor, Zero

TWO = Mesh(tensor=2)


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
        (lambda: Plan(mesh={"pipeline": 2}), ["pipeline=2", "cannot do yet"]),
        (lambda: Plan(tensor=Tensor(sequence=True)), ["tensor.sequence", "tensor=1", "tensor=2 or more"]),
        (lambda: Plan(tensor={"sequnce": True}), ["'sequnce'", "did you mean 'sequence'"]),
        (lambda: Tensor(sequence=1), ["Tensor.sequence", "1", "True or False"]),  # type: ignore[arg-type]
        (lambda: Plan(rules={"*.q": "column"}), ["Plan.rules", "tensor=1"]),
        (lambda: Plan(rules={"*.q": "colum"}, mesh=TWO), ["'*.q'", "'colum'", "did you mean 'column'", "Shard(dim)"]),
        (lambda: Plan(rules={"*.q": True}, mesh=TWO), ["'*.q'", "True"]),
        (lambda: Plan(rules={"": 0}, mesh=TWO), ["pattern ''"]),
        (lambda: Plan(rules=[("a", 0), ("a", 1)], mesh=TWO), ["'a' twice"]),
        (lambda: Plan(rules="column", mesh=TWO), ["Plan.rules is 'column'", "mapping"]),  # type: ignore[arg-type]
        (lambda: Plan(check_replicas=0), ["Plan.check_replicas", "0", ">= 1"]),
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


def test_rules_become_hashable_pairs_with_dims_as_shards() -> None:
    plan = Plan(
        mesh=TWO, rules={"*.q": "column", "*.w": 1, "*.v": Shard(0, 3), "b": REPLICATE}, tensor={"sequence": True}
    )
    assert plan.rules == (("*.q", "column"), ("*.w", Shard(1)), ("*.v", Shard(0, 3)), ("b", REPLICATE))
    assert plan.tensor == Tensor(sequence=True)
    assert hash(plan) == hash(Plan(mesh=TWO, rules=plan.rules, tensor=plan.tensor))


def test_ranks_are_laid_out_with_the_pipeline_outermost_and_the_tensor_axis_innermost() -> None:
    mesh = Mesh(data=-1, tensor=2, pipeline=2).resolve(8)
    assert mesh.size == 8
    assert [mesh.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]
    assert [mesh.coordinates(rank)["data"] for rank in range(4)] == [0, 0, 1, 1]
    assert mesh.coordinates(7) == {"pipeline": 1, "data": 1, "tensor": 1}


def test_switching_zero_off_makes_it_stage_zero() -> None:
    assert Plan(zero=3, without=["zero"]).zero == Zero(stage=0)
