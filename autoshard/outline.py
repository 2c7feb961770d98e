"""Regions of a graph as callables of their own, compiled once for all that compute the same.

Before: nodes whose `Tag.region` is the same stand together, such as the update of one parameter.
After: each such run of nodes is one call. Elementwise regions on tensors of one shape are compiled on flat tensors of
any length, so that one kernel updates every parameter of an optimizer group; others are compiled for their shapes.
Regions on single numbers are left as they are.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autoshard import compat
from autoshard.program import TAG, Graph, Tag
from autoshard.retrace import copied, is_mutable

Run = Callable[[list[Tensor]], Sequence[Tensor]]
Compile = Callable[[fx.GraphModule, list[Tensor]], Run]

_IN_PLACE = torch.ops.aten.copy_.default
_REDUCES_ALL = torch.ops.aten.sum.default


@dataclass(frozen=True)
class Region:
    """A run of nodes of one region, cut out.

    Args:
        nodes: as they stand in the graph.
        inputs: nodes before the run that it reads, in order of first use; a kernel's arguments.
        outputs: nodes of the run that are read after it; a kernel's results.
        module: the run as a graph of its own.
        key: alike for regions that one kernel serves.
        length: elements of its tensors, if it is elementwise on tensors of one shape; else None.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    module: fx.GraphModule
    key: str
    length: int | None


def has_regions(graph: Graph) -> bool:
    return any(_region_of(node) for node in graph.module.graph.nodes)


def outlined(graph: Graph, compile_region: Compile) -> tuple[fx.GraphModule, int]:
    """A module that calls a compiled kernel for each region and interprets the rest, and how many were compiled.

    Args:
        compile_region: called once per distinct region with its graph and fake inputs.
    """
    module = copied(graph).module
    _take_numbers_out(module.graph)
    regions = [_cut(run) for run in _runs(module.graph) if _is_worth_a_kernel(run)]
    kernels = _Kernels(compile_region, regions)
    for region in regions:
        _replace(module.graph, region, kernels.call_of(region))
    module.graph.lint()
    module.recompile()
    return module, kernels.compiled


def _region_of(node: fx.Node) -> str:
    found: Tag | None = node.meta.get(TAG)
    return found.region if found is not None and node.op == "call_function" else ""


def _take_numbers_out(graph: fx.Graph) -> None:
    """What a region computes of single numbers alone is computed before it, and once where others compute it too.

    A kernel would compute it again for every element: a bias correction's power costs more than the update.
    """
    made: dict[str, fx.Node] = {}
    for run in _runs(graph):
        inside: dict[fx.Node, None] = {}  # what depends on the region's tensors, or is written in it, in order
        for node in run:
            inputs = node.all_input_nodes
            if is_mutable(node):
                inside.update({node: None, inputs[0]: None})
                made = {key: n for key, n in made.items() if inputs[0] not in n.all_input_nodes}
            elif any(n.meta["val"].dim() or n in inside for n in (node, *inputs)):
                inside[node] = None
            elif (key := f"{node.target} {node.args} {node.kwargs}") in made:
                node.replace_all_uses_with(made[key])
                graph.erase_node(node)
            else:
                made[key] = node
                node.meta[TAG] = node.meta[TAG].but(region="")
                if inside:
                    next(iter(inside)).prepend(node)


def _runs(graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
    grouped = itertools.groupby(list(graph.nodes), key=_region_of)
    return [tuple(nodes) for region, nodes in grouped if region]


def _is_worth_a_kernel(nodes: Sequence[fx.Node]) -> bool:
    return any(node.meta["val"].numel() > 1 for n in nodes for node in (n, *n.all_input_nodes))


def _cut(nodes: tuple[fx.Node, ...]) -> Region:
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        new[node] = graph.placeholder(f"x{i}")
        new[node].meta.update(node.meta)
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in outputs))
    module = compat.graph_module(torch.nn.Module(), graph)
    length = _flat_length(inputs, nodes)
    return Region(nodes, inputs, outputs, module, _key(graph, length is not None), length)


