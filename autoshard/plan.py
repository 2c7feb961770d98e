"""What the user asks for: the mesh, the ZeRO stage and every knob. Frozen, hashable, checked when made."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from autoshard.errors import PlanError
from autoshard.names import hint
from autoshard.placement import Replicate, Shard

_AXES = ("pipeline", "data", "tensor")  # outermost first: neighbours in rank talk most

_K = TypeVar("_K", "Mesh", "Zero", "Tensor")
_T = TypeVar("_T")

STYLES = ("column", "row", "vocab", "replicate")
Rule = Shard | Replicate | str  # a string is one of STYLES


def _check(owner: str, name: str, found: object, ok: bool, valid: str) -> None:
    if not ok:
        raise PlanError(f"{owner}.{name} is {found!r}; valid: {valid}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _known_fields_only(kind: type[_T]) -> type[_T]:
    """A keyword-only dataclass that refuses other arguments by name, with the nearest field."""
    init: Any = kind.__init__
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        valid = f"valid: {', '.join(known)}"
        if args:
            raise PlanError(f"{kind.__name__} was given {args[0]!r} without its field's name; {valid}")
        for name in values:
            if name not in known:
                raise PlanError(f"{kind.__name__} has no field {name!r}; {hint(name, known)}{valid}")
        init(self, **values)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


@_known_fields_only
@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The sizes of the mesh axes, in ranks. Their product is the world size; one may be -1, "the rest".

    Ranks are laid out pipeline outermost, then data, then tensor innermost.
    """

    data: int = -1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name, size in self.axes:
            _check(
                "Mesh", name, size, _is_int(size) and (size >= 1 or size == -1), "an integer >= 1, or -1 for the rest"
            )
        free = [name for name, size in self.axes if size == -1]
        if len(free) > 1:
            raise PlanError(f"Mesh has -1 on {' and '.join(free)}; valid: -1 on at most one axis")

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of every axis, outermost first."""
        return tuple((name, getattr(self, name)) for name in _AXES)

    @property
    def size(self) -> int:
        """The number of ranks; only of a resolved mesh.

        Raises:
            PlanError: if an axis is still -1.
        """
        total = math.prod(size for _, size in self.axes)
        if total < 0:
            raise PlanError(f"{self} is not resolved; call mesh.resolve(world_size) first")
        return total

    def axis(self, name: str) -> int:
        """The size of the axis `name`, in ranks."""
        return dict(self.axes)[name]

    def resolve(self, world_size: int) -> Mesh:
        """This mesh with -1 filled in for `world_size` ranks.

        Raises:
            PlanError: if the axes do not multiply to `world_size`.
        """
        known = math.prod(size for _, size in self.axes if size != -1)
        free = next((name for name, size in self.axes if size == -1), None)
        shape = ", ".join(f"{name}={size}" for name, size in self.axes)
        if free is None and known != world_size:
            raise PlanError(
                f"Mesh({shape}) needs {known} ranks but the world has {world_size}; "
                f"launch {known} ranks (torchrun --nproc-per-node {known}) or set one axis to -1"
            )
        if free is not None and world_size % known:
            divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
            raise PlanError(
                f"Mesh({shape}): the fixed axes need a multiple of {known} ranks but the world has {world_size}; "
                f"their product must be one of {divisors}"
            )
        return self if free is None else dataclasses.replace(self, **{free: world_size // known})

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on every axis.

        Raises:
            PlanError: if `rank` is not in this (resolved) mesh.
        """
        _check("Mesh.coordinates", "rank", rank, _is_int(rank) and 0 <= rank < self.size, f"0 to {self.size - 1}")
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name, _ in self.axes}


@_known_fields_only
@dataclass(frozen=True, kw_only=True)
class Zero:
    """What is sharded over the data axis (ZeRO, arXiv:1910.02054).

    Args:
        stage: 0 nothing; 1 optimizer state; 2 also gradients; 3 also parameters.
        persistence_threshold: elements. A parameter with fewer stays whole on every rank, with its gradient
            and optimizer state (stages 1 to 3). 0 shards all that can be sharded.
    """

    stage: int = 0
    persistence_threshold: int = 0

    def __post_init__(self) -> None:
        _check("Zero", "stage", self.stage, _is_int(self.stage) and 0 <= self.stage <= 3, "0, 1, 2 or 3")
        found = self.persistence_threshold
        _check("Zero", "persistence_threshold", found, _is_int(found) and found >= 0, "an integer >= 0, in elements")
        if self.stage == 0 and found:
            raise PlanError(
                f"Zero.persistence_threshold is {found} at stage 0, where every parameter is whole; "
                "valid: 0, or a stage of 1 to 3"
            )


