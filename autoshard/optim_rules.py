"""Optimizer updates as pure functions on tensors: what the `update` pass writes into the graph.

Each rule is elementwise in parameter and gradient, so it is exact on any shard, and takes the learning rate
and the count of updates as 0-dim tensors, so one compiled graph serves every step. Equal to torch.optim's
own single-tensor loops to rounding. Where a rule would divide nothing by nothing (eps=0 and no gradient so
far), the update is 0, so that the padding of a shard stays zero; torch gives NaN there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# How torch runs a step, not what it computes: a rule has one way of running.
HINTS = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class Slot:
    """One tensor of optimizer state of one parameter.

    Args:
        name: torch's own state key ("exp_avg", "momentum_buffer", ...).
        fill: its value before the first update.
        scalar: 0-dim and the same on every rank, rather than shaped like the parameter.
        dtype: None for the parameter's.
    """

    name: str
    fill: float = 0.0
    scalar: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Group:
    """One torch parameter group, frozen.

    Args:
        names: the model's names of its parameters.
        lr: learning rate before the schedule's factor.
        options: the rest of the torch group, as (name, value) pairs sorted by name; lists are tuples here.
    """

    names: tuple[str, ...]
    lr: float
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str) -> Any:
        """The value of an option.

        Raises:
            KeyError: the group has no such option.
        """
        return dict(self.options)[name]


Update = tuple[Tensor, dict[str, Tensor]]


class Rule(Protocol):
    """How one optimizer updates one parameter."""

    @property
    def honours(self) -> frozenset[str]:
        """The group options that change what `update` computes."""
        ...

    @property
    def fixed(self) -> frozenset[str]:
        """Those of them that torch reads from the constructor only, whatever a group says."""
        ...

    def slots(self, group: Group) -> tuple[Slot, ...]:
        """The state that a parameter of `group` has."""
        ...

    def update(
        self, param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor, group: Group
    ) -> Update:
        """The parameter and slots after one update; nothing is changed in place.

        Args:
            param: any shape, a floating dtype.
            grad: shape and dtype of `param`.
            slots: one tensor for each of `self.slots(group)`.
            lr: 0-dim float64, the schedule's factor in it.
            step: 0-dim float64, 1 at the first update.
            group: options only; `lr` and `names` of it are not read.
        """
        ...


@dataclass(frozen=True)
class _Rule:
    honours: frozenset[str]
    slots: Callable[[Group], tuple[Slot, ...]]
    formula: Callable[[Tensor, Tensor, Mapping[str, Tensor], Tensor, Tensor, Group], Update]
    fixed: frozenset[str] = frozenset()

    def update(
        self, param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor, group: Group
    ) -> Update:
        if param.dtype not in (torch.bfloat16, torch.float16):
            return self.formula(param, grad, slots, lr, step, group)
        # In half precision a 0-dim lr or bias correction would itself be rounded to 8 or 11 bits.
        wide = {name: slot.float() if slot.dtype == param.dtype else slot for name, slot in slots.items()}
        new_param, new = self.formula(param.float(), grad.float(), wide, lr, step, group)
        return new_param.to(param.dtype), {name: slot.to(slots[name].dtype) for name, slot in new.items()}


def _ascent_and_decay(param: Tensor, grad: Tensor, lr: Tensor, group: Group, decoupled: bool) -> tuple[Tensor, Tensor]:
    if group.option("maximize"):
        grad = -grad
    decay = group.option("weight_decay")
    if decay and decoupled:
        param = param * (1 - lr * decay)
    elif decay:
        grad = torch.add(grad, param, alpha=decay)
    return param, grad


def _ratio(numerator: Tensor, denominator: Tensor, eps: float) -> Tensor:
    ratio = numerator / denominator
    return ratio if eps else torch.where((numerator == 0) & (denominator == 0), 0.0, ratio)


def _second_moment(average: Tensor, grad: Tensor, beta: float) -> Tensor:
    return torch.addcmul(average * beta, grad, grad, value=1 - beta)


def _scalar_dtype() -> torch.dtype:
    # torch keeps its counters in float32 unless the default dtype is float64.
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _adam_slots(group: Group) -> tuple[Slot, ...]:
    slots = (Slot("exp_avg"), Slot("exp_avg_sq"))
    return (*slots, Slot("max_exp_avg_sq")) if group.option("amsgrad") else slots


def _adam(param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor, group: Group) -> Update:
    """arXiv:1412.6980 algorithm 1; decoupled decay of arXiv:1711.05101; amsgrad of arXiv:1904.09237."""
    (beta1, beta2), eps = group.option("betas"), group.option("eps")
    param, grad = _ascent_and_decay(param, grad, lr, group, group.option("decoupled_weight_decay"))
    new = {
        "exp_avg": torch.lerp(slots["exp_avg"], grad, 1 - beta1),
        "exp_avg_sq": _second_moment(slots["exp_avg_sq"], grad, beta2),
    }
    variance = new["exp_avg_sq"]
    if group.option("amsgrad"):
        variance = new["max_exp_avg_sq"] = torch.maximum(slots["max_exp_avg_sq"], variance)
    correction1, correction2 = 1 - torch.pow(beta1, step), 1 - torch.pow(beta2, step)
    denominator = variance.sqrt() / correction2.sqrt() + eps
    return param - (lr / correction1) * _ratio(new["exp_avg"], denominator, eps), new


def _sgd_slots(group: Group) -> tuple[Slot, ...]:
    return (Slot("momentum_buffer"),) if group.option("momentum") else ()


def _sgd(param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor, group: Group) -> Update:
    param, grad = _ascent_and_decay(param, grad, lr, group, decoupled=False)
    momentum, dampening = group.option("momentum"), group.option("dampening")
    if not momentum:
        return param - lr * grad, {}
    buffer = torch.add(slots["momentum_buffer"] * momentum, grad, alpha=1 - dampening)
    if dampening:  # torch starts the buffer at the first gradient, undamped
        buffer = torch.where(step == 1, grad, buffer)
    direction = torch.add(grad, buffer, alpha=momentum) if group.option("nesterov") else buffer
    return param - lr * direction, {"momentum_buffer": buffer}


def _adagrad_slots(group: Group) -> tuple[Slot, ...]:
    return (Slot("sum", fill=float(group.option("initial_accumulator_value"))),)


def _adagrad(
    param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor, group: Group
) -> Update:
    param, grad = _ascent_and_decay(param, grad, lr, group, decoupled=False)
    eps = group.option("eps")
    rate = lr / (1 + (step - 1) * group.option("lr_decay"))
    total = torch.addcmul(slots["sum"], grad, grad)
    return param - rate * _ratio(grad, total.sqrt() + eps, eps), {"sum": total}


def _rmsprop_slots(group: Group) -> tuple[Slot, ...]:
    slots: tuple[Slot, ...] = (Slot("square_avg"),)
    if group.option("momentum") > 0:
        slots += (Slot("momentum_buffer"),)
    return (*slots, Slot("grad_avg")) if group.option("centered") else slots


def _rmsprop(
    param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor, group: Group
) -> Update:
    param, grad = _ascent_and_decay(param, grad, lr, group, decoupled=False)
    alpha, eps, momentum = group.option("alpha"), group.option("eps"), group.option("momentum")
    new = {"square_avg": _second_moment(slots["square_avg"], grad, alpha)}
    variance = new["square_avg"]
    if group.option("centered"):
        mean = new["grad_avg"] = torch.lerp(slots["grad_avg"], grad, 1 - alpha)
        variance = torch.addcmul(variance, mean, mean, value=-1)
    direction = _ratio(grad, variance.sqrt() + eps, eps)
    if momentum > 0:
        direction = new["momentum_buffer"] = slots["momentum_buffer"] * momentum + direction
    return param - lr * direction, new


def _nadam_slots(group: Group) -> tuple[Slot, ...]:
    return (Slot("mu_product", fill=1.0, scalar=True, dtype=_scalar_dtype()), Slot("exp_avg"), Slot("exp_avg_sq"))


def _nadam(param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor, group: Group) -> Update:
    """Dozat 2016, "Incorporating Nesterov Momentum into Adam", with its momentum schedule."""
    (beta1, beta2), eps, decay = group.option("betas"), group.option("eps"), group.option("momentum_decay")
    param, grad = _ascent_and_decay(param, grad, lr, group, group.option("decoupled_weight_decay"))
    mu = beta1 * (1 - 0.5 * torch.pow(0.96, step * decay))
    mu_next = beta1 * (1 - 0.5 * torch.pow(0.96, (step + 1) * decay))
    # Rounded to the slot's dtype at each step, as torch does.
    product = slots["mu_product"] * mu.to(slots["mu_product"].dtype)
    new = {
        "mu_product": product,
        "exp_avg": torch.lerp(slots["exp_avg"], grad, 1 - beta1),
        "exp_avg_sq": _second_moment(slots["exp_avg_sq"], grad, beta2),
    }
    product = product.to(lr.dtype)
    denominator = (new["exp_avg_sq"] / (1 - torch.pow(beta2, step))).sqrt() + eps
    param = param - (lr * (1 - mu) / (1 - product)) * _ratio(grad, denominator, eps)
    return param - (lr * mu_next / (1 - product * mu_next)) * _ratio(new["exp_avg"], denominator, eps), new


def _lion_slots(group: Group) -> tuple[Slot, ...]:
    return (Slot("exp_avg"),)


def _lion(param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor, group: Group) -> Update:
    """arXiv:2302.06675, program 1."""
    beta1, beta2 = group.option("betas")
    param, grad = _ascent_and_decay(param, grad, lr, group, decoupled=True)
    direction = torch.lerp(slots["exp_avg"], grad, 1 - beta1).sign()
    return param - lr * direction, {"exp_avg": torch.lerp(slots["exp_avg"], grad, 1 - beta2)}


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675): the sign of an interpolated momentum, with decoupled weight decay.

    Args:
        params: what every torch optimizer takes: parameters, named parameters or groups.
        lr: learning rate, about a tenth of AdamW's.
        betas: interpolation for the update, and decay of the momentum; each in [0, 1).
        weight_decay: decoupled, times lr.
        maximize: ascend instead of descending.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value, ok in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not ok:
                raise ValueError(f"Lion: {name} is {value}; valid: {'each in [0, 1)' if name == 'betas' else '>= 0'}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` returned, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for values in self.param_groups:
            group = Group((), 0.0, tuple((name, values[name]) for name in LION.honours))
            for param in values["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                lr = torch.as_tensor(values["lr"], dtype=torch.float64, device=param.device)
                every_step_alike = torch.ones_like(lr)
                new, slots = LION.update(param, param.grad, state, lr, every_step_alike, group)
                param.copy_(new)
                state["exp_avg"].copy_(slots["exp_avg"])
        return loss


_COMMON = frozenset({"weight_decay", "maximize"})

ADAM: Rule = _Rule(_COMMON | {"betas", "eps", "amsgrad", "decoupled_weight_decay"}, _adam_slots, _adam)
SGD: Rule = _Rule(_COMMON | {"momentum", "dampening", "nesterov"}, _sgd_slots, _sgd)
ADAGRAD: Rule = _Rule(
    _COMMON | {"eps", "lr_decay", "initial_accumulator_value"},
    _adagrad_slots,
    _adagrad,
    fixed=frozenset({"initial_accumulator_value"}),
)
RMSPROP: Rule = _Rule(_COMMON | {"alpha", "eps", "momentum", "centered"}, _rmsprop_slots, _rmsprop)
NADAM: Rule = _Rule(_COMMON | {"betas", "eps", "momentum_decay", "decoupled_weight_decay"}, _nadam_slots, _nadam)
LION: Rule = _Rule(_COMMON | {"betas"}, _lion_slots, _lion)

# Keyed by the exact class: a subclass may step otherwise.
RULES: Mapping[type[torch.optim.Optimizer], Rule] = {
    torch.optim.AdamW: ADAM,
    torch.optim.Adam: ADAM,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.RMSprop: RMSPROP,
    torch.optim.NAdam: NADAM,
    Lion: LION,
}
