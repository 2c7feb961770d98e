"""Every pass: what it makes of a small graph, that it computes what one device computes, and what it refuses.

The graph is of ``mean((x @ w.T) ** 2)`` and its gradient, for 2 data ranks. Functions that begin with an underscore
and take no fixture run on the ranks.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autoshard
from autoshard import CaptureError, Mesh, Plan, VerifyError
from autoshard.capture import Captured, Modules, capture_training
from autoshard.collectives import Axis
from autoshard.invariants import check_program
from autoshard.manager import PassContext, pass_list, run_passes
from autoshard.optim import bind
from autoshard.passes.lower import lower
from autoshard.placement import PARTIAL, REPLICATE, Shard
from autoshard.program import TAG, Graph, Kind, Program, render, tag
from tests.multirank.runner import run_ranks

aten = torch.ops.aten
CPU = torch.device("cpu")
SGD = functools.partial(torch.optim.SGD, lr=0.1)
Loss = Callable[[nn.Module, Any], Tensor]


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 4, bias=False).double()


def _mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def captured(model: nn.Module, loss: Loss, x: Any, accumulate: int = 1) -> Captured:
    """The capture for 2 ranks that each pass a batch like `x`."""
    return capture_training(Modules(model, {}), loss, x, ranks=2, accumulate=accumulate, device=CPU)


def context(stage: int = 3, accumulate: int = 1, model: nn.Module | None = None) -> PassContext:
    plan = Plan(mesh=Mesh(data=2), zero=stage, accumulate=accumulate, backend="debug", device="cpu")
    binding = bind(SGD, {n: p.to("meta") for n, p in model.named_parameters()}) if model is not None else None
    return PassContext(plan, (Axis("data", 2, "autoshard:cpu:data2:data"),), binding)


def snapshots(model: nn.Module, loss: Loss, x: Tensor, stage: int = 3, accumulate: int = 1) -> dict[str, Program]:
    """The program after every pass."""
    found: dict[str, Program] = {}

    def keep(name: str, program: Program) -> None:
        found[name] = Program(program.graphs)

    graph = captured(model, loss, x, accumulate).graph
    run_passes(Program({"micro": graph}), context(stage, accumulate, model), watch=keep)
    return found


def lines(graph: Graph) -> list[str]:
    """The graph as text without dtypes, modules and the overloads' names; a role stays in brackets."""
    found = []
    for line in render(graph).splitlines():
        code, _, note = line.strip().partition("  # ")
        role = re.search(r"\[.*\]$", note)
        code = re.sub(r"\bfloat64\b|\bint64\b", "", code).replace(".default(", "(").replace(".Tensor(", "(")
        code = code.replace("autoshard:cpu:data2:data", "data").replace(
            ", dtype=torch., device=cpu, pin_memory=False", ""
        )
        found.append(re.sub(r" +", " ", code + (f" {role[0]}" if role else "")).strip())
    return found


def new_lines(before: Graph, after: Graph) -> list[str]:
    return [line for line in lines(after) if line not in lines(before)]


X = torch.zeros(4, 2, dtype=torch.float64)


@pytest.fixture(scope="module")
def small() -> dict[str, Graph]:
    return {name: program.graphs["micro"] for name, program in snapshots(_linear(), _mean_square, X).items()}


# ---------------------------------------------------------------- what each pass makes


def test_canonicalize_writes_a_mean_as_a_sum_and_drops_what_computes_nothing(small: dict[str, Graph]) -> None:
    assert "mean: [] = mean(pow_1)" in lines(small["capture"])
    assert "detach: [4, 2] = detach(arg0_1)" in lines(small["capture"])
    forward = lines(small["canonicalize"])[3:8]
    assert forward == [
        "t: [2, 4] = t(arg0_1)",
        "mm: [8, 4] = mm(arg1_1, t)",
        "pow_1: [8, 4] = pow.Tensor_Scalar(mm, 2)",
        "sum_1: [] = sum(pow_1)",
        "div: [] = div(sum_1, 32)",
    ]
    assert not any("detach" in line or "mean(" in line for line in lines(small["canonicalize"]))


