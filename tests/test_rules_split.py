"""With a tensor axis, layers and losses consist of ops whose inner and class dims can be split.

`canonicalize` writes out the sums that fused ops hide: what it makes computes what the captured graph computes, and
the dim that is split there has a row in every op that has it.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoshard.capture import Modules, call_model, capture_training
from autoshard.collectives import Axis
from autoshard.manager import PassContext
from autoshard.passes.canonicalize import canonicalize
from autoshard.placement import REPLICATE, Partial, Placement, Shard
from autoshard.plan import Mesh, Plan
from autoshard.program import Kind, Program
from autoshard.rules import Row, candidates, rule_of, spread
from autoshard.rules.options import op_of, tensor_inputs
from tests.zoo import ZOO

aten = torch.ops.aten
CPU = torch.device("cpu")
CLASSES = 14  # a size that no other dim has


class Weights(nn.Module):
    """Parameters of the given shapes."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for i, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(f"p{i}", nn.Parameter(value.to(dtype)))


def tensor_axis() -> PassContext:
    plan = Plan(mesh=Mesh(data=1), backend="debug", device="cpu")
    return PassContext(plan, (Axis("tensor", 2, "autoshard:cpu:tensor2:tensor"),))


def graphs(model: Weights, loss: Callable[..., Tensor], batch: Any) -> tuple[fx.GraphModule, fx.GraphModule, list[Any]]:
    """As captured, as canonical, and the values of the inputs."""
    captured = capture_training(Modules(model, {}), loss, batch, ranks=1, accumulate=1, device=CPU)
    values: list[Any] = [p.detach() for p in model.parameters()]
    values += [batch] if isinstance(batch, Tensor) else list(batch)
    values += [torch.zeros(2, dtype=torch.int64), *captured.constants.values()]
    assert [p.kind for p in captured.graph.signature.inputs].count(Kind.RNG) == 1
    canonical = canonicalize(Program({"micro": captured.graph}), tensor_axis()).graphs["micro"]
    return captured.graph.module, canonical.module, values


def run(module: fx.GraphModule, values: list[Any]) -> list[Tensor]:
    return list(fx.Interpreter(module).run(*values))


def assert_same(before: fx.GraphModule, after: fx.GraphModule, values: list[Any], tolerance: float) -> None:
    for old, new in zip(run(before, values), run(after, values), strict=True):
        torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance)


def cannot_be_split(module: fx.GraphModule, size: int) -> list[str]:
    """The calls without a row in which their dims of `size` are split over 2 ranks."""
    found = []
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        op, rule = op_of(node), rule_of(node.target)
        for output, tensors in ((False, op.inputs), (True, op.outputs)):
            for i, t in enumerate(tensors):
                for dim, length in enumerate(t.shape if t is not None else ()):
                    if length == size and (rule is None or spread(rule, op, i, Shard(dim), output, 2) is None):
                        found.append(f"{node.format_node()}, {'output' if output else 'input'} {i} along {dim}")
    return found


def test_a_call_whose_dim_cannot_be_split_is_noticed() -> None:
    _, after, _ = graphs(Weights((6, CLASSES)), lambda m, x: (m.p0.cumsum(1) * x).sum(), torch.ones(6, 1).double())
    assert "cumsum" in cannot_be_split(after, CLASSES)[0]


def _nll(**options: Any) -> Callable[..., Tensor]:
    return lambda m, batch: F.cross_entropy(m.p0, batch[0], **options).sum()


def _classes(*shape: int, ignored: int | None = None) -> Tensor:
    found = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(1))
    if ignored is not None:
        found.view(-1)[::2] = ignored
    return found


