"""What "one device" means: the oracle that every plan is compared with, in plain eager PyTorch.

One device runs the same global micro-batches in order, where global micro-batch k is the concatenation, over data
ranks, of each rank's k-th chunk. Nothing here imports the code under test, but for the public `Mean`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
Schedule = Callable[[Any], Any]


@dataclass(frozen=True)
class Recipe:
    """What of a plan changes the numbers.

    Args:
        ranks: size of the data axis; with `accumulate` it decides which samples form a micro-batch.
        accumulate: micro-batches per step.
        clip_norm: largest L2 norm of the whole gradient, or None.
        optimizer: factory from named parameters.
        schedule: factor on lr for update n + 1.
    """

    ranks: int = 2
    accumulate: int = 1
    clip_norm: float | None = None
    optimizer: OptimizerFactory | None = None
    schedule: Schedule | None = None


@dataclass
class Trace:
    """What one device saw.

    Args:
        losses: one per step, 0-dim.
        grad_norms: one per step, before clipping.
        extras: per step, name -> 0-dim.
        gradients: of the first step, unclipped; a parameter with no path to the loss is absent.
        parameters, buffers: after the last step, by the first name of each.
    """

    losses: list[Tensor] = field(default_factory=list)
    grad_norms: list[Tensor] = field(default_factory=list)
    extras: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def rank_slice(batch: Any, rank: int, ranks: int) -> Any:
    """The part of a global batch that `rank` passes to its step: the rank-th of `ranks` equal parts of dim 0.

    0-dim tensors and what is not a tensor are the same everywhere.
    """
    return _map_batch(batch, lambda x: x.chunk(ranks)[rank].clone() if ranks > 1 else x)


def global_micro_batches(batch: Any, ranks: int, accumulate: int) -> list[Any]:
    """Global micro-batch k: the concatenation over ranks of each rank's k-th chunk."""

    def micro(k: int) -> Any:
        return _map_batch(batch, lambda x: torch.cat([part.chunk(accumulate)[k] for part in x.chunk(ranks)]))

    return [micro(k) for k in range(accumulate)]


