"""Every optimizer computes what torch's eager step computes: by a rule, on shards, or by owners."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard import moves, optim, runtime
from autoshard.errors import OptimizerError
from autoshard.optim import Binding, EagerUpdate, LocalShard, Mode, bind
from autoshard.placement import (
    REPLICATE,
    Placement,
    Shard,
    local_shape,
    owned,
    shard_bounds,
    shard_length,
    take,
    without_padding,
)
from autoshard.plan import Mesh, Plan
from tests.multirank.runner import run_ranks

SHAPES: dict[str, tuple[int, ...]] = {"w": (5, 7), "tall": (9, 3), "bias": (3,), "one": (1,), "scalar": ()}
MATRICES = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
STEPS = 10


def _named(shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def _start(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, dtype=torch.float64, generator=numbers) for name, shape in shapes.items()}


def _gradient(shapes: Mapping[str, tuple[int, ...]], step: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, dtype=torch.float64, generator=numbers) for name, shape in shapes.items()}


def _factor(step: int) -> float:
    return (step + 1) / STEPS


def _run_torch(factory: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]], steps: int = STEPS) -> Any:
    """The reference: torch's own optimizer on whole tensors, its lr set by hand as a torch scheduler would."""
    params = {name: torch.nn.Parameter(value) for name, value in _start(shapes).items()}
    optimizer = factory(list(params.items()))
    base = [float(group["lr"]) for group in optimizer.param_groups]
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * _factor(step)
        for name, grad in _gradient(shapes, step).items():
            params[name].grad = grad
        optimizer.step()
    state = {name: dict(optimizer.state[p]) for name, p in params.items()}
    return {name: p.detach() for name, p in params.items()}, state


def _run_rule(binding: Binding, shapes: Mapping[str, tuple[int, ...]], trace: bool = False) -> Any:
    """Our rule, with lr and step as 0-dim tensors, optionally through a graph traced once on fake tensors."""
    rule = binding.rule
    assert rule is not None
    params = _start(shapes)
    slots = {
        name: {
            t.name: torch.full(t.shape, t.fill, dtype=t.dtype)
            for t in binding.slot_templates(name, shapes[name], torch.float64)
        }
        for name in params
    }
    graphs: dict[str, Any] = {}
    for step, (name, shape) in ((s, item) for s in range(STEPS) for item in shapes.items()):
        group = binding.group_of(name)
        lr = torch.tensor(group.lr * _factor(step), dtype=torch.float64)
        count = torch.tensor(step + 1.0, dtype=torch.float64)
        update = functools.partial(rule.update, group=group)
        grad = _gradient(shapes, step)[name].reshape(shape)
        if trace and name not in graphs:
            graphs[name] = make_fx(update, tracing_mode="fake")(params[name], grad, slots[name], lr, count)
        params[name], slots[name] = graphs.get(name, update)(params[name], grad, slots[name], lr, count)
    return params, slots


def _assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        where = f"{name}: {{}}"
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=where.format)