@_known_fields_only
@dataclass(frozen=True, kw_only=True)
class Tensor:
    """How the tensor axis is used.

    Args:
        sequence: activations between the split layers are split along the sequence too (Megatron's sequence
            parallelism), in the place of copies that every tensor rank holds.
    """

    sequence: bool = False

    def __post_init__(self) -> None:
        _check("Tensor", "sequence", self.sequence, isinstance(self.sequence, bool), "True or False")


_OPTIONAL_PASSES = ("zero",)
_LATER = {
    "precision": ("model", ("fp32", "bf16", "fp16")),
    "recompute": ("none", ("blocks", "full")),
}


@_known_fields_only
@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is trained: which program each rank runs.

    Args:
        mesh: sizes of the mesh axes, in ranks. A mapping is taken too.
        zero: ZeRO stage 0..3, or `Zero` with its knobs. A mapping is taken too.
        tensor: `Tensor`, the knobs of the tensor axis. A mapping is taken too.
        rules: how parameters are split over the tensor axis, in the place of what autoshard would choose: a mapping
            from patterns to "column" (split along its layer's output), "row" (along its input), "vocab" (an embedding's
            rows), "replicate", `Shard(dim)`, the dim alone, or `Replicate()`. A pattern is a shell glob over the path
            of a parameter, or of a module for the parameters that it holds itself; the first that matches counts.
        precision: "model" computes in the model's own dtypes. Others are refused by this version.
        recompute: "none" keeps activations for backward. Others are refused by this version.
        accumulate: micro-batches per optimizer step.
        clip_norm: the largest L2 norm of the whole gradient, or None for no clipping.
        backend: "inductor" compiles the graphs, "debug" runs the same graphs uncompiled.
        device: "cuda" or "cpu"; None takes CUDA where there is one.
        check_replicas: compare every N steps, bit for bit, what several ranks hold copies of; None does not.
        max_compiles: programs a step may compile for different batch shapes before it refuses another.
        seed: of every random number: dropout, and the initialisation of a model given as a callable.
        without: names of passes to switch off, for finding a fault; "zero" runs the plan as stage 0.

    Raises:
        PlanError: a value is not valid; the message names the field, what was found and what is valid.
    """

    mesh: Mesh = field(default_factory=Mesh)
    zero: Zero = field(default_factory=Zero)
    tensor: Tensor = field(default_factory=Tensor)
    rules: tuple[tuple[str, Rule], ...] = ()
    precision: str = "model"
    recompute: str = "none"
    accumulate: int = 1
    clip_norm: float | None = None
    backend: str = "inductor"
    device: str | None = None
    check_replicas: int | None = None
    max_compiles: int = 8
    seed: int = 0
    without: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        mesh: Mesh | Mapping[str, int] | None = None,
        zero: Zero | int | Mapping[str, int] = 0,
        tensor: Tensor | Mapping[str, bool] | None = None,
        rules: Mapping[str, Rule | int] | Sequence[tuple[str, Rule | int]] = (),
        precision: str = "model",
        recompute: str = "none",
        accumulate: int = 1,
        clip_norm: float | None = None,
        backend: str = "inductor",
        device: str | torch.device | None = None,
        check_replicas: int | None = None,
        max_compiles: int = 8,
        seed: int = 0,
        without: Sequence[str] = (),
    ) -> None:
        values = {
            "mesh": _as_knob("mesh", Mesh, {} if mesh is None else mesh),
            "zero": _as_knob("zero", Zero, {"stage": zero} if isinstance(zero, int) else zero),
            "tensor": _as_knob("tensor", Tensor, {} if tensor is None else tensor),
            "rules": _as_rules(rules),
            "precision": precision,
            "recompute": recompute,
            "accumulate": accumulate,
            "clip_norm": float(clip_norm) if isinstance(clip_norm, int) and _is_int(clip_norm) else clip_norm,
            "backend": backend,
            "device": str(device) if isinstance(device, torch.device) else device,
            "check_replicas": check_replicas,
            "max_compiles": max_compiles,
            "seed": seed,
            "without": (without,) if isinstance(without, str) else tuple(without),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._validate()

    def _validate(self) -> None:
        check = _check
        for name, (now, later) in _LATER.items():
            found = getattr(self, name)
            if isinstance(found, str) and found in later:
                raise PlanError(f"Plan.{name} is {found!r}, which this version cannot do yet; valid: {now!r}")
            check("Plan", name, found, found == now, repr(now))
        for axis in ("pipeline",):
            if self.mesh.axis(axis) != 1:
                raise PlanError(
                    f"Plan.mesh has {axis}={self.mesh.axis(axis)}, which this version cannot do yet; "
                    f"valid: {axis}=1 (use the data axis with zero=1..3, and the tensor axis)"
                )
        if self.mesh.tensor == 1:
            for name, given in (("tensor.sequence", self.tensor.sequence), ("rules", bool(self.rules))):
                if given:
                    raise PlanError(
                        f"Plan.{name} is set, but the mesh has tensor=1, where it changes nothing; "
                        f"valid: a mesh with tensor=2 or more, or no {name}"
                    )
        check(
            "Plan", "accumulate", self.accumulate, _is_int(self.accumulate) and self.accumulate >= 1, "an integer >= 1"
        )
        clip = self.clip_norm
        clip_ok = clip is None or (isinstance(clip, float) and 0 < clip < math.inf)
        check("Plan", "clip_norm", clip, clip_ok, "a positive finite number, or None")
        check("Plan", "backend", self.backend, self.backend in ("inductor", "debug"), "'inductor' or 'debug'")
        check("Plan", "device", self.device, _valid_device(self.device), "None, 'cpu' or 'cuda'")
        every = self.check_replicas
        check(
            "Plan",
            "check_replicas",
            every,
            every is None or (_is_int(every) and every >= 1),
            "None, or a number of steps >= 1",
        )
        compiles = self.max_compiles
        check("Plan", "max_compiles", compiles, _is_int(compiles) and compiles >= 1, "an integer >= 1")
        check(
            "Plan", "seed", self.seed, _is_int(self.seed) and 0 <= self.seed < 2**63, "an integer from 0 to 2**63 - 1"
        )
        for name in self.without:
            valid = f"passes that the others do not need: {', '.join(_OPTIONAL_PASSES)}"
            check("Plan", "without", name, name in _OPTIONAL_PASSES, valid)
        if "zero" in self.without:
            object.__setattr__(self, "zero", Zero(stage=0))


def _valid_device(device: object) -> bool:
    return device is None or (isinstance(device, str) and device.split(":")[0] in ("cpu", "cuda"))


def _as_rules(given: Any) -> tuple[tuple[str, Rule], ...]:
    """Pairs of pattern and rule, dims as shards."""
    valid = f"{', '.join(map(repr, STYLES))}, Shard(dim), a dim, or Replicate()"
    pairs = given.items() if isinstance(given, Mapping) else given
    if isinstance(pairs, str) or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise PlanError(f"Plan.rules is {given!r}; valid: a mapping from patterns to {valid}")
    found: list[tuple[str, Rule]] = []
    for pattern, rule in pairs:
        if not isinstance(pattern, str) or not pattern:
            raise PlanError(f"Plan.rules has the pattern {pattern!r}; valid: a glob such as '*.attention.q'")
        made = Shard(rule) if _is_int(rule) else rule
        shard = isinstance(made, Shard) and _is_int(made.dim) and _is_int(made.outer) and made.outer >= 1
        if not (shard or isinstance(made, Replicate) or (isinstance(made, str) and made in STYLES)):
            raise PlanError(f"Plan.rules[{pattern!r}] is {rule!r}; {hint(str(rule), STYLES)}valid: {valid}")
        found.append((pattern, made))
    twice = [pattern for i, (pattern, _) in enumerate(found) if pattern in [p for p, _ in found[:i]]]
    if twice:
        raise PlanError(f"Plan.rules has the pattern {twice[0]!r} twice; valid: each pattern once")
    return tuple(found)


def _as_knob(name: str, kind: type[_K], value: Any) -> _K:
    if isinstance(value, kind):
        return value
    fields = [f.name for f in dataclasses.fields(kind)]
    if not isinstance(value, Mapping):
        number = "0, 1, 2, 3, " if kind is Zero else ""
        raise PlanError(
            f"Plan.{name} is {value!r}; valid: {number}{kind.__name__}({', '.join(fields)}) or a mapping of those"
        )
    return kind(**{str(key): knob for key, knob in value.items()})
