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
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from autoshard.assign import Choice, assign
from autoshard.manager import PassContext
from autoshard.ops import whole
from autoshard.placement import REPLICATE, Partial, Placement, Replicate, Shard
from autoshard.program import TAG, Graph, Kind, Placements, Port, Program, Role, Tag, tag
from autoshard.retrace import clean, copied
from autoshard.rules.table import CHEAP_VIEWS


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
    for axis in range(len(context.axes)):
        choices.append(assign(graph, inputs, axis, choices, context))
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


@dataclass
class _Made:
    """The redistribute nodes so far, which consumers share, and the parameters among the graph's inputs."""

    parameters: set[fx.Node]
    nodes: dict[tuple[fx.Node, int, Placement], fx.Node] = field(default_factory=dict)

    def is_weight(self, node: fx.Node) -> bool:
        """Whether a node is a parameter, or a view of one."""
        while node.target in CHEAP_VIEWS or node.target is redistribute:
            node = node.all_input_nodes[0]
        return node in self.parameters


def _write(graph: Graph, inputs: tuple[Port, ...], choices: list[Choice], context: PassContext) -> tuple[Port, ...]:
    """Tag every node and insert a redistribute node, shared by its consumers, wherever placements differ."""
    nodes = list(graph.module.graph.nodes)
    made = _Made({n for n, p in zip(graph.placeholders(), inputs, strict=True) if p.kind is Kind.PARAMETER})
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


def _feed(node: fx.Node, choices: list[Choice], made: _Made) -> None:
    position = iter(range(1 << 30))

    def moved(source: fx.Node) -> fx.Node:
        if not isinstance(source.meta.get("val"), Tensor):
            return source
        i = next(position)
        return _moved(source, tuple(choice.needs[node][i] for choice in choices), node, made)

    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), moved)


def _moved(source: fx.Node, target: Placements, before: fx.Node, made: _Made) -> fx.Node:
    """`source` as `target` says: first what ends whole, then what ends split, so that no dim is split twice between."""
    for axis in sorted(range(len(target)), key=lambda i: isinstance(target[i], Shard)):
        source = _moved_on(source, axis, target[axis], before, made)
    return source


def _moved_on(source: fx.Node, axis: int, target: Placement, before: fx.Node, made: _Made) -> fx.Node:
    placements: Placements = tag(source).placements[0]
    if placements[axis] == target:
        return source
    key = (source, axis, target)
    if key not in made.nodes:
        graph = source.graph
        with graph.inserting_before(before):
            node = graph.call_function(redistribute, (source, axis, placements[axis], target))  # type: ignore[arg-type]
        node.meta["val"] = source.meta["val"]
        after = tuple(target if i == axis else p for i, p in enumerate(placements))
        role: Role | None = Role.ACTIVATION_REDUCE if isinstance(placements[axis], Partial) else Role.ACTIVATION_GATHER
        if isinstance(placements[axis], Replicate):
            role = None
        elif made.is_weight(source):
            role = Role.PARAM_GATHER
        elif before.target is whole:
            role = Role.STATISTICS_GATHER
        node.meta[TAG] = Tag(
            tag(before).phase if TAG in before.meta else tag(source).phase, tag(source).module, role, (after,)
        )
        made.nodes[key] = node
    return made.nodes[key]
