"""`autoshard.verify` says yes to what is right, and names the pass and node of a fault that was put in.

Functions that begin with an underscore and take no fixture run on the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autoshard
from autoshard import Mean, Mesh, Plan, Report
from autoshard.capture import capture_training
from autoshard.compare import global_micro_batches, local_batch
from autoshard.compile import compile_graph
from autoshard.program import TAG, Graph, Kind, Program, tag
from autoshard.rules import Labels, Rule
from autoshard.rules.table import TABLE
from tests.multirank.runner import run_outcomes, run_ranks

aten = torch.ops.aten
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
FAULTY = "0.weight"


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def _dropout_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()


def _loss(model: nn.Module, batch: Any) -> Mean:
    out = model(batch["x"])
    return Mean(F.cross_entropy(out, batch["y"], ignore_index=-100, reduction="sum"), (batch["y"] != -100).sum())


def _batch(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (rows,), generator=generator)
    labels[rows // 2 + 1 :: 2] = -100  # the micro-batches and ranks differ in how many labels count
    return {"x": torch.randn(rows, 6, generator=generator, dtype=torch.float64), "y": labels}


def _verify(model: Callable[[], nn.Module] = _model, steps: int = 1, **fields: Any) -> Report:
    plan = Plan(**{"mesh": Mesh(data=-1), "zero": 3, "backend": "debug", "device": "cpu", "clip_norm": 0.5, **fields})
    return autoshard.verify(model(), plan, _batch(), loss=_loss, optimizer=ADAMW, steps=steps)


# ---------------------------------------------------------------- what is right


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 2), (2, 1), (3, 2)])
def test_a_right_plan_is_said_to_be_right_on_two_ranks(stage: int, accumulate: int) -> None:
    for report in run_ranks(functools.partial(_verify, steps=2, zero=stage, accumulate=accumulate), 2):
        assert report.ok, report
        assert report.first is None
        compared = {(row.step, row.kind) for row in report.rows}
        assert compared == {(1, "initial")} | {
            (step, kind) for step in (1, 2) for kind in ("loss", "gradient", "parameter", "buffer")
        }


def test_a_model_with_dropout_is_compared_from_its_capture_on_and_the_report_says_so() -> None:
    report = run_ranks(functools.partial(_verify, _dropout_model, steps=2), 2)[0]
    assert report.ok, report
    assert "draws random numbers" in report.notes[0]


def test_verify_leaves_the_model_as_it_was() -> None:
    model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    autoshard.verify(model, Plan(backend="debug", device="cpu"), _batch(), loss=_loss, optimizer=ADAMW)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class _Rounding(nn.Sequential):
    """A float64 model with a float32 result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def _rounding_model() -> nn.Module:
    torch.manual_seed(0)
    return _Rounding(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def test_what_a_model_rounds_to_by_itself_is_the_bound_and_the_report_says_so() -> None:
    report = run_ranks(functools.partial(_verify, _rounding_model), 2)[0]
    assert report.ok, report
    assert {row.kind: row.tolerance for row in report.rows} == {
        "initial": 1e-8, "loss": 1e-3, "gradient": 1e-3, "parameter": 1e-3
    }  # fmt: skip
    assert "rounds to float32" in report.notes[0]
    assert run_ranks(_verify, 2)[0].notes == ()


def _verify_own_slice() -> Report:
    plan = Plan(mesh=Mesh(data=-1), backend="debug", device="cpu")
    mine = local_batch(_batch(), int(os.environ["RANK"]), 2, 1)
    return autoshard.verify(_model(), plan, mine, loss=_loss)


def test_a_rank_s_slice_in_the_place_of_the_global_batch_is_refused() -> None:
    for outcome in run_outcomes(_verify_own_slice, 2):
        assert outcome.kind[0] == "DivergenceError"
        assert re.search(r"global batch's tensor.*verify takes the whole global batch", outcome.message)


def test_the_slices_of_the_ranks_make_up_the_global_micro_batches() -> None:
    batch = {"x": torch.arange(24).view(12, 2)}
    parts = [local_batch(batch, rank, 3, 2)["x"] for rank in range(3)]
    for k, micro in enumerate(global_micro_batches(batch, 2)):
        assert torch.equal(micro["x"], torch.cat([part.chunk(2)[k] for part in parts]))


def test_a_global_batch_that_does_not_divide_is_refused_with_a_size_that_works() -> None:
    with pytest.raises(autoshard.BatchError, match=r"8 samples.*multiple of 6"):
        local_batch(_batch(8), 0, 3, 2)


# ---------------------------------------------------------------- what is wrong


def _doubled_gradient(graph: Graph) -> Graph:
    """`graph` with the gradient of FAULTY times 2, in a node named "fault"."""
    output = next(iter(reversed(graph.module.graph.nodes)))
    values = graph.output_nodes()
    at = next(i for i, port in graph.signature.find_outputs(Kind.GRADIENT) if port.name == FAULTY)
    values[at] = _scaled(values[at], output)
    output.args = (tuple(values),)
    graph.module.recompile()
    return graph


def _scaled(value: fx.Node, before: fx.Node) -> fx.Node:
    with value.graph.inserting_before(before):
        node = value.graph.create_node("call_function", aten.mul.Tensor, (value, 2.0), name="fault")
    node.meta["val"] = value.meta["val"]
    node.meta[TAG] = tag(value).but(role=None, rule="table")
    return node


def _doubled_update(graph: Graph) -> Graph:
    """The epilogue with the new value of FAULTY times 2; the copy into it is the node to name."""
    held = dict(zip(graph.placeholders(), graph.signature.inputs, strict=True))
    for node in graph.module.graph.nodes:
        if node.target is aten.copy_.default and (held[node.args[0]].kind, held[node.args[0]].name) == (
            Kind.PARAMETER,
            FAULTY,
        ):
            node.args = (node.args[0], _scaled(node.args[1], node))
    graph.module.recompile()
    return graph


def _forgotten_sum(graph: Graph) -> Graph:
    """The micro graph with the gradient of FAULTY added to itself instead of to what was accumulated."""
    held = dict(zip(graph.placeholders(), graph.signature.inputs, strict=True))
    for node in graph.module.graph.nodes:
        if node.target is aten.copy_.default and held[node.args[0]].name == f"gradient:{FAULTY}":
            node.args[1].args = (node.args[1].args[1], node.args[1].args[1])
    graph.module.recompile()
    return graph


@contextlib.contextmanager
def _fault_in(name: str) -> Iterator[None]:
    """Pass `name` makes a program with an error in it."""
    module = importlib.import_module(f"autoshard.passes.{name}")
    original = getattr(module, name)
    spoil = {"update": _doubled_update, "accumulate": _forgotten_sum}.get(name, _doubled_gradient)
    where = "epilogue" if name == "update" else "micro"

    def faulty(program: Program, context: Any) -> Program:
        program = original(program, context)
        return program.with_graph(where, spoil(program.graphs[where]))

    with mock.patch.object(module, name, faulty):
        yield


def _with_fault(name: str, accumulate: int, tensor: int = 1) -> Report:
    with _fault_in(name):
        return _verify(accumulate=accumulate, zero=2, mesh=Mesh(data=-1, tensor=tensor))


@pytest.mark.parametrize(
    ("name", "accumulate", "tensor"),
    [
        *((name, accumulate, 1) for name in ("canonicalize", "place", "zero", "lower") for accumulate in (1, 2)),
        *((name, 1, 2) for name in ("place", "lower")),
    ],
)
def test_a_gradient_that_a_pass_doubles_is_found_in_that_pass_and_node(name: str, accumulate: int, tensor: int) -> None:
    for report in run_ranks(_with_fault, 2 * tensor, name, accumulate, tensor):
        assert not report.ok
        assert report.first is not None
        assert (report.first.pass_name, report.first.graph, report.first.node) == (name, "micro", "fault"), report
        assert report.first.output == f"gradient {FAULTY}"
        assert report.first.error == pytest.approx(1.0)
        assert [row.name for row in report.rows if not row.ok and row.kind == "gradient"] == [FAULTY]
        assert f"pass {name}, node fault" in str(report)


def test_a_sum_over_micro_batches_that_is_forgotten_is_found_in_accumulate() -> None:
    report = run_ranks(_with_fault, 2, "accumulate", 2)[0]
    assert report.first is not None
    assert (report.first.pass_name, report.first.output) == ("accumulate", f"gradient {FAULTY}"), report


def test_a_wrong_update_is_found_in_the_write_of_that_parameter() -> None:
    report = run_ranks(_with_fault, 2, "update", 1)[0]
    assert {row.kind for row in report.rows if not row.ok} == {"parameter"}
    assert report.first is not None
    assert (report.first.pass_name, report.first.graph) == ("update", "epilogue"), report
    assert report.first.node.startswith("copy_")
    assert report.first.output == f"parameter {FAULTY}"


def _with_wrong_capture() -> Report:
    def faulty(*args: Any, **kwargs: Any) -> Any:
        captured = capture_training(*args, **kwargs)
        _doubled_gradient(captured.graph)
        return captured

    with mock.patch("autoshard.api.capture_training", faulty):
        return _verify()


def test_a_wrong_capture_is_found_in_capture() -> None:
    report = run_ranks(_with_wrong_capture, 2)[0]
    assert report.first is not None
    assert (report.first.pass_name, report.first.node) == ("capture", "fault"), report


def _with_wrong_row() -> Report:
    """A sum whose row says that every rank has the whole sum, where each has a term."""
    original = TABLE[aten.sum.default]

    def labels(op: Any) -> Labels:
        return Labels(("abcdefg"[: op.inputs[0].dim()],), (("", ""),))

    with mock.patch.dict(TABLE, {aten.sum.default: Rule(labels=labels, linear=original.linear)}):
        return _verify()


def test_a_wrong_row_of_the_rule_table_is_found_at_the_op_that_it_is_of() -> None:
    for report in run_ranks(_with_wrong_row, 2):
        assert report.first is not None
        assert report.first.pass_name == "lower", report
        assert report.first.node.startswith("sum")
        assert "aten.sum.default" in report.first.detail
        assert "rules/table.py" in report.first.detail


def _with_wrong_compiler() -> Report:
    def faulty(name: str, graph: Graph, backend: str, runtime: Any) -> Any:
        run, seconds = compile_graph(name, graph, backend, runtime)
        at = next((i for i, port in graph.signature.find_outputs(Kind.GRADIENT) if port.name == FAULTY), None)

        def wrong(args: list[Tensor]) -> tuple[Tensor, ...]:
            outputs = run(args)
            return tuple(out * 2 if i == at else out for i, out in enumerate(outputs))

        return wrong, seconds

    with mock.patch("autoshard.engine.compile_graph", faulty):
        return _verify()


def test_a_wrong_compiler_is_told_from_wrong_passes() -> None:
    report = run_ranks(_with_wrong_compiler, 2)[0]
    assert report.first is not None
    assert report.first.pass_name == "compile", report


# ---------------------------------------------------------------- as a command


def test_the_command_verifies_what_a_configuration_names(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autoshard.verify_cli", "experiment=tiny", "steps=1", "model.layers=1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "the plan computes what one device computes" in ended.stdout
    assert re.search(r"^gradient +\d+ +0 ", ended.stdout, re.M)
