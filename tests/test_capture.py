"""What can be captured, and what is refused with the source line that is to blame."""

from __future__ import annotations

import collections
import functools
import re
import traceback
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import Plan
from autoshard.capture import Captured, Modules, capture_training
from autoshard.errors import CaptureError
from autoshard.program import Kind, Phase, tag

CPU = torch.device("cpu")


def capture(model: nn.Module, loss: Any = None, **modules: nn.Module) -> Captured:
    loss = loss or (lambda m, x: m(x).square().mean())
    return capture_training(Modules(model, modules), loss, torch.zeros(4, 3), ranks=2, accumulate=1, device=CPU)


class Wrapped(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0
        self.noted: Tensor | None = None
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x))


def test_a_branch_on_data_is_refused_with_its_source_line() -> None:
    def body(self: Wrapped, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x  # the line to name

    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+.*x\.sum\(\) > 0"):
        capture(Wrapped(body))


def test_an_output_shape_that_depends_on_data_is_refused_with_its_source_line() -> None:
    def body(self: Wrapped, x: Tensor) -> Tensor:
        return x[x > 0]

    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+.*x\[x > 0\]"):
        capture(Wrapped(body))


def test_a_branch_on_values_that_depend_on_no_input_works() -> None:
    def body(self: Wrapped, x: Tensor) -> Tensor:
        return x * 2 if torch.arange(4).sum() > 5 else x

    targets = [node.target for node in capture(Wrapped(body)).graph.module.graph.nodes]
    assert torch.ops.aten.mul.Tensor in targets


def test_python_state_that_changes_the_computation_is_refused_by_name() -> None:
    def body(self: Wrapped, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls

    with pytest.raises(CaptureError, match=r"Wrapped\.calls"):
        capture(Wrapped(body))


def test_an_attribute_that_only_notes_something_is_fine_and_is_undone() -> None:
    def body(self: Wrapped, x: Tensor) -> Tensor:
        self.calls += 1
        self.noted = x
        return x

    model = Wrapped(body)
    capture(model)
    assert model.noted is None
    assert model.calls == 0


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"shape \(8, 3\).*scalar"):
        capture(nn.Linear(3, 3), lambda m, x: m(x))


def test_a_loss_that_calls_backward_is_refused() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x).square().mean()
        value.backward()
        return value

    with pytest.raises(CaptureError, match="calls backward itself"):
        capture(nn.Linear(3, 3), loss)


def test_a_branch_on_data_in_a_layer_of_torch_names_its_line_too() -> None:
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+.*which calls .*batchnorm\.py:\d+.*num_batches"):
        capture(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)))


def test_a_product_of_two_dtypes_is_refused_when_it_is_traced() -> None:
    with pytest.raises(
        TypeError, match=r"float64 \[3, 3\].*float32 \[8, 3\]|float32 \[8, 3\].*float64 \[3, 3\]"
    ) as raised:
        capture(nn.Linear(3, 3).double())
    assert "test_capture.py" in raised.value.__notes__[0]


def test_a_loss_that_no_parameter_reaches_is_refused() -> None:
    with pytest.raises(CaptureError, match="does not depend on any trainable parameter"):
        capture(nn.Linear(3, 3), lambda m, x: m(x).detach().mean())


def test_a_captured_tensor_becomes_a_constant_and_one_that_requires_grad_is_refused() -> None:
    scale = torch.full((3,), 2.0)
    captured = capture(nn.Linear(3, 3), lambda m, x: (m(x) * scale).mean())
    (constant,) = captured.constants.values()
    assert torch.equal(constant, scale)
    learned = torch.ones(3, requires_grad=True)
    with pytest.raises(CaptureError, match="frozen="):
        capture(nn.Linear(3, 3), lambda m, x: (m(x) * learned).mean())


def test_a_frozen_modules_parameters_are_inputs_without_gradients() -> None:
    teacher = nn.Linear(3, 3)
    captured = capture(nn.Linear(3, 3), lambda m, x: (m(x) - teacher(x)).square().mean(), teacher=teacher)
    inputs = {port.name for _, port in captured.graph.signature.find_inputs(Kind.PARAMETER)}
    gradients = {port.name for _, port in captured.graph.signature.find_outputs(Kind.GRADIENT)}
    assert inputs == {"weight", "bias", "teacher.weight", "teacher.bias"}
    assert gradients == {"weight", "bias"}
    assert not captured.constants


def test_every_node_says_its_phase_and_module() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
    nodes = [n for n in capture(model).graph.module.graph.nodes if n.op == "call_function"]
    products = [tag(n) for n in nodes if "mm" in str(n.target)]
    assert [(t.phase, t.module) for t in products if not t.phase.backward] == [
        (Phase.FORWARD, "0"),
        (Phase.FORWARD, "2"),
    ]
    assert {t.module for t in products if t.phase is Phase.WEIGHT_GRADIENT} == {"0", "2"}
    assert [t.module for t in products if t.phase is Phase.INPUT_GRADIENT] == ["2"]