def _flat_length(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> int | None:
    """The number of elements of a region's tensors, where flattening them changes nothing but shapes."""
    shapes = {tuple(node.meta["val"].shape) for node in (*inputs, *nodes)} - {()}
    pure = all(_elementwise(node) for node in nodes)
    if len(shapes) != 1 or not pure or not all(node.meta["val"].is_contiguous() for node in inputs):
        return None
    length = torch.Size(next(iter(shapes))).numel()
    return length if length > 1 else None  # a symbolic size stands for 2 and more


def _elementwise(node: fx.Node) -> bool:
    target = node.target
    if target in (_IN_PLACE, _REDUCES_ALL):
        return True
    scalar = node.meta["val"].dim() == 0 and not node.all_input_nodes
    return scalar or (isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags)


def _key(graph: fx.Graph, any_length: bool) -> str:
    """The graph's text with names by position, with the dtypes of its inputs and, unless it takes any, their shapes."""
    names = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            shape = f"{value.dim() > 0}" if any_length else f"{tuple(value.shape)} {value.stride()}"
            lines.append(f"{value.dtype} {value.device} {shape}")
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            lines.append(f"{node.target} {args} {kwargs}")
    return "\n".join(lines)


class _Kernels:
    """Kernels by what they compute; one that takes any length is compiled for the longest."""

    def __init__(self, compile_region: Compile, regions: Sequence[Region]) -> None:
        self.compile_region = compile_region
        self.longest: dict[str, int] = {}
        for region in regions:
            if region.length is not None:
                self.longest[region.key] = max(self.longest.get(region.key, 0), region.length)
        self.compiled = 0
        self._any_length: dict[str, tuple[Run, Callable[[int], bool]]] = {}
        self._by_shape: dict[str, Run] = {}

    def call_of(self, region: Region) -> Callable[..., Sequence[Tensor]]:
        if region.length is None:
            return _as_it_is(self._shaped(region, region.key, None))
        if region.key not in self._any_length:
            inputs, holds = compat.inputs_of_any_length(_values(region), self.longest[region.key])
            self._any_length[region.key] = self._compile(region, inputs), holds
        run, holds = self._any_length[region.key]
        if not holds(region.length):  # the compiler took the longest for granted in this length
            run = self._shaped(region, f"{region.length}\n{region.key}", region.length)
        shapes = [tuple(node.meta["val"].shape) for node in region.outputs]
        return _flattening(run, shapes)

    def _shaped(self, region: Region, key: str, length: int | None) -> Run:
        if key not in self._by_shape:
            values = _values(region)
            flat = values if length is None else [v.reshape(-1) if v.dim() else v for v in values]
            self._by_shape[key] = self._compile(region, compat.fresh_inputs(flat))
        return self._by_shape[key]

    def _compile(self, region: Region, inputs: list[Tensor]) -> Run:
        self.compiled += 1
        return self.compile_region(region.module, inputs)


def _values(region: Region) -> list[Tensor]:
    return [node.meta["val"] for node in region.inputs]


def _as_it_is(run: Run) -> Callable[..., Sequence[Tensor]]:
    def kernel(*args: Tensor) -> Sequence[Tensor]:
        return run(list(args))

    return kernel


def _flattening(run: Run, shapes: list[tuple[int, ...]]) -> Callable[..., Sequence[Tensor]]:
    def kernel(*args: Tensor) -> Sequence[Tensor]:
        results = run([x.view(-1) if x.dim() else x for x in args])
        return [result.view(shape) for result, shape in zip(results, shapes, strict=True)]

    return kernel


def _replace(graph: fx.Graph, region: Region, kernel: Callable[..., Sequence[Tensor]]) -> None:
    with graph.inserting_before(region.nodes[0]):
        call = graph.call_function(kernel, region.inputs)
        results = [graph.call_function(operator.getitem, (call, i)) for i in range(len(region.outputs))]
    for node, result in zip(region.outputs, results, strict=True):
        node.replace_all_uses_with(result)
    for node in reversed(region.nodes):
        graph.erase_node(node)
