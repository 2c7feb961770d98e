"""Global shapes to the shapes of one rank; changes of placement become functional collectives.

Before: ops at global shapes, redistribute nodes, placements on every node.
After: every op runs on local shards, arguments that repeat a shape are local, every redistribute node is the
collective that performs it. Rank coordinates are inputs; all ranks have this one graph.

    y: f32[8, 4] S(0) = view(x, [8, 4])          y: f32[4, 4] = view(x, [4, 4])
    l: f32[] R = redistribute(s, P -> R)    ->   l: f32[] = wait_tensor(all_reduce(s, "sum", "data"))
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autoshard import collectives, moves, placement
from autoshard.compat import pytree
from autoshard.errors import VerifyError
from autoshard.fragments import Writer
from autoshard.manager import PassContext
from autoshard.ops import whole
from autoshard.passes.place import op_outputs, redistribute
from autoshard.placement import REPLICATE, Partial, Placement, Shard, shard_length
from autoshard.program import Graph, Kind, Placements, Port, Program, Signature, tag
from autoshard.randomness import uniform_op
from autoshard.retrace import clean, default_tag
from autoshard.rules import indexed_dim, rule_of
from autoshard.rules.options import op_of, tensor_inputs


def lower(program: Program, context: PassContext) -> Program:
    for name, graph in program.graphs.items():
        program = program.with_graph(name, _Lowering(graph, context).run())
    return program


def coordinate_ports(context: PassContext) -> tuple[Port, ...]:
    """One input per mesh axis in use: this rank's coordinate."""
    return tuple(Port(Kind.COORDINATE, axis.name, (1,), torch.int64, context.replicate()) for axis in context.axes)


