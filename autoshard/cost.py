"""What one step costs this rank: FLOPs, bytes at rest, bytes per collective and axis, gathered bytes alive."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autoshard import assign
from autoshard.manager import PassContext
from autoshard.passes.update import slot_placements
from autoshard.passes.zero import at_rest
from autoshard.program import TAG, Graph, Role, tag
from autoshard.rules.table import CHEAP_VIEWS
from autoshard.state import Layout

if TYPE_CHECKING:
    from autoshard.api import Step
    from autoshard.engine import Training

_c10d = torch.ops._c10d_functional
_WAIT = _c10d.wait_tensor.default


@dataclass(frozen=True)
class Collective:
    """Every collective of one kind, axis and role in one step.

    Args:
        graph: the graph it is in.
        op: "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor" or "all_to_all_single".
        axis: the mesh axis.
        role: what it is for.
        count: how many a step runs.
        sent: bytes that this rank sends for them in a step (ring algorithms).
    """

    graph: str
    op: str
    axis: str
    role: Role
    count: int
    sent: int


@dataclass(frozen=True)
class Cost:
    """The cost of one step on one rank.

    Args:
        flops: floating-point operations of matrix products, convolutions and attention, over all micro-batches.
        global_flops: what one device would compute for the same global batch.
        at_rest: bytes held between steps: "params", "buffers", "optimizer", "other"; padding counted.
        collectives: by graph, op, axis and role.
        gathered_peak: most bytes of gathered parameters alive at once in the micro graph's order.
    """

    flops: int
    global_flops: int
    at_rest: dict[str, int]
    collectives: tuple[Collective, ...]
    gathered_peak: int

    @property
    def bytes_at_rest(self) -> int:
        return sum(self.at_rest.values())

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that this rank sends in a step, by axis."""
        found: dict[str, int] = {}
        for entry in self.collectives:
            found[entry.axis] = found.get(entry.axis, 0) + entry.sent
        return found

    def __str__(self) -> str:
        lines = [
            f"FLOPs per rank and step   {self.flops:,} ({self.flops / max(self.global_flops, 1):.3f} of one device's)",
            f"bytes at rest             {self.bytes_at_rest:,} ("
            + ", ".join(f"{name} {size:,}" for name, size in self.at_rest.items())
            + ")",
            f"gathered bytes alive      {self.gathered_peak:,} at most",
        ]
        lines += [
            f"{c.axis:8} {c.role.value:20} {c.op:24} x{c.count:<5} {c.sent:>14,} bytes sent ({c.graph})"
            for c in self.collectives
        ]
        return "\n".join(lines)


def cost(step: Step, training: Training) -> Cost:
    """The cost of a step under `training`'s program."""
    repeat = step.plan.accumulate
    graphs = training.program.graphs
    times = {name: 1 if name == "epilogue" else repeat for name in graphs}
    return Cost(
        flops=sum(flops(graph) * times[name] for name, graph in graphs.items()),
        global_flops=flops(training.captured.graph) * repeat,
        at_rest=_at_rest(step, training),
        collectives=tuple(c for name, graph in graphs.items() for c in _collectives(name, graph, times[name])),
        gathered_peak=gathered_peak(graphs["micro"]),
    )


def flops(graph: Graph) -> int:
    """FLOPs of a graph's matrix products, convolutions and attention at the shapes that it has."""
    return sum(assign.flops(node) for node in graph.module.graph.nodes)


def _at_rest(step: Step, training: Training) -> dict[str, int]:
    context: PassContext = step.context
    found = {"params": 0, "buffers": 0, "optimizer": 0, "other": 24}  # step counter and random key
    parameters = step.modules.parameters()
    for name, p in parameters.items():
        shape = tuple(p.shape)
        resting = at_rest(shape, context.placed(name), context)
        found["params"] += _nbytes(Layout(shape, p.dtype, resting.parameter), context)
        if context.binding is None or name not in training.with_gradient or name in context.binding.unassigned:
            continue
        for slot in context.binding.slot_templates(name, shape, p.dtype):
            lies = slot_placements(slot, resting, context)
            found["optimizer"] += _nbytes(Layout(slot.shape, slot.dtype, lies), context)
    for b in step.modules.buffers().values():
        found["buffers"] += b.numel() * b.element_size()
    return found


def _nbytes(layout: Layout, context: PassContext) -> int:
    return math.prod(layout.local_shape(context.axes)) * layout.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One collective of a lowered graph: its op, mesh axis, and the bytes that this rank sends each time it runs."""

    node: fx.Node
    op: str
    axis: str
    sent: int


def calls(graph: Graph) -> Iterator[Call]:
    """The collectives of a lowered graph, in order."""
    for node in graph.module.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional" or target is _WAIT:
            continue
        op = target._schema.name.partition("::")[2]
        yield Call(node, op, str(node.args[-1]).rpartition(":")[2], _sent(op, node))


def _collectives(name: str, graph: Graph, times: int) -> Iterator[Collective]:
    found: dict[tuple[str, str, Role], list[int]] = {}
    for call in calls(graph):
        role = tag(call.node).role
        assert role is not None
        entry = found.setdefault((call.op, call.axis, role), [0, 0])
        entry[0] += times
        entry[1] += times * call.sent
    for (op, axis, role), (count, sent) in found.items():
        yield Collective(name, op, axis, role, count, sent)


def _sent(op: str, node: fx.Node) -> int:
    source: Any = node.args[0]
    given = _size(source.meta["val"])
    ranks = _ranks(op, node)
    if op == "all_gather_into_tensor":
        return given * (ranks - 1)
    share = given * (ranks - 1) // ranks
    return 2 * share if op == "all_reduce" else share


def _ranks(op: str, node: fx.Node) -> int:
    args: tuple[Any, ...] = node.args
    match op:
        case "all_gather_into_tensor":
            return int(args[1])
        case "reduce_scatter_tensor":
            return int(args[2])
        case "all_to_all_single":
            return len(args[1])
    # all_reduce does not say; the group's name does: autoshard:cpu:data2-tensor2:data
    _, _, shape, axis = str(node.args[-1]).split(":")
    return next(int(part.removeprefix(axis)) for part in shape.split("-") if part.startswith(axis))


def _size(t: Tensor) -> int:
    return t.numel() * t.element_size()


def gathered_peak(graph: Graph) -> int:
    """Most bytes of gathered parameters alive at once when the graph runs in its order."""
    order = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    events: list[tuple[int, int]] = []
    for node in order:
        if node.target is not _WAIT or TAG not in node.meta or tag(node).role is not Role.PARAM_GATHER:
            continue
        size = _size(node.meta["val"])
        events += [(order[node], size), (_last_use(node, order) + 1, -size)]
    alive = peak = 0
    for _, change in sorted(events):
        alive += change
        peak = max(peak, alive)
    return peak


def _last_use(node: fx.Node, order: dict[fx.Node, int]) -> int:
    last = order[node]
    for user in node.users:
        again = user.target in CHEAP_VIEWS or (TAG in user.meta and tag(user).role is Role.PARAM_GATHER)
        last = max(last, _last_use(user, order) if again else order[user])
    return last
