"""Every row that each node of a graph could take on one axis.

Shards start at the graph's inputs and flow along the rules; a rule that splits a dim into equal pieces, such as the
one of a fused q, k and v, asks its input for a strided shard, which flows back to the parameter that it comes from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from autoshard.placement import PARTIAL, REPLICATE, Placement, Shard
from autoshard.randomness import uniform_op
from autoshard.rules import Op, Row, divides, make_op, replicated, rule_of, splits, spread

Fits = Callable[[fx.Node, Row], bool]
Source = tuple[fx.Node, int]  # a node and which of its outputs


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes that feed tensors, in the order of the flattened arguments, repeats kept."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) if isinstance(n.meta.get("val"), Tensor) else None)
    return found


def op_of(node: fx.Node) -> Op:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return make_op(node.target, args, kwargs, node.meta.get("val"))


def signature_of(node: fx.Node) -> str:
    """Alike for nodes that make the same call: op, constants, and shapes and dtypes of tensors."""
    fixed = fx.map_arg((node.args, node.kwargs), lambda n: _type_of(n.meta.get("val")))
    return f"{node.target} {fixed} {_type_of(node.meta.get('val'))}"


def _type_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return tuple(map(_type_of, value)) if isinstance(value, (tuple, list)) else value


def source_of(node: fx.Node) -> Source:
    """Where a value is made: behind a getitem, the node with several outputs."""
    if node.target is operator.getitem:
        maker, index = node.args
        assert isinstance(maker, fx.Node)
        assert isinstance(index, int)
        return maker, index
    return node, 0


class _Call:
    """The rows of every node with one signature."""

    def __init__(self, op: Op, ranks: int) -> None:
        self.op = op
        self.ranks = ranks
        self.rule = rule_of(op.target)
        self._flows: dict[tuple[tuple[Placement, ...], ...], list[Row]] = {}
        self._made: dict[Shard, Row | None] = {}

    def flow(self, feeds: tuple[tuple[Placement, ...], ...]) -> list[Row]:
        """The rows that placements of the inputs suggest."""
        if feeds not in self._flows:
            self._flows[feeds] = [row for row in self._flow(feeds) if row is not None]
        return self._flows[feeds]

    def _flow(self, feeds: tuple[tuple[Placement, ...], ...]) -> Iterator[Row | None]:
        op, rule = self.op, self.rule
        yield replicated(op)
        if rule is None:
            return
        for i, placements in enumerate(feeds):
            for placement in placements:
                if isinstance(placement, Shard):
                    yield spread(rule, op, i, placement, False, self.ranks)
        for linear in rule.linear(op):
            if any(i < len(feeds) and PARTIAL in feeds[i] for i in linear):  # a whole value is a sum of one term
                yield Row(
                    tuple(PARTIAL if i in linear else REPLICATE for i in range(len(feeds))),
                    (PARTIAL,) * len(op.outputs),
                )
        if rule.spread is not None and op.outputs[0] is not None:
            for d in range(op.outputs[0].dim()):
                yield self.made(Shard(d))

    def made(self, shard: Shard) -> Row | None:
        """The row by which the first output is made as `shard`."""
        if shard not in self._made:
            self._made[shard] = self._make(shard)
        return self._made[shard]

    def _make(self, shard: Shard) -> Row | None:
        op, out = self.op, self.op.outputs[0]
        if out is None or shard.dim >= out.dim():
            return None
        if op.target is uniform_op:
            whole = (REPLICATE,) * len(op.inputs)
            return Row(whole, (shard,)) if splits(out.shape[shard.dim], shard, self.ranks) else None
        return spread(self.rule, op, 0, shard, True, self.ranks) if self.rule is not None else None


@dataclass
class Options:
    """What a graph's nodes could do on one axis.

    Args:
        ranks: of the axis.
        inputs: per placeholder, the placements that it may arrive in.
        slices: per placeholder, shards of a whole value that cost nothing to take and whose flow is followed.
        fits: whether a row of a node goes with what the other axes have chosen.
    """

    ranks: int
    inputs: Mapping[fx.Node, tuple[Placement, ...]]
    slices: Mapping[fx.Node, tuple[Shard, ...]]
    fits: Fits
    signatures: dict[fx.Node, str] = field(default_factory=dict)
    rows: dict[fx.Node, dict[Row, None]] = field(default_factory=dict)
    free: set[fx.Node] = field(default_factory=set)  # depend on no input
    parameters: dict[fx.Node, dict[Placement, None]] = field(default_factory=dict)
    _calls: dict[str, _Call] = field(default_factory=dict)

    def run(self, graph: fx.Graph, parameters: set[fx.Node]) -> Options:
        nodes = [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        self.parameters = {n: dict.fromkeys(self.inputs[n]) for n in parameters}
        for node in nodes:
            signature = self.signatures[node] = signature_of(node)
            if signature not in self._calls:
                self._calls[signature] = _Call(op_of(node), self.ranks)
            self.rows[node] = {}
            feeds = tensor_inputs(node)
            single = len(self._calls[signature].op.outputs) == 1
            if node.target is uniform_op or (single and all(f in self.free for f in feeds)):
                self.free.add(node)
        for _ in range(2):
            for node in nodes:
                self._forward(node)
            for node in reversed(nodes):
                self._backward(node)
        for node in nodes:
            self._forward(node)
        return self

    def available(self, node: fx.Node) -> list[Placement]:
        """Placements in which a node's output may be made, or taken for nothing."""
        maker, index = source_of(node)
        if maker in self.parameters:
            return list(self.parameters[maker])
        if maker in self.inputs:
            return [*self.inputs[maker], *self.slices.get(maker, ())]
        return list(dict.fromkeys(row.outputs[index] for row in self.rows[maker]))

    def _add(self, node: fx.Node, row: Row | None) -> None:
        if row is not None and row not in self.rows[node] and self.fits(node, row):
            self.rows[node][row] = None

    def _forward(self, node: fx.Node) -> None:
        call = self._calls[self.signatures[node]]
        feeds = tuple(tuple(self.available(feed)) for feed in tensor_inputs(node))
        for row in call.flow(feeds):
            self._add(node, row)

    def _made(self, node: fx.Node, shard: Shard) -> Row | None:
        return self._calls[self.signatures[node]].made(shard)

    def _backward(self, node: fx.Node) -> None:
        """What a node's rows want of its inputs is made there, where that is by a rule."""
        feeds = tensor_inputs(node)
        for row in list(self.rows[node]):
            for feed, wanted in zip(feeds, row.inputs, strict=True):
                maker, index = source_of(feed)
                if not isinstance(wanted, Shard):
                    continue
                if maker in self.parameters:
                    if wanted.outer > 1 and divides(maker.meta["val"].shape[wanted.dim], wanted, self.ranks):
                        self.parameters[maker].setdefault(wanted)
                elif maker in self.rows and index == 0 and (maker in self.free or self._is_strided(feed, wanted)):
                    self._add(maker, self._made(maker, wanted))

    def _is_strided(self, feed: fx.Node, wanted: Shard) -> bool:
        return wanted.outer > 1 and wanted not in self.available(feed)
