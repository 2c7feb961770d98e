"""Four ranks as data=2 x tensor=2: what ranks of one data coordinate share, what is counted once, what is compared.

Functions that begin with an underscore and take no fixture run on the ranks.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard import Mean, Mesh, Plan, runtime
from autoshard.data import data_rank
from autoshard.plan import Rule
from tests import reference
from tests.multirank.runner import End, run_outcomes, run_ranks

ADAFACTOR = functools.partial(torch.optim.Adafactor, lr=0.05)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.05)
STEPS = 2


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 4)).double()


def _loss(model: nn.Module, batch: Any) -> Mean:
    error = (model(batch["x"]) - batch["y"]).pow(2).sum(-1) * batch["kept"]
    return Mean(error.sum(), batch["kept"].sum())


def _batch(rows: int, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, n, dtype=torch.float64, generator=g) for n in (8, 4))
    return {"x": x, "y": y, "kept": (torch.rand(rows, generator=g) > 0.3).double()}


def _step(optimizer: Any = ADAMW, **fields: Any) -> autoshard.Step:
    plan = Plan(**{"mesh": Mesh(data=2, tensor=2), "zero": 3, "backend": "debug", "device": "cpu", **fields})
    return autoshard.parallelize(_model(), plan, loss=_loss, optimizer=optimizer)


def _mine(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's slice, by its data coordinate."""
    data, ranks = data_rank(Mesh(data=2, tensor=2))
    return reference.rank_slice(batch, data, ranks)


# ---------------------------------------------------------------- training and evaluation


def _trained(optimizer: Any, fields: dict[str, Any]) -> dict[str, Any]:
    step = _step(optimizer, **fields)
    batches = [_mine(_batch(8, seed)) for seed in range(STEPS)]
    state = step.init(batches[0])
    _, gradients = step.gradients(state, batches[0])
    found: dict[str, Any] = {"gradients": {name: g.full_tensor() for name, g in gradients.items()}, "metrics": []}
    for batch in batches:
        state, metrics = step(state, batch)
        found["metrics"].append(metrics)
    tail = _batch(7, 9)
    sizes = [3, 4]
    data = step.runtime.data_coordinate
    start = sum(sizes[:data])
    found["evaluated"] = step.evaluate(state, {k: v[start : start + sizes[data]] for k, v in tail.items()})
    found["parameters"] = {name: state.full(name) for name in state.params}
    found["at rest"] = step.cost().at_rest
    found["held"] = sum(t.nbytes for key, t in state._alive().items() if key[0] == "params")
    found["explained"] = step.explain()
    return found


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        (ADAMW, {"zero": 3, "clip_norm": 0.5}),
        (ADAMW, {"zero": 1, "accumulate": 2, "clip_norm": 0.5}),
        (ADAFACTOR, {"zero": 2}),
    ],
    ids=["adamw-3", "adamw-1", "adafactor-2"],
)
def test_two_axes_train_and_evaluate_as_one_device(optimizer: Any, fields: dict[str, Any]) -> None:
    model = _model()
    batches = [_batch(8, seed) for seed in range(STEPS)]
    recipe = reference.Recipe(
        ranks=2, accumulate=fields.get("accumulate", 1), clip_norm=fields.get("clip_norm"), optimizer=optimizer
    )
    expected = reference.train(model, batches, recipe, _loss)
    tail = _loss(model, _batch(7, 9))
    for found in run_ranks(_trained, 4, optimizer, fields):
        assert reference.worst(found["gradients"], expected.gradients)[0] < 1e-9
        assert reference.worst(found["parameters"], expected.parameters)[0] < 1e-6
        for metrics, loss, norm, batch in zip(
            found["metrics"], expected.losses, expected.grad_norms, batches, strict=True
        ):
            torch.testing.assert_close(metrics["loss"], loss, rtol=1e-9, atol=0)
            torch.testing.assert_close(metrics["grad_norm"].double(), norm.double(), rtol=1e-9, atol=0)
            assert int(metrics["samples"]) == 8
            assert float(metrics["tokens"]) == float(batch["kept"].sum())
        assert int(found["evaluated"]["samples"]) == 7
        torch.testing.assert_close(found["evaluated"]["loss"], tail.total / tail.count, rtol=1e-6, atol=0)
        assert "axes (data, tensor)" in found["explained"]
        assert found["at rest"]["params"] == found["held"]
        if fields["zero"] == 3:  # a quarter each, but for what tensor ranks hold copies of
            assert found["held"] < 0.35 * sum(p.nbytes for p in model.parameters())


