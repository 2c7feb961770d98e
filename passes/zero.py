"""ZeRO (arXiv:1910.02054): what lies sharded on the data axis, gathered where used, reduced where made.

Before: parameters arrive whole, gradients leave as partial sums.
After: by stage, parameters arrive sharded and are gathered just before a group of uses and again in backward,
gradients leave sharded (reduce-scatter) or whole (all-reduce) right after they are made. What is gathered is
dead after its group of uses.

    w: R                              w: S(0)
    y = mm(x, w)                      g = redistribute(w, S(0) -> R);  y = mm(x, g)
    dx = mm(dy, t(w))         ->      h = redistribute(w, S(0) -> R);  dx = mm(dy, t(h))
    dw: P = mm(t(x), dy)              dw: P = mm(t(x), dy)
    return dw                         return redistribute(dw, P -> S(0))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from autoshard import compat
from autoshard.manager import PassContext
from autoshard.passes.place import redistribute
from autoshard.placement import REPLICATE, Partial, Placement, Replicate, Shard, shard_length, splits_of, to_dtensors
from autoshard.program import TAG, Graph, Kind, Phase, Placements, Port, Program, Role, Signature, tag
from autoshard.retrace import clean, copied
from autoshard.rules.table import CHEAP_VIEWS


@dataclass(frozen=True)
class Resting:
    """How a parameter, its optimizer state and its gradient lie, on every axis.

    Args:
        parameter: between steps.
        slot: the optimizer's state, and the gradient while it is updated.
        gradient: as the micro graph returns it, where it was a partial sum.
    """

    parameter: Placements
    slot: Placements
    gradient: Placements


def at_rest(shape: tuple[int, ...], placed: Placements, context: PassContext) -> Resting:
    """What the ZeRO stage makes of a parameter of global `shape` that `place` laid as `placed`, whole on data.

    With micro-batches to come, stages 0 and 1 keep its gradient partial.
    """
    if context.data is None:
        return Resting(placed, placed, placed)
    stage = context.plan.zero.stage
    split = context.on_data(data_shard(shape, placed, context), placed)
    whole = context.on_data(REPLICATE, placed)
    gradient = split if stage >= 1 else whole
    if stage < 2 and context.plan.accumulate > 1:
        gradient = context.on_data(Partial(), placed)
    return Resting(split if stage >= 3 else whole, split if stage >= 1 else whole, gradient)


def data_shard(shape: tuple[int, ...], placed: Placements, context: PassContext) -> Placement:
    """How a parameter is split over the data axis: along the dim with the least padding, the first of those.

    A dim that another axis splits is split further within each of that axis' shards, where it divides; not where
    those are strided themselves: DTensor puts two strided shards of one dim together wrongly (torch 2.14). A scalar,
    an empty tensor, one under the persistence threshold and one without such a dim stay whole.
    """
    assert context.data is not None
    ranks, numel = context.ranks[context.data], math.prod(shape)
    if not shape or numel == 0 or numel < context.plan.zero.persistence_threshold:
        return REPLICATE
    found: list[tuple[float, bool, int, Shard]] = []
    for dim, size in enumerate(shape):
        axes = splits_of(placed, context.ranks, dim)
        if not axes:
            found.append((shard_length(size, ranks) * ranks / size, False, dim, Shard(dim)))
            continue
        inner = math.prod(context.ranks[i] for i in axes)
        others = to_dtensors(placed, context.ranks)
        if size % (inner * ranks) == 0 and all(compat.split_factor(others[i]) == 1 for i in axes):
            found.append((1.0, True, dim, Shard(dim, inner)))
    return min(found, key=lambda item: item[:3])[3] if found else REPLICATE


def zero(program: Program, context: PassContext) -> Program:
    if context.data is None:
        return program
    for name, graph in program.graphs.items():
        program = program.with_graph(name, _Rewrite(copied(graph), context).run())
    return program


class _Rewrite:
    def __init__(self, graph: Graph, context: PassContext) -> None:
        assert context.data is not None
        self.graph = graph
        self.context = context
        self.axis = context.data
        self.order = {node: i for i, node in enumerate(graph.module.graph.nodes)}
        self.needed = self._all_uses()

    def run(self) -> Graph:
        inputs = list(self.graph.signature.inputs)
        for i, (node, port) in enumerate(zip(self.graph.placeholders(), inputs, strict=True)):
            if port.kind is Kind.PARAMETER:
                resting = at_rest(port.shape, port.placements, self.context).parameter
                on_data = resting[self.axis]
                if isinstance(on_data, Shard):
                    inputs[i] = port.at(resting)
                    self._gather(node, on_data)
        outputs = self._reduce()
        clean(self.graph.module)
        return Graph(self.graph.module, Signature(tuple(inputs), outputs))

    def _with(self, placements: Placements, placement: Placement) -> Placements:
        return self.context.on_data(placement, placements)

    def _gather(self, node: fx.Node, shard: Shard) -> None:
        """Give every group of uses a gather of its own; views of the parameter are made anew for each group."""
        whole = tag(node).placements
        node.meta[TAG] = tag(node).but(placements=(self._with(whole[0], shard),))
        for group in self._groups(self._uses(node, node)):
            first = min((user for user, _ in group), key=self.order.__getitem__)
            graph = node.graph
            made: dict[fx.Node, fx.Node] = {}
            with graph.inserting_before(first):
                gathered = graph.call_function(redistribute, (node, self.axis, shard, REPLICATE))  # type: ignore[arg-type]
                gathered.meta["val"] = node.meta["val"]
                owner = tag(first) if TAG in first.meta else tag(node)
                phase = owner.phase
                gathered.meta[TAG] = owner.but(
                    phase=Phase.INPUT_GRADIENT if phase.backward else phase,
                    role=Role.PARAM_GATHER,
                    placements=whole,
                    rule="",
                )
                self.order[gathered] = self.order[first]
                made[node] = gathered
            for user, source in group:
                user.replace_input_with(source, self._again(source, made, user, gathered))

    def _again(self, source: fx.Node, made: dict[fx.Node, fx.Node], user: fx.Node, gathered: fx.Node) -> fx.Node:
        """The chain of views from the parameter to `source`, on top of `gathered`."""
        if source not in made:
            base = self._again(source.all_input_nodes[0], made, user, gathered)
            with source.graph.inserting_after(base):
                copy = source.graph.node_copy(source, lambda _: base)
            copy.meta = dict(source.meta)
            copy.meta[TAG] = tag(source).but(phase=tag(gathered).phase)
            made[source] = copy
        return made[source]

    def _uses(self, node: fx.Node, parameter: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """(user, the view of the parameter that it reads) for every use that is more than a view."""
        found = []
        for user in list(node.users):
            if user.target in CHEAP_VIEWS and user.all_input_nodes == [node]:
                found += self._uses(user, parameter)
            else:
                found.append((user, node))
        return found

    def _groups(self, uses: list[tuple[fx.Node, fx.Node]]) -> list[list[tuple[fx.Node, fx.Node]]]:
        """Uses in order, split between forward and backward and where keeping costs more than gathering again.

        Between two uses that is so when the program needs more bytes of other parameters than this one has.
        """
        groups: list[list[tuple[fx.Node, fx.Node]]] = []
        last: fx.Node | None = None
        for user, source in sorted(uses, key=lambda use: self.order[use[0]]):
            if last is None or self._backward(last) != self._backward(user) or self._far(last, user, source):
                groups.append([])
            groups[-1].append((user, source))
            last = user
        return groups

    @staticmethod
    def _backward(user: fx.Node) -> bool:
        return tag(user).phase.backward if TAG in user.meta else True

    def _far(self, first: fx.Node, second: fx.Node, source: fx.Node) -> bool:
        start, stop = self.order[first], self.order[second]
        between = {name: size for at, name, size in self.needed if start < at < stop}
        value = source.meta["val"]
        return sum(between.values()) > 2 * value.numel() * value.element_size()

    def _all_uses(self) -> list[tuple[int, str, int]]:
        """(position, parameter, bytes) of every use of a parameter in the graph."""
        found = []
        for node, port in zip(self.graph.placeholders(), self.graph.signature.inputs, strict=True):
            if port.kind is Kind.PARAMETER:
                value = node.meta["val"]
                size = value.numel() * value.element_size()
                found += [(self.order[user], port.name, size) for user, _ in self._uses(node, node)]
        return found

    def _reduce(self) -> tuple[Port, ...]:
        output = next(iter(reversed(self.graph.module.graph.nodes)))
        values, ports = self.graph.output_nodes(), list(self.graph.signature.outputs)
        for i, (value, port) in enumerate(zip(values, ports, strict=True)):
            if port.kind is not Kind.GRADIENT:
                continue
            now = port.placements[self.axis]
            target = at_rest(port.shape, self._with(port.placements, REPLICATE), self.context).gradient[self.axis]
            if isinstance(target, Partial) and isinstance(now, (Replicate, Shard)):
                target = REPLICATE  # nothing to reduce: every rank has computed the whole gradient
            if now != target:
                with value.graph.inserting_after(value):
                    reduced = value.graph.call_function(redistribute, (value, self.axis, now, target))
                reduced.meta["val"] = value.meta["val"]
                placements = self._with(port.placements, target)
                # A gradient of work that is not over the batch may come split: bringing it to rest is a collective too.
                role = None if isinstance(now, Replicate) else Role.GRAD_REDUCE
                reduced.meta[TAG] = tag(value).but(
                    role=role, placements=(placements,), rule="", phase=Phase.WEIGHT_GRADIENT
                )
                values[i] = reduced
            ports[i] = port.at(self._with(port.placements, target))
        output.args = (tuple(values),)
        return tuple(ports)
