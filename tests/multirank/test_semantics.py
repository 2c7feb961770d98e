"""What DESIGN.md promises of a step, on real ranks: each promise compared with one device.

Functions that begin with an underscore and take no fixture run on the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests import reference
from tests.multirank import zoo_run
from tests.multirank.runner import run_ranks
from tests.multirank.zoo_run import Combination, Measured
from tests.zoo import find_case

STAGES = (0, 1, 2, 3)


def _run(combination: Combination) -> list[Measured]:
    return run_ranks(zoo_run.run_case, combination.ranks, combination)


def check_exact(combination: Combination) -> list[Measured]:
    """Run a combination on its ranks, fail if it is not what one device computes, and return what was measured."""
    measured = _run(combination)
    complaints = zoo_run.compare(combination, measured).complaints(combination.case)
    assert not complaints, "\n".join(complaints)
    return measured


# ---------------------------------------------------------------- stages, accumulation, tied weights


@pytest.mark.parametrize("accumulate", [1, 4])
def test_stages_agree_with_one_device_and_each_other_under_tied_weights(accumulate: int) -> None:
    losses = {}
    for stage in STAGES:
        combination = Combination("gpt", stage, accumulate=accumulate, steps=3)
        losses[stage] = check_exact(combination)[0].losses
    for stage in STAGES[1:]:
        assert losses[stage] == pytest.approx(losses[0], abs=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_a_mean_over_ragged_labels_is_exact_under_accumulation_and_so_are_its_extras(stage: int) -> None:
    combination = Combination("gpt_ragged_mean", stage, accumulate=4, steps=2)
    measured = check_exact(combination)
    trace = combination.on_one_device()
    for step, batch in enumerate(combination.batches()):
        metrics = measured[0].metrics[step]
        assert metrics["accuracy"] == pytest.approx(float(trace.extras[step]["accuracy"]), abs=1e-12)
        assert metrics["tokens"] == int((batch["y"] != -100).sum())
        assert metrics["samples"] == batch["x"].shape[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_scalar_losses_are_averaged_over_global_micro_batches(stage: int) -> None:
    check_exact(Combination("gpt_ignore_index", stage, accumulate=2, steps=2))


@pytest.mark.parametrize("stage", [0, 2])
def test_batch_norm_uses_the_statistics_of_the_global_micro_batch(stage: int) -> None:
    combination = Combination("batch_norm_mlp", stage, accumulate=2, steps=1)
    measured = check_exact(combination)
    batch = combination.batches()[0]
    first = find_case("batch_norm_mlp").model().get_submodule("0")
    running = torch.zeros(32, dtype=torch.float64)
    for x, _ in reference.global_micro_batches(batch, 2, 2):
        running = 0.9 * running + 0.1 * first(x).mean(0).detach()
    torch.testing.assert_close(measured[0].buffers["1.running_mean"], running, rtol=0, atol=1e-12)
    alone = 0.1 * first(reference.rank_slice(batch, 0, 2)[0]).mean(0).detach()
    assert (running - alone).abs().max() > 1e-3


def test_in_batch_losses_and_accumulation_see_the_global_micro_batch() -> None:
    check_exact(Combination("contrastive", 3, accumulate=2, steps=2))


# ---------------------------------------------------------------- shapes, norms, thresholds


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_empty_scalar_and_indivisible_parameters_train_on_one_two_and_four_ranks(stage: int, ranks: int) -> None:
    check_exact(Combination("odd_shapes", stage, data=ranks, clip_norm=0.5))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["gpt", "odd_shapes"])
def test_the_norm_of_the_gradient_and_clipping_by_it_equal_one_device(name: str, stage: int) -> None:
    combination = Combination(name, stage, clip_norm=0.05, accumulate=2, steps=3)
    measured = check_exact(combination)
    assert all(norm > 0.05 for norm in measured[0].grad_norms)
    free = dataclasses.replace(combination, clip_norm=None).on_one_device()
    assert reference.worst(measured[0].parameters, free.parameters)[0] > 1e-6


def _placements(combination: Combination) -> tuple[dict[str, bool], dict[str, bool]]:
    """Whether each parameter, and each whole set of optimizer slots, is sharded; by name."""
    _, state = zoo_run.started(combination, combination.slices(dist.get_rank())[0])
    parameters = {name: _is_sharded(p) for name, p in state.params.items()}
    slots = {
        name: any(_is_sharded(slot) for slot in slots.values() if slot.dim()) for name, slots in state.optimizer.items()
    }
    return parameters, slots


def _is_sharded(tensor: DTensor) -> bool:
    assert all(isinstance(p, (Shard, Replicate)) for p in tensor.placements)
    return any(isinstance(p, Shard) for p in tensor.placements)


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_under_the_persistence_threshold_stay_whole_and_exact(stage: int) -> None:
    combination = Combination("gpt", stage, threshold=100, steps=2)
    check_exact(combination)
    sizes = {name: p.numel() for name, p in combination.case.model().named_parameters()}
    parameters, slots = run_ranks(_placements, 2, combination)[0]
    assert parameters == {name: stage == 3 and size >= 100 for name, size in sizes.items()}
    assert slots == {name: size >= 100 for name, size in sizes.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_shards_what_zero_says(stage: int) -> None:
    parameters, slots = run_ranks(_placements, 2, Combination("llama", stage))[0]
    assert set(parameters.values()) == {stage == 3}
    assert set(slots.values()) == {stage >= 1}


# ---------------------------------------------------------------- optimizers, groups, schedules


def _no_decay_for_vectors(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    named = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.3},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-2},
        ],
        lr=3e-3,
    )


def _groups_of_names(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    named = list(named)
    groups: list[dict[str, Any]] = [
        {"params": [(n, p) for n, p in named if "head" in n or "embed" in n], "momentum": 0.0},
        {"params": [(n, p) for n, p in named if not ("head" in n or "embed" in n)]},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _lion(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    from autoshard.optim import Lion

    return Lion([p for _, p in named], lr=1e-3, weight_decay=0.1)


OPTIMIZERS: dict[str, reference.OptimizerFactory] = {
    "AdamW with groups": _no_decay_for_vectors,
    "AdamW amsgrad": functools.partial(torch.optim.AdamW, lr=3e-3, amsgrad=True),
    "Adam with decay": functools.partial(torch.optim.Adam, lr=3e-3, weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1),
    "SGD Nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD with named groups": _groups_of_names,
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "NAdam": functools.partial(torch.optim.NAdam, lr=3e-3),
    "Lion": _lion,
    "RAdam, torch's own step": functools.partial(torch.optim.RAdam, lr=3e-3),
    "Adafactor, needs whole tensors": functools.partial(torch.optim.Adafactor, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_shards_as_torch_updates_the_whole(name: str) -> None:
    check_exact(Combination("frozen_parameter", 3, optimizer=OPTIMIZERS[name]))


@pytest.mark.parametrize("name", ["AdamW with groups", "SGD momentum", "Adafactor, needs whole tensors"])
@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_is_exact_where_parameters_are_whole_too(name: str, stage: int) -> None:
    case = "dict_io" if "Adafactor" in name else "odd_shapes"  # Adafactor itself divides by zero on (0,)
    check_exact(Combination(case, stage, optimizer=OPTIMIZERS[name]))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128, generator=generator))
        self.vector = nn.Parameter(torch.randn(3, dtype=torch.complex128, generator=generator))
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.layer.weight.heavy = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x.to(torch.complex128) @ self.matrix * self.vector).abs())


def _groups_by_attribute(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    parameters = [p for _, p in named]
    heavy = [p for p in parameters if getattr(p, "heavy", False)]
    light = [p for p in parameters if not getattr(p, "heavy", False)]
    return torch.optim.AdamW([{"params": heavy, "weight_decay": 0.9}, {"params": light, "weight_decay": 0.0}], lr=0.1)


def _complex_as_on_one_device(stage: int) -> float:
    import autoshard

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    torch.manual_seed(0)
    ours, theirs = _Complex(), _Complex()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(8, 5, dtype=torch.float64)
    plan = autoshard.Plan(zero=stage, backend="debug", device="cpu", accumulate=2, clip_norm=0.01)
    step = autoshard.parallelize(ours, plan, loss=loss, optimizer=_groups_by_attribute)
    mine = reference.rank_slice(x, dist.get_rank(), 2)
    state = step.init(mine)
    for _ in range(2):
        state, metrics = step(state, mine)
    recipe = reference.Recipe(accumulate=2, clip_norm=0.01, optimizer=_groups_by_attribute)
    trace = reference.train(theirs, [x, x], recipe, loss)
    torch.testing.assert_close(metrics["grad_norm"], trace.grad_norms[-1])
    return max(float((state.full(name) - value).abs().max()) for name, value in trace.parameters.items())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_complex_parameters_and_groups_by_an_attribute_of_parameters_equal_one_device(stage: int) -> None:
    assert max(run_ranks(_complex_as_on_one_device, 2, stage)) < 1e-9


def _halve(n: Any) -> Any:
    return 0.5**n


def test_the_schedule_is_the_factor_on_lr_for_update_n_plus_one() -> None:
    measured = check_exact(Combination("mlp", 3, schedule=_halve, steps=4))
    assert [m["lr"] for m in measured[0].metrics] == pytest.approx([3e-3, 1.5e-3, 0.75e-3, 0.375e-3])


def _steps_without_optimizer() -> str:
    import autoshard

    combination = Combination("mlp", 1)
    case, batch = combination.case, combination.slices(dist.get_rank())[0]
    step = autoshard.parallelize(case.model(), combination.plan(), loss=case.loss)
    state = step.init(batch)
    metrics, gradients = step.gradients(state, batch)
    assert set(gradients) == {name for name, _ in case.model().named_parameters()}
    assert torch.isfinite(metrics["loss"])
    try:
        step(state, batch)
    except ValueError as error:
        return str(error)
    return ""


def test_without_an_optimizer_a_step_is_refused_and_gradients_work() -> None:
    for message in run_ranks(_steps_without_optimizer, 2):
        assert "optimizer=" in message


# ---------------------------------------------------------------- state and metrics


def _use_a_donated_state() -> tuple[str, bool, bool]:
    combination = Combination("mlp", 3)
    batches = combination.slices(dist.get_rank())
    before = [t.clone() for t in batches[0]]
    step = combination.parallelize()
    old = step.init(batches[0])
    new, metrics = step(old, batches[0])
    kept = float(metrics["loss"])
    step(new, batches[1])
    unchanged = all(torch.equal(a, b) for a, b in zip(batches[0], before, strict=True))
    message = ""
    for use in (lambda: step(old, batches[1]), lambda: old.params["0.weight"], lambda: old.full("0.weight")):
        try:
            use()
        except ValueError as error:
            message = f"{type(error).__name__}: {error}"
        else:
            return "no error", unchanged, False
    return message, unchanged, float(metrics["loss"]) == kept


def test_a_donated_state_is_refused_and_batches_and_metrics_are_not_donated() -> None:
    for message, batch_unchanged, metrics_kept in run_ranks(_use_a_donated_state, 2):
        assert message.startswith("StateError")
        assert "donated" in message
        assert batch_unchanged
        assert metrics_kept


def _initial_state(name: str, stage: int) -> tuple[bool, bool, dict[str, Tensor]]:
    import autoshard

    case = find_case(name)
    model = case.model()
    step = autoshard.parallelize(model, autoshard.Plan(zero=stage, backend="debug", device="cpu"), loss=case.loss)
    state = step.init(reference.rank_slice(case.batches(1)[0], dist.get_rank(), dist.get_world_size()))
    consumed = all(p.is_meta for p in model.parameters())
    kept_model = case.model()
    other = autoshard.parallelize(kept_model, autoshard.Plan(zero=stage, backend="debug", device="cpu"), loss=case.loss)
    other.init(reference.rank_slice(case.batches(1)[0], dist.get_rank(), dist.get_world_size()), keep_model=True)
    kept = not any(p.is_meta for p in kept_model.parameters())
    whole = {n: state.full(n) for n in [*state.params, *state.buffers]}
    return consumed, kept, whole


@pytest.mark.parametrize("stage", [0, 3])
def test_init_takes_the_model_s_own_weights_and_consumes_the_module_unless_told(stage: int) -> None:
    for consumed, kept, whole in run_ranks(_initial_state, 2, "gpt", stage):
        assert consumed
        assert kept
        expected = {n: p.detach() for n, p in find_case("gpt").model().named_parameters()}
        assert reference.worst(whole, expected) == (0.0, "nothing")


def _materialised(name: str, seed: int) -> dict[str, Tensor]:
    import autoshard

    case = find_case(name)
    plan = autoshard.Plan(zero=3, seed=seed, backend="debug", device="cpu")
    step = autoshard.parallelize(case.build, plan, loss=case.loss)
    batch = reference.rank_slice(case.batches(1)[0], dist.get_rank(), dist.get_world_size())
    state = step.init(_in_float32(batch))
    return {n: state.full(n) for n in [*state.params, *state.buffers]}


def _in_float32(batch: Any) -> Any:
    return reference.map_tensors(batch, lambda x: x.float() if x.is_floating_point() else x)


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet", "vit", "hf_llama", "odd_shapes"])
def test_a_model_given_as_a_callable_starts_bit_equal_to_building_it_on_one_device(name: str) -> None:
    torch.manual_seed(5)
    model = find_case(name).build()
    expected = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    for found in run_ranks(_materialised, 2, name, 5):
        assert reference.worst(found, expected) == (0.0, "nothing")


def _tied_names() -> tuple[bool, bool]:
    combination = Combination("gpt", 3)
    state = combination.parallelize().init(combination.slices(dist.get_rank())[0])
    return "head.weight" in list(state.params), torch.equal(state.full("head.weight"), state.full("embed.weight"))


def test_a_tied_weight_appears_once_and_its_other_name_resolves_to_it() -> None:
    assert run_ranks(_tied_names, 2) == [(False, True)] * 2


def _metrics() -> dict[str, tuple[str, int, float]]:
    combination = Combination("dict_io", 1, steps=1)
    batch = combination.slices(dist.get_rank())[0]
    step = combination.parallelize()
    _, metrics = step(step.init(batch), batch)
    return {n: (type(value).__name__, value.dim(), float(value)) for n, value in metrics.items()}


def test_metrics_are_plain_0_dim_tensors_equal_on_every_rank() -> None:
    first, second = run_ranks(_metrics, 2)
    assert first == second
    assert set(first) >= {"loss", "grad_norm", "lr", "samples", "classes", "value"}
    assert all(kind == "Tensor" and dim == 0 for kind, dim, _ in first.values())
    trace = Combination("dict_io", 1, steps=1).on_one_device()
    assert first["classes"][2] == pytest.approx(float(trace.extras[0]["classes"]), abs=1e-12)
    assert first["value"][2] == pytest.approx(float(trace.extras[0]["value"]), abs=1e-12)


def _replicas(stage: int) -> bool:
    combination = Combination("batch_norm_mlp", stage, steps=30)
    batches = combination.slices(dist.get_rank())
    step, state = zoo_run.started(combination, batches[0])
    for batch in batches:
        state, _ = step(state, batch)
    whole = {n: t.to_local().clone() for n, t in {**state.params, **state.buffers}.items()}
    return not zoo_run.disagreements(whole)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicas_are_bit_equal_after_many_steps(stage: int) -> None:
    assert run_ranks(_replicas, 2, stage) == [True, True]


# ---------------------------------------------------------------- gradients, evaluate, forward


def _gradients_twice() -> tuple[list[float], bool, dict[str, bool], dict[str, Tensor]]:
    combination = Combination("unused_parameter", 3, accumulate=2, clip_norm=1e-3)
    batch = combination.slices(dist.get_rank())[0]
    step, state = zoo_run.started(combination, batch)
    before = {n: state.full(n) for n in state.params}
    losses: list[float] = []
    found: dict[str, DTensor] = {}
    for _ in range(2):
        metrics, found = step.gradients(state, batch)
        losses.append(float(metrics["loss"]))
    unchanged = all(torch.equal(before[n], state.full(n)) for n in before)
    return (
        losses,
        unchanged,
        {n: _is_sharded(g) for n, g in found.items()},
        {n: g.full_tensor() for n, g in found.items()},
    )


def test_gradients_are_of_the_whole_step_unclipped_and_change_nothing() -> None:
    combination = Combination("unused_parameter", 3, accumulate=2)
    trace = combination.on_one_device()
    for losses, unchanged, sharded, gradients in run_ranks(_gradients_twice, 2):
        assert losses == [losses[0], losses[0]]
        assert losses[0] == pytest.approx(float(trace.losses[0]), abs=1e-12)
        assert unchanged
        assert all(sharded.values())
        assert reference.worst(gradients, trace.gradients)[0] < 1e-8


def _evaluated(name: str, sizes: Iterable[tuple[int, int]], trained: int) -> list[tuple[dict[str, float], bool]]:
    """Metrics of batches of which the ranks have so many rows, and whether buffers stay as they are."""
    combination = Combination(name, 3, steps=max(trained, 1))
    batches = combination.slices(dist.get_rank())
    step, state = zoo_run.started(combination, batches[0])
    for batch in batches[:trained]:
        state, _ = step(state, batch)
    buffers = {n: state.full(n) for n in state.buffers}
    found = []
    for rows in sizes:
        whole = combination.case.batch(sum(rows), torch.Generator().manual_seed(77))
        mine = reference.map_tensors(whole, lambda x: x.split(rows)[dist.get_rank()])  # noqa: B023
        metrics = step.evaluate(state, mine)
        unchanged = all(torch.equal(value, state.full(n)) for n, value in buffers.items())
        found.append(({n: float(value) for n, value in metrics.items()}, unchanged))
    return found


@pytest.mark.parametrize("name", ["batch_norm_mlp", "gpt_ragged_mean"])
def test_evaluation_is_exact_in_eval_mode_for_any_leading_size(name: str) -> None:
    sizes = [(2, 2), (5, 5), (3, 2), (3, 0)]
    combination = Combination(name, 3, steps=2)
    model, case = combination.case.model(), combination.case
    recipe = reference.Recipe(optimizer=zoo_run.ADAMW)
    reference.train(model, combination.batches(), recipe, case.loss)
    model.eval()
    found = run_ranks(_evaluated, 2, name, sizes, 2)
    for number, rows in enumerate(sizes):
        whole = case.batch(sum(rows), torch.Generator().manual_seed(77))
        with torch.no_grad():
            terms, extras = reference.objective(case.loss, model, whole)
        expected = sum(float(total / count) for total, count in terms)
        for metrics, unchanged in (of_rank[number] for of_rank in found):
            assert metrics["loss"] == pytest.approx(expected, abs=1e-8), rows
            assert unchanged
            for extra, (total, count) in extras.items():
                assert metrics[extra] == pytest.approx(float(total / count), abs=1e-8)
            tokens = int((whole["y"] != -100).sum()) if name == "gpt_ragged_mean" else None
            assert metrics.get("tokens") == tokens
            assert metrics["samples"] == sum(rows)


def _forwarded(rows: int) -> tuple[Any, Any]:
    combination = Combination("dict_io", 3)
    step, state = zoo_run.started(combination, combination.slices(dist.get_rank())[0])
    whole = combination.case.batch(2 * rows, torch.Generator().manual_seed(3))["inputs"]
    mine = reference.rank_slice(whole, dist.get_rank(), 2)
    return step.forward(state, mine), step.forward(state, inputs=mine)


@pytest.mark.parametrize("rows", [2, 3])
def test_forward_takes_a_rank_s_slice_and_gives_its_slice_as_plain_tensors(rows: int) -> None:
    case = find_case("dict_io")
    with torch.no_grad():
        whole = case.model().eval()(case.batch(2 * rows, torch.Generator().manual_seed(3))["inputs"])
    for rank, (by_position, by_keyword) in enumerate(run_ranks(_forwarded, 2, rows)):
        for found in (by_position, by_keyword):
            assert type(found["class"]) is Tensor
            torch.testing.assert_close(found["class"], whole["class"].chunk(2)[rank], rtol=0, atol=1e-12)
            value = whole["more"]["value"].chunk(2)[rank]
            torch.testing.assert_close(found["more"]["value"], value, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- batches


def _with_new_shapes(limit: int) -> tuple[list[float], str, str]:
    import autoshard

    case = find_case("mlp")
    plan = autoshard.Plan(zero=2, backend="debug", device="cpu", max_compiles=limit)
    step = autoshard.parallelize(case.model(), plan, loss=case.loss, optimizer=zoo_run.ADAMW)
    rank, losses = dist.get_rank(), []
    whole = [case.batch(size, torch.Generator().manual_seed(size)) for size in (8, 4, 8, 12)]
    state = step.init(reference.rank_slice(whole[0], rank, 2))
    printed = io.StringIO()
    refusal = ""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for batch in whole:
            try:
                state, metrics = step(state, reference.rank_slice(batch, rank, 2))
            except ValueError as error:
                refusal = str(error)
            else:
                losses.append(float(metrics["loss"]))
    return losses, refusal, printed.getvalue()


def test_a_batch_with_new_shapes_recompiles_with_a_message_up_to_the_bound() -> None:
    case = find_case("mlp")
    batches = [case.batch(size, torch.Generator().manual_seed(size)) for size in (8, 4, 8)]
    trace = reference.train(case.model(), batches, reference.Recipe(optimizer=zoo_run.ADAMW), case.loss)
    values = run_ranks(_with_new_shapes, 2, 2)
    for losses, refusal, _ in values:
        assert losses == pytest.approx([float(x) for x in trace.losses], abs=1e-8)
        assert "max_compiles" in refusal
    assert "compil" in values[0][2]


def _masked_by_a_replicated_table(model: Any, batch: Any) -> Tensor:
    x, y = batch["data"]
    weights = batch["weights"].tensor if hasattr(batch["weights"], "tensor") else batch["weights"]
    errors = (model(x) - y) ** 2 * weights * batch["scale"]
    return errors.mean() if batch["kind"] == "mean" else errors.sum()


def _replicated_batch(wrapped: bool) -> Callable[[Any], Any]:
    def make(data: Any) -> dict[str, Any]:
        import autoshard

        weights = torch.arange(1.0, 5.0, dtype=torch.float64)
        return {
            "data": data,
            "weights": autoshard.Replicated(weights) if wrapped else weights,
            "scale": torch.tensor(0.5, dtype=torch.float64),
            "kind": "mean",
        }

    return make


def _losses_with_replicated() -> list[float]:
    import autoshard

    combination = Combination("mlp", 3, steps=2)
    batches = [_replicated_batch(True)(data) for data in combination.slices(dist.get_rank())]
    step = autoshard.parallelize(
        combination.case.model(), combination.plan(), loss=_masked_by_a_replicated_table, optimizer=zoo_run.ADAMW
    )
    return zoo_run.train(step, batches)[1]


def test_replicated_tensors_numbers_and_strings_in_a_batch_are_the_same_everywhere() -> None:
    combination = Combination("mlp", 3, steps=2)
    model = combination.case.model()
    optimizer = zoo_run.ADAMW(model.parameters())
    expected = []
    for data in combination.batches():
        optimizer.zero_grad()
        loss = _masked_by_a_replicated_table(model, _replicated_batch(False)(data))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in run_ranks(_losses_with_replicated, 2):
        assert losses == pytest.approx(expected, abs=1e-8)


# ---------------------------------------------------------------- frozen modules, closures, several models


def _teacher() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4)).double()


def _distil(teacher: nn.Module, offset: Tensor) -> Callable[[Any, Any], Tensor]:
    def loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), teacher(x) + offset) + 0.1 * F.mse_loss(model(x), y)

    return loss


OFFSET = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def _distilled() -> tuple[list[float], list[str], bool, str]:
    import autoshard

    combination = Combination("mlp", 3, steps=3)
    teacher = _teacher()
    step = autoshard.parallelize(
        combination.case.model(),
        combination.plan(),
        loss=_distil(teacher, OFFSET),
        optimizer=zoo_run.ADAMW,
        frozen={"teacher": teacher},
    )
    batches = combination.slices(dist.get_rank())
    state, losses = zoo_run.train(step, batches)
    wanted = {f"teacher.{n}": p for n, p in _teacher().named_parameters()}
    kept = all(torch.equal(state.full(n), p) for n, p in wanted.items())
    return losses, list(state.optimizer), kept, str(step.explain())


def test_a_frozen_teacher_takes_part_and_is_not_trained_and_constants_are_listed() -> None:
    combination = Combination("mlp", 3, steps=3)
    loss = _distil(_teacher().requires_grad_(False), OFFSET)
    recipe = reference.Recipe(optimizer=zoo_run.ADAMW)
    model = combination.case.model()
    trace = reference.train(model, combination.batches(), recipe, loss)
    for losses, slots, kept, explained in run_ranks(_distilled, 2):
        assert losses == pytest.approx([float(x) for x in trace.losses], abs=1e-8)
        assert set(slots) == {n for n, _ in model.named_parameters()}
        assert kept
        assert "constant" in explained


def _adapter() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)).double()
    model[0].requires_grad_(False)
    return model


def _regression(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _whole(state: Any) -> dict[str, Tensor]:
    """Every parameter, buffer and optimizer slot of a state."""
    slots = {f"{name}/{slot}": t.full_tensor() for name, held in state.optimizer.items() for slot, t in held.items()}
    return {**{name: state.full(name) for name in (*state.params, *state.buffers)}, **slots}


def _saved_without_frozen(folder: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int, int, str]:
    """A state's tensors before and after, the bytes of a whole and of a small checkpoint, an error."""
    import autoshard

    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    plan = autoshard.Plan(zero=stage, backend="debug", device="cpu")

    def fresh() -> autoshard.Step:
        return autoshard.parallelize(_adapter(), plan, loss=_regression, optimizer=zoo_run.ADAMW)

    step = fresh()
    state, _ = step(step.init(x), x)
    before = _whole(state)
    step.save(state, f"{folder}/whole")
    step.save(state, f"{folder}/small", frozen=False)
    after = _whole(fresh().load(f"{folder}/small"))
    with pytest.raises(autoshard.CheckpointError) as refused:
        step.load(f"{folder}/small")
    whole, small = (sum(f.stat().st_size for f in Path(folder, name).rglob("*.distcp")) for name in ("whole", "small"))
    return before, after, whole, small, str(refused.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_without_frozen_parameters_is_small_and_takes_them_from_the_model(
    stage: int, tmp_path: Path
) -> None:
    for before, after, whole, small, refused in run_ranks(_saved_without_frozen, 2, str(tmp_path), stage):
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert whole - small > 0.9 * 64 * 65 * 8
        assert "0.weight" in refused
        assert "pretrained" in refused


def _frozen_parameters(stage: int) -> tuple[bool, bool]:
    combination = Combination("frozen_parameter", stage)
    batch = combination.slices(dist.get_rank())[0]
    step, state = zoo_run.started(combination, batch)
    _, gradients = step.gradients(state, batch)
    frozen = {n for n, p in combination.case.model().named_parameters() if not p.requires_grad}
    return bool(frozen & set(gradients)), bool(frozen & set(state.optimizer))


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_have_no_gradient_and_no_optimizer_state(stage: int) -> None:
    assert run_ranks(_frozen_parameters, 2, stage) == [(False, False)] * 2


def _two_models() -> tuple[list[float], list[float]]:
    first, second = Combination("llama", 3, steps=3), Combination("batch_norm_mlp", 1, steps=3, accumulate=2)
    rank = dist.get_rank()
    step_a, step_b = first.parallelize(), second.parallelize()
    batches_a, batches_b = first.slices(rank), second.slices(rank)
    state_a, state_b = step_a.init(batches_a[0]), step_b.init(batches_b[0])
    losses_a, losses_b = [], []
    for a, b in zip(batches_a, batches_b, strict=True):
        state_a, metrics_a = step_a(state_a, a)
        state_b, metrics_b = step_b(state_b, b)
        losses_a.append(float(metrics_a["loss"]))
        losses_b.append(float(metrics_b["loss"]))
    return losses_a, losses_b


def test_two_models_with_two_plans_train_in_one_process() -> None:
    first = Combination("llama", 3, steps=3).on_one_device()
    second = Combination("batch_norm_mlp", 1, steps=3, accumulate=2).on_one_device()
    for losses_a, losses_b in run_ranks(_two_models, 2):
        assert losses_a == pytest.approx([float(x) for x in first.losses], abs=1e-8)
        assert losses_b == pytest.approx([float(x) for x in second.losses], abs=1e-8)


# ---------------------------------------------------------------- what is said about a program


def _described(stage: int, accumulate: int) -> tuple[str, str, str]:
    combination = Combination("gpt", stage, accumulate=accumulate)
    step = combination.parallelize()
    step.init(combination.slices(dist.get_rank())[0])
    graphs = "\n".join(
        f"{phase}\n{graph.module.code}"
        for phase in ("micro", "epilogue")
        for graph in step.program(phase).graphs.values()
    )
    return graphs, str(step.explain()), step.fingerprint()


def test_stages_1_and_2_are_the_same_program_at_one_micro_batch_and_explain_says_so() -> None:
    first, said, _ = run_ranks(_described, 2, 1, 1)[0]
    second, also_said, _ = run_ranks(_described, 2, 2, 1)[0]
    assert first == second
    for text in (said, also_said):
        assert "same program" in text
    assert run_ranks(_described, 2, 1, 4)[0][0] != run_ranks(_described, 2, 2, 4)[0][0]


def test_the_fingerprint_is_equal_on_all_ranks_and_differs_by_plan() -> None:
    prints = {stage: [value[2] for value in run_ranks(_described, 2, stage, 1)] for stage in (1, 2, 3)}
    for found in prints.values():
        assert found[0] == found[1]
    assert len({found[0] for found in prints.values()}) == 3


# ---------------------------------------------------------------- dropout


def _dropout_losses(stage: int) -> list[float]:
    import autoshard

    case = find_case("gpt")
    model = case.model()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    plan = autoshard.Plan(zero=stage, accumulate=2, backend="debug", device="cpu")
    step = autoshard.parallelize(model, plan, loss=case.loss, optimizer=zoo_run.ADAMW)
    ranks = dist.get_world_size()
    # The same global micro-batches on any mesh: rank r's chunk k is the r-th part of micro-batch k.
    micro = [case.batch(4, torch.Generator().manual_seed(k)) for k in range(2)]
    parts = [reference.rank_slice(m, dist.get_rank(), ranks) for m in micro]
    batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return zoo_run.train(step, [batch] * 3)[1]


def test_dropout_is_the_same_function_of_seed_step_and_position_on_every_mesh() -> None:
    one = run_ranks(_dropout_losses, 1, 0)[0]
    assert run_ranks(_dropout_losses, 2, 3)[0] == pytest.approx(one, abs=1e-8)
    assert run_ranks(_dropout_losses, 4, 1)[0] == pytest.approx(one, abs=1e-8)
    assert run_ranks(_dropout_losses, 1, 0)[0] == one
    plain = Combination("gpt", 0, data=1).on_one_device()
    assert abs(one[0] - float(plain.losses[0])) > 1e-3
