"""Choose one placement per node output and mesh axis; state every change of placement as a node.

Before: canonical ops at global shapes.
After: every node is tagged with placements that its rule allows for the placements of its inputs; where a
consumer needs another placement than the producer's there is a `redistribute` node, the identity at global
shapes. Batch tensors are sharded on dim 0 of the data axis, parameters, buffers and constants are whole.

    x: S(0)                          x: S(0)
    w: R                             w: R
    y = mm(x, w)            ->       y: S(0) = mm(x, w)
    dw = mm(x.t, dy)                 dw: P = mm(x.t, dy)
    loss = sum(y)                    l: P = sum(y);  loss: R = redistribute(l, P -> R)
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from autoshard import collectives
from autoshard.assign import Choice, assign, nbytes
from autoshard.manager import PassContext
from autoshard.ops import whole
from autoshard.placement import REPLICATE, Partial, Placement, Replicate, Shard
from autoshard.program import TAG, Graph, Kind, Placements, Port, Program, Role, Tag, tag
from autoshard.randomness import uniform_op
from autoshard.retrace import clean, copied
from autoshard.rules import Op, Row, candidates, divides, replicated, rule_of, spread
from autoshard.rules.options import op_of, tensor_inputs


def redistribute(x: Tensor, axis: int, source: Placement, target: Placement) -> Tensor:
    """A change of placement of `x` on one axis: the identity at global shapes, a collective once lowered."""
    return x


def place(program: Program, context: PassContext) -> Program:
    for name, graph in program.graphs.items():
        program = program.with_graph(name, _placed(graph, context))
    return program


def _placed(graph: Graph, context: PassContext) -> Graph:
    graph = copied(graph)
    inputs = tuple(_seed(port, context) for port in graph.signature.inputs)
    choices: list[Choice] = []
    for i, axis in enumerate(context.axes):
        if i == context.data:
            choices.append(_Chooser(graph, inputs, i, axis.ranks).run())
        else:
            choices.append(assign(graph, inputs, i, choices, context))
    inputs = tuple(
        port.at(tuple(choice.outputs[node][0] for choice in choices))
        for node, port in zip(graph.placeholders(), inputs, strict=True)
    )
    outputs = _write(graph, inputs, choices, context)
    clean(graph.module)
    signature = type(graph.signature)(inputs, outputs)
    return Graph(graph.module, signature)


def _seed(port: Port, context: PassContext) -> Port:
    if port.kind is Kind.BATCH and port.shape and context.data is not None and port.sharded:
        return port.at(context.on_data(Shard(0)))
    return port.at(context.replicate())


class _Chooser:
    """Forward over the graph: each node takes the cheapest row for the placements that reach it.

    Nodes that depend on no input have no placement of their own yet; the first consumer that is sharded
    says how they are made, so that what is cheap to make is made in pieces and never moved.
    """

    def __init__(self, graph: Graph, inputs: tuple[Port, ...], axis: int, ranks: int) -> None:
        self.graph = graph
        self.ranks = ranks
        self.choice = Choice()
        self.free: set[fx.Node] = set()
        self.ops: dict[fx.Node, Op] = {}
        for node, port in zip(graph.placeholders(), inputs, strict=True):
            self.choice.outputs[node] = (port.placements[axis],)
            self.choice.needs[node] = ()

    def run(self) -> Choice:
        for node in self.graph.module.graph.nodes:
            if node.op == "call_function":
                self._visit(node)
        for node in [n for n in self.graph.module.graph.nodes if n in self.free]:
            self._settle(node, None)
        return self.choice

    def _visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source = node.args[0]
            self.choice.outputs[node] = (self.choice.outputs[source][node.args[1]],)  # type: ignore[index]
            self.choice.needs[node] = ()
            return
        feeds = tensor_inputs(node)
        self.ops[node] = op_of(node)
        random = node.target is uniform_op
        if random or all(n in self.free for n in feeds):
            rule = rule_of(node.target)
            if random or (rule is not None and len(self.ops[node].outputs) == 1):
                self.free.add(node)
                return
        placed = tuple(REPLICATE if n in self.free else self.choice.outputs[n][0] for n in feeds)
        row, name = self._best(node, feeds, placed)
        for feed, placement in zip(feeds, row.inputs, strict=True):
            if feed in self.free:
                self._settle(feed, placement)
        self._set(node, row, name)

    def _set(self, node: fx.Node, row: Row, name: str) -> None:
        self.choice.outputs[node] = row.outputs
        self.choice.needs[node] = row.inputs
        self.choice.rules[node] = name

    def _best(self, node: fx.Node, feeds: list[fx.Node], placed: tuple[Placement, ...]) -> tuple[Row, str]:
        op, rule = self.ops[node], rule_of(node.target)
        best, best_cost = replicated(op), float("inf")
        for row in candidates(rule, op, placed, self.ranks):
            cost = 0.0
            for t, feed, now, need in zip(op.inputs, feeds, placed, row.inputs, strict=True):
                if feed not in self.free:
                    cost += collectives.cost(now, need, nbytes(t), self.ranks)
            if not any(isinstance(p, (Shard, Partial)) for p in row.inputs) and any(
                isinstance(p, (Shard, Partial)) for p in placed
            ):
                # Work that every rank repeats: as dear as moving what it makes.
                cost += sum(map(nbytes, op.outputs)) + sum(map(nbytes, op.inputs))
            if cost < best_cost:
                best, best_cost = row, cost
        had_rule = rule is not None or all(isinstance(p, Replicate) for p in placed)
        sharded = any(not isinstance(p, Replicate) for p in (*best.inputs, *best.outputs))
        name = "table" if sharded else ("whole" if had_rule else "replicated")
        if not sharded and any(isinstance(p, Shard) for p in placed):
            name = "gathered on purpose" if node.target is whole else "replicated"
        return best, name

    def _settle(self, node: fx.Node, wanted: Placement | None) -> None:
        """Decide how a node without inputs is made, and with it what feeds it."""
        if node not in self.free:
            return
        self.free.discard(node)
        op, rule = self.ops[node], rule_of(node.target)
        row = replicated(op)
        if isinstance(wanted, Shard):
            if node.target is uniform_op:
                out = op.outputs[0]
                if out is not None and divides(out.shape[wanted.dim], wanted, self.ranks):
                    row = Row((REPLICATE,) * len(op.inputs), (wanted,))
            elif rule is not None:
                row = spread(rule, op, 0, wanted, True, self.ranks) or row
        for feed, placement in zip(tensor_inputs(node), row.inputs, strict=True):
            self._settle(feed, placement)
        self._set(node, row, "made in place")


def _write(graph: Graph, inputs: tuple[Port, ...], choices: list[Choice], context: PassContext) -> tuple[Port, ...]:
    """Tag every node and insert a redistribute node, shared by its consumers, wherever placements differ."""
    nodes = list(graph.module.graph.nodes)
    made: dict[tuple[fx.Node, int, Placement], fx.Node] = {}
    for node in nodes:
        if node.op == "placeholder":
            ports = dict(zip(graph.placeholders(), inputs, strict=True))
            node.meta[TAG] = node.meta.get(TAG, _any_tag(nodes)).but(placements=(ports[node].placements,))
        elif node.op == "call_function":
            outputs = [c.outputs[node] for c in choices]
            count = len(op_outputs(node))
            placements = tuple(tuple(o[i] for o in outputs) for i in range(count))
            rules = {c.rules.get(node, "") for c in choices}
            rule = "replicated" if "replicated" in rules else next(iter(sorted(rules)), "")
            node.meta[TAG] = tag(node).but(placements=placements, rule=rule)
            if node.target is not operator.getitem:
                _feed(node, choices, made)
    final = []
    output = nodes[-1]
    at_rest = {port.name: port.placements for port in inputs if port.kind is Kind.PARAMETER}
    for value, port in zip(output.args[0], graph.signature.outputs, strict=True):
        now = tag(value).placements[0]
        leaving = tuple(
            at_rest[port.name][i] if port.kind is Kind.GRADIENT and i != context.data else _leaving(port, p)
            for i, p in enumerate(now)
        )
        final.append((_moved(value, leaving, output, made), port.at(leaving)))
    output.args = (tuple(value for value, _ in final),)
    return tuple(port for _, port in final)


def op_outputs(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _any_tag(nodes: list[fx.Node]) -> Tag:
    return next(n.meta[TAG] for n in nodes if TAG in n.meta)


def _leaving(port: Port, placement: Placement) -> Placement:
    """How an output leaves: gradients as they come (the zero pass decides), results as slices, the rest whole."""
    if port.kind is Kind.GRADIENT:
        return placement
    if port.kind is Kind.RESULT and placement == Shard(0):
        return placement
    return REPLICATE


def _feed(node: fx.Node, choices: list[Choice], made: dict[tuple[fx.Node, int, Placement], fx.Node]) -> None:
    position = iter(range(1 << 30))

    def moved(source: fx.Node) -> fx.Node:
        if not isinstance(source.meta.get("val"), Tensor):
            return source
        i = next(position)
        return _moved(source, tuple(choice.needs[node][i] for choice in choices), node, made)

    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), moved)


def _moved(
    source: fx.Node, target: Placements, before: fx.Node, made: dict[tuple[fx.Node, int, Placement], fx.Node]
) -> fx.Node:
    """`source` as `target` says: first what ends whole, then what ends split, so that no dim is split twice between."""
    for axis in sorted(range(len(target)), key=lambda i: isinstance(target[i], Shard)):
        source = _moved_on(source, axis, target[axis], before, made)
    return source


def _moved_on(
    source: fx.Node, axis: int, target: Placement, before: fx.Node, made: dict[tuple[fx.Node, int, Placement], fx.Node]
) -> fx.Node:
    placements: Placements = tag(source).placements[0]
    if placements[axis] == target:
        return source
    key = (source, axis, target)
    if key not in made:
        graph = source.graph
        with graph.inserting_before(before):
            node = graph.call_function(redistribute, (source, axis, placements[axis], target))  # type: ignore[arg-type]
        node.meta["val"] = source.meta["val"]
        after = tuple(target if i == axis else p for i, p in enumerate(placements))
        role: Role | None = Role.ACTIVATION_REDUCE if isinstance(placements[axis], Partial) else Role.ACTIVATION_GATHER
        if isinstance(placements[axis], Replicate):
            role = None
        elif before.target is whole:
            role = Role.STATISTICS_GATHER
        node.meta[TAG] = Tag(
            tag(before).phase if TAG in before.meta else tag(source).phase, tag(source).module, role, (after,)
        )
        made[key] = node
    return made[key]
