"""The choice of placements on one mesh axis that costs least: see `assign`.

Repeated layers are solved once: nodes that compute the same in modules whose paths differ only in numbers share one
decision, so that the program that is solved has the size of one layer.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from autoshard import collectives
from autoshard.manager import PassContext
from autoshard.ops import whole
from autoshard.placement import PARTIAL, REPLICATE, Placement, Replicate, Shard, fits, shard_length
from autoshard.program import TAG, Graph, Kind, Port, tag
from autoshard.rules import Row, divides, rule_of, splits
from autoshard.rules.options import Options, source_of, tensor_inputs
from autoshard.solve import Problem, Use, Value

# Everything is weighed in bytes sent. A mesh axis is asked for so that work and memory are split, so what stays
# whole on it weighs far more than the time that it takes: a matmul of 8 x 8 x 8 already is worth its reduction.
_WORK = 0.25  # bytes per floating-point operation that every rank repeats
_TOUCHED = 1e-7  # bytes per byte that an op reads or writes on every rank alike: it decides between equals
_TOUCHED_IN_SEQUENCE = 0.1  # the same where the plan asks for activations to be split too
_HELD = 16.0  # bytes per byte of a parameter that every rank holds
_WEIGHT_MOVED = 4.0  # times the bytes of a parameter that is gathered for use: it was split so as not to be
_LATENCY = 0.5  # parts of an average parameter that could be sent while a collective starts
_LATENCY_ON_DATA = 0.05  # the same on the data axis, where collectives of activations are few and small


@dataclass
class Choice:
    """What was decided on one axis: outputs of each node, what each use of a node needs, and by which rule."""

    outputs: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    needs: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    rules: dict[fx.Node, str] = field(default_factory=dict)

    def of(self, node: fx.Node) -> Placement:
        maker, index = source_of(node)
        return self.outputs[maker][index]


def nbytes(t: Tensor | None) -> int:
    return t.numel() * t.element_size() if isinstance(t, Tensor) else 0


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *, scores: int, values: int) -> int:
    """Of attention over query (batch, heads, length, width), with so many products of each of its two kinds."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (scores * width + values * value.shape[3])


# What torch's registry lacks (2.14), in its form: of an op's arguments. Two products forward; backward makes the
# scores again and has two products for each: arXiv:2205.14135, algorithm 4.
_FLOPS: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: _attention_flops(
        q, k, v, scores=1, values=1
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, v, *__, **___: (
        _attention_flops(q, k, v, scores=3, values=2)
    ),
}


def flops(node: fx.Node) -> int:
    """Floating-point operations of a node at the shapes of its values: of products, convolutions and attention."""
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet) or _FLOPS.get(packet)
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def assign(graph: Graph, inputs: Sequence[Port], axis: int, earlier: Sequence[Choice], context: PassContext) -> Choice:
    """Placements of every node on `axis`, given those on the axes before it.

    Minimises the bytes sent on the axis, plus, weighted far more, the work and the parameters that it leaves whole.

    Args:
        inputs: ports of the graph; a parameter's placement on `axis` is free unless `context.parameters` has it.
        earlier: the choices on axes 0 to `axis` - 1.
    """
    return _Assignment(graph, inputs, axis, earlier, context).run()