# ---------------------------------------------------------------- from mesh to mesh

RULES: dict[str, Rule] = {
    "0.weight": autoshard.Shard(0, 3),
    "0.bias": autoshard.Shard(0, 3),
    "3": "row",
    "2": "replicate",
}


def _on(mesh: Mesh, zero: int) -> autoshard.Step:
    rules: dict[str, Rule] = RULES if mesh.tensor > 1 else {}
    plan = Plan(mesh=mesh, zero=zero, backend="debug", device="cpu", rules=rules)
    return autoshard.parallelize(_model, plan, loss=_loss, optimizer=ADAMW)


def _saved(path: str) -> dict[str, str]:
    step = _on(Mesh(data=2, tensor=2), 3)
    batch = _mine(_batch(8, 0))
    state, _ = step(step.init(batch), batch)
    step.save(state, path)
    return {name: str(p.placements) for name, p in state.params.items()}


def _loaded(path: str, mesh: Mesh, zero: int, again: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What was saved, and the parameters after one more step."""
    step = _on(mesh, zero)
    state = step.load(path)
    step.save(state, again)
    loaded = {name: state.full(name) for name in state.params}
    state, _ = step(state, reference.rank_slice(_batch(8, 1), step.runtime.data_coordinate, mesh.data))
    return loaded, {name: state.full(name) for name in state.params}


def test_a_run_goes_on_from_mesh_to_mesh_under_the_rules_of_its_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [_batch(8, 0), _batch(8, 1)]
    after_one = reference.train(_model(), batches[:1], reference.Recipe(optimizer=ADAMW), _loss).parameters
    after_two = reference.train(_model(), batches, reference.Recipe(optimizer=ADAMW), _loss).parameters
    for placed in run_ranks(_saved, 4, f"{tmp_path}/0"):
        assert placed["0.weight"] == "(Shard(dim=1), _StridedShard(dim=0, sf=3))"
        assert placed["0.bias"] == "(Replicate(), _StridedShard(dim=0, sf=3))"
        assert placed["3.weight"] == "(Shard(dim=0), Shard(dim=1))"
        assert placed["2.weight"] == "(Shard(dim=0), Replicate())"
    meshes = [(Mesh(data=4), 2), (Mesh(data=1, tensor=2), 0), (Mesh(data=1), 3), (Mesh(data=2, tensor=2), 1)]
    bits: list[dict[str, Tensor]] = []
    for number, (mesh, zero) in enumerate(meshes):
        path, again = f"{tmp_path}/{number}", f"{tmp_path}/{number + 1}"
        for loaded, stepped in run_ranks(_loaded, mesh.size, path, mesh, zero, again):
            bits.append(loaded)
            assert reference.worst(loaded, after_one)[0] < 1e-9
            assert reference.worst(stepped, after_two)[0] < 1e-6
    assert all(torch.equal(found[name], bits[0][name]) for found in bits for name in bits[0])


def _verified() -> tuple[bool, str]:
    plan = Plan(mesh=Mesh(data=2, tensor=2), zero=3, backend="debug", device="cpu", rules=RULES, clip_norm=0.1)
    report = autoshard.verify(_model(), plan, _batch(8), loss=_loss, optimizer=ADAMW, steps=2)
    return report.ok, str(report)


def test_verify_compares_a_plan_of_two_axes_with_one_device() -> None:
    for ok, text in run_ranks(_verified, 4):
        assert ok, text


# ---------------------------------------------------------------- what ranks must share


def _refused(function: Any, *words: str, args: tuple[Any, ...] = ()) -> None:
    for outcome in run_outcomes(function, 4, *args, timeout=60.0):
        assert outcome.end is End.RAISED, f"rank {outcome.rank} {outcome.end.value}\n{outcome.details}"
        assert "DivergenceError" in outcome.kind, outcome.details
        assert outcome.seconds < 30
        assert [word for word in words if word not in outcome.message] == [], outcome.message


def _sliced_by_rank(call: str) -> None:
    step, batch = _step(), reference.rank_slice(_batch(8), dist.get_rank(), 4)
    state = step.init(batch)
    if call == "forward":
        step.forward(state, batch["x"])
    elif call == "step":
        step(state, batch)
    else:
        getattr(step, call)(state, batch)


@pytest.mark.parametrize("call", ["step", "gradients", "evaluate", "forward"])
def test_ranks_of_one_data_coordinate_must_pass_the_same_rows(call: str) -> None:
    _refused(_sliced_by_rank, "batch tensor", "rank 0 and rank 1", "data coordinate", args=(call,))


def _other_rows() -> None:
    step = _step()
    state = step.init(_mine(_batch(8)))
    step.evaluate(state, {k: v[: 2 + dist.get_rank() % 2] for k, v in _mine(_batch(8)).items()})


def test_ranks_of_one_data_coordinate_must_evaluate_as_many_rows() -> None:
    _refused(_other_rows, "rank 0 has 2 samples", "rank 1 has 3")


def _flipped(kind: str, name: str, when: int) -> None:
    step = _step(zero=1, check_replicas=2, rules={"0": "replicate"})
    state = step.init(_mine(_batch(8)))
    for number in range(4):
        if number == when and dist.get_rank() == 2:
            local = state.local((kind, *name.split("/")))
            bits = local.view(torch.int64).view(-1)
            bits[-1:] ^= 1
        state, _ = step(state, _mine(_batch(8)))


@pytest.mark.parametrize(
    ("kind", "name", "title", "ranks"),
    [
        ("params", "3.bias", "parameter 3.bias", "between rank 0 and rank 2"),
        ("optimizer", "0.weight/exp_avg", "optimizer slot exp_avg of 0.weight", "between rank 2 and rank 3"),
    ],
)
def test_one_bit_in_one_copy_is_found_and_named(kind: str, name: str, title: str, ranks: str) -> None:
    _refused(_flipped, title, ranks, args=(kind, name, 2))


def _not_due() -> bool:
    step = _step(zero=0, check_replicas=3)
    state = step.init(_mine(_batch(8)))
    state, _ = step(state, _mine(_batch(8)))
    if dist.get_rank() == 2:
        state.local(("params", "3.bias")).add_(1e-9)
    step(state, _mine(_batch(8)))
    return True


def test_copies_are_compared_only_every_n_steps() -> None:
    assert run_ranks(_not_due, 4) == [True] * 4


# ---------------------------------------------------------------- groups


def _groups_beside_the_default_one() -> list[tuple[int, bool, bool]]:
    """Of the group of each axis and of both: worker threads, whether it is the default group, whether it times out
    as that does."""
    cpu = torch.device("cpu")
    world: Any = dist.group.WORLD
    found = []
    for mesh in (Mesh(), Mesh(data=2, tensor=2)):
        place = runtime.start(Plan(mesh=mesh, device="cpu"))
        for axes in [[0]] if len(place.axes) == 1 else [[0], [1], [0, 1]]:
            group: Any = place.group_of(axes)
            options = group._get_backend(cpu).options
            found.append(
                (options._threads, group is world, options._timeout == world._get_backend(cpu).options._timeout)
            )
    return found


def test_collectives_run_on_groups_of_one_worker_thread_where_the_default_group_has_gloo_s_two() -> None:
    # Two threads of one gloo group corrupt the heap (compat.gloo_in_order): a job died of it every few thousand steps.
    for found in run_ranks(_groups_beside_the_default_one, 4):
        assert found == [(1, False, True)] * 4
