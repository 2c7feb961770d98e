"""Functions of tensors written into a graph: traced once per shape of their arguments, then copied.

Tracing an op takes a millisecond, copying a node a hundredth of that; a model repeats the same few changes of
placement and the same optimizer update for every parameter.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoshard import compat
from autoshard.program import TAG, Tag
from autoshard.retrace import Decompositions


class Writer:
    """Builds a graph of local shapes node by node; every node gets a tag and a fake value."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._mode = compat.fake_mode()
        self._traced: dict[Hashable, fx.GraphModule] = {}
        self._root = nn.Module()

    def placeholder(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tag: Tag
    ) -> fx.Node:
        node = self.graph.placeholder(re.sub(r"\W", "_", name))
        node.target = node.name  # unique, which two sanitised names need not be
        with self._mode:
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype, device=device)
        node.meta[TAG] = tag
        return node

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tag: Tag,
        name: str | None = None,
    ) -> fx.Node:
        """One op; its value is what it makes of the values of its arguments.

        Args:
            name: what to call the node, if that is free; None for one made from `target`.
        """
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            value = target(*values, **named)
        node = self.graph.call_function(target, args, kwargs, name=name)
        node.meta.update({"val": value, TAG: tag})
        return node

    def reshape(self, x: fx.Node, shape: Sequence[int], tag: Tag, name: str | None = None) -> fx.Node:
        """A view where the strides allow one, else of a copy."""
        view = torch.ops.aten.view.default
        try:
            return self.call(view, (x, list(shape)), {}, tag, name)
        except (RuntimeError, ValueError):
            copy = self.call(torch.ops.aten.clone.default, (x,), {"memory_format": torch.contiguous_format}, tag)
            return self.call(view, (copy, list(shape)), {}, tag, name)

    def copy(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A node of another graph, on arguments of this one; its value is made anew."""
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        assert callable(node.target)
        return self.call(node.target, args, kwargs, node.meta[TAG], node.name)

    def constant(self, node: fx.Node, owner: nn.Module) -> fx.Node:
        """A `get_attr` node of another graph, whose module is `owner`."""
        name = f"constant_{len(self._root._buffers)}"
        self._root.register_buffer(name, getattr(owner, str(node.target)))
        new = self.graph.get_attr(name)
        new.meta = dict(node.meta)
        return new

    def write(
        self,
        function: Callable[..., Any],
        args: Sequence[fx.Node],
        tag: Tag,
        key: Hashable = None,
        decompositions: Decompositions | None = None,
    ) -> Any:
        """The ops that `function` runs on tensors like `args`.

        Args:
            function: of as many tensors as `args`; returns a tensor or a tree of lists, tuples and dicts of them.
            key: whatever else decides what it does; two functions of one key must do the same. None: nothing else
                does the same.
            decompositions: how to write some of the ops that it runs.

        Returns:
            What the function returns, with nodes in the place of tensors.
        """
        values = [node.meta["val"] for node in args]
        full = (key, *((tuple(v.shape), v.stride(), v.dtype, v.device) for v in values))
        traced = self._traced.get(full)
        if traced is None:
            traced = self._trace(function, values, decompositions)
            if key is not None:
                self._traced[full] = traced
        new: dict[fx.Node, fx.Node] = {}
        given = iter(args)
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                new[node] = next(given)
            elif node.op == "output":
                return fx.map_arg(node.args[0], new.__getitem__)
            else:
                is_constant = node.op == "get_attr"
                new[node] = self.constant(node, traced) if is_constant else self.graph.node_copy(node, new.__getitem__)
                new[node].meta = {"val": node.meta.get("val"), TAG: tag}
        raise AssertionError("a graph has an output")

    def _trace(
        self, function: Callable[..., Any], values: list[Tensor], decompositions: Decompositions | None
    ) -> fx.GraphModule:
        with self._mode:  # new tensors: the tracer knows its inputs by identity, and nodes may share a value
            inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
            return compat.make_fx(lambda *flat: function(*flat), inputs, decompositions)

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        """The graph as a module that returns `outputs` as a tuple."""
        self.graph.output(tuple(outputs))
        return compat.graph_module(self._root, self.graph)
