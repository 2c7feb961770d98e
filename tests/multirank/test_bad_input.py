"""Whatever a user gets wrong ends in an error on every rank, within seconds, that says what to do; nothing hangs.

Functions that begin with an underscore and take no fixture run on the ranks.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests import reference
from tests.multirank.runner import End, Outcome, run_outcomes, run_ranks

SECONDS = 15.0  # from the call to the error, tracing included, on a busy machine
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def check_refused(outcomes: list[Outcome], kind: str, *patterns: str) -> None:
    """Every rank raised an error of `kind` in seconds, and each pattern is in every message."""
    for outcome in outcomes:
        assert outcome.end is End.RAISED, f"rank {outcome.rank} {outcome.end.value}\n{outcome.details}"
        assert kind in outcome.kind, f"rank {outcome.rank} raised {outcome.kind[0]}: {outcome.details}"
        assert outcome.seconds < SECONDS
        for pattern in patterns:
            assert re.search(pattern, outcome.message, re.I | re.S), f"no {pattern!r} in: {outcome.message}"


def refused(
    function: Callable[..., Any], kind: str, *patterns: str, args: tuple[Any, ...] = (), ranks: int = 2
) -> None:
    """`function(*args)` is refused on all ranks."""
    check_refused(run_outcomes(function, ranks, *args, timeout=40.0), kind, *patterns)


# ---------------------------------------------------------------- small things to build mistakes from


def _plan(**fields: Any) -> Any:
    import autoshard

    return autoshard.Plan(**{"zero": 3, "backend": "debug", "device": "cpu", **fields})


def _model(width: int = 16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4)).double()


def _loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _batch(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {
        "x": torch.randn(rows, 8, generator=generator, dtype=torch.float64),
        "y": torch.randn(rows, 4, generator=generator, dtype=torch.float64),
    }


def _step(model: nn.Module | None = None, loss: Any = _loss, **fields: Any) -> Any:
    import autoshard

    return autoshard.parallelize(model or _model(), _plan(**fields), loss=loss, optimizer=ADAMW)


# ---------------------------------------------------------------- the mesh and the batch


def _wrong_world(size: int) -> None:
    import autoshard

    _step(mesh=autoshard.Mesh(data=size)).init(_batch())


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_mesh_that_does_not_fit_the_world_is_refused_with_what_to_launch(size: int) -> None:
    refused(_wrong_world, "PlanError", f"data={size}", r"world .*2", r"-1|nproc-per-node", args=(size,))


def _indivisible(rows: int, accumulate: int) -> None:
    _step(accumulate=accumulate).init(_batch(rows))


@pytest.mark.parametrize(("rows", "accumulate"), [(6, 4), (3, 4), (0, 1)])
def test_a_batch_that_the_micro_batches_do_not_divide_is_refused_with_a_size_that_works(
    rows: int, accumulate: int
) -> None:
    refused(_indivisible, "BatchError", str(rows), f"multiple of {accumulate}", args=(rows, accumulate))


def _indivisible_later() -> None:
    step = _step(accumulate=4)
    state = step.init(_batch(4))
    step(state, _batch(6))


def test_a_later_batch_that_the_micro_batches_do_not_divide_is_refused_too() -> None:
    refused(_indivisible_later, "BatchError", "6", "multiple of 4")


def _unequal_leading_sizes() -> None:
    batch = _batch()
    batch["y"] = batch["y"][:3]
    _step().init(batch)


def test_tensors_of_a_batch_with_unequal_leading_sizes_are_refused_by_name() -> None:
    refused(_unequal_leading_sizes, "BatchError", "x.*4", "y.*3", "Replicated")


# ---------------------------------------------------------------- the model and the loss


def _nothing_to_train() -> None:
    _step(_model().requires_grad_(False)).init(_batch())


def test_a_model_without_a_trainable_parameter_is_refused() -> None:
    refused(_nothing_to_train, "AutoshardError", "trainable", "requires_grad|evaluate|forward")


def _detached_loss() -> None:
    _step(loss=lambda model, batch: _loss(model, batch).detach()).init(_batch())


def test_a_loss_without_a_path_to_a_parameter_is_refused() -> None:
    refused(_detached_loss, "AutoshardError", "trainable|depend", "detach")


def _wrong_loss(kind: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return {"vector": out.sum(-1), "one element": out.sum().reshape(1), "none": None, "text": "loss"}[kind]

    _step(loss=loss).init(_batch())


@pytest.mark.parametrize(
    ("kind", "found"), [("vector", r"\(8,\)"), ("one element", r"\(1,\)"), ("none", "None"), ("text", "str")]
)
def test_a_loss_that_is_not_a_scalar_is_refused_with_its_shape_or_type(kind: str, found: str) -> None:
    refused(_wrong_loss, "AutoshardError", found, r"mean\(\)|Mean", args=(kind,))


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if h.sum() > 0:  # the offending line
            return h
        return -h


class _Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 4), nn.Linear(8, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.first(x) if self.calls % 2 else self.second(x)


def _control_flow() -> None:
    _step(_Branch().double()).init(_batch())


def test_control_flow_on_data_is_refused_with_the_source_line() -> None:
    refused(_control_flow, "CaptureError", r"test_bad_input\.py:\d+", r"h\.sum\(\) > 0", "torch.where")


def _python_state() -> None:
    _step(_Alternating().double()).init(_batch())


def test_python_state_that_changes_what_forward_computes_is_refused_by_name() -> None:
    refused(_python_state, "CaptureError", "calls", "register_buffer")


def _captured_parameter() -> None:
    outside = torch.ones(4, dtype=torch.float64, requires_grad=True)
    _step(loss=lambda model, batch: (model(batch["x"]) * outside).sum()).init(_batch())


def test_a_captured_tensor_that_requires_grad_is_refused_with_advice() -> None:
    refused(_captured_parameter, "CaptureError", r"\(4,\)", "frozen")


# ---------------------------------------------------------------- checkpoints


def _save(path: str, width: int = 16, spoil: str = "") -> None:
    step = _step(_model(width))
    state = step.init(_batch())
    state, _ = step(state, _batch())
    if spoil:
        local = state.params[spoil].to_local()
        if local.numel() and dist.get_rank() == 1:
            local.view(-1)[0] = float("nan")
    step.save(state, path)


def _load(path: str, width: int = 16) -> float:
    step = _step(_model(width))
    state = step.load(path, _batch())
    _, metrics = step(state, _batch())
    return float(metrics["loss"])


def _saved(folder: Path, **options: Any) -> str:
    path = str(folder / "checkpoint")
    run_ranks(_save_with, 2, path, options)
    return path


def _save_with(path: str, options: dict[str, Any]) -> None:
    _save(path, **options)


def test_a_checkpoint_as_saved_loads(tmp_path: Path) -> None:
    first, second = run_ranks(_load, 2, _saved(tmp_path))
    assert first == second


def test_a_missing_checkpoint_is_refused_with_its_path(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    refused(_load, "CheckpointError", re.escape(path), args=(path,))


def _data_files(path: str) -> list[Path]:
    """Files of a checkpoint that hold tensors: the larger ones, largest first."""
    files = [file for file in Path(path).rglob("*") if file.is_file()]
    return sorted(files, key=lambda file: file.stat().st_size, reverse=True)


def test_a_truncated_checkpoint_file_is_refused_by_name(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    file = _data_files(path)[0]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(_load, "CheckpointError", re.escape(file.name), args=(path,))


def test_a_checkpoint_with_a_file_missing_is_refused_by_name(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    file = _data_files(path)[1]
    file.unlink()
    refused(_load, "CheckpointError", re.escape(file.name), args=(path,))


def test_every_file_of_a_checkpoint_is_needed_and_each_loss_is_noticed(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    for index, file in enumerate(_data_files(path)):
        copy = tmp_path / f"copy{index}"
        shutil.copytree(path, copy)
        (copy / file.relative_to(path)).unlink()
        refused(_load, "CheckpointError", args=(str(copy),))


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    file = _data_files(path)[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))
    refused(_load, "CheckpointError", re.escape(file.name), args=(path,))


def test_a_checkpoint_of_another_model_is_refused_with_the_parameter_that_differs(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    refused(_load, "CheckpointError", r"0\.weight", "16", "24", args=(path, 24))


def test_not_a_number_in_a_loaded_parameter_is_refused_by_name(tmp_path: Path) -> None:
    path = _saved(tmp_path, spoil="2.weight")
    refused(_load, "CheckpointError", r"2\.weight", "NaN|not a number|finite", args=(path,))


def _evaluate_saved(path: str) -> tuple[float, int]:
    import autoshard

    step = autoshard.parallelize(_model(), _plan(zero=2), loss=_loss)  # no optimizer
    state = step.load(path)
    return float(step.evaluate(state, _batch())["loss"]), len(state.optimizer)


def test_a_checkpoint_of_training_is_read_for_evaluation_without_its_optimizer(tmp_path: Path) -> None:
    first, second = run_ranks(_evaluate_saved, 2, _saved(tmp_path))
    assert first == second
    assert first[1] == 0


# ---------------------------------------------------------------- ranks that differ


def _another_plan(field: str, values: tuple[Any, Any]) -> None:
    step = _step(**{field: values[dist.get_rank()]})
    state = step.init(_batch())
    step(state, _batch())


@pytest.mark.parametrize(
    ("field", "values"),
    [("zero", (1, 3)), ("zero", (0, 2)), ("accumulate", (1, 2)), ("clip_norm", (None, 1.0)), ("seed", (0, 1))],
    ids=str,
)
def test_a_rank_with_another_plan_is_refused_on_both_sides_with_the_field(field: str, values: tuple[Any, Any]) -> None:
    refused(_another_plan, "DivergenceError", "rank", field, args=(field, values))


def _another_mesh() -> None:
    from autoshard import Mesh

    _step(mesh=Mesh(data=4) if dist.get_rank() < 3 else Mesh(data=2, tensor=2))


def test_a_rank_with_another_mesh_is_refused_on_all_sides_before_groups_are_made() -> None:
    outcomes = run_outcomes(_another_mesh, 4, timeout=40.0, fresh=True)
    check_refused(outcomes, "DivergenceError", "rank 0", "rank 3", "data=4", "tensor=2")


def _another_model(kind: str) -> None:
    other = dist.get_rank() == 1
    model = _model()
    if other and kind == "width":
        model = _model(24)
    if other and kind == "activation":
        model[1] = nn.ReLU()
    if other and kind == "constant":
        model[1] = nn.Softplus(beta=2)
    if not other and kind == "constant":
        model[1] = nn.Softplus(beta=1)
    if other and kind == "name":
        model = nn.Sequential(*model, nn.Identity(), nn.Linear(4, 4).double())
    step = _step(model)
    state = step.init(_batch())
    step(state, _batch())


@pytest.mark.parametrize("kind", ["width", "activation", "constant", "name"])
def test_a_rank_with_another_model_is_refused_on_both_sides(kind: str) -> None:
    refused(_another_model, "DivergenceError", "rank", "model|graph|program|parameter", args=(kind,))


def _another_optimizer() -> None:
    import autoshard

    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3 * (1 + dist.get_rank()))
    step = autoshard.parallelize(_model(), _plan(), loss=_loss, optimizer=optimizer)
    step(step.init(_batch()), _batch())


def test_a_rank_with_another_optimizer_is_refused_on_both_sides() -> None:
    refused(_another_optimizer, "DivergenceError", "rank", "optimizer|program|update")


def _other_batch(kind: str) -> Any:
    batch: Any = _batch()
    if dist.get_rank() == 0:
        return batch
    if kind == "rows":
        return _batch(6)
    if kind == "columns":
        return {**batch, "extra": torch.zeros(4)}
    if kind == "dtype":
        return {**batch, "y": batch["y"].float()}
    if kind == "key":
        return {"x": batch["x"], "z": batch["y"]}
    return (batch["x"], batch["y"])


def _loss_of_first(model: Any, batch: Any) -> Tensor:
    """A loss that any of those batches suits: the refusal is of the difference."""
    return model(reference.tensors_of(batch)[0]).sum()


BATCH_KINDS = ["rows", "columns", "dtype", "key", "tree"]


def _another_first_batch(kind: str) -> None:
    _step(loss=_loss_of_first).init(_other_batch(kind))


@pytest.mark.parametrize("kind", BATCH_KINDS)
def test_a_rank_with_another_batch_structure_at_init_is_refused_on_both_sides(kind: str) -> None:
    refused(_another_first_batch, "DivergenceError", "rank", "batch", args=(kind,))


def _ragged(call: str) -> None:
    step = _step(loss=_loss_of_first)
    rows = 4 + dist.get_rank()
    if call == "init":
        step.init(_batch(rows))
    state = step.init(_batch())
    if call == "step":
        step(state, _batch(rows))
    step.forward(state, _batch(rows)["x"])


@pytest.mark.parametrize("call", ["init", "step", "forward"])
def test_ranks_with_another_number_of_samples_are_told_to_drop_or_pad_the_tail(call: str) -> None:
    sizes = "rank 0 has a batch of leading size 4; rank 1 has a batch of leading size 5"
    refused(_ragged, "DivergenceError", sizes, r"drop the tail, or pad", r"Tail\.PAD", "'valid'", "Mean", args=(call,))


def _another_later_batch(kind: str) -> None:
    step = _step(loss=_loss_of_first)
    state = step.init(_batch())
    state, _ = step(state, _batch())
    step(state, _other_batch(kind))


@pytest.mark.parametrize("kind", BATCH_KINDS)
def test_a_rank_with_another_batch_structure_in_a_later_step_is_refused_on_both_sides(kind: str) -> None:
    refused(_another_later_batch, "DivergenceError", "rank", "batch", args=(kind,))


def _one_rank_refuses() -> None:
    rows = 4 if dist.get_rank() == 0 else 3
    _step(accumulate=2).init(_batch(rows))


def test_a_mistake_on_one_rank_alone_ends_both() -> None:
    outcomes = run_outcomes(_one_rank_refuses, 2, timeout=40.0)
    for outcome in outcomes:
        assert outcome.end is End.RAISED, outcome.details
        assert "AutoshardError" in outcome.kind
        assert outcome.seconds < SECONDS


# ---------------------------------------------------------------- a rank that takes another path later


class _OtherInEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x - x.mean(0) if not self.training and dist.get_rank() == 1 else x


def _other_path(kind: str) -> None:
    import autoshard

    rank = dist.get_rank()
    weight = torch.full((4,), float(rank), dtype=torch.float64)
    loss = {
        "constant": lambda model, batch: (model(batch["x"]) * weight).mean(),
        "value": lambda model, batch: model(batch["x"]).mean() * batch["n"],
        "replicated": lambda model, batch: (model(batch["x"]) * batch["w"]).mean(),
        "task": lambda model, batch: model(batch["x"]).mean() if batch["task"] == "a" else model(batch["x"]).sum(),
    }.get(kind, _loss)
    fields = {"zero": 0} if kind == "task" else {}  # it makes two programs
    step = _step(_OtherInEval().double() if "program" in kind else None, loss, **fields)
    batch: dict[str, Any] = _batch()
    batch |= {"n": torch.tensor(1.0 + rank)} if kind == "value" else {}
    batch |= {"w": autoshard.Replicated(weight)} if kind == "replicated" else {}
    batch |= {"task": "a"} if kind == "task" else {}
    state = step.init(batch)
    if kind == "task":
        for task in ("a", "b"):  # both programs exist
            step.gradients(state, batch | {"task": task})
        batch["task"] = "ab"[rank]
    if kind == "full" and rank == 0:
        state.full("0.weight")
    if kind == "evaluation's keys" and rank == 0:
        batch["z"] = batch["x"]
    if kind == "evaluation's shape":
        batch["z"] = torch.zeros(4, 3 + rank)
    if kind == "forward's program":
        step.forward(state, batch["x"])
    elif kind.startswith("evaluation"):
        step.evaluate(state, batch)
    else:
        step(state, batch)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("full", "full.*step"),
        ("forward's program", "sub|mean|sum"),
        ("evaluation's program", "sub|mean|sum"),
        ("evaluation's keys", "z"),
        ("evaluation's shape", "z.*3.*4"),
        ("constant", "constant"),
        ("value", r"\['n'\].*1\.0.*2\.0"),
        ("replicated", r"\['w'\]"),
        ("task", "task.*'a'.*task.*'b'"),
    ],
)
def test_a_rank_that_takes_another_path_after_init_is_told_and_no_rank_hangs(kind: str, named: str) -> None:
    refused(_other_path, "DivergenceError", named, args=(kind,))


# ---------------------------------------------------------------- a state that does not belong


def _foreign_state(kind: str) -> list[str]:
    step = _step()
    state: Any = step.init(_batch())
    if kind == "plan":
        state = _step(zero=1).init(_batch())
    elif kind == "model":
        state = _step(nn.Sequential(nn.Linear(8, 4)).double()).init(_batch())
    elif kind == "none":
        state = None
    messages = []
    for use in (
        lambda: step(state, _batch()),
        lambda: step.gradients(state, _batch()),
        lambda: step.evaluate(state, _batch()),
        lambda: step.forward(state, _batch()["x"]),
        lambda: step.save(state, "/nonexistent/never written"),
        lambda: step.export(state, "/nonexistent/never written"),
    ):
        with pytest.raises(ValueError) as raised:
            use()
        messages.append(f"{type(raised.value).__name__}: {raised.value}")
    return messages


@pytest.mark.parametrize(("kind", "named"), [("plan", r"0\.bias"), ("model", r"0\.bias"), ("none", "None")])
def test_a_state_of_another_model_or_plan_is_refused_by_every_call(kind: str, named: str) -> None:
    for messages in run_ranks(_foreign_state, 2, kind):
        for message in messages:
            assert re.match(f"StateError: .*{named}.*init", message), message


def _alternating_branches(optimizer: str) -> str:
    import autoshard

    def loss(model: Any, batch: Any) -> Tensor:
        return (model[batch["task"]](batch["x"]) - batch["y"]).square().mean()

    def model() -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.Linear(8, 4) for name in "ab"}).double()

    factory: reference.OptimizerFactory = ADAMW
    if optimizer == "sgd":
        factory = functools.partial(torch.optim.SGD, lr=0.1)
    step = autoshard.parallelize(model(), _plan(), loss=loss, optimizer=factory)
    batches = [_batch(), _batch(), _batch()]
    for task, batch in zip("aba", batches, strict=True):
        batch["task"] = task  # type: ignore[assignment]
    state = step.init(batches[0])
    for batch in batches:
        state, _ = step(state, batch)
    whole: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(whole, _batch())
    joined = {key: torch.cat([part[key] for part in whole]) for key in whole[0]}
    other = model()
    reference.train(other, [joined | {"task": t} for t in "aba"], reference.Recipe(optimizer=factory), loss)
    found = {name: state.full(name) for name in state.params}
    return f"{reference.worst(found, dict(other.named_parameters()))[0] < 1e-12}"


def test_branches_that_alternate_by_batch_train_where_the_optimizer_has_no_state() -> None:
    assert run_ranks(_alternating_branches, 2, "sgd") == ["True", "True"]


def test_branches_that_alternate_by_batch_are_refused_where_the_optimizer_has_state() -> None:
    refused(_alternating_branches, "StateError", r"b\.weight", "every batch reach", args=("adamw",))


# ---------------------------------------------------------------- values


def _index_out_of_range(which: str, call: str) -> None:
    import autoshard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 7))
    step = autoshard.parallelize(model, _plan(), loss=lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), optimizer=ADAMW)
    batch = {"x": torch.arange(4), "y": torch.arange(4)}
    state = step.init(batch)
    batch[which][2] = 77
    getattr(step, call)(state, batch)


@pytest.mark.parametrize(
    ("which", "call"), [("x", "__call__"), ("y", "__call__"), ("y", "gradients"), ("x", "evaluate")]
)
def test_a_token_or_label_out_of_range_is_named_with_the_batch_s_values(which: str, call: str) -> None:
    patterns = (rf"batch\['{which}'\] is 0 to 77", "Token ids", "class labels", "ignore_index")
    refused(_index_out_of_range, "BatchError", *patterns, args=(which, call))


def _label_out_of_range_in_a_count() -> None:
    import autoshard

    def loss(model: Any, batch: Any) -> Any:
        weight = torch.arange(1.0, 8.0)[batch["y"]]
        return autoshard.Mean(
            (F.cross_entropy(model(batch["x"]), batch["y"] % 7, reduction="none") * weight).sum(), weight.sum()
        )

    step = autoshard.parallelize(nn.Linear(3, 7), _plan(accumulate=2), loss=loss, optimizer=ADAMW)
    batch = {"x": torch.zeros(4, 3), "y": torch.arange(4)}
    state = step.init(batch)
    batch["y"][1] = 77
    step(state, batch)


def test_so_it_is_in_the_count_of_a_mean_which_runs_before() -> None:
    refused(_label_out_of_range_in_a_count, "BatchError", r"batch\['y'\] is 0 to 77")


# ---------------------------------------------------------------- a rank that dies


def _die_in_training(place: str) -> None:
    step = _step()
    state = step.init(_batch())
    for index in range(200):
        if dist.get_rank() == 1 and index == 3:
            if place == "kill":
                os.kill(os.getpid(), 9)
            raise RuntimeError("rank 1 broke in the user's own code")
        state, metrics = step(state, _batch())
        float(metrics["loss"])
        time.sleep(0.01)


def test_a_rank_that_is_killed_ends_the_others_within_seconds_with_advice() -> None:
    survivor, dead = run_outcomes(_die_in_training, 2, "kill", timeout=60.0)
    assert dead.end is End.DIED
    assert survivor.end is End.RAISED, survivor.details
    assert survivor.seconds - dead.seconds < 10
    assert re.search(r"rank|peer", survivor.message, re.I), survivor.details
    assert re.search(r"checkpoint|load|resume|restart", survivor.message, re.I), survivor.message


def _die_before_init() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    _step().init(_batch())


def test_a_rank_that_dies_before_the_first_step_ends_the_others_within_seconds() -> None:
    survivor, dead = run_outcomes(_die_before_init, 2, timeout=60.0)
    assert dead.end is End.DIED
    assert survivor.end is End.RAISED, survivor.details
    assert survivor.seconds < SECONDS


# ---------------------------------------------------------------- the bed itself


def test_the_model_batch_and_plan_without_a_mistake_train() -> None:
    """A refusal above is of the mistake, not of the model around it."""
    assert len(run_ranks(_right, 2)) == 2
    assert reference.rank_slice(torch.arange(4), 1, 2).tolist() == [2, 3]


def _right() -> float:
    step = _step(accumulate=2)
    _, metrics = step(step.init(_batch()), _batch())
    return float(metrics["loss"])