class _Assignment:
    def __init__(
        self, graph: Graph, inputs: Sequence[Port], axis: int, earlier: Sequence[Choice], context: PassContext
    ) -> None:
        self.graph = graph
        self.axis = axis
        self.earlier = earlier
        self.context = context
        self.ranks = [a.ranks for a in context.axes[: axis + 1]]
        self.ports = dict(zip(graph.placeholders(), inputs, strict=True))
        self.is_tensor = context.axes[axis].name == "tensor"
        self.parameters = {node for node, port in self.ports.items() if port.kind is Kind.PARAMETER}
        self.nodes = [
            n for n in graph.module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem
        ]

    def run(self) -> Choice:
        options = Options(
            self.ranks[-1],
            {node: self._arrivals(node, port) for node, port in self.ports.items()},
            {node: self._slices(node, port) for node, port in self.ports.items()},
            self._fits,
        ).run(self.graph.module.graph, self.parameters)
        return _Solved(self, options).choice()

    def others(self, node: fx.Node) -> list[Placement]:
        """The placements of a value on the axes before."""
        return [choice.of(node) for choice in self.earlier]

    def _arrivals(self, node: fx.Node, port: Port) -> tuple[Placement, ...]:
        if port.kind is not Kind.PARAMETER or self.axis == self.context.data:
            return (port.placements[self.axis],)
        known = self.context.parameters.get(port.name)
        if known is not None:
            return (known[self.axis],)
        wish = self.context.wishes.get(port.name)
        if wish is not None and self.is_tensor:
            return (wish,)
        n = self.ranks[-1]
        shards = [Shard(d) for d, size in enumerate(port.shape) if splits(size, Shard(d), n)]
        return (REPLICATE, *(s for s in shards if fits(port.shape, [*self.others(node), s], self.ranks)))

    def _slices(self, node: fx.Node, port: Port) -> tuple[Shard, ...]:
        """Shards of the batch, within what the axes before leave of it, and of the sequence where that is asked for."""
        if port.kind is not Kind.BATCH or not port.sharded or not port.shape or self.axis == self.context.data:
            return ()
        outer = 1
        for placement, ranks in zip(self.others(node), self.ranks, strict=False):
            if placement == Shard(0, outer):
                outer *= ranks
        found = [Shard(0, outer)]
        if self.is_tensor and self.context.plan.tensor.sequence:
            found += [Shard(d) for d in range(1, len(port.shape))]
        return tuple(s for s in found if divides(port.shape[s.dim], s, self.ranks[-1]))

    def _fits(self, node: fx.Node, row: Row) -> bool:
        if not self.earlier or not any(isinstance(p, Shard) for p in (*row.inputs, *row.outputs)):
            return True
        value = node.meta["val"]
        made = value if isinstance(value, (tuple, list)) else (value,)
        operands = [(t, row.outputs[i], [c.outputs[node][i] for c in self.earlier]) for i, t in enumerate(made)]
        for i, feed in enumerate(tensor_inputs(node)):
            operands.append((feed.meta["val"], row.inputs[i], [c.needs[node][i] for c in self.earlier]))
        split = [entry for entry in operands if isinstance(entry[1], Shard) and entry[0] is not None]
        return all(fits(t.shape, [*before, own], self.ranks) for t, own, before in split)