def test_place_shards_the_batch_and_lets_partial_sums_flow_to_where_they_leave(small: dict[str, Graph]) -> None:
    assert lines(small["place"]) == [
        "arg0_1: [4, 2] R",
        "arg1_1: [8, 2] S(0)",
        "arg2_1: [2] R",
        "t: [2, 4] R = t(arg0_1)",
        "mm: [8, 4] S(0) = mm(arg1_1, t)",
        "pow_1: [8, 4] S(0) = pow.Tensor_Scalar(mm, 2)",
        "sum_1: [] P = sum(pow_1)",
        "div: [] P = div(sum_1, 32)",
        "full: [] R = full([], 1)",
        "expand: [8, 4] S(0) = expand(full, [8, 4])",
        "div_1: [8, 4] S(0) = div.Scalar(expand, 32)",
        "pow_2: [8, 4] S(0) = pow.Tensor_Scalar(mm, 1.0)",
        "mul: [8, 4] S(0) = mul.Scalar(pow_2, 2.0)",
        "mul_1: [8, 4] S(0) = mul(div_1, mul)",
        "t_1: [4, 8] S(1) = t(mul_1)",
        "mm_1: [4, 2] P = mm(t_1, arg1_1)",
        "t_2: [2, 4] P = t(mm_1)",
        "t_3: [4, 2] P = t(t_2)",
        "redistribute: [] R = redistribute(div, 0, P, R) [activation reduce]",
        "return redistribute, t_3",
    ]


def test_zero_3_gathers_the_weight_where_it_is_used_and_scatters_its_gradient(small: dict[str, Graph]) -> None:
    assert new_lines(small["place"], small["zero"]) == [
        "arg0_1: [4, 2] S(0)",
        "redistribute_1: [4, 2] R = redistribute(arg0_1, 0, S(0), R) [parameter gather]",
        "t_4: [2, 4] R = t(redistribute_1)",
        "mm: [8, 4] S(0) = mm(arg1_1, t_4)",
        "redistribute_2: [4, 2] S(0) = redistribute(t_3, 0, P, S(0)) [gradient reduce]",
        "return redistribute, redistribute_2",
    ]


@pytest.mark.parametrize(
    ("stage", "accumulate", "reduced"),
    [(0, 1, "R"), (1, 1, "S(0)"), (2, 1, "S(0)"), (0, 2, None), (1, 2, None), (2, 2, "S(0)")],
)
def test_zero_below_3_only_says_how_the_gradient_leaves(stage: int, accumulate: int, reduced: str | None) -> None:
    found = snapshots(_linear(), _mean_square, X, stage, accumulate)
    new = new_lines(found["place"].graphs["micro"], found["zero"].graphs["micro"])
    expected = [] if reduced is None else [
        f"redistribute_1: [4, 2] {reduced} = redistribute(t_3, 0, P, {reduced}) [gradient reduce]",
        "return redistribute, redistribute_1",
    ]  # fmt: skip
    assert new == expected


def test_lower_makes_shapes_local_and_placement_changes_collectives(small: dict[str, Graph]) -> None:
    text = lines(small["lower"])
    assert text[:9] == [
        "arg0_1: [2, 2] S(0)",
        "arg1_1: [4, 2] S(0)",
        "arg2_1: [2] R",
        "coordinate_data: [1] R",
        "all_gather_into_tensor: [4, 2] R = all_gather_into_tensor(arg0_1, 2, data) [parameter gather]",
        "wait_tensor: [4, 2] R = wait_tensor(all_gather_into_tensor) [parameter gather]",
        "t_4: [2, 4] R = t(wait_tensor)",
        "mm: [4, 4] S(0) = mm(arg1_1, t_4)",
        "pow_1: [4, 4] S(0) = pow.Tensor_Scalar(mm, 2)",
    ]
    assert "expand: [4, 4] S(0) = expand(full, [4, 4])" in text
    assert "all_reduce: [] R = all_reduce(div, sum, data) [activation reduce]" in text
    assert text[-5:-3] == [
        "reduce_scatter_tensor: [2, 2] S(0) = reduce_scatter_tensor(view_2, sum, 2, data) [gradient reduce]",
        "wait_tensor_1: [2, 2] S(0) = wait_tensor(reduce_scatter_tensor) [gradient reduce]",
    ]


def test_accumulate_adds_every_outcome_into_an_input_and_changes_nothing_without_micro_batches(
    small: dict[str, Graph],
) -> None:
    assert lines(small["accumulate"]) == lines(small["lower"])
    found = snapshots(_linear(), _mean_square, X, 3, 2)
    assert new_lines(found["lower"].graphs["micro"], found["accumulate"].graphs["micro"]) == [
        "accumulator_0: [] R",
        "accumulator_1: [2, 2] S(0)",
        "add_tensor_1: [2, 2] S(0) = add(accumulator_1, wait_tensor_1)",
        "add_tensor: [] R = add(accumulator_0, wait_tensor_2)",
        "copy__default: [] R = copy_(accumulator_0, add_tensor)",
        "copy__default_1: [2, 2] S(0) = copy_(accumulator_1, add_tensor_1)",
        "return",
    ]