WEIGHTS = torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64)
PROBABILITIES = torch.rand(6, CLASSES, generator=torch.Generator().manual_seed(2)).double().softmax(1)
LOSSES: dict[str, tuple[Callable[..., Tensor], Any, tuple[int, ...]]] = {
    "plain": (_nll(), _classes(6), (6, CLASSES)),
    "sum": (_nll(reduction="sum"), _classes(6), (6, CLASSES)),
    "none": (_nll(reduction="none"), _classes(6), (6, CLASSES)),
    "ignored": (_nll(ignore_index=-100), _classes(6, ignored=-100), (6, CLASSES)),
    "ignored class": (_nll(ignore_index=3), _classes(6, ignored=3), (6, CLASSES)),
    "smoothed": (_nll(label_smoothing=0.1), _classes(6, ignored=-100), (6, CLASSES)),
    "weights": (_nll(weight=WEIGHTS), _classes(6), (6, CLASSES)),
    "weights, smoothed": (_nll(weight=WEIGHTS, label_smoothing=0.1), _classes(6, ignored=-100), (6, CLASSES)),
    "probabilities": (_nll(), PROBABILITIES, (6, CLASSES)),
    "probabilities, weights": (_nll(weight=WEIGHTS, label_smoothing=0.1), PROBABILITIES, (6, CLASSES)),
    "pixels": (_nll(), _classes(6, 4, 3), (6, CLASSES, 4, 3)),
    "pixels, weights": (_nll(weight=WEIGHTS), _classes(6, 4, 3), (6, CLASSES, 4, 3)),
    "one sample": (_nll(), _classes(), (CLASSES,)),
    "logsumexp": (
        lambda m, batch: (m.p0.logsumexp(1) - m.p0.gather(1, batch[0][:, None])[:, 0]).square().mean(),
        _classes(6),
        (6, CLASSES),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_classes_of_a_loss_can_be_split_from_end_to_end(name: str) -> None:
    loss, target, shape = LOSSES[name]
    if target.dim() == 0:
        target = target[None]
        loss = functools.partial(lambda m, batch: F.cross_entropy(m.p0, batch[0][0]))
    before, after, values = graphs(Weights(shape), loss, (target,))
    assert_same(before, after, values, 1e-12)
    assert not cannot_be_split(after, CLASSES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", ["log_softmax", "logsumexp"])
def test_a_written_out_log_of_a_sum_is_rounded_once(op: str, dtype: torch.dtype) -> None:
    model = Weights((64, 50), dtype=dtype)
    x = torch.randn(64, 50, generator=torch.Generator().manual_seed(4)).to(dtype)
    apply = getattr(torch, op)

    def loss(m: Any, x: Tensor) -> Tensor:
        return (apply(m.p0, 1) * (x if op == "log_softmax" else x[:, 0])).sum()

    before, after, values = graphs(model, loss, x)
    assert any(op in str(n.target) for n in before.graph.nodes)
    assert not any(op in str(n.target) for n in after.graph.nodes)
    model.double()
    (exact,) = torch.autograd.grad(loss(model, x.double()), next(model.parameters()))
    old, new = run(before, values)[1], run(after, values)[1]
    assert old.dtype == new.dtype == dtype
    torch.testing.assert_close(new, old, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    assert (new - exact).abs().max() <= 1.2 * (old - exact).abs().max()


@pytest.mark.parametrize("value", [-math.inf, math.inf])
def test_a_written_out_logsumexp_of_infinities_is_torchs(value: float) -> None:
    x = torch.tensor([[value, 1.0, 2.0], [value] * 3], dtype=torch.float64)
    before, after, values = graphs(Weights((2, 3)), lambda m, x: (m.p0 + x).logsumexp(1).sum(), x)
    found, wanted = run(after, values)[0], run(before, values)[0]
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert not found.isnan()


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda m, x: F.linear(x, m.p0, m.p1), ((4, CLASSES), (4,))),
    "addmm": (lambda m, x: torch.addmm(m.p1, x, m.p0, beta=0.5, alpha=2), ((CLASSES, 4), (4,))),
    "addmm without its input": (
        lambda m, x: torch.addmm(m.p1 / 0, x, m.p0, beta=0, alpha=2), ((CLASSES, 4), (4,))
    ),
    "addmv": (lambda m, x: torch.addmv(m.p1, x, m.p0, beta=0.5, alpha=2), ((CLASSES,), (6,))),
    "baddbmm": (
        lambda m, x: torch.baddbmm(m.p1, x.view(2, 3, CLASSES), m.p0, beta=0.5, alpha=2), ((2, CLASSES, 4), (2, 1, 4))
    ),
    "convolution": (
        lambda m, x: F.conv1d(x.unsqueeze(-1).expand(6, CLASSES, 5), m.p0, m.p1, padding=1), ((4, CLASSES, 3), (4,))
    ),
    "transposed convolution": (
        lambda m, x: F.conv_transpose1d(x.unsqueeze(-1).expand(6, CLASSES, 5), m.p0, m.p1), ((CLASSES, 4, 3), (4,))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_inner_dim_of_a_product_with_a_bias_can_be_split(name: str) -> None:
    layer, shapes = PRODUCTS[name]
    x = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    before, after, values = graphs(Weights(*shapes), lambda m, x: layer(m, x).square().mean(), x)
    if "without" not in name:
        assert_same(before, after, values, 1e-12)
    else:
        assert run(after, values)[0].isfinite()
    assert not cannot_be_split(after, CLASSES)
    split = [n for n in after.graph.nodes if n.target in (aten.mm.default, aten.bmm.default, aten.mv.default)]
    split += [n for n in after.graph.nodes if n.target is aten.convolution.default]
    assert split
    op = op_of(split[0])
    inner = Shard(1 if op.inputs[0].dim() > 1 and op.inputs[0].shape[1] == CLASSES else 2)
    rule = rule_of(op.target)
    assert rule is not None
    row = spread(rule, op, 0, inner, False, 2)
    assert row is not None
    assert row.outputs == (Partial(),)


def test_a_bias_is_added_to_the_sum_and_not_to_its_terms() -> None:
    _, after, _ = graphs(
        Weights((4, CLASSES), (4,)), lambda m, x: F.linear(x, m.p0, m.p1).sum(), torch.ones(6, CLASSES).double()
    )
    add = next(n for n in after.graph.nodes if n.target is aten.add.Tensor)
    rule = rule_of(add.target)
    rows = list(candidates(rule, op_of(add), (Partial(), Shard(0)), 2))
    assert not any(isinstance(p, Partial) for row in rows for p in row.outputs)


# ---------------------------------------------------------------- whole models

Seeds = dict[str, Shard]
LAYOUTS: dict[str, Seeds] = {
    "llama": {r"embed|head\.|query|key|value|gate|up\.": Shard(0), r"out\.|down": Shard(1)},
    "gpt": {"embed|mlp.0": Shard(0), "qkv": Shard(0, 3), "(out|mlp.2).weight": Shard(1)},
    "torch_encoder": {"embed|linear1": Shard(0), "in_proj": Shard(0, 3), "(out_proj|linear2).weight": Shard(1)},
    "resnet": {"layer.*(conv1|bn1)": Shard(0), "layer.*conv2": Shard(1)},
}


def gathers(module: fx.GraphModule, seeds: dict[fx.Node, Placement]) -> list[str]:
    """Where a shard would have to be gathered, when every call takes the row that moves the least."""
    placed: dict[fx.Node, tuple[Placement, ...]] = {n: (p,) for n, p in seeds.items()}
    free: set[fx.Node] = set()  # of no input, made as they are needed
    found = []
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            if node.op == "call_function":
                placed[node] = (placed[node.args[0]][node.args[1]],)
            continue
        op, rule, feeds = op_of(node), rule_of(node.target), tensor_inputs(node)
        if rule is not None and all(n in free for n in feeds) and len(op.outputs) == 1:
            free.add(node)
            continue
        now = tuple(REPLICATE if n in free else placed[n][0] for n in feeds)

        def cost(row: Row, now: Any = now, op: Any = op) -> tuple[int, int, bool]:
            moved = [(p, t.numel()) for p, need, t in zip(now, row.inputs, op.inputs, strict=True) if p != need]
            return (
                sum(n for p, n in moved if isinstance(p, Shard)),
                sum(n for p, n in moved if isinstance(p, Partial)),
                all(p == REPLICATE for p in row.outputs),
            )

        row = min(candidates(rule, op, now, 2), key=cost)
        placed[node] = row.outputs
        if cost(row)[0]:
            found.append(f"{node.format_node()}: {' '.join(map(str, now))}")
    return found


def gathers_of(name: str, layout: Seeds) -> list[str]:
    """`gathers` of the training graph of a model of the zoo, its parameters split as the first pattern says."""
    case = next(case for case in ZOO if case.name == name)
    modules = Modules(case.model(), {})
    batch = case.batches(1)[0]
    captured = capture_training(modules, case.loss or call_model, batch, ranks=1, accumulate=1, device=CPU)
    graph = canonicalize(Program({"micro": captured.graph}), tensor_axis()).graphs["micro"]
    seeds: dict[fx.Node, Placement] = {}
    for node, port in zip(graph.placeholders(), graph.signature.inputs, strict=True):
        matching = [shard for text, shard in layout.items() if re.search(text, port.name)]
        seeds[node] = matching[0] if matching and port.kind is Kind.PARAMETER else REPLICATE
    assert set(layout.values()) <= set(seeds.values())
    return gathers(graph.module, seeds)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_whose_layers_are_split_in_pairs_gathers_nothing(name: str) -> None:
    assert not gathers_of(name, LAYOUTS[name])


def test_fused_projections_that_are_split_as_one_are_gathered() -> None:
    assert gathers_of("gpt", LAYOUTS["gpt"] | {"qkv": Shard(0)})