class _PaperLion(torch.optim.Optimizer):
    """Lion as program 1 of arXiv:2302.06675 writes it, in its own words: the reference of our class and rule."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, sign: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "sign": sign})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                g = p.grad * group["sign"]
                m = self.state[p].get("exp_avg", torch.zeros_like(p))
                c = beta1 * m + (1 - beta1) * g
                p -= group["lr"] * (torch.sign(c) + group["weight_decay"] * p)
                self.state[p]["exp_avg"] = beta2 * m + (1 - beta2) * g


T = torch.optim
RULE_CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (T.AdamW, {"lr": 1e-2}),
    (T.AdamW, {"lr": 1e-2, "weight_decay": 0.3, "amsgrad": True, "betas": (0.7, 0.9)}),
    (T.AdamW, {"lr": 1e-2, "maximize": True, "eps": 1e-3}),
    (T.AdamW, {"lr": torch.tensor(1e-2)}),
    (T.Adam, {"lr": 1e-2}),
    (T.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (T.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (T.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    (T.SGD, {"lr": 0.1}),
    (T.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (T.SGD, {"lr": 0.1, "momentum": 0.9}),
    (T.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (T.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4}),
    (T.Adagrad, {"lr": 0.1}),
    (T.Adagrad, {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
    (T.Adagrad, {"lr": 0.1, "maximize": True, "eps": 1e-3}),
    (T.RMSprop, {"lr": 1e-2}),
    (T.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.8, "alpha": 0.9}),
    (T.RMSprop, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True, "momentum": 0.8}),
    (T.NAdam, {"lr": 1e-2}),
    (T.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "momentum_decay": 0.1, "betas": (0.8, 0.9)}),
    (T.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
]


def _plain(factory: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> functools.partial[Any]:
    return functools.partial(factory, foreach=False, **options)


@pytest.mark.parametrize(("kind", "options"), RULE_CASES)
@pytest.mark.parametrize("trace", [False, True], ids=["eager", "traced"])
def test_a_rule_equals_torch_over_ten_steps(kind: type[Any], options: dict[str, Any], trace: bool) -> None:
    factory = _plain(kind, options)
    binding = bind(factory, _named())
    assert binding.mode is Mode.GRAPH
    expected, state = _run_torch(factory, SHAPES)
    params, slots = _run_rule(binding, SHAPES, trace)
    assert not torch.equal(params["w"], _start(SHAPES)["w"])
    _assert_close(params, expected)
    for name, theirs in state.items():
        theirs.pop("step", None)
        assert {k: (v.shape, v.dtype) for k, v in slots[name].items()} == {
            k: (v.shape, v.dtype) for k, v in theirs.items()
        }
        _assert_close(slots[name], theirs)


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_as_a_class_and_as_a_rule_equals_its_paper(maximize: bool) -> None:
    ours = functools.partial(optim.Lion, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, maximize=maximize)
    paper = functools.partial(_PaperLion, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, sign=-1.0 if maximize else 1.0)
    expected, state = _run_torch(paper, SHAPES)
    for params, slots in (_run_torch(ours, SHAPES), _run_rule(bind(ours, _named()), SHAPES, trace=True)):
        _assert_close(params, expected)
        for name in SHAPES:
            _assert_close(slots[name], state[name])


@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("betas", (0.9, 1.0)), ("weight_decay", -0.1)])
def test_lion_refuses_a_value_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"Lion: {name} is"):
        optim.Lion([torch.nn.Parameter(torch.ones(2))], **{name: value})


@pytest.mark.parametrize("kind", [k for k in optim.RULES if k is not T.SGD])
def test_padding_stays_zero_and_finite_even_without_eps(kind: Any) -> None:
    factory = (
        functools.partial(kind, weight_decay=0.1)
        if kind is optim.Lion
        else functools.partial(kind, eps=0.0, weight_decay=0.1)
    )
    binding = bind(factory, {"p": torch.empty(4, device="meta")})
    rule, group = binding.rule, binding.groups[0]
    assert rule is not None
    param, grad = torch.tensor([1.0, 2.0, 0.0, 0.0]), torch.tensor([3.0, -1.0, 0.0, 0.0])
    templates = binding.slot_templates("p", (4,), torch.float32)
    slots = {t.name: torch.full(t.shape, t.fill, dtype=t.dtype) for t in templates}
    for step in range(3):
        count = torch.tensor(step + 1.0, dtype=torch.float64)
        param, slots = rule.update(param, grad, slots, torch.tensor(0.1, dtype=torch.float64), count, group)
    assert param[2:].tolist() == [0.0, 0.0]
    assert all(torch.isfinite(t).all() for t in (param, *slots.values()))
    assert param.dtype == torch.float32


def test_half_precision_keeps_the_learning_rate_exact() -> None:
    binding = bind(functools.partial(T.AdamW, lr=3e-3, weight_decay=0.0), _named({"p": (64,)}, torch.bfloat16))
    assert binding.rule is not None
    param, grad = torch.full((64,), 1e-3, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    slots = {s: torch.zeros(64, dtype=torch.bfloat16) for s in ("exp_avg", "exp_avg_sq")}
    one, lr = torch.ones((), dtype=torch.float64), torch.tensor(3e-3, dtype=torch.float64)
    new, slots = binding.rule.update(param, grad, slots, lr, one, binding.groups[0])
    assert new.dtype == torch.bfloat16
    exact = param.double() - 3e-3
    assert torch.equal(new, exact.to(torch.bfloat16))
    assert all(slot.dtype == torch.bfloat16 for slot in slots.values())


# --- binding ------------------------------------------------------------------------------------------------


def test_groups_and_names_are_read_from_any_kind_of_factory() -> None:
    def by_name(named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        pairs = list(named)
        return T.AdamW(
            [
                {"params": [p for n, p in pairs if n.startswith("w")], "weight_decay": 0.5},
                {"params": [p for n, p in pairs if n in ("bias", "one")], "lr": 1e-1},
            ],
            lr=1e-2,
        )

    binding = bind(by_name, _named())
    assert [group.names for group in binding.groups] == [("w",), ("bias", "one")]
    assert [group.lr for group in binding.groups] == [1e-2, 1e-1]
    assert [group.option("weight_decay") for group in binding.groups] == [0.5, 1e-2]
    assert binding.unassigned == ("tall", "scalar")
    assert binding.group_of("one") is binding.groups[1]
    with pytest.raises(KeyError):
        binding.group_of("tall")
    assert hash(binding.groups) == hash(bind(by_name, _named()).groups)
    plain = bind(lambda params: T.AdamW([p for p in params if p.dim() == 2]), _named())
    assert plain.groups[0].names == ("w", "tall")


def test_grouped_sorts_by_glob_and_by_predicate_and_the_rest_keeps_the_defaults() -> None:
    factory = optim.grouped(
        functools.partial(T.AdamW, lr=1e-2),
        {"*bias": {"weight_decay": 0.0}, (lambda name: name in ("one", "bias")): {"lr": 5e-2}},
    )
    groups = bind(factory, _named()).groups
    assert [(g.names, g.lr, g.option("weight_decay")) for g in groups] == [
        (("bias",), 1e-2, 0.0),
        (("one",), 5e-2, 1e-2),
        (("w", "tall", "scalar"), 1e-2, 1e-2),
    ]
    params, _ = _run_torch(factory, SHAPES)
    _assert_close(_run_rule(bind(factory, _named()), SHAPES)[0], params)


@pytest.mark.parametrize(("pattern", "reason"), [("norm.*", "no name matches"), ("bi*", "taken by an earlier one")])
def test_grouped_refuses_a_pattern_that_takes_nothing(pattern: str, reason: str) -> None:
    factory = optim.grouped(T.AdamW, {"*bias": {"weight_decay": 0.0}, pattern: {"lr": 1.0}})
    with pytest.raises(OptimizerError, match=reason):
        bind(factory, _named())


def test_binding_a_huge_model_allocates_nothing_of_its_size() -> None:
    huge = {"embedding": torch.empty(10**7, 10**5, device="meta"), "w": torch.empty(10**6, 10**6, device="meta")}
    for kind in (T.Adagrad, T.Adamax, T.Adafactor, T.Muon):
        templates = bind(kind, huge).slot_templates("w", (10**6, 10**6), torch.float32)
        assert any(10**6 in t.shape for t in templates)


def test_a_live_optimizer_has_the_users_class_groups_and_constructor_state() -> None:
    factory = optim.grouped(functools.partial(T.Adagrad, initial_accumulator_value=0.25), {"w": {"lr": 0.5}})
    params = {name: torch.nn.Parameter(value) for name, value in _start(SHAPES).items()}
    live = bind(factory, _named()).instantiate(params)
    assert type(live) is T.Adagrad
    assert [group["lr"] for group in live.param_groups] == [0.5, 1e-2]
    assert live.param_groups[0]["params"][0] is params["w"]
    assert torch.equal(live.state[params["w"]]["sum"], torch.full((5, 7), 0.25, dtype=torch.float64))


@pytest.mark.parametrize(
    ("kind", "shapes", "mode"),
    [
        *[(kind, SHAPES, Mode.SHARD) for kind in (T.Adamax, T.Adadelta, T.RAdam, T.Rprop, T.ASGD)],
        (T.Muon, MATRICES, Mode.OWNER),
        (T.Adafactor, SHAPES, Mode.OWNER),
        # RMS clipping alone couples the elements of a vector: factoring has no part in it.
        (T.Adafactor, {"bias": (3,)}, Mode.OWNER),
    ],
)
def test_torchs_other_classes_are_tried_out(kind: type[Any], shapes: Mapping[str, tuple[int, ...]], mode: Mode) -> None:
    assert bind(kind, _named(shapes)).mode is mode


def test_complex_parameters_are_left_to_the_class_itself() -> None:
    assert bind(T.Adam, _named({"w": (5, 7)}, torch.complex128)).mode is Mode.SHARD


class _Custom(torch.optim.Optimizer):
    """An elementwise base, whose subclasses each do one more thing."""

    def __init__(self, params: Any, strength: float = 0.1) -> None:
        self.calls = 0
        super().__init__(params, {"lr": strength})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.one(p, self.state[p], group)

    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert p.grad is not None
        state["count"] = state.get("count", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / state["count"])


class _Lamb(_Custom):
    """Trust ratio by norms, a Python count of steps: what LAMB implementations look like."""

    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert p.grad is not None
        if not state:
            state["step"], state["exp_avg"] = 0, torch.zeros_like(p)
        state["step"] += 1
        update = state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1) / (1 - 0.9 ** state["step"])
        trust = p.norm() / update.norm() if p.norm() > 0 else 1.0
        p.sub_(group["lr"] * trust * update)


class _FactorsLargeOnes(_Custom):
    """Elementwise up to 128 rows, as the factored optimizers are."""

    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(p.grad / p.grad.norm() if p.shape[0] >= 128 else p.grad, alpha=group["lr"])


class _GlobalNorm(_Custom):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.data.sub_(p.grad / norm)


class _Noisy(_Custom):
    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(torch.randn_like(p))


class _PythonNoise(_Custom):
    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(random.random())


class _CountsItself(_Custom):
    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.calls += 1
        p.sub_(group["lr"] / self.calls)


class _CountsInGroup(_Custom):
    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        p.sub_(group["lr"] / group["k"])


class _HiddenTensors(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.buffers = [torch.zeros(3)]


class _Distributed(_Custom):
    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * (dist.get_world_size() if dist.is_initialized() else 1))


class _KeepsList(_Custom):
    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("history", []).append(1)


class _LateState(_Custom):
    def one(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["ready" if "warm" in state else "warm"] = 1


class _NeedsClosure(_Custom):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("pass a closure")


class _NoLr(_Custom):
    def __init__(self, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {"strength": 1.0})


def test_a_users_own_class_is_classified_by_what_it_does() -> None:
    custom = bind(_Custom, _named())
    assert custom.mode is Mode.SHARD
    (count,) = custom.slot_templates("w", (5, 7), torch.float32)
    assert (count.name, count.shape, count.number, count.like_parameter) == ("count", (), int, False)
    lamb = bind(_Lamb, _named())
    assert lamb.mode is Mode.OWNER
    assert [(t.name, t.shape) for t in lamb.slot_templates("w", (5, 7), torch.float32)] == [
        ("step", ()),
        ("exp_avg", (5, 7)),
    ]
    assert bind(_FactorsLargeOnes, _named({"w": (100, 4)})).mode is Mode.SHARD
    assert bind(_FactorsLargeOnes, _named({"w": (1000, 4)})).mode is Mode.OWNER


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (T.LBFGS, "LBFGS needs a closure"),
        (T.SparseAdam, "SparseAdam failed when it was tried on dense gradients"),
        (_NeedsClosure, "without a closure .*pass a closure"),
        (_GlobalNorm, "_GlobalNorm updates one parameter by the values of others"),
        (_Noisy, "_Noisy draws random numbers"),
        (_PythonNoise, "_PythonNoise draws random numbers"),
        (_CountsItself, "_CountsItself keeps state in calls"),
        (_CountsInGroup, r"_CountsInGroup keeps state in param_groups\[0\]\['k'\]"),
        (_HiddenTensors, "_HiddenTensors keeps tensors, .* in its attribute 'buffers'"),
        (_Distributed, r"_Distributed calls torch\.distributed"),
        (_KeepsList, "_KeepsList keeps state 'history' of type list"),
        (_LateState, "_LateState keeps state in state keys that come after the first step"),
        (_NoLr, "lr is None; valid: a number"),
        (T.Muon, "factory failed .*only supports 2D"),
        (lambda named: None, "returned NoneType"),
        (lambda named: 1 / 0, "ZeroDivisionError"),
        (lambda named: T.SGD([torch.nn.Parameter(torch.ones(2))]), "none of the model's parameters"),
        (functools.partial(T.SGD, lr=-1.0), "Invalid learning rate"),
        (3, "valid: a factory"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused_by_name(kind: Any, reason: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with pytest.raises(OptimizerError, match=reason):
        bind(kind, _named())
    assert torch.equal(torch.get_rng_state(), before), "binding must not draw from the user's random stream"


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_what_a_group_says_without_effect_is_refused() -> None:
    def with_group(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda named: T.Adagrad([{"params": [p for _, p in named], **options}])

    with pytest.raises(OptimizerError, match=r"group option 'layer_decay' .* valid: lr, eps"):
        bind(with_group(layer_decay=0.5), _named())
    with pytest.raises(OptimizerError, match="initial_accumulator_value from its constructor"):
        bind(with_group(initial_accumulator_value=0.5), _named())
    with pytest.raises(OptimizerError, match="use schedule= instead"):
        bind(with_group(initial_lr=0.5), _named())
    with pytest.raises(OptimizerError, match="'w' is there twice"):
        bind(lambda named: T.SGD([named[0][1], named[0][1]]), _named())
    with pytest.raises(OptimizerError, match="no trainable parameter"):
        bind(T.SGD, {})
    assert bind(functools.partial(T.AdamW, foreach=True), _named()).mode is Mode.GRAPH


def test_step_hooks_and_a_schedulers_patch_are_refused() -> None:
    def hooked(named: Any) -> torch.optim.Optimizer:
        optimizer = T.SGD(named)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    def scheduled(named: Any) -> torch.optim.Optimizer:
        optimizer = T.SGD(named)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    with pytest.raises(OptimizerError, match="step hooks"):
        bind(hooked, _named())
    with pytest.raises(OptimizerError, match="schedule="):
        bind(scheduled, _named())


# --- eager steps on shards ----------------------------------------------------------------------------------


def _padded_part(whole: Tensor, dim: int, ranks: int, coordinate: int) -> Tensor:
    size = whole.shape[dim]
    start, end = shard_bounds(size, ranks, coordinate)
    part = torch.zeros(
        [shard_length(size, ranks) if d == dim else s for d, s in enumerate(whole.shape)], dtype=whole.dtype
    )
    part.narrow(dim, 0, end - start).copy_(whole.narrow(dim, start, end - start))
    return part


def _run_eager(factory: Any, shapes: dict[str, tuple[int, ...]], dim: int, steps: int, bucket_bytes: int) -> Any:
    """On every rank: padded shards of everything that has `dim`, stepped in place, then put together again."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    binding = bind(factory, _named(shapes))
    update = EagerUpdate(binding, bucket_bytes)

    def place(whole: Tensor) -> Tensor:
        return _padded_part(whole, dim, ranks, rank) if whole.dim() > dim else whole.clone()

    params = {
        name: LocalShard(place(whole), shapes[name], (Shard(dim),), (ranks,), (rank,))
        if whole.dim() > dim
        else LocalShard(whole, shapes[name])
        for name, whole in _start(shapes).items()
    }
    slots = {
        name: {
            t.name: place(torch.zeros(t.shape, dtype=t.dtype))
            if t.like_parameter
            else torch.zeros(t.shape, dtype=t.dtype)
            for t in binding.slot_templates(name, shapes[name], torch.float64)
        }
        for name in shapes
    }
    like = {
        n: {t.name for t in binding.slot_templates(n, s, torch.float64) if t.like_parameter} for n, s in shapes.items()
    }
    for step in range(steps):
        grads = {name: place(grad) for name, grad in _gradient(shapes, step).items()}
        update.step(params, grads, slots, lr_factor=_factor(step), first=step == 0)

    def padding(shard: LocalShard, padded: Tensor) -> Tensor:
        filled = padded.clone()
        shard.valid(filled).zero_()
        return filled

    def whole(shard: LocalShard, local: Tensor) -> Tensor:
        if not shard.sharded:
            return local
        gathered = [torch.empty_like(local) for _ in range(ranks)]
        dist.all_gather(gathered, local.contiguous())
        return shard.whole(gathered)

    dirty = [n for n, s in params.items() if s.sharded and padding(s, s.local).count_nonzero()]
    full = {n: whole(s, s.local) for n, s in params.items()}
    state = {n: {k: whole(params[n], v) if k in like[n] else v for k, v in held.items()} for n, held in slots.items()}
    return binding.mode, full, state, dirty