def _map_batch(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return map_tensors(batch, lambda x: function(x) if x.dim() else x)


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """`batch` with `function` of each tensor in its place, through mappings, lists and tuples."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def call_model(model: nn.Module, batch: Any) -> Any:
    """A model that returns its own loss is called with the batch as one value, positions or keywords."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def objective(loss: Callable[[Any, Any], Any] | None, model: nn.Module, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """The terms of a loss as (total, count) pairs, and its extras likewise."""
    value = loss(model, batch) if loss else call_model(model, batch)
    extras: Mapping[str, Any] = {}
    if loss and isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, extras = value
    elif not isinstance(value, Tensor) and getattr(value, "loss", None) is not None:
        value = value.loss
    elif isinstance(value, (tuple, list)):
        value = value[0]
    return [_as_pair(term) for term in _terms(value)], {name: _as_pair(extra) for name, extra in extras.items()}


def _terms(value: Any) -> Sequence[Any]:
    """A loss may be a sum of Means and scalars, each with a count of its own."""
    return value.means if hasattr(value, "means") else (value,)


def _as_pair(value: Any) -> tuple[Tensor, Tensor]:
    if isinstance(value, Tensor):
        return value, torch.ones((), dtype=torch.float64)
    return value.total, torch.as_tensor(value.count).detach()


def unique_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their first name; a tied one appears once."""
    return dict(model.named_parameters())


def gradients_of(
    model: nn.Module, batches: Iterable[Any], loss: Callable[[Any, Any], Any] | None
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and extras over some global micro-batches, as their totals over their counts.

    The gradients of each term are summed over micro-batches and divided by the term's whole count afterwards.
    """
    trained = {name: p for name, p in unique_parameters(model).items() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    sums: list[dict[str, Tensor]] = []
    totals: list[Tensor] = []
    counts: list[Tensor] = []
    extra_sums: dict[str, list[Tensor]] = {}
    for batch in batches:
        pairs, extras = objective(loss, model, batch)
        if not sums:
            sums = [{} for _ in pairs]
            totals, counts = [torch.zeros(()) for _ in pairs], [torch.zeros(()) for _ in pairs]
        for index, (total, count) in enumerate(pairs):
            totals[index] = totals[index] + total.detach()
            counts[index] = counts[index] + count
            if not total.requires_grad:
                continue
            total.backward(retain_graph=True)  # not autograd.grad: reentrant checkpoints refuse it
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    sums[index][name] = sums[index].get(name, 0) + parameter.grad
                    parameter.grad = None
        for name, (total, count) in extras.items():
            known = extra_sums.setdefault(name, [torch.zeros(()), torch.zeros(())])
            known[0], known[1] = known[0] + total.detach(), known[1] + count
    gradients: dict[str, Tensor] = {}
    for term, count in zip(sums, counts, strict=True):
        for name, value in term.items():
            gradients[name] = gradients.get(name, 0) + value / count
    loss_value = torch.stack([total / count for total, count in zip(totals, counts, strict=True)]).sum()
    return loss_value, gradients, {name: total / count for name, (total, count) in extra_sums.items()}


def train(
    model: nn.Module, batches: Sequence[Any], recipe: Recipe, loss: Callable[[Any, Any], Any] | None = None
) -> Trace:
    """Train `model` in place on global batches, one optimizer step each, and tell what happened.

    Without an optimizer in the recipe the model is not changed but for its buffers.
    """
    trace = Trace()
    optimizer = recipe.optimizer(list(model.named_parameters())) if recipe.optimizer else None
    base = [group["lr"] for group in optimizer.param_groups] if optimizer else []
    parameters = unique_parameters(model)
    for index, batch in enumerate(batches):
        micro = global_micro_batches(batch, recipe.ranks, recipe.accumulate)
        value, gradients, extras = gradients_of(model, micro, loss)
        trace.losses.append(value.detach().clone())
        trace.extras.append({name: extra.clone() for name, extra in extras.items()})
        if index == 0:
            trace.gradients = {name: gradient.detach().clone() for name, gradient in gradients.items()}
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        with_gradient = [p for p in parameters.values() if p.grad is not None]
        limit = recipe.clip_norm if recipe.clip_norm is not None else float("inf")
        trace.grad_norms.append(torch.nn.utils.clip_grad_norm_(with_gradient, limit).detach().clone())
        if optimizer is not None:
            if recipe.schedule is not None:
                factor = float(recipe.schedule(torch.tensor(index)))
                for group, lr in zip(optimizer.param_groups, base, strict=True):
                    group["lr"] = lr * factor
            optimizer.step()
    trace.parameters = {name: p.detach().clone() for name, p in parameters.items()}
    trace.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return trace


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what was expected, 0 where both are zero or empty.

    Integers and booleans are equal (0) or not (infinity).
    """
    if found.shape != expected.shape:
        raise AssertionError(f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if found.dtype != expected.dtype:
        raise AssertionError(f"dtype {found.dtype}, expected {expected.dtype}")
    if expected.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    difference = torch.linalg.vector_norm(found.double() - expected.double()).item()
    scale = torch.linalg.vector_norm(expected.double()).item()
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else float("inf")


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, floor: float = 0.0) -> tuple[float, str]:
    """The largest relative error over two mappings of equal keys, and where it is.

    Args:
        floor: norms below this are compared absolutely against it, for values that are zero but for rounding.
    """
    if set(found) != set(expected):
        missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        raise AssertionError(f"names differ: missing {missing}, unexpected {unexpected}")
    result = (0.0, "nothing")
    for name, value in expected.items():
        error = relative_error(found[name], value)
        if value.is_floating_point() and value.numel() and error:
            norm = torch.linalg.vector_norm(value.double()).item()
            if norm < floor:
                error = torch.linalg.vector_norm(found[name].double() - value.double()).item() / floor
        if not error <= result[0]:
            result = (error, name)
    return result