def test_update_is_one_graph_on_shards_with_one_collective_for_the_norm() -> None:
    epilogue = snapshots(_linear(), _mean_square, X)["update"].graphs["epilogue"]
    assert [(port.kind, port.name) for port in epilogue.signature.inputs] == [
        (Kind.PARAMETER, "weight"), (Kind.GRADIENT, "weight"), (Kind.STEP, "step"), (Kind.COORDINATE, "data")
    ]  # fmt: skip
    text = lines(epilogue)
    assert [line for line in text if "all_" in line or "scatter" in line] == [
        "all_reduce: [] = all_reduce(sum_2, sum, data) [gradient-norm reduce]",
        "wait_tensor: [] = wait_tensor(all_reduce) [gradient-norm reduce]",
    ]
    assert text[-6:] == [
        "mul_3: [2, 2] = mul(mul_2, gradient_weight)",
        "sub: [2, 2] = sub(parameter_weight, mul_3)",
        "copy_: [2, 2] = copy_(parameter_weight, sub)",
        "add_1: [] = add(step_step, 1)",
        "copy__1: [] = copy_(step_step, add_1)",
        "return sqrt, mul_1",
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_pass_leaves_the_program_that_it_is_given_as_it_was(accumulate: int) -> None:
    model = _net()
    batch = _class_batch(4 * accumulate)
    program = Program({"micro": captured(model, _classes, batch, accumulate).graph})
    for name, run in pass_list():
        before = str(program)
        after = run(program, context(3, accumulate, model))
        assert str(program) == before, name
        program = after


# ---------------------------------------------------------------- what each pass computes


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 5)).double()


def _classes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _class_batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 5, (rows,), generator=generator)}


@pytest.mark.parametrize("name", ["capture", "canonicalize", "place", "zero"])
def test_a_pass_at_global_shapes_computes_what_eager_computes(name: str) -> None:
    model, batch = _net(), _class_batch(8)
    graph = snapshots(model, _classes, _class_batch(4))[name].graphs["micro"]  # type: ignore[arg-type]
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    args = []
    for port in graph.signature.inputs:
        match port.kind:
            case Kind.BATCH:
                args.append(batch["x"] if "x" in port.name else batch["y"])
            case Kind.RNG:
                args.append(torch.zeros(2, dtype=torch.int64))
            case _:
                args.append(values[port.name].detach().clone())
    with torch.no_grad():
        outputs = dict(zip(graph.signature.outputs, fx.Interpreter(graph.module).run(*args), strict=True))
    loss = _classes(model, batch)
    loss.backward()
    for port, value in outputs.items():
        match port.kind:
            case Kind.LOSS:
                expected = loss.detach()
            case Kind.GRADIENT:
                expected = model.get_parameter(port.name).grad  # type: ignore[assignment]
            case _:
                expected = model.get_buffer(port.name)
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    assert {port.kind for port in outputs} == {Kind.LOSS, Kind.GRADIENT, Kind.BUFFER}


def _verified(stage: int, accumulate: int) -> str:
    plan = Plan(mesh=Mesh(data=-1), zero=stage, accumulate=accumulate, backend="debug", device="cpu", clip_norm=0.1)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    report = autoshard.verify(_net(), plan, _class_batch(8), loss=_classes, optimizer=adamw, steps=2)
    return "" if report.ok else str(report)


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (1, 2), (3, 2)])
def test_lower_accumulate_and_update_compute_what_one_device_computes(stage: int, accumulate: int) -> None:
    assert run_ranks(_verified, 2, stage, accumulate) == ["", ""]


