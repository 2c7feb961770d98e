"""Global shapes to the shapes of one rank; changes of placement become functional collectives.

Before: ops at global shapes, redistribute nodes, placements on every node.
After: every op runs on local shards, arguments that repeat a shape are local, every redistribute node is the
collective that performs it. Rank coordinates are inputs; all ranks have this one graph.

    y: f32[8, 4] S(0) = view(x, [8, 4])          y: f32[4, 4] = view(x, [4, 4])
    l: f32[] R = redistribute(s, P -> R)    ->   l: f32[] = wait_tensor(all_reduce(s, "sum", "data"))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autoshard import collectives, compat
from autoshard.errors import VerifyError
from autoshard.manager import PassContext
from autoshard.ops import whole
from autoshard.passes.place import op_outputs, redistribute
from autoshard.placement import Shard
from autoshard.program import TAG, Graph, Kind, Placements, Port, Program, Signature, tag
from autoshard.randomness import uniform_op
from autoshard.retrace import clean, default_tag, stamp
from autoshard.rules import rule_of


def lower(program: Program, context: PassContext) -> Program:
    for name, graph in program.graphs.items():
        program = program.with_graph(name, _lowered(graph, context))
    return program


def coordinate_ports(context: PassContext) -> tuple[Port, ...]:
    """One input per mesh axis in use: this rank's coordinate."""
    return tuple(Port(Kind.COORDINATE, axis.name, (1,), torch.int64, context.replicate()) for axis in context.axes)


def local_shape(shape: tuple[int, ...], placements: Placements, context: PassContext) -> tuple[int, ...]:
    """What one rank holds of a tensor of global `shape`, padding counted."""
    for placement, axis in zip(placements, context.axes, strict=True):
        shape = collectives.local_shape(shape, placement, axis.ranks)
    return shape


def fake_inputs(ports: tuple[Port, ...], context: PassContext) -> list[Tensor]:
    return [
        torch.empty(local_shape(port.shape, port.placements, context), dtype=port.dtype, device=context.device)
        for port in ports
    ]


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class _Lowering(fx.Interpreter):
    """Runs the global graph on local fake tensors under the tracer."""

    def __init__(self, module: fx.GraphModule, context: PassContext, coordinates: list[Tensor]) -> None:
        super().__init__(module)
        self.context = context
        self.coordinates = coordinates

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or not op_outputs(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is redistribute:
            result = self._redistribute(n, args[0])
        elif n.target is uniform_op:
            result = self._uniform(n, args)
        elif n.target is whole:
            result = args[0] * 1  # a value of its own, which the compiler fuses away
        elif n.target in _VIEWS:
            # A collective may have left other strides than the global program had.
            result = torch.reshape(args[0], self._localize(n, list(args))[1])
        else:
            result = n.target(*self._localize(n, list(args)), **kwargs)  # type: ignore[operator]
        self._check(n, result)
        stamp(compat.traced_graph(), n.meta[TAG])
        return result

    def _redistribute(self, n: fx.Node, x: Tensor) -> Tensor:
        arguments: tuple[Any, ...] = n.args
        _, axis, source, target = arguments
        before = tag(n.args[0]).placements[0]  # type: ignore[arg-type]
        size = list(n.meta["val"].shape)
        for i, (placement, other) in enumerate(zip(before, self.context.axes, strict=True)):
            if i != axis:
                size = list(collectives.local_shape(tuple(size), placement, other.ranks))
        return collectives.redistribute(
            x,
            self.context.axes[axis],
            source,
            target,
            tuple(size),
            self.coordinates[axis],
        )

    def _uniform(self, n: fx.Node, args: Any) -> Tensor:
        sharded = [(i, p) for i, p in enumerate(tag(n).placements[0]) if isinstance(p, Shard)]
        return uniform_op(
            *args[:4],
            [self.coordinates[i] for i, _ in sharded],
            [p.dim for _, p in sharded],
            [p.outer for _, p in sharded],
            [self.context.axes[i].ranks for i, _ in sharded],
        )

    def _localize(self, n: fx.Node, args: list[Any]) -> list[Any]:
        rule = rule_of(n.target)
        if rule is None or not (rule.sizes or rule.localize):
            return args
        shapes = self._shapes(n)
        for argument, output in rule.sizes.items():
            args[argument] = list(shapes[output] or ())
        return rule.localize(args, shapes) if rule.localize else args

    def _shapes(self, n: fx.Node) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(
            local_shape(tuple(value.shape), placements, self.context) if isinstance(value, Tensor) else None
            for value, placements in zip(op_outputs(n), tag(n).placements, strict=True)
        )

    def _check(self, n: fx.Node, result: Any) -> None:
        found = result if isinstance(result, (tuple, list)) else (result,)
        for value, shape in zip(found, self._shapes(n), strict=True):
            if isinstance(value, Tensor) and tuple(value.shape) != shape:
                raise VerifyError(
                    f"lower: {n.name} = {n.target} in {tag(n).module or 'the loss'} has local shape "
                    f"{tuple(value.shape)}, its placement {[list(map(str, p)) for p in tag(n).placements]} of "
                    f"{[tuple(v.shape) for v in op_outputs(n) if isinstance(v, Tensor)]} says {shape}"
                )


def _lowered(graph: Graph, context: PassContext) -> Graph:
    extra = coordinate_ports(context)
    ports = (*graph.signature.inputs, *extra)
    first = default_tag(graph)

    def run(*args: Tensor) -> Any:
        stamp(compat.traced_graph(), first)
        coordinates = list(args[len(args) - len(extra) :]) if extra else []
        return _Lowering(graph.module, context, coordinates).run(*args[: len(args) - len(extra)])

    with compat.fake_mode():
        module = compat.make_fx(run, fake_inputs(ports, context))
    for node, port in zip([n for n in module.graph.nodes if n.op == "placeholder"], ports, strict=True):
        node.meta[TAG] = first.but(placements=(port.placements,), role=None)
    clean(module)
    return Graph(module, Signature(ports, graph.signature.outputs), local=True)
