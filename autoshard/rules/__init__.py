"""Placement rules: which shards of an op's inputs give which shards of its outputs, on one mesh axis.

A rule is a row in `table.TABLE`, written as dim labels. For a matmul::

    "mk, kn -> mn/k"

Inputs come before the arrow, outputs after it, one group of labels each, one label a dim. Sharding a label
shards every dim that carries it; an input without the label must be whole; an output lists after the slash
the labels over which it is then a partial sum, and is whole otherwise. ``.`` is a dim that cannot be split.
Everything replicated is always valid and needs no row, so an op without one is correct and slow.

The label ``V`` is a dim that another operand counts places of, as the rows of an embedding::

    "VZ, ij -> ijZ/V"

Where it is split every rank holds a range of the places and `shifted` computes the op on it.

`linear` names the sets of inputs in which the op is linear together, so that partial sums may flow through.
`sizes` names the arguments that repeat an output's shape and must become local: {argument: output}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoshard.compat import pytree
from autoshard.placement import PARTIAL, REPLICATE, Partial, Placement, Shard

INDEXED = "V"  # the label of a dim that another operand counts places of


@dataclass(frozen=True)
class Op:
    """One call at global shapes.

    Args:
        target: the aten overload.
        args: positional arguments with fake tensors in the place of nodes.
        kwargs: keyword arguments, likewise.
        inputs: the tensors among the arguments, flattened in order.
        outputs: the tensors it returns, flattened in order.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]

    def arg(self, index: int, default: Any = None) -> Any:
        """A positional argument, or its schema default, or `default`."""
        if index < len(self.args):
            return self.args[index]
        schema = self.target._schema.arguments
        if index < len(schema):
            if schema[index].name in self.kwargs:
                return self.kwargs[schema[index].name]
            if schema[index].has_default_value():
                return schema[index].default_value
        return default


def make_op(target: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> Op:
    inputs = tuple(x for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor))
    outputs = tuple(x if isinstance(x, Tensor) else None for x in (result if _many(result) else (result,)))
    return Op(target, tuple(args), kwargs, inputs, outputs)


def _many(result: Any) -> bool:
    return isinstance(result, (tuple, list))