def test_gradient_hooks_and_attributes_of_a_parameter_are_kept_by_new_programs_too() -> None:
    layer = nn.Linear(3, 3).double()
    layer.weight.register_hook(lambda grad: grad * 3)
    layer.weight.factor = 5.0  # type: ignore[attr-defined]
    model = Wrapped(lambda self, x: x * self.linear.weight.factor)
    model.linear = layer
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean()

    step = autoshard.parallelize(model, Plan(backend="debug", device="cpu"), loss=loss)
    state = step.init(torch.zeros(2, 3, dtype=torch.float64))
    x = torch.randn(5, 3, dtype=torch.float64)
    _, gradients = step.gradients(state, x)
    weight.requires_grad_()
    expected = torch.autograd.grad((nn.functional.linear(x, weight, bias) * 5).mean(), weight)[0] * 3
    torch.testing.assert_close(gradients["linear.weight"].full_tensor(), expected)


def test_a_hook_that_would_never_run_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match=r"^weight .*register_hook"):
        capture(model)


def test_a_checkpointed_block_is_captured_once() -> None:
    from torch.utils.checkpoint import checkpoint

    model = Wrapped(lambda self, x: checkpoint(self.linear, x, use_reentrant=False))
    plain = Wrapped(lambda self, x: self.linear(x))
    count = [sum("addmm" in str(n.target) for n in capture(m).graph.module.graph.nodes) for m in (model, plain)]
    assert count[0] == count[1] == 2


def _start(loss: Any, batch: Any, model: nn.Module | None = None) -> None:
    plan = Plan(backend="debug", device="cpu")
    autoshard.parallelize(model or nn.Linear(3, 3), plan, loss=loss).init(batch)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_a_key_that_the_batch_lacks_is_named_with_the_line_and_the_keys_there_are(kind: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).sum() * batch["lables"].sum()

    with pytest.raises(CaptureError) as raised:
        _start(loss, kind(x=torch.zeros(4, 3), labels=torch.zeros(4)))
    line = r"test_capture\.py:\d+, in loss: `return .*batch\[\"lables\"\].*`"
    told = rf"{line}: the batch has no key 'lables'; did you mean 'labels'\? valid: x, labels$"
    assert re.search(told, str(raised.value)), str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError)
    assert any(frame.name == "loss" for frame in traceback.extract_tb(raised.value.__cause__.__traceback__))


def _missing_elsewhere(self: Wrapped, x: Tensor) -> Tensor:
    table: dict[str, Tensor] = {}
    return table["y"]


def _wrong_shape(self: Wrapped, x: Tensor) -> Tensor:
    return x @ torch.zeros(5, 5)


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [(_missing_elsewhere, KeyError, r"table\[\"y\"\]"), (_wrong_shape, RuntimeError, r"x @ torch\.zeros")],
)
def test_what_the_users_code_raises_stays_what_it_is_and_is_said_to_be_of_the_tracing(
    body: Any, kind: type[Exception], source: str
) -> None:
    with pytest.raises(kind) as raised:
        _start(lambda model, batch: model(batch["x"]).sum(), {"x": torch.zeros(4, 3)}, Wrapped(body))
    (note,) = raised.value.__notes__
    assert re.search(rf"autoshard was tracing .*test_capture\.py:\d+, in {body.__name__}: `.*{source}", note), note
    assert any(frame.name == body.__name__ for frame in traceback.extract_tb(raised.value.__traceback__))


def test_a_model_that_wants_a_loss_is_said_to_want_one() -> None:
    step = autoshard.parallelize(nn.Linear(2, 2), Plan(backend="debug", device="cpu"))
    with pytest.raises(TypeError) as raised:
        step.init({"x": torch.zeros(2, 2), "y": torch.zeros(2)})
    (note,) = raised.value.__notes__  # no source line: none of the user's code has run
    assert "pass loss=lambda model, batch" in note


def test_an_unknown_name_of_a_state_is_refused_with_the_nearest_of_its_section() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
    plan = Plan(backend="debug", device="cpu")
    step = autoshard.parallelize(model, plan, loss=lambda m, x: m(x).sum(), optimizer=optimizer)
    state = step.init(torch.zeros(4, 3))
    for get, words in (
        (lambda: state.params["0.wieght"], "no parameter '0.wieght'; did you mean '0.weight'? valid: 0.weight, 0.bias"),
        (lambda: state.buffers["1.running_men"], "no buffer '1.running_men'; did you mean '1.running_mean'? valid: 1."),
        (lambda: state.optimizer["0.wieght"], "no optimizer state of a parameter '0.wieght'; did you mean '0.weight'?"),
        (lambda: state.optimizer["0.bias"]["exp_avgs"], "no optimizer slot of '0.bias' 'exp_avgs'; did you mean 'exp_"),
        (lambda: state.params["zzz"], "no parameter 'zzz'; valid: 0.weight"),
        (lambda: state.full("1.running_men"), "no parameter or buffer '1.running_men'; did you mean '1.running_mean'?"),
    ):
        with pytest.raises(KeyError, match=re.escape(words)):
            get()
    assert "0.weight" in state.params
    assert "1.running_mean" not in state.params
    assert state.params.get("zzz") is None


