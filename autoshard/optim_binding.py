"""From the user's optimizer factory to what the program needs: groups, state, and how the step may be run.

`bind` calls the factory once, on meta parameters. Classes with a rule of ours (`optim_rules`) become part of
the update graph. Any other class is tried out on small float64 tensors, since no list of names could say
what a user's own class does: does stepping parts equal stepping the whole?
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoshard import compat
from autoshard.errors import OptimizerError
from autoshard.optim_rules import HINTS, RULES, Group, Rule, Slot
from autoshard.placement import shard_length

Factory = Callable[[Any], torch.optim.Optimizer]


class Mode(enum.Enum):
    """How the step of an optimizer class is run."""

    GRAPH = "our own rule, in the update graph"
    SHARD = "its own step on local shards"
    OWNER = "its own step on whole parameters, each on one rank"


@dataclass(frozen=True)
class SlotTemplate:
    """What to allocate for one slot of one parameter.

    Args:
        name: the optimizer's own state key.
        shape: global shape.
        dtype: element type.
        fill: value before the first update. In the modes SHARD and OWNER the first update lets the
            optimizer make its own state, so there it only marks a state that was never stepped.
        like_parameter: shaped like the parameter, so sharded like it; else whole on every rank.
        number: the Python type that the optimizer keeps this slot as (int, float, bool), None for a tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0.0
    like_parameter: bool = False
    number: type | None = None