@dataclass(frozen=True)
class Row:
    """One valid combination: a placement per tensor input and per output."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True)
class Labels:
    """The labels of each input, and of each output with the labels over which it is partial.

    Args:
        reduce: what makes a partial output whole: "sum", "max" or "min".
        units: labels whose dims may differ in size, each a row of so many equal pieces that stay whole: the groups
            of a convolution's channels, the heads of keys that several heads of queries share.
    """

    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    reduce: str = "sum"
    units: Mapping[str, int] = field(default_factory=dict)


def parse(text: str) -> Labels:
    """`"mk, kn -> mn/k"` as Labels."""
    left, right = text.split("->")
    outputs = []
    for part in right.split(","):
        dims, _, partial = part.strip().partition("/")
        outputs.append((dims, partial))
    return Labels(tuple(part.strip() for part in left.split(",")) if left.strip() else (), tuple(outputs))


Spread = Callable[[Op, int, Shard, bool, int], "Row | None"]
Shape = tuple[int, ...]
Localize = Callable[[Op, list[Any], tuple[Shape, ...], tuple["Shape | None", ...]], list[Any]]
Shifted = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Tensor, int, int], Any]


@dataclass(frozen=True)
class Rule:
    """How one op may be sharded.

    Args:
        labels: an op's labels, fixed text or made from its arguments; None where only `spread` knows.
        spread: asked before the labels: (op, operand index, its shard, whether it is an output, ranks) to a row.
        linear: sets of inputs in which the op is linear.
        sizes: {argument index: output index} of arguments that are an output's shape.
        localize: other arguments that depend on local shapes: (op at global shapes, args, local shapes of the
            tensor inputs, of the outputs) to args.
        shifted: the op on a shard of the dim with label V: (target, local args, local kwargs, offset, length, size)
            to its result. `offset` is an int64 tensor (1,), the first place that this rank holds, `length` how many
            it holds, padding counted, `size` how many there are on all ranks.
    """

    labels: Callable[[Op], Labels | None] | None = None
    spread: Spread | None = None
    linear: Callable[[Op], tuple[frozenset[int], ...]] = field(default=lambda op: ())
    sizes: Mapping[int, int] = field(default_factory=dict)
    localize: Localize | None = None
    shifted: Shifted | None = None


def replicated(op: Op) -> Row:
    return Row((REPLICATE,) * len(op.inputs), (REPLICATE,) * len(op.outputs))


def spread(rule: Rule, op: Op, index: int, shard: Shard, output: bool, ranks: int) -> Row | None:
    """The row in which operand `index` (an input, or an output) is sharded as `shard`, if there is one."""
    if rule.spread is not None:
        found = rule.spread(op, index, shard, output, ranks)
        if found is not None or rule.labels is None:
            return found
    labels = rule.labels(op) if rule.labels is not None else None
    if labels is None:
        return None
    if len(labels.inputs) != len(op.inputs) or len(labels.outputs) < len(op.outputs):
        raise ValueError(f"rule of {op.target} names {labels}, the call has {len(op.inputs)} tensor inputs")
    dims = labels.outputs[index][0] if output else labels.inputs[index]
    label = dims[shard.dim]
    if label == "." or (label == INDEXED and (rule.shifted is None or shard.outer > 1)):
        return None

    def at(labels_of: str, partial: str = "") -> Placement:
        if label in labels_of:
            return Shard(labels_of.index(label), shard.outer)
        return Partial(labels.reduce) if label in partial else REPLICATE

    row = Row(
        tuple(at(dims) for dims in labels.inputs),
        tuple(at(*labels.outputs[i]) for i in range(len(op.outputs))),
    )
    operands = [*zip(op.inputs, row.inputs, strict=True), *zip(op.outputs, row.outputs, strict=True)]
    sizes = {t.shape[p.dim] for t, p in operands if isinstance(p, Shard) and t is not None}
    if label in labels.units:
        units = labels.units[label]
        return row if divides(units, shard, ranks) and not any(size % units for size in sizes) else None
    if len(sizes) != 1 or not splits(sizes.pop(), shard, ranks):
        return None
    return row


def divides(size: int, shard: Shard, ranks: int) -> bool:
    """Whether a dim of `size` falls into equal parts."""
    return size % (shard.outer * ranks) == 0 and size > 0


def splits(size: int, shard: Shard, ranks: int) -> bool:
    """Whether a dim of `size` can be split, with padding at its end where it does not divide."""
    return divides(size, shard, ranks) or (shard.outer == 1 and size > ranks)


def indexed_dim(rule: Rule, op: Op) -> tuple[bool, int, int] | None:
    """(Whether it is an output, its index, the dim) of an operand with a dim that others count places of, if any."""
    labels = rule.labels(op) if rule.labels is not None and rule.shifted is not None else None
    if labels is None:
        return None
    for output, dims in ((False, labels.inputs), (True, tuple(names for names, _ in labels.outputs))):
        for index, names in enumerate(dims):
            if INDEXED in names:
                return output, index, names.index(INDEXED)
    return None


def candidates(rule: Rule | None, op: Op, placed: tuple[Placement, ...], ranks: int) -> Iterator[Row]:
    """The rows that the placements of the inputs suggest, the replicated one last."""
    if rule is not None:
        seen: set[Row] = set()
        for i, placement in enumerate(placed):
            row = spread(rule, op, i, placement, False, ranks) if isinstance(placement, Shard) else None
            if row is not None and row not in seen:
                seen.add(row)
                yield row
        for linear in rule.linear(op):
            if linear and all(i < len(placed) and placed[i] == PARTIAL for i in linear):
                yield Row(
                    tuple(PARTIAL if i in linear else REPLICATE for i in range(len(placed))),
                    (PARTIAL,) * len(op.outputs),
                )
    yield replicated(op)


def rule_of(target: Any) -> Rule | None:
    """The rule of an op: its row in the table, or the pointwise rule where torch says that it is pointwise."""
    from autoshard.rules.table import POINTWISE, TABLE

    found = TABLE.get(target)
    if found is None and isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return POINTWISE
    return found
