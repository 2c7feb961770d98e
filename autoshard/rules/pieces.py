"""Ops that cut a dim into pieces, or make one of pieces, where every piece is split over the ranks.

A fused projection holds queries, keys and values one after the other; a rank that has its heads of each holds a
strided shard of the fused dim. With every size and place in it a multiple of `unit`, and `unit` split over the ranks:

    split(x: S(1/3), [H, H, H], 1)     ->  S(1), S(1), S(1)             unit H
    cat([a: S(1), b: S(1)], 1)         ->  S(1/2)                       unit H
    slice(x: S(1/4), 1, H, 4 * H)      ->  S(1/3)                       unit H
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autoshard.placement import Placement, Shard
from autoshard.rules import Op, Row, Shape, Spread, divides

Cut = Callable[[Op, int], list[int] | None]
Outputs = tuple[Shape | None, ...]


def spread(cut: Cut) -> Spread:
    """`cut`: the places at which an op cuts a dim, besides the sizes of its tensors; None where it does not cut it."""

    def row(op: Op, index: int, shard: Shard, output: bool, ranks: int) -> Row | None:
        operands = [*op.inputs, *op.outputs]
        asked = (op.outputs if output else op.inputs)[index]
        places = cut(op, shard.dim)
        if asked is None or places is None or not divides(asked.shape[shard.dim], shard, ranks):
            return None
        if any(t is None or t.dim() != asked.dim() for t in operands):
            return None
        sizes = [t.shape[shard.dim] for t in operands if t is not None]
        unit = asked.shape[shard.dim] // shard.outer
        if 0 in sizes or any(place % unit for place in (*sizes, *places)):
            return None

        def at(t: Tensor | None) -> Placement:
            assert t is not None
            return Shard(shard.dim, t.shape[shard.dim] // unit)

        return Row(tuple(map(at, op.inputs)), tuple(map(at, op.outputs)))

    return row


def along(dim_arg: int, default: int = 0) -> Cut:
    """An op that cuts one dim, where its tensors begin and end."""
    return lambda op, dim: [] if dim == op.arg(dim_arg, default) % op.inputs[0].dim() else None


def sliced(first: int) -> Cut:
    """An op with a slice (dim, start, stop, step) at arguments from `first` on."""

    def cut(op: Op, dim: int) -> list[int] | None:
        at, start, stop, step = _slice(op, first)
        return [start, stop] if dim == at and step == 1 else None

    return cut


def padded(op: Op, dim: int) -> list[int] | None:
    before = 2 * (op.inputs[0].dim() - 1 - dim)
    places = list(op.arg(1)[before : before + 2])
    return places if any(places) else None


def _slice(op: Op, first: int) -> tuple[int, int, int, int]:
    whole = op.outputs[0] if first == 2 else op.inputs[0]  # of a gradient or a scatter: what the slice is in
    assert whole is not None
    dim = op.arg(first, 0) % whole.dim()
    start, stop, step = slice(op.arg(first + 1), op.arg(first + 2), op.arg(first + 3, 1)).indices(whole.shape[dim])
    return dim, start, max(start, stop), step


def split_size(op: Op, args: list[Any], inputs: tuple[Shape, ...], outputs: Outputs) -> list[Any]:
    first = outputs[0]
    assert first is not None
    args[1] = first[op.arg(2, 0) % len(first)]
    return args


def split_sizes(op: Op, args: list[Any], inputs: tuple[Shape, ...], outputs: Outputs) -> list[Any]:
    dim = op.arg(2, 0) % op.inputs[0].dim()
    args[1] = [shape[dim] for shape in outputs if shape is not None]
    return args


def slice_bounds(first: int) -> Callable[[Op, list[Any], tuple[Shape, ...], Outputs], list[Any]]:
    def localize(op: Op, args: list[Any], inputs: tuple[Shape, ...], outputs: Outputs) -> list[Any]:
        dim, start, stop, _ = _slice(op, first)
        whole, local = (op.outputs[0], outputs[0]) if first == 2 else (op.inputs[0], inputs[0])
        assert whole is not None
        assert local is not None
        if whole.shape[dim] == local[dim]:
            return args
        share = whole.shape[dim] // local[dim]
        return [*args[:first], dim, start // share, stop // share, 1]

    return localize


def pads(op: Op, args: list[Any], inputs: tuple[Shape, ...], outputs: Outputs) -> list[Any]:
    x = op.inputs[0]
    amounts = list(args[1])
    for i, amount in enumerate(amounts):
        dim = x.dim() - 1 - i // 2
        if inputs[0][dim] != x.shape[dim]:
            amounts[i] = amount * inputs[0][dim] // x.shape[dim]
    args[1] = amounts
    return args
