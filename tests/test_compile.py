"""What the compiler must not undo: gathers stay just ahead of their use, nothing is gathered twice at once."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn

from autoshard import compat
from autoshard import compile as compiling
from autoshard.capture import Modules, capture_training
from autoshard.collectives import Axis
from autoshard.compile import decompose
from autoshard.cost import gathered_peak
from autoshard.manager import PassContext, run_passes
from autoshard.optim import bind
from autoshard.plan import Mesh, Plan
from autoshard.program import Graph, Program
from autoshard.runtime import start
from tests.multirank.runner import run_ranks

CPU = torch.device("cpu")
_COLLECTIVES = {"all_gather_into_tensor": "gather", "all_to_all_single": "reduce", "all_reduce": "all-reduce"}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


def program(layers: int = 3) -> Program:
    model = nn.Sequential(*(Residual(16) for _ in range(layers)))
    device = torch.device("cpu")
    batch = torch.zeros(4, 16)
    captured = capture_training(
        Modules(model, {}), lambda m, x: m(x).square().mean(), batch, ranks=2, accumulate=1, device=device
    )
    parameters = {n: p.detach().to("meta").requires_grad_() for n, p in model.named_parameters()}
    binding = bind(functools.partial(torch.optim.SGD, lr=0.1), parameters)
    axes = (Axis("data", 2, "autoshard:cpu:data2:data", emulate_reduce_scatter=True),)
    context = PassContext(Plan(zero=3, mesh=Mesh(data=2)), axes, binding, None, device)
    return run_passes(Program({"micro": captured.graph}), context)


def events_of_graph(graph: Graph) -> list[str]:
    found = []
    for node in graph.module.graph.nodes:
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        name = name.rpartition("::")[2]
        if name in _COLLECTIVES:
            found.append(_COLLECTIVES[name])
        elif name in ("mm", "addmm"):
            found.append("mm")
    return found


def events_of_code(code: str) -> list[str]:
    found = []
    body = code[code.index("def call(") :]
    for line in body.splitlines():
        for name, event in _COLLECTIVES.items():
            if re.search(rf"_c10d_functional\.{name}\w*\.default\(", line):
                found.append(event)
        if re.search(r"extern_kernels\.(add)?mm\(|_mkl_linear", line):
            found.append("mm")
    return found


def compiled_and_written() -> tuple[list[str], list[str]]:
    """Run on a rank, because compiling collectives needs a process group."""
    world = dist.group.WORLD
    assert world is not None
    compat.register_group("autoshard:cpu:data2:data", world)
    graph = decompose(program().graphs["micro"])
    with compat.generated_code() as code:
        compat.compile_inductor(graph.module, [node.meta["val"] for node in graph.placeholders()])
    return events_of_code(code[-1]), events_of_graph(graph)


def gathers_before_each_product(events: list[str]) -> list[int]:
    return [events[:i].count("gather") for i, event in enumerate(events) if event == "mm"]


def test_the_compiler_starts_a_gather_one_use_early_at_most() -> None:
    for compiled, written in run_ranks(compiled_and_written, 2, timeout=280):
        early, planned = gathers_before_each_product(compiled), gathers_before_each_product(written)
        assert len(early) == len(planned) > 10
        assert [e - p for e, p in zip(early, planned, strict=True) if not p <= e <= p + 1] == []
        assert compiled.count("gather") == written.count("gather")
        assert compiled.count("reduce") == written.count("reduce")


def test_the_vectors_that_are_taken_without_trying_all_are_inductors_own_choice() -> None:
    from torch._inductor import config, cpu_vec_isa

    chosen = []
    for known in (None, compat._vectors_work()):
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        with config.patch({"cpp.vec_isa_ok": known}):
            chosen.append(str(cpu_vec_isa.pick_vec_isa()))
    assert chosen[0] == chosen[1]


class CompilerError(Exception):
    pass


@pytest.mark.parametrize("raises", [False, True])
def test_a_long_compile_says_that_it_goes_on_until_it_ends_or_fails(
    raises: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(module: fx.GraphModule, inputs: Any) -> Any:
        time.sleep(0.5)
        if raises:
            raise CompilerError
        return module

    monkeypatch.setattr(compiling, "_BEAT", 0.1)
    monkeypatch.setattr(compat, "compile_inductor", slow)
    runtime = start(Plan(device="cpu"))
    captured = capture_training(
        Modules(nn.Linear(3, 3), {}), lambda m, x: m(x).sum(), torch.zeros(4, 3), ranks=1, accumulate=1, device=CPU
    )
    expected = pytest.raises(CompilerError) if raises else contextlib.nullcontext()
    with compiling.compiled_for("a test"), expected:
        compiling.compile_graph("micro", captured.graph, "inductor", runtime)
    assert not [thread for thread in threading.enumerate() if thread.name == "autoshard-compiling"]
    time.sleep(0.3)
    first, *between = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"autoshard: compiling micro \(\d+ nodes\) with Inductor, for a test \.\.\.", first)
    if not raises:
        assert between.pop().startswith("autoshard: compiled micro in ")
    assert len(between) >= 2
    assert {line for line in between if not re.fullmatch(r"autoshard: still compiling micro, \d+ s", line)} == set()


def quiet_rank() -> list[str]:
    """The names of the threads that tell of a compile on this rank."""
    runtime = start(Plan(device="cpu"))
    with compiling._heartbeat(runtime, "still compiling"):
        return [thread.name for thread in threading.enumerate() if thread.name == "autoshard-compiling"]


def test_only_rank_0_tells() -> None:
    assert run_ranks(quiet_rank, 2) == [["autoshard-compiling"], []]


def test_at_stage_three_two_matrices_at_most_are_gathered_at_once() -> None:
    one = 16 * 64 * 4
    assert one <= gathered_peak(program().graphs["micro"]) <= 2 * one
