"""Regions of the update graph: one kernel for all parameters of a group, and the same values as the graph itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autoshard import compat
from autoshard.capture import Modules, capture_training
from autoshard.collectives import Axis
from autoshard.compile import compile_graph
from autoshard.manager import PassContext, run_passes
from autoshard.optim import bind
from autoshard.outline import has_regions, outlined
from autoshard.plan import Mesh, Plan
from autoshard.program import TAG, Graph, Kind, Phase, Program, Signature, Tag
from tests.multirank.runner import run_ranks

Factory = Callable[[Any], torch.optim.Optimizer]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
CPU = torch.device("cpu")


class Odd(nn.Module):
    """Parameters of many shapes: (), (1,), (3,), (5, 7), (7, 5), (40, 3)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.randn(1))
        self.three = nn.Parameter(torch.randn(3))
        self.wide, self.tall = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7, 5))
        self.long = nn.Parameter(torch.randn(40, 3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.wide @ self.tall).sum(1, keepdim=True) * self.scale + self.one + self.long * self.three).sin()


def program(optimizer: Factory, ranks: int = 2, clip_norm: float | None = 0.5) -> Program:
    model = Odd().double()
    captured = capture_training(
        Modules(model, {}),
        lambda m, x: m(x).square().mean(),
        torch.randn(40 // ranks, 5, dtype=torch.float64),
        ranks=ranks,
        accumulate=1,
        device=CPU,
    )
    binding = bind(optimizer, {n: p.detach().to("meta").requires_grad_() for n, p in model.named_parameters()})
    axes = (Axis("data", ranks, f"autoshard:cpu:data{ranks}:data", emulate_reduce_scatter=True),)
    plan = Plan(zero=3, mesh=Mesh(data=ranks), clip_norm=clip_norm, device="cpu")
    context = PassContext(plan, axes if ranks > 1 else (), binding, None, CPU)
    return run_passes(Program({"micro": captured.graph}), context)


class Recorder:
    """Takes the place of the compiler: keeps what it was given, interprets it."""

    def __init__(self) -> None:
        self.inputs: list[list[Tensor]] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        self.inputs.append(inputs)
        return lambda args: module(*args)


def arguments(graph: Graph, seed: int = 0) -> list[Tensor]:
    """A value for every input: positive where a second moment needs it, at the placeholder's own shape."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for node, port in zip(graph.placeholders(), graph.signature.inputs, strict=True):
        value = node.meta["val"]
        if port.kind in (Kind.STEP, Kind.COORDINATE):
            found.append(torch.zeros(value.shape, dtype=value.dtype))
        else:
            found.append(torch.rand(value.shape, generator=generator, dtype=value.dtype))
    return found


def test_one_kernel_updates_parameters_of_every_shape() -> None:
    graph = program(ADAMW).graphs["epilogue"]
    recorder = Recorder()
    module, compiled = outlined(graph, recorder)
    assert compiled == len(recorder.inputs) == 2  # the norm's sum of squares, and the update
    for inputs in recorder.inputs:
        assert any(x.dim() for x in inputs)
        assert all(isinstance(x.shape[0], torch.SymInt) for x in inputs if x.dim())
    calls = [
        n for n in module.graph.nodes if n.op == "call_function" and not isinstance(n.target, torch._ops.OpOverload)
    ]
    kernels = [node for node in calls if node.name.startswith("kernel")]
    assert len(kernels) == 2 * 4  # (), (1,) and a shard of one are not worth one


def test_a_kernel_computes_nothing_of_single_numbers_alone_and_nor_is_it_computed_twice() -> None:
    class Kept(Recorder):
        def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
            modules.append(module)
            return super().__call__(module, inputs)

    modules: list[fx.GraphModule] = []
    module, _ = outlined(program(ADAMW).graphs["epilogue"], Kept())
    for kernel in modules:
        for node in kernel.graph.nodes:
            if node.op == "call_function":
                assert any(n.meta["val"].dim() for n in (node, *node.all_input_nodes)), node.format_node()
    powers = [node for node in module.graph.nodes if node.target is torch.ops.aten.pow.Scalar]
    assert len(powers) == 2  # of both betas, once for all parameters


def test_other_options_make_another_kernel() -> None:
    def grouped(named: Any) -> torch.optim.Optimizer:
        parameters: dict[str, Any] = dict(named)
        coarse: list[Any] = [parameters.pop("wide"), parameters.pop("tall")]
        groups: list[dict[str, Any]] = [{"params": coarse, "eps": 1e-3}, {"params": [*parameters.values()]}]
        return torch.optim.AdamW(groups, lr=0.1)

    one, two = Recorder(), Recorder()
    outlined(program(ADAMW).graphs["epilogue"], one)
    outlined(program(grouped).graphs["epilogue"], two)

    assert (len(one.inputs), len(two.inputs)) == (2, 3)


def test_a_region_that_is_not_elementwise_keeps_its_shape() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).softmax(1) + 1

    values = [torch.randn(4, 3), torch.randn(3, 4)]
    with compat.fake_mode():
        module = compat.make_fx(function, [torch.empty(4, 3), torch.empty(3, 4)])
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta[TAG] = Tag(Phase.FORWARD, region="block")
    graph = Graph(module, Signature((), ()))
    recorder = Recorder()
    result, compiled = outlined(graph, recorder)
    assert (has_regions(graph), compiled) == (True, 1)
    assert [tuple(x.shape) for x in recorder.inputs[0]] == [(4, 3), (3, 4)]
    assert torch.equal(result(*values), function(*values))
    assert len(module.graph.nodes) > len(result.graph.nodes)  # the graph itself stays as it was


def update_on_a_rank(optimizer: Factory, backend: str) -> list[Tensor]:
    """What two updates leave in the inputs of the epilogue, and what the second returns."""
    import autoshard

    world = dist.group.WORLD
    assert world is not None
    compat.register_group("autoshard:cpu:data2:data", world)
    graph = program(optimizer).graphs["epilogue"]
    runtime = autoshard.runtime.start(Plan(mesh=Mesh(data=2), device="cpu"))
    run, _ = compile_graph("epilogue", graph, backend, runtime)
    args = arguments(graph)
    results: Sequence[Tensor] = ()
    for _ in range(2):
        results = run(list(args))
    return [*args, *results]


@pytest.mark.parametrize("optimizer", [ADAMW, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_compiled_regions_compute_what_the_graph_computes(optimizer: Factory) -> None:
    compiled = run_ranks(update_on_a_rank, 2, optimizer, "inductor", timeout=280)
    expected = run_ranks(update_on_a_rank, 2, optimizer, "debug")
    for ours, theirs in zip(compiled, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