def local_shape(shape: tuple[int, ...], placements: Placements, context: PassContext) -> tuple[int, ...]:
    """What one rank holds of a tensor of global `shape`, padding counted."""
    return placement.local_shape(shape, placements, context.ranks)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class _Lowering:
    """Writes the global graph again, on local shapes."""

    def __init__(self, graph: Graph, context: PassContext) -> None:
        self.graph = graph
        self.context = context
        self.writer = Writer()
        self.local: dict[fx.Node, fx.Node] = {}
        self.coordinates: list[fx.Node] = []
        self.masked: dict[tuple[fx.Node, int, str], fx.Node] = {}

    def run(self) -> Graph:
        coordinates = coordinate_ports(self.context)
        ports = (*self.graph.signature.inputs, *coordinates)
        first = default_tag(self.graph).but(role=None)
        placeholders = self.graph.placeholders()
        names = [str(node.target) for node in placeholders] + [f"coordinate_{port.name}" for port in coordinates]
        made = [
            self.writer.placeholder(
                name,
                local_shape(port.shape, port.placements, self.context),
                port.dtype,
                self.context.device,
                first.but(placements=(port.placements,)),
            )
            for name, port in zip(names, ports, strict=True)
        ]
        self.local.update(zip(placeholders, made, strict=False))
        self.coordinates = made[len(placeholders) :]
        for node in self.graph.module.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                self.local[node] = self._node(node)
        module = self.writer.finish([self._leaving(node) for node in self.graph.output_nodes()])
        clean(module)
        return Graph(module, Signature(ports, self.graph.signature.outputs), local=True)

    def _node(self, n: fx.Node) -> fx.Node:
        if n.op == "get_attr":
            return self.writer.constant(n, self.graph.module)
        args, kwargs = self._given(n)
        if n.target is redistribute:
            result = self._redistribute(n, args[0])
        elif n.target is uniform_op:
            result = self.writer.call(n.target, self._uniform(n, args), {}, tag(n), n.name)
        elif n.target is whole:  # a value of its own, which the compiler fuses away
            result = self.writer.call(torch.ops.aten.mul.Tensor, (args[0], 1), {}, tag(n), n.name)
        elif n.target in _VIEWS:
            # A collective may have left other strides than the global program had.
            result = self.writer.reshape(args[0], self._localize(n, list(args))[1], tag(n), n.name)
        elif (split := self._split_places(n)) is not None:
            result = self._shifted(n, tuple(self._localize(n, list(args))), kwargs, *split)
        else:
            assert callable(n.target)
            result = self.writer.call(n.target, tuple(self._localize(n, list(args))), kwargs, tag(n), n.name)
        self._check(n, result.meta["val"])
        return result

    def _given(self, n: fx.Node) -> Any:
        """Local arguments; what is summed up over a dim that ends in padding has that padding made neutral."""
        reducing = {} if n.target is redistribute or n.target is operator.getitem else self._reducing(n)
        found: Any = fx.map_arg((n.args, n.kwargs), lambda x: self._neutral(x, reducing))
        return found

    def _reducing(self, n: fx.Node) -> dict[int, str]:
        """The axes on which an output of `n` is not split, and how its terms are joined there."""
        found = {}
        for axis in range(len(self.context.axes)):
            ends = [p[axis] for p in tag(n).placements]
            if not all(isinstance(end, Shard) for end in ends):
                found[axis] = next((end.op for end in ends if isinstance(end, Partial)), "sum")
        return found

    def _neutral(self, x: fx.Node, reducing: Mapping[int, str]) -> fx.Node:
        """The local value of `x`, with the neutral element as padding on the axes of `reducing`."""
        value = x.meta.get("val")
        if not isinstance(value, Tensor):
            return self.local[x]
        local = self.local[x]
        for axis, op in reducing.items():
            p, n = tag(x).placements[0][axis], self.context.axes[axis].ranks
            if not isinstance(p, Shard) or value.shape[p.dim] % n == 0:
                continue
            if op == "sum" and self._is_zero_padded(x, axis):
                continue
            key = (local, axis, op)  # of what other axes have made neutral already
            if key not in self.masked:
                self.masked[key] = self._masked(local, p.dim, value.shape[p.dim], axis, op, x)
            local = self.masked[key]
        return local

    def _is_zero_padded(self, x: fx.Node, axis: int) -> bool:
        """On `axis` parameters, and what a change of placement there has made, are padded with zeros."""
        if x.target is not redistribute:
            return bool(x.op == "placeholder")
        source, changed = x.args[0], x.args[1]
        assert isinstance(source, fx.Node)
        return bool(changed == axis) or self._is_zero_padded(source, axis)

    def _masked(self, local: fx.Node, dim: int, size: int, axis: int, op: str, x: fx.Node) -> fx.Node:
        def mask(t: Tensor, coordinate: Tensor) -> Tensor:
            length = t.shape[dim]
            places = torch.arange(length, device=t.device) + coordinate * length
            inside = (places < size).view(-1, *[1] * (t.dim() - 1 - dim))
            return torch.where(
                inside, t, torch.full((), placement.neutral(op, t.dtype), dtype=t.dtype, device=t.device)
            )

        key = ("neutral", dim, size, axis, op)
        return self.writer.write(mask, [local, self.coordinates[axis]], tag(x).but(role=None), key)

    def _leaving(self, x: Any) -> Any:
        """An output: padding that leaves is zero."""
        return self._neutral(x, dict.fromkeys(range(len(self.context.axes)), "sum"))

    def _redistribute(self, n: fx.Node, x: fx.Node) -> fx.Node:
        arguments: tuple[Any, ...] = n.args
        source, axis, before, after = arguments
        placements = tag(source).placements[0]
        size = local_shape(tuple(n.meta["val"].shape), self._with(placements, axis, REPLICATE), self.context)
        axes = self.context.axes
        before, after = (moves.within(self._with(placements, axis, p), axes, axis) for p in (before, after))

        def change(x: Tensor, coordinate: Tensor) -> Tensor:
            return collectives.redistribute(x, axes[axis], before, after, size, coordinate)

        key = ("redistribute", axis, before, after, size)
        return self.writer.write(change, [x, self.coordinates[axis]], tag(n), key)

    @staticmethod
    def _with(placements: Placements, axis: int, own: Placement) -> Placements:
        return tuple(own if i == axis else p for i, p in enumerate(placements))

    def _uniform(self, n: fx.Node, args: Any) -> tuple[Any, ...]:
        sharded = [(i, p) for i, p in enumerate(tag(n).placements[0]) if isinstance(p, Shard)]
        return (
            *args[:4],
            [self.coordinates[i] for i, _ in sharded],
            [p.dim for _, p in sharded],
            [p.outer for _, p in sharded],
            [self.context.axes[i].ranks for i, _ in sharded],
        )

    def _split_places(self, n: fx.Node) -> tuple[int, int] | None:
        """The axis that splits the dim whose places another operand counts, and the dim's global size."""
        rule = rule_of(n.target)
        if rule is None or rule.shifted is None:
            return None
        op = op_of(n)
        found = indexed_dim(rule, op)
        if found is None:
            return None
        output, index, dim = found
        placements = tag(n).placements[index] if output else tag(tensor_inputs(n)[index]).placements[0]
        axes = [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
        operand = (op.outputs if output else op.inputs)[index]
        return (axes[0], operand.shape[dim]) if axes and operand is not None else None

    def _shifted(self, n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int, size: int) -> fx.Node:
        shifted = rule_of(n.target).shifted  # type: ignore[union-attr]
        assert shifted is not None
        length = shard_length(size, self.context.axes[axis].ranks)
        leaves, tree = pytree.tree_flatten((args, kwargs))

        def run(*tensors: Tensor) -> Any:
            *own, coordinate = tensors
            values = iter(own)
            args, kwargs = pytree.tree_unflatten([next(values) if isinstance(x, fx.Node) else x for x in leaves], tree)
            return shifted(n.target, args, kwargs, coordinate * length, length, size)

        key = (n.target, repr(tree), *("*" if isinstance(x, fx.Node) else repr(x) for x in leaves), length, size)
        nodes = [x for x in leaves if isinstance(x, fx.Node)]
        return self.writer.write(run, [*nodes, self.coordinates[axis]], tag(n), key)

    def _localize(self, n: fx.Node, args: list[Any]) -> list[Any]:
        rule = rule_of(n.target)
        if rule is None or not (rule.sizes or rule.localize):
            return args
        shapes = self._shapes(n)
        for argument, output in rule.sizes.items():
            args[argument] = list(shapes[output] or ())
        if rule.localize is None:
            return args
        held = tuple(tuple(self.local[x].meta["val"].shape) for x in tensor_inputs(n))
        return rule.localize(op_of(n), args, held, shapes)

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