class _Solved:
    """Options to a `Problem`, and its answer to a `Choice`."""

    def __init__(self, assignment: _Assignment, options: Options) -> None:
        self.a = assignment
        self.options = options
        self.problem = Problem()
        self.rows: dict[fx.Node, tuple[Row, ...]] = {n: tuple(options.rows[n]) for n in assignment.nodes}
        self.members: dict[object, list[fx.Node]] = {}
        self.key_of: dict[fx.Node, object] = {}
        self.number: dict[object, int] = {}
        self.weights = self._weights()
        sequence = assignment.is_tensor and assignment.context.plan.tensor.sequence
        sizes = [nbytes(node.meta["val"]) for node in assignment.parameters]
        latency = _LATENCY_ON_DATA if assignment.axis == assignment.context.data else _LATENCY
        self.latency = latency * sum(sizes) / max(len(sizes), 1)
        self.touched = _TOUCHED_IN_SEQUENCE if sequence else _TOUCHED

    def _weights(self) -> set[fx.Node]:
        """Parameters and what is computed of parameters alone."""
        found = set(self.a.parameters)
        for node in self.a.nodes:
            feeds = [source_of(n)[0] for n in tensor_inputs(node)]
            if feeds and all(n in found for n in feeds):
                found.add(node)
        return found

    def choice(self) -> Choice:
        self._group()
        for key, members in self.members.items():
            self.number[key] = self.problem.node(self._costs(members[0], len(members)))
        self._values()
        answer = self.problem.solve()
        choice = Choice()
        for node in self.a.ports:
            choice.outputs[node] = (self._arrivals(node)[answer[self.number[self.key_of[node]]]],)
            choice.needs[node] = ()
        for node in self.a.graph.module.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                choice.outputs[node], choice.needs[node] = (choice.of(node),), ()
                continue
            row = self.rows[node][answer[self.number[self.key_of[node]]]]
            choice.outputs[node], choice.needs[node] = row.outputs, row.inputs
            choice.rules[node] = self._reason(node, row, choice)
        return choice

    def _arrivals(self, node: fx.Node) -> tuple[Placement, ...]:
        found = self.options.parameters.get(node, self.options.inputs[node])
        fixed = len(self.options.inputs[node]) == 1
        return tuple(self.options.inputs[node]) if fixed else tuple(found)

    def _reason(self, node: fx.Node, row: Row, choice: Choice) -> str:
        """For `explain`: what runs whole though a shard reaches it, or a term and there is no rule, is "replicated"."""
        if node in self.options.free:
            return "made in place"
        if any(not isinstance(p, Replicate) for p in (*row.inputs, *row.outputs)):
            return "table"
        if node.target is whole:
            return "gathered on purpose"
        arriving = [choice.of(feed) for feed in tensor_inputs(node)]
        unruled = rule_of(node.target) is None and any(not isinstance(p, Replicate) for p in arriving)
        return "replicated" if unruled or any(isinstance(p, Shard) for p in arriving) else "whole"

    # ---------------------------------------------------------------- equal nodes

    def _group(self) -> None:
        """Nodes that compute the same in modules that differ only in numbers, at the same place in each."""
        seen: dict[object, int] = {}
        layers = Layers([tag(node).module for node in self.a.nodes])
        for node, port in self.a.ports.items():
            pattern = layers.pattern(port.name) if port.kind is Kind.PARAMETER else node.name
            self._put(node, (port.kind, pattern, port.shape, port.dtype, self._arrivals(node)))
        for node in self.a.nodes:
            path = self._path(node, layers)
            own = (path, tag(node).phase, self.options.signatures[node], self.rows[node])
            place = seen[own] = seen.get(own, -1) + 1
            pattern = layers.pattern(path)
            alone = node.name if pattern == path else ""
            before = tuple(choice.outputs[node] for choice in self.a.earlier)
            self._put(node, (pattern, *own[1:], place, alone, before))

    @staticmethod
    def _path(node: fx.Node, layers: Layers) -> str:
        """The module that a node belongs to; for what no layer owns, such as a sum of gradients, a neighbour's."""
        own = tag(node).module
        near = (tag(n).module for n in (*node.all_input_nodes, *node.users) if TAG in n.meta)
        return next((path for path in (own, *near) if layers.pattern(path) != path), own)

    def _put(self, node: fx.Node, key: object) -> None:
        self.members.setdefault(key, []).append(node)
        self.key_of[node] = key

    # ---------------------------------------------------------------- costs

    def _costs(self, node: fx.Node, times: int) -> list[float]:
        if node in self.a.ports:
            if node not in self.a.parameters:
                return [0.0]
            shape, n = node.meta["val"].shape, self.a.ranks[-1]
            dims = [shape[p.dim] if isinstance(p, Shard) else None for p in self._arrivals(node)]
            parts = [shard_length(size, n) / size if size is not None else 1.0 for size in dims]
            return [_HELD * nbytes(node.meta["val"]) * times * max(part - 1 / n, 0.0) for part in parts]
        share = 1.0
        for choice, ranks in zip(self.a.earlier, self.a.ranks, strict=False):
            if any(isinstance(p, Shard) for p in (*choice.needs[node], *choice.outputs[node])):
                share /= ranks
        value = node.meta["val"]
        made = sum(map(nbytes, value)) if isinstance(value, (tuple, list)) else nbytes(value)
        touched = made + sum(nbytes(n.meta["val"]) for n in tensor_inputs(node))
        work = (_WORK * flops(node) + self.touched * touched) * share * times
        return [work * (self._part(node, row) - 1 / self.a.ranks[-1]) for row in self.rows[node]]

    def _part(self, node: fx.Node, row: Row) -> float:
        """How much of a node's work the busiest rank does: 1 / ranks, more with padding, all where nothing is split."""
        value = node.meta["val"]
        outputs = value if isinstance(value, (tuple, list)) else (value,)
        tensors = [*(n.meta["val"] for n in tensor_inputs(node)), *outputs]
        placed = zip(tensors, (*row.inputs, *row.outputs), strict=True)
        sizes = [t.shape[p.dim] for t, p in placed if t is not None and isinstance(p, Shard)]
        n = self.a.ranks[-1]
        return max((shard_length(size, n) / size if size % n else 1 / n for size in sizes), default=1.0)

    def _values(self) -> None:
        """Every value with its uses, equal ones once."""
        uses: dict[tuple[object, int], dict[Use, None]] = {}
        makers: dict[tuple[object, int], fx.Node] = {}
        places: dict[Placement, int] = {}

        def place(p: Placement) -> int:
            return places.setdefault(p, len(places))

        def use(value: fx.Node, user: int, wanted: Sequence[Placement]) -> None:
            maker, index = source_of(value)
            key = (self.key_of[maker], index)
            makers.setdefault(key, maker)
            uses.setdefault(key, {})[Use(user, tuple(map(place, wanted)))] = None

        for node in self.a.nodes:
            number = self.number[self.key_of[node]]
            for i, feed in enumerate(tensor_inputs(node)):
                use(feed, number, [row.inputs[i] for row in self.rows[node]])
        by_name = {port.name: node for node, port in self.a.ports.items() if port.kind is Kind.PARAMETER}
        for value, port in zip(self.a.graph.output_nodes(), self.a.graph.signature.outputs, strict=True):
            parameter = by_name.get(port.name) if port.kind is Kind.GRADIENT else None
            if parameter is not None and self.a.axis != self.a.context.data:
                use(value, self.number[self.key_of[parameter]], self._arrivals(parameter))
            else:
                may_leave: list[Placement] = [REPLICATE]
                if parameter is not None:  # as it comes: the zero pass reduces it
                    may_leave.append(PARTIAL)
                elif port.kind is Kind.RESULT:
                    may_leave.append(Shard(0))
                use(value, self.problem.node([0.0] * len(may_leave)), may_leave)
        for (key, index), found in uses.items():
            maker = makers[key, index]
            at = self._arrivals(maker) if maker in self.a.ports else tuple(r.outputs[index] for r in self.rows[maker])
            wanted = {p for u in found for p in u.wanted}
            moves = self._moves(maker, index, set(at), [p for p, number in places.items() if number in wanted])
            times = len(self.members[key])
            self.problem.values.append(
                Value(
                    self.number[key],
                    tuple(map(place, at)),
                    tuple(found),
                    {(places[a], places[b]): cost * times for (a, b), cost in moves.items()},
                )
            )

    def _moves(
        self, maker: fx.Node, index: int, made: set[Placement], wanted: Sequence[Placement]
    ) -> dict[tuple[Placement, Placement], float]:
        value = maker.meta["val"]
        value = value[index] if isinstance(value, (tuple, list)) else value
        before = [choice.outputs[maker][index] for choice in self.a.earlier]
        size = float(nbytes(value))
        for placement, ranks in zip(before, self.a.ranks, strict=False):
            size /= ranks if isinstance(placement, Shard) else 1
        found = {}
        for a in made:
            for b in wanted:
                if a == b or not fits(value.shape, [*before, b], self.a.ranks):
                    continue
                sent = collectives.cost(a, b, int(size), self.a.ranks[-1])
                if maker in self.weights:
                    sent *= _WEIGHT_MOVED
                moved = isinstance(a, Replicate)
                found[a, b] = sent + (_TOUCHED * size if moved else self.latency)
        return found


class Layers:
    """Which numbers in a module's path count layers: those of modules that have modules of their own in them.

    In ``blocks.3.mlp.0`` that is the 3; the 0 tells one linear of a sequence from another.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._holders = {path[: dot.start()] for path in set(paths) for dot in re.finditer(r"\.", path)}
        self._known: dict[str, str] = {}

    def pattern(self, path: str) -> str:
        """The path with a sign in the place of every number of a layer."""
        if path not in self._known:
            parts = path.split(".")
            ends = [".".join(parts[: i + 1]) for i in range(len(parts))]
            folded = [re.sub(r"\d+", "#", p) if end in self._holders else p for p, end in zip(parts, ends, strict=True)]
            self._known[path] = ".".join(folded)
        return self._known[path]