@dataclass(frozen=True)
class Binding:
    """An optimizer class with its groups, bound to a model's parameter names. Made by `bind`.

    Args:
        optimizer_class: the class that the factory made.
        groups: its parameter groups, in its order; a parameter is in at most one.
        mode: how its step is run.
        rule: the update rule in mode GRAPH, else None.
        unassigned: parameters in no group; they are not updated.
        template: the factory's optimizer, on meta parameters; for `instantiate`.
    """

    optimizer_class: type[torch.optim.Optimizer]
    groups: tuple[Group, ...]
    mode: Mode
    rule: Rule | None
    unassigned: tuple[str, ...]
    template: torch.optim.Optimizer = field(repr=False, compare=False)

    @property
    def class_name(self) -> str:
        return _class_name(self.optimizer_class)

    def group_of(self, name: str) -> Group:
        """The group of a parameter.

        Raises:
            KeyError: the parameter is in no group.
        """
        return self._groups_by_name[name]

    @functools.cached_property
    def _groups_by_name(self) -> dict[str, Group]:
        return {name: group for group in self.groups for name in group.names}

    def instantiate(self, tensors: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """A live optimizer of the user's class and groups, without state unless its constructor makes some.

        Args:
            tensors: leaf tensors by parameter name, of any shape; parameters not given are left out.

        Raises:
            OptimizerError: the class makes state in its constructor and cannot be constructed from its groups.
        """
        return _instantiate(self.template, self.groups, tensors)

    def slot_templates(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[SlotTemplate, ...]:
        """The state of parameter `name` at its global shape, in the order in which the optimizer keeps it.

        Allocates nothing of the parameter's size, unless the class reads values before it has made its state.

        Raises:
            OptimizerError: the class keeps something other than tensors and numbers.
            KeyError: the parameter is in no group.
        """
        group, shape = self.group_of(name), tuple(shape)
        if self.rule is not None:
            return tuple(_template_of_rule(slot, shape, dtype) for slot in self.rule.slots(group))
        if 0 in shape:
            return ()  # nothing to update: it is never stepped
        small = _state_after_one_step(self.instantiate, name, _clipped(shape), dtype, "cpu")
        found = _state_after_one_step(self.instantiate, name, shape, dtype, "meta")
        if list(found) != list(small):
            found = _state_after_one_step(self.instantiate, name, shape, dtype, "cpu")
        return tuple(_template_of_value(self.class_name, key, value, shape) for key, value in found.items())


def bind(factory: Factory, named_parameters: Mapping[str, Tensor]) -> Binding:
    """Calls the user's factory on meta parameters and finds out how its optimizer can be run.

    Args:
        factory: gets a list of (name, meta parameter) pairs, which torch's optimizers take as they are; one that
            makes its own groups may choose by name. One that cannot take pairs gets the plain parameters.
        named_parameters: the trainable parameters; only shapes and dtypes are read.

    Raises:
        OptimizerError: the factory fails, or its optimizer cannot be run exactly on shards or by owners;
            the message names the class and the reason.
    """
    if not named_parameters:
        raise OptimizerError("the model has no trainable parameter for the optimizer; set requires_grad on some")
    metas = {}
    for name, p in named_parameters.items():
        metas[name] = torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
        compat.carry_over(p, metas[name])  # a factory may sort by an attribute, such as _no_weight_decay
    optimizer = _call(factory, metas)
    groups = _read_groups(optimizer, metas)
    kind, names = type(optimizer), [name for group in groups for name in group.names]
    unassigned = tuple(name for name in metas if name not in set(names))
    rule = RULES.get(kind)
    if rule is not None and not any(metas[name].is_complex() for name in names):
        for group in groups:
            _check_options(optimizer, rule, group)
        return Binding(kind, groups, Mode.GRAPH, rule, unassigned, optimizer)
    shapes = {name: tuple(metas[name].shape) for name in names}
    mode = _Probe(optimizer, groups, shapes, {name for name in names if metas[name].is_complex()}).classify()
    return Binding(kind, groups, mode, None, unassigned, optimizer)


def _class_name(kind: type) -> str:
    module = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(": ")


# --- the factory's optimizer ----------------------------------------------------------------------------


def _call(factory: Factory, metas: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    if not callable(factory):
        raise OptimizerError(
            f"optimizer= is {factory!r}; valid: a factory, such as functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    try:
        optimizer = factory(list(metas.items()))
    except Exception as first:
        try:
            optimizer = factory(list(metas.values()))
        except Exception:
            raise OptimizerError(
                f"the optimizer factory failed on the model's parameters ({_reason(first)}); it gets a list of "
                "(name, parameter) pairs on the meta device and returns a torch.optim.Optimizer"
            ) from first
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"the optimizer factory returned {type(optimizer).__name__}; valid: one torch.optim.Optimizer"
        )
    return optimizer


def _read_groups(optimizer: torch.optim.Optimizer, metas: Mapping[str, torch.nn.Parameter]) -> tuple[Group, ...]:
    title = _class_name(type(optimizer))
    if "closure" in _required_arguments(type(optimizer).step):
        raise OptimizerError(f"{title} needs a closure that runs the model again, which a traced step cannot give it")
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state", "defaults"):
            continue
        if "hook" in name and value:
            raise OptimizerError(f"{title} has step hooks registered ({name}), which would not run; remove them")
        if name == "step":
            raise OptimizerError(
                f"{title}: its step was replaced on the object, as a torch lr scheduler does; use schedule= instead"
            )
        _refuse_hidden(title, name, value)
    names = {id(param): name for name, param in metas.items()}
    seen: set[str] = set()
    groups = []
    for index, source in enumerate(optimizer.param_groups):
        where = f"{title}, parameter group {index}"
        mine = []
        for param in source["params"]:
            if id(param) not in names:
                raise OptimizerError(
                    f"{where}: a tensor of shape {tuple(param.shape)} is none of the model's parameters; "
                    "use the ones that the factory is given"
                )
            name = names[id(param)]
            if name in seen:
                raise OptimizerError(f"{where}: parameter {name!r} is there twice; put it in one group, once")
            seen.add(name)
            mine.append(name)
        options = {
            key: _freeze(where, key, value) for key, value in source.items() if key not in ("params", "param_names")
        }
        lr = options.pop("lr", None)
        if not isinstance(lr, (int, float)):
            raise OptimizerError(f"{where}: lr is {lr!r}; valid: a number, which the schedule multiplies")
        if "initial_lr" in options:
            raise OptimizerError(f"{where}: has initial_lr, from a torch lr scheduler; use schedule= instead")
        groups.append(Group(tuple(mine), float(lr), tuple(sorted(options.items()))))
    return tuple(groups)


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _freeze(where: str, key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta:
            raise OptimizerError(f"{where}: option {key!r} is a tensor of shape {tuple(value.shape)}; valid: a number")
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(where, key, item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _freeze(where, key, item)) for name, item in value.items())
    return value


def _thaw(value: Any) -> Any:
    """A torch group option as the live optimizer gets it: tensors as the numbers they hold."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return type(value)([_thaw(item) for item in value])
    return copy.deepcopy(value)


def _holds(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(item, kinds) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds(item, kinds) for item in value)
    return isinstance(value, kinds)


def _refuse_hidden(title: str, name: str, value: Any) -> None:
    if _holds(value, (Tensor, torch.Generator, torch.optim.Optimizer)):
        raise OptimizerError(
            f"{title} keeps tensors, generators or optimizers in its attribute {name!r}, where they would be neither "
            "sharded nor saved; per-parameter state belongs in self.state[parameter]"
        )


def _check_options(optimizer: torch.optim.Optimizer, rule: Rule, group: Group) -> None:
    title = _class_name(type(optimizer))
    for key, value in group.options:
        if key not in rule.honours | HINTS:
            raise OptimizerError(
                f"{title}: the group option {key!r} ({value!r}) has no effect on its update; "
                f"valid: lr, {', '.join(sorted(rule.honours))}"
            )
        if key in rule.fixed and value != optimizer.defaults[key]:
            raise OptimizerError(
                f"{title} takes {key} from its constructor ({optimizer.defaults[key]!r}) and ignores a group's "
                f"({value!r}); give it to the constructor"
            )


def _instantiate(
    template: torch.optim.Optimizer, groups: tuple[Group, ...], tensors: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    made = []
    for group, source in zip(groups, template.param_groups, strict=True):
        params = [tensors[name] for name in group.names if name in tensors]
        if params:
            options = {k: _thaw(v) for k, v in source.items() if k not in ("params", "param_names")}
            made.append({**options, "lr": group.lr, "params": params})
    kind = type(template)
    if template.state:  # only the constructor knows how to make it
        arguments = inspect.signature(kind.__init__).parameters
        try:
            optimizer = kind(copy.copy(made), **{k: _thaw(v) for k, v in template.defaults.items() if k in arguments})
        except Exception as error:
            raise OptimizerError(
                f"{_class_name(kind)} makes state in its constructor, and constructing it from its parameter "
                f"groups failed ({_reason(error)}); make the state at the first step, or take groups"
            ) from error
        state = optimizer.state
    else:
        optimizer, state = kind.__new__(kind), defaultdict(dict)
    fresh = ("param_groups", "state")
    optimizer.__dict__.update({k: copy.deepcopy(v) for k, v in vars(template).items() if k not in fresh})
    optimizer.param_groups, optimizer.state = made, state
    return optimizer


# --- state --------------------------------------------------------------------------------------------------


def _template_of_rule(slot: Slot, shape: tuple[int, ...], dtype: torch.dtype) -> SlotTemplate:
    return SlotTemplate(
        slot.name, () if slot.scalar else shape, slot.dtype or dtype, slot.fill, like_parameter=not slot.scalar
    )


def _template_of_value(title: str, key: str, value: Any, shape: tuple[int, ...]) -> SlotTemplate:
    numbers = {bool: torch.bool, int: torch.int64, float: torch.float64}
    if type(value) in numbers:
        return SlotTemplate(key, (), numbers[type(value)], number=type(value))
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise OptimizerError(
            f"{title} keeps state {key!r} of type {type(value).__name__}; valid: dense tensors and numbers"
        )
    alike = tuple(value.shape) == shape and shape != ()
    return SlotTemplate(key, tuple(value.shape), value.dtype, like_parameter=alike)


def _state_after_one_step(
    instantiate: Callable[[Mapping[str, Tensor]], torch.optim.Optimizer],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
) -> dict[str, Any]:
    param = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
    param.grad = torch.ones_like(param)
    optimizer = instantiate({name: param})
    with _own_random_numbers():
        try:
            optimizer.step()
        except Exception:
            # On meta a step stops where it first reads a value, when the state has been made.
            if device != "meta":
                raise
    return dict(optimizer.state[param])


# --- trying a class out -------------------------------------------------------------------------------------

# Above the 128 from which the factored optimizers factor, and the 4,096 elements from which the 8-bit ones quantise.
_LARGEST_DIM = 160
_LARGEST_NUMEL = 2**18
# Gradients small and large, so that a clipped or trust-scaled update shows.
_GRADIENT_SCALES = (1.0, 1e-3, 1e3, 1.0)


def _clipped(shape: tuple[int, ...]) -> tuple[int, ...]:
    limit = _LARGEST_DIM
    clipped = [min(size, limit) for size in shape]
    while np.prod(clipped, dtype=np.int64) > _LARGEST_NUMEL:
        limit = limit * 3 // 4
        clipped = [min(size, limit) for size in shape]
    return tuple(clipped)


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@contextmanager
def _watch_distributed(found: list[str]) -> Iterator[None]:
    """Collects the functions of torch.distributed that are called inside."""

    def notice(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            found.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(before)


@dataclass(frozen=True)
class _Outcome:
    """One parameter and its state after the steps of a probe."""

    param: Tensor
    state: dict[str, Any]


class _Probe:
    """Runs a class on one small float64 stand-in for every kind of parameter that each group holds."""

    def __init__(
        self,
        template: torch.optim.Optimizer,
        groups: tuple[Group, ...],
        shapes: Mapping[str, tuple[int, ...]],
        complex_names: set[str],
    ) -> None:
        self.template, self.groups, self.title = template, groups, _class_name(type(template))
        self.start: dict[str, Tensor] = {}
        self.grads: dict[str, list[Tensor]] = {}
        random_numbers = torch.Generator("cpu").manual_seed(0)
        known = set()
        for index, group in enumerate(groups):
            for name in group.names:
                shape, is_complex = _clipped(shapes[name]), name in complex_names
                if 0 in shape or (index, shape, is_complex) in known:
                    continue
                known.add((index, shape, is_complex))
                dtype = torch.complex128 if is_complex else torch.float64
                drawn = [
                    torch.randn(shape, dtype=dtype, generator=random_numbers, device="cpu")
                    for _ in range(1 + len(_GRADIENT_SCALES))
                ]
                self.start[name] = drawn[0]
                self.grads[name] = [g * scale for g, scale in zip(drawn[1:], _GRADIENT_SCALES, strict=True)]

    def classify(self) -> Mode:
        """The mode in which the class is exact.

        Raises:
            OptimizerError: there is none.
        """
        if not self.start:
            return Mode.SHARD
        with _own_random_numbers():
            whole = self._run_whole()
            if self._shards_agree(whole):
                return Mode.SHARD
            alone = {name: self._try([name])[name] for name in self.start}
        if all(_same(alone[name], whole[name]) for name in self.start):
            return Mode.OWNER
        raise OptimizerError(
            f"{self.title} updates one parameter by the values of others, so no rank could step its part alone; "
            "use an optimizer that treats each parameter by itself"
        )

    def _try(self, names: Iterable[str]) -> dict[str, _Outcome]:
        return self._run({name: (self.start[name], self.grads[name]) for name in names})

    def _run(
        self, tensors: Mapping[str, tuple[Tensor, list[Tensor]]], after: Callable[[Any], None] = lambda _: None
    ) -> dict[str, _Outcome]:
        params = {name: torch.nn.Parameter(start.clone()) for name, (start, _) in tensors.items()}
        optimizer = _instantiate(self.template, self.groups, params)
        for step in range(len(_GRADIENT_SCALES)):
            for name, (_, grads) in tensors.items():
                params[name].grad = grads[step].clone()
            optimizer.step()
            after(optimizer)
        return {name: _Outcome(p.detach(), dict(optimizer.state[p])) for name, p in params.items()}

    def _run_whole(self) -> dict[str, _Outcome]:
        """Every stand-in in one optimizer, and the checks of what the class does besides."""
        seen: list[dict[str, Any]] = []
        numbers, distributed = _random_states(), list[str]()

        def look(optimizer: torch.optim.Optimizer) -> None:
            hidden = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
            for name, value in hidden.items():
                _refuse_hidden(self.title, name, value)
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key != "params":
                        _refuse_hidden(self.title, f"param_groups[{index}][{key!r}]", value)
                        hidden[f"param_groups[{index}][{key!r}]"] = value
            keys = [list(optimizer.state[p]) for g in optimizer.param_groups for p in g["params"]]
            seen.append(
                {**{k: _snapshot(v) for k, v in hidden.items()}, "state keys that come after the first step": keys}
            )

        try:
            with _watch_distributed(distributed):
                outcome = self._run({n: (self.start[n], self.grads[n]) for n in self.start}, look)
        except OptimizerError:
            raise
        except Exception as error:
            raise OptimizerError(
                f"{self.title} failed when it was tried on dense gradients without a closure ({_reason(error)})"
            ) from error
        if distributed:
            raise OptimizerError(f"{self.title} calls {distributed[0]} in its step; autoshard does the communication")
        if _random_states() != numbers:
            raise OptimizerError(f"{self.title} draws random numbers in its step, which would differ between ranks")
        # The first step may set a flag; what goes on changing is state.
        changed = [key for key in seen[-1] if key not in seen[0] or seen[0][key] != seen[-1][key]]
        if changed:
            raise OptimizerError(
                f"{self.title} keeps state in {changed[0]}, which would be neither sharded nor saved; "
                "per-parameter state belongs in self.state[parameter]"
            )
        for name, found in outcome.items():
            for key, value in found.state.items():
                _template_of_value(self.title, key, value, tuple(self.start[name].shape))
        return outcome

    def _shards_agree(self, whole: Mapping[str, _Outcome]) -> bool:
        """Whether ranks that hold a half, the other half, and nothing get what one device gets, in every dim."""
        for dim in range(max(1, *(t.dim() for t in self.start.values())) if self.start else 1):
            parts: list[dict[str, _Outcome]] = []
            for rank in range(3):
                held = {}
                for name, start in self.start.items():
                    grads = self.grads[name]
                    if start.dim():
                        held[name] = (_part(start, dim, rank), [_part(g, dim, rank) for g in grads])
                    else:
                        held[name] = (start, grads)
                try:
                    parts.append(self._run(held))
                except Exception:
                    return False  # whatever it was, this class needs whole tensors
            for name, one in whole.items():
                if not _joined_equals([part[name] for part in parts], one, dim):
                    return False
        return True


def _snapshot(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        return id(value)


def _part(tensor: Tensor, dim: int, rank: int) -> Tensor:
    dim = min(dim, tensor.dim() - 1)
    size = tensor.shape[dim]
    half = shard_length(size, 2)
    start, end = ((0, half), (half, size), (size, size))[rank]
    return tensor.narrow(dim, start, end - start)


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # Vectorised loops and their scalar tails may round differently.
        return torch.allclose(a, b, rtol=1e-10, atol=1e-13, equal_nan=True)
    return type(a) is type(b) and a == b


def _same(a: _Outcome, b: _Outcome) -> bool:
    return (
        _close(a.param, b.param)
        and list(a.state) == list(b.state)
        and all(_close(a.state[key], b.state[key]) for key in a.state)
    )


def _joined_equals(parts: list[_Outcome], whole: _Outcome, dim: int) -> bool:
    if any(list(part.state) != list(whole.state) for part in parts):
        return False
    if not whole.param.dim():
        return all(_same(part, whole) for part in parts)
    dim = min(dim, whole.param.dim() - 1)
    if not _close(torch.cat([part.param for part in parts], dim), whole.param):
        return False
    for key, value in whole.state.items():
        if isinstance(value, Tensor) and value.shape == whole.param.shape:
            if any(part.state[key].shape != part.param.shape for part in parts):
                return False
            if not _close(torch.cat([part.state[key] for part in parts], dim), value):
                return False
        elif not all(_close(part.state[key], value) for part in parts):
            return False
    return True