class _ByPlace(nn.Module):
    """Reads and writes an activation and a weight by their places in memory, rows of 5."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        h = x @ w
        n = h.shape[0]
        views = [
            h.as_strided((n, 3), (5, 1), 1),  # some columns
            h.as_strided((n, 2, 3), (5, 2, 1)),  # windows that overlap, within a row
            h.as_strided((5 * n - 2, 3), (1, 1)),  # windows over all rows
            h.t().as_strided((5, 3), (1, 2)),  # the memory under a transposed view
            (h.t() * 2).as_strided((n, 5), (5, 1)),  # all of it, in the order of memory
            x @ w.as_strided((6, 3), (5, 1), 1),
            x @ w.t().as_strided((6, 2), (2, 1), 7),
        ]
        written = h.t().clone()
        written.as_strided((n, 2), (5, 1), 1).mul_(3)
        return (
            torch.cat([(v.sin() * torch.arange(1.0, v.numel() + 1).view(v.shape)).flatten() for v in views]).mean()
            + (written.sin() * torch.arange(1.0, 5 * n + 1).view(5, n)).mean()
        )


def _strided_gradients() -> dict[str, Tensor]:
    plan = Plan(zero=3, backend="debug", device="cpu")
    step = autoshard.parallelize(_ByPlace(), plan, loss=lambda model, x: model(x))
    x = _rows().chunk(2)[dist.get_rank()]
    metrics, gradients = step.gradients(step.init(x), x)
    return {"loss": metrics["loss"], "weight": gradients["weight"].full_tensor()}


def _rows() -> Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_views_by_place_in_memory_see_the_elements_that_one_device_sees() -> None:
    model = _ByPlace()
    loss = model(_rows())
    loss.backward()
    for found in run_ranks(_strided_gradients, 2):
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["weight"], model.weight.grad, rtol=1e-12, atol=1e-12)


def test_a_strided_view_whose_dims_in_front_are_the_batch_s_stays_sharded() -> None:
    def windows(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)  # the view's gradient, which is by places, would be cheaper of gathered samples
        return y.detach().as_strided((x.shape[0], 3, 2), (4, 1, 1)).pow(2).mean() + y.pow(2).mean()

    placed = snapshots(_linear(), windows, X)["place"].graphs["micro"]
    node = next(n for n in placed.module.graph.nodes if n.target is aten.index_select.default)
    assert tag(node).placements == ((Shard(0),),)
    assert not any("as_strided" in line for line in lines(placed))


def _half_scores(x: Tensor) -> Tensor:
    return torch.stack([x.flatten(), x.flatten() + 1], 1).log_softmax(1)


def _half_statistics(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of half precision, and sums over the batch that overflow float16 where what is made of them does not."""
    x, y = batch["x"], batch["y"].flatten()
    found = {
        "mean": x.mean(),
        "mean of rows": x.mean((0, 2))[1],
        "mean of float32 as half": x.float().mean(dtype=x.dtype),
        "variance": (x / 100).var(),
        "deviation": ((x - 100) * 8).std(),
        "nll": F.nll_loss(_half_scores(x), y, weight=torch.arange(1, 3, dtype=x.dtype)),
        "mse": F.mse_loss(x / 100, x.detach() / 50),
        "huber": F.huber_loss(x, x.detach() + 9),
        "bce": F.binary_cross_entropy_with_logits(x - 100, (x > 100).to(x.dtype)),
        "norm": torch.linalg.vector_norm(x),
        "mean of bag": F.embedding_bag(
            torch.arange(4).repeat(128)[None].long(), x[0].detach() * 100, mode="mean"
        ).mean(),
    }
    return model(x).square().mean() + found["mse"], found


def test_half_precision_is_summed_wide_and_rounded_once() -> None:
    torch.manual_seed(0)
    model = nn.BatchNorm1d(4).half()
    nn.init.uniform_(model.bias, 1, 2)
    x = (torch.randn(32, 4, 1024) * 10 + 100).half()
    batch = {"x": x, "y": torch.randint(0, 2, (32, 4 * 1024))}
    one_rank = {name: value.chunk(2)[0] for name, value in batch.items()}
    found = snapshots(copy.deepcopy(model), _half_statistics, one_rank)  # type: ignore[arg-type]
    graph = found["zero"].graphs["micro"]
    given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    args = [
        batch["x" if "x" in port.name else "y"] if port.kind is Kind.BATCH
        else torch.zeros(2, dtype=torch.int64) if port.kind is Kind.RNG
        else given[port.name].detach().clone()
        for port in graph.signature.inputs
    ]  # fmt: skip
    with torch.no_grad():
        outputs = zip(graph.signature.outputs, fx.Interpreter(graph.module).run(*args), strict=True)
    double = copy.deepcopy(model).double()
    loss, extras = _half_statistics(double, {**batch, "x": x.double()})
    loss.backward()
    seen = set()
    for port, value in outputs:
        match port.kind:
            case Kind.GRADIENT:
                expected = double.get_parameter(port.name).grad
            case Kind.BUFFER:
                expected = double.get_buffer(port.name)
            case Kind.LOSS:
                expected = loss.detach()
            case _:
                expected = extras[port.name.removesuffix(".total").rpartition(".")[0]].detach()
        assert expected is not None
        seen.add(port.name)
        assert value.dtype == (torch.float32 if port.kind in (Kind.LOSS, Kind.EXTRA) else port.dtype)
        assert value.double().tolist() == pytest.approx(expected.double().tolist(), rel=2e-3), port.name  # fp16: 1e-3
    assert len(seen) == 1 + len(extras) + 2 + 3
    rounded = [n for n in graph.module.graph.nodes if "convert_element_type" in str(n.target)]
    assert rounded
    assert not any(PARTIAL in tag(n.args[0]).placements[0] for n in rounded)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "view",
    [
        lambda h: h[1:].as_strided((3, 2), (4, 1), 0),  # before the view's own elements
        lambda h: h[:2].as_strided((4, 4), (4, 1)),  # after them
        lambda h: h[:, :2].as_strided((4, 2), (4, 1)),  # its elements have gaps
    ],
)
def test_a_view_of_memory_that_is_not_the_tensor_s_own_is_refused_with_its_source_line(view: Any) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return view(model(x)).sum()

    with pytest.raises(CaptureError, match=r"test_passes\.py:\d+, .*as_strided.*: as_strided to size .*contiguous\(\)"):
        captured(_linear(), loss, X)