EAGER_CASES = [
    (T.Adamax, SHAPES, Mode.SHARD),
    (T.Adadelta, SHAPES, Mode.SHARD),
    (T.RAdam, SHAPES, Mode.SHARD),
    (T.Rprop, SHAPES, Mode.SHARD),
    (T.ASGD, SHAPES, Mode.SHARD),
    (_Custom, SHAPES, Mode.SHARD),
    (T.Adafactor, SHAPES, Mode.OWNER),
    (_Lamb, SHAPES, Mode.OWNER),
    (T.Muon, MATRICES, Mode.OWNER),
]


@pytest.mark.parametrize(("kind", "shapes", "mode"), EAGER_CASES, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize(("ranks", "dim"), [(2, 0), (2, 1), (4, 0)])
def test_eager_steps_on_ranks_equal_one_process(
    kind: type[Any], shapes: dict[str, tuple[int, ...]], mode: Mode, ranks: int, dim: int
) -> None:
    expected, expected_state = _run_torch(kind, shapes, steps=4)
    for found_mode, params, state, dirty in run_ranks(_run_eager, ranks, kind, shapes, dim, 4, 64):
        assert found_mode is mode
        assert dirty == [], "padding must stay zero"
        _assert_close(params, expected)
        for name, theirs in expected_state.items():
            assert list(state[name]) == list(theirs)
            _assert_close(state[name], {k: torch.as_tensor(v) for k, v in theirs.items()})


TWO_AXES: dict[str, tuple[Placement, ...]] = {
    "w": (Shard(1), Shard(0)),
    "v": (Shard(0, 2), Shard(0)),
    "only": (REPLICATE, Shard(0, 2)),
    "padded": (Shard(1), REPLICATE),
    "whole": (REPLICATE, REPLICATE),
}
ON_TWO_AXES: dict[str, tuple[int, ...]] = {"w": (4, 6), "v": (8, 3), "only": (8, 5), "padded": (4, 5), "whole": (3, 3)}


def _run_on_two_axes(factory: Any, steps: int) -> Any:
    """As `_run_eager`, on a mesh of 2 x 2 with the placements of `TWO_AXES`."""
    here = runtime.start(Plan(mesh=Mesh(data=2, tensor=2), device="cpu"))
    where = [int(c) for c in here.coordinates]
    binding = bind(factory, _named(ON_TWO_AXES))
    update = EagerUpdate(binding)

    def place(name: str, x: Tensor) -> Tensor:
        part = torch.zeros(local_shape(x.shape, TWO_AXES[name], (2, 2)), dtype=x.dtype)
        ranges = owned(x.shape, TWO_AXES[name], (2, 2), where)
        without_padding(part, ranges).copy_(take(x, ranges))
        return part

    params: dict[str, LocalShard] = {}
    for name, x in _start(ON_TWO_AXES).items():
        split = [i for i, p in enumerate(TWO_AXES[name]) if p != REPLICATE]
        params[name] = LocalShard(
            place(name, x),
            tuple(x.shape),
            tuple(TWO_AXES[name][i] for i in split),
            (2,) * len(split),
            tuple(where[i] for i in split),
            here.group_of(split),
        )
    slots = {
        name: {
            t.name: place(name, torch.zeros(t.shape, dtype=t.dtype))
            if t.like_parameter
            else torch.zeros(t.shape, dtype=t.dtype)
            for t in binding.slot_templates(name, shape, torch.float64)
        }
        for name, shape in ON_TWO_AXES.items()
    }
    for step in range(steps):
        grads = {name: place(name, grad) for name, grad in _gradient(ON_TWO_AXES, step).items()}
        update.step(params, grads, slots, lr_factor=_factor(step), first=step == 0)
    return {name: moves.whole(shard.local, here.axes, TWO_AXES[name], shard.shape) for name, shard in params.items()}


@pytest.mark.parametrize("kind", [T.Adamax, T.Adafactor, _Lamb], ids=lambda v: v.__name__)
def test_eager_steps_are_exact_where_two_axes_split_a_parameter(kind: type[Any]) -> None:
    expected, _ = _run_torch(kind, ON_TWO_AXES, steps=3)
    for found in run_ranks(_run_on_two_axes, 4, kind, 3):
        _assert_close(found, expected)


def _groups_of_two(named: Any) -> torch.optim.Optimizer:
    return optim.grouped(functools.partial(T.Adafactor, lr=0.3), {"w": {"lr": 0.02, "weight_decay": 0.1}})(named)


@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
def test_groups_are_kept_by_owners_whatever_the_bucket(bucket_bytes: int) -> None:
    shapes: dict[str, tuple[int, ...]] = {**SHAPES, "nothing": (0,), "thin": (6, 2), "ones": (5, 1)}
    expected, _ = _run_torch(functools.partial(_without_empty, _groups_of_two), shapes, steps=3)
    for _, params, state, _ in run_ranks(_run_eager, 2, _groups_of_two, shapes, 1, 3, bucket_bytes):
        _assert_close(params, expected)
        assert state["nothing"] == {}


def _without_empty(factory: Any, named: Any) -> torch.optim.Optimizer:
    """One device cannot step Adafactor on an empty tensor either (it divides by its size)."""
    return factory([(name, p) for name, p in named if p.numel()])


def test_an_eager_update_is_not_made_for_a_class_with_a_rule() -> None:
    with pytest.raises(ValueError, match=r"torch\.optim\.AdamW has a rule"):
        EagerUpdate(bind(T.AdamW, _named()))