def test_verify_of_a_module_that_init_has_consumed_says_how_to_keep_it() -> None:
    model, plan = nn.Linear(2, 2), Plan(backend="debug", device="cpu")

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    autoshard.parallelize(model, plan, loss=loss).init(torch.zeros(2, 2))
    with pytest.raises(autoshard.AutoshardError, match=r"keep_model=True"):
        autoshard.verify(model, plan, torch.zeros(2, 2), loss=loss)


def test_a_module_that_init_has_consumed_is_not_initialised_anew_by_another_step() -> None:
    model, plan, batch = nn.Sequential(nn.Linear(2, 2)), Plan(backend="debug", device="cpu"), torch.zeros(2, 2)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    autoshard.parallelize(model, plan, loss=loss).init(batch)
    for other in (model, model[0]):
        with pytest.raises(autoshard.AutoshardError, match=r"weights to a state already.*keep_model=True"):
            autoshard.parallelize(other, plan, loss=loss).init(batch)


@pytest.mark.parametrize("kind", ["parameter", "data of a parameter", "frozen parameter", "attribute", "max_norm"])
def test_a_write_that_would_be_lost_is_refused_by_name(kind: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            if kind == "parameter":
                self.linear.weight.clamp_(-0.1, 0.1)
            elif kind == "data of a parameter":
                self.linear.weight.data[0].mul_(2)
            elif kind == "frozen parameter":
                self.teacher.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
            elif kind == "attribute":
                self.center.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x + self.table(x.argmax(1)) - self.center - self.teacher(x)

    model: Any = Wrapped(body)
    model.table = nn.Embedding(3, 3, max_norm=0.5 if kind == "max_norm" else None)
    model.teacher = nn.Linear(3, 3).requires_grad_(False)
    model.center = torch.zeros(3)
    name = {"frozen parameter": "teacher.weight", "attribute": r"shape \(3,\)", "max_norm": "table.weight"}
    with pytest.raises(CaptureError, match=f"changes .*{name.get(kind, 'linear.weight')}.* in place"):
        capture(model)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = Wrapped(lambda self, x: x + self.table(x.argmax(1)))
    model.table = nn.Embedding(3, 3, sparse=True)
    with pytest.raises(CaptureError, match=r"table.weight is sparse"):
        capture(model)


def test_an_extra_with_the_name_of_a_metric_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"'lr' has the name"):
        capture(nn.Linear(3, 3), lambda model, x: (model(x).mean(), {"lr": x.mean()}))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.compile(nn.Linear(3, 3)), "torch.compile"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3))), "TorchScript"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"0 \(LazyLinear\) has no shape for weight"),
    ],
)
def test_a_model_that_cannot_be_traced_as_it_is_says_so(make: Any, what: str) -> None:
    with pytest.raises(autoshard.AutoshardError, match=what):
        autoshard.parallelize(make(), Plan(backend="debug", device="cpu"))


class _Opaque:
    def __init__(self) -> None:
        self.x = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (torch.zeros(4, 3).numpy(), "numpy array.*from_numpy"),
        ([[1.0, 2.0, 3.0]] * 4, r"list of numbers.*torch\.tensor\(batch\)"),
        ({"x": torch.zeros(4, 3).to_sparse()}, "x.*sparse.*to_dense"),
        (UserDict({"x": torch.zeros(4, 3)}), r"UserDict that holds tensors \(x\).*dict\(batch\)"),
        (_Opaque(), r"_Opaque that holds tensors \(x\).*register_dataclass"),
    ],
)
def test_a_batch_whose_tensors_cannot_be_seen_is_refused(batch: Any, what: str) -> None:
    step = autoshard.parallelize(nn.Linear(3, 3), Plan(backend="debug", device="cpu"))
    with pytest.raises(autoshard.BatchError, match=what):
        step.init(batch)


def test_a_model_that_is_called_on_numbers_alone_is_run() -> None:
    class Table(nn.Linear):
        def forward(self, x: Tensor | int) -> Tensor:
            return self.weight.sum(0) if isinstance(x, int) else super().forward(x).square().mean()

    step = autoshard.parallelize(Table(3, 3), Plan(backend="debug", device="cpu"))
    state = step.init(torch.zeros(4, 3))
    assert torch.equal(step.forward(state, 3), state.full("weight").sum(0))