def test_canonicalize_refuses_a_random_op_that_it_cannot_make_reproducible() -> None:
    def noisy(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) + torch.poisson(x.abs().sum(1, keepdim=True))).sum()

    program = Program({"micro": captured(_linear(), noisy, X).graph})
    with pytest.raises(CaptureError, match=r"draws random numbers with aten\.poisson"):
        dict(pass_list())["canonicalize"](program, context())


def _after(small: dict[str, Graph], name: str) -> Graph:
    graph = small[name]
    return Graph(copy.deepcopy(graph.module), graph.signature, graph.local)


def _node(graph: Graph, name: str) -> Any:
    return next(node for node in graph.module.graph.nodes if node.name == name)


def test_a_partial_sum_that_reaches_an_op_that_is_not_linear_is_refused(small: dict[str, Graph]) -> None:
    graph = _after(small, "place")
    node = _node(graph, "div")
    node.target, node.args = aten.exp.default, (node.args[0],)
    with pytest.raises(VerifyError, match=r"after place.*no rule allows the placements of div on axis data"):
        check_program(Program({"micro": graph}), context(), "place")


def test_a_gather_of_what_lies_otherwise_is_refused(small: dict[str, Graph]) -> None:
    graph = _after(small, "zero")
    node = _node(graph, "redistribute_1")
    node.args = (node.args[0], 0, Shard(1), REPLICATE)
    with pytest.raises(VerifyError, match=r"after zero.*placements of redistribute_1"):
        check_program(Program({"micro": graph}), context(), "zero")


def test_lower_refuses_placements_that_the_op_does_not_have(small: dict[str, Graph]) -> None:
    graph = _after(small, "zero")
    node = _node(graph, "mm")
    node.meta[TAG] = tag(node).but(placements=((REPLICATE,),))
    with pytest.raises(VerifyError, match=r"lower: mm .* local shape \(4, 4\), its placement .* says \(8, 4\)"):
        lower(Program({"micro": graph}), context())


def test_a_collective_that_is_used_before_it_is_awaited_is_refused(small: dict[str, Graph]) -> None:
    graph = _after(small, "lower")
    wait = _node(graph, "wait_tensor")
    wait.replace_all_uses_with(wait.args[0], delete_user_cb=lambda user: user is not wait)
    with pytest.raises(VerifyError, match="all_gather_into_tensor is used before it is awaited"):
        check_program(Program({"micro": graph}), context(), "lower")


def test_a_collective_without_a_role_is_refused(small: dict[str, Graph]) -> None:
    graph = _after(small, "lower")
    node = _node(graph, "all_reduce")
    node.meta[TAG] = tag(node).but(role=None)
    with pytest.raises(VerifyError, match="collective all_reduce has no role"):
        check_program(Program({"micro": graph}), context(), "lower")


def test_an_accumulator_that_is_written_twice_is_refused() -> None:
    graph = snapshots(_linear(), _mean_square, X, 3, 2)["accumulate"].graphs["micro"]
    first, second = _node(graph, "copy__default"), _node(graph, "copy__default_1")
    second.args = (first.args[0], second.args[1])
    with pytest.raises(VerifyError, match="after accumulate, graph micro writes an input twice"):
        check_program(Program({"micro": graph}), context(3, 2), "accumulate")


def test_an_epilogue_whose_signature_lacks_an_output_is_refused() -> None:
    graph = snapshots(_linear(), _mean_square, X)["update"].graphs["epilogue"]
    output = next(iter(reversed(graph.module.graph.nodes)))
    output.args = (output.args[0][:1],)
    with pytest.raises(VerifyError, match="4 inputs and 1 outputs, its signature 4 and 2"):
        check_program(Program({"epilogue": graph}), context(), "update")
