"""What plan.rules ask of each parameter on the tensor axis."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from autoshard.capture import Modules
from autoshard.errors import PlanError
from autoshard.placement import REPLICATE, Placement, Replicate, Shard
from autoshard.plan import Rule

_SHOWN = 5


@dataclass(frozen=True)
class _Held:
    """A parameter under one of its names, and the module that holds it under that name."""

    name: str
    first: str
    path: str
    module: nn.Module
    parameter: nn.Parameter


def parameter_wishes(rules: tuple[tuple[str, Rule], ...], modules: Modules, ranks: int) -> dict[str, Placement]:
    """Placements on a tensor axis of `ranks`, by the parameters' first names; what no rule takes is absent.

    Raises:
        PlanError: a pattern takes no parameter, or none that earlier ones leave, a dim does not exist, a style has no
            meaning for a module, or two rules want a tied parameter differently.
    """
    held = list(_held(modules))
    wishes: dict[str, Placement] = {}
    taken: dict[str, str] = {}
    for pattern, rule in rules:
        matched = [h for h in held if fnmatch.fnmatchcase(h.name, pattern) or fnmatch.fnmatchcase(h.path, pattern)]
        if not matched:
            raise PlanError(_nothing(pattern, held, modules))
        free = [h for h in matched if h.name not in taken]
        if not free:
            before = taken[matched[0].name]
            raise PlanError(
                f"Plan.rules[{pattern!r}] is never used: the first pattern that matches counts, and {before!r} comes "
                f"before it and takes {matched[0].name}; valid: the narrower pattern first"
            )
        for h in free:
            taken[h.name] = pattern
            wish = _wish(pattern, rule, h, ranks)
            if wishes.setdefault(h.first, wish) != wish:
                raise PlanError(
                    f"Plan.rules[{pattern!r}] wants {h.name} as {wish}, but it is tied to {h.first}, which another "
                    f"rule wants as {wishes[h.first]}; valid: one wish for both"
                )
    return wishes


def _held(modules: Modules) -> Iterator[_Held]:
    first = {id(p): name for name, p in modules.parameters().items()}
    for prefix, root in modules:
        for path, module in root.named_modules(remove_duplicate=False):
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
                own = f"{prefix}{path}".rstrip(".")
                yield _Held(f"{own}.{name}" if own else name, first[id(p)], own, module, p)


def _wish(pattern: str, rule: Rule, held: _Held, ranks: int) -> Placement:
    shape = tuple(held.parameter.shape)
    match rule:
        case Replicate() | "replicate":
            return REPLICATE
        case Shard(dim, outer):
            if not -len(shape) <= dim < len(shape):
                raise PlanError(
                    f"Plan.rules[{pattern!r}] is {rule}, but {held.name} of shape {list(shape)} has no dim {dim}; "
                    f"valid: {f'0 to {len(shape) - 1}' if shape else repr('replicate')}, or a pattern without it"
                )
            dim %= len(shape)
            if outer > 1 and shape[dim] % (outer * ranks):
                raise PlanError(
                    f"Plan.rules[{pattern!r}] is {rule}, but dim {dim} of {held.name} has {shape[dim]} elements, which "
                    f"{outer} parts over {ranks} ranks do not divide; valid: outer=1, or a divisor"
                )
            return Shard(dim, outer)
    return _styled(pattern, str(rule), held)


def _styled(pattern: str, style: str, held: _Held) -> Placement:
    dims = _dims(held.module)
    if dims is None or (style == "vocab") != isinstance(held.module, nn.Embedding | nn.EmbeddingBag):
        known = "an Embedding" if style == "vocab" else "Linear, Conv1D and convolutions"
        raise PlanError(
            f"Plan.rules[{pattern!r}] is {style!r}, which has a meaning for {known}, but {held.path or 'the model'} is "
            f"a {type(held.module).__name__}; valid for {held.name}: Shard(dim), Replicate() or 'replicate'"
        )
    outputs, inputs = dims
    if held.parameter.dim() < 2:  # a bias, which lies as the output does
        return Shard(0) if style == "column" else REPLICATE
    return Shard(outputs if style == "column" else inputs)


def _dims(module: nn.Module) -> tuple[int, int] | None:
    """The dims of a module's weight that are its output and its input; rows are an embedding's input."""
    match module:
        case nn.Linear() | nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return 0, 1
        case nn.ConvTranspose1d() | nn.ConvTranspose2d() | nn.ConvTranspose3d():
            return 1, 0
        case nn.Embedding() | nn.EmbeddingBag():
            return 1, 0
    # transformers' Linear with a transposed weight, which is known by its name: transformers may not be installed.
    return (1, 0) if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def _nothing(pattern: str, held: list[_Held], modules: Modules) -> str:
    paths = {f"{prefix}{path}".rstrip(".") for prefix, root in modules for path, _ in root.named_modules()}
    inside = [path for path in sorted(paths) if path and fnmatch.fnmatchcase(path, pattern)]
    if inside:
        return (
            f"Plan.rules has the pattern {pattern!r}, which matches {inside[0]}, a module without parameters of its "
            f"own; valid: {pattern + '.*'!r} for all below it, or the path of a module or parameter in it"
        )
    names = [*dict.fromkeys(n for h in held for n in (h.path, h.name) if n)]
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    return (
        f"Plan.rules has the pattern {pattern!r}, which matches no parameter and no module; did you mean "
        f"{', '.join(map(repr, near))}? valid: globs over the paths of the model's modules and parameters, "
        f"such as {', '.join(map(repr, names[:_SHOWN]))}"
    )
