"""Functions of tensors written into a graph: recorded once per shape of their arguments, then copied.

Running an op on shapes takes a millisecond, copying a node a hundredth of that; a model repeats the same few ops,
changes of placement and optimizer updates for every layer and parameter.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard import compat
from autoshard.compat import pytree
from autoshard.program import TAG, Tag
from autoshard.retrace import Decompositions, is_mutable

aten = torch.ops.aten
_SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)  # ops that return what they are given


class Writer:
    """Builds a graph of local shapes node by node; every node gets a tag and a fake value."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._mode = compat.fake_mode()
        self._recorded: dict[Hashable, fx.Graph] = {}
        self._values: dict[Hashable, Any] = {}
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
        value = self._value(target, args, kwargs)
        node = self.graph.call_function(target, args, kwargs, name=name)
        node.meta.update({"val": value, TAG: tag})
        return node

    def _value(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What an op makes of values like those of its arguments; nodes that compute the same share it."""
        key: list[Any] = [target]

        def known(n: fx.Node) -> Any:
            value = n.meta["val"]
            key.append(_like(value))
            return value

        values, named = fx.map_arg((args, kwargs), known)
        # Constants by their text: 1, 1.0 and True are equal, and not alike.
        key.append(repr(fx.map_arg((args, kwargs), lambda _: "*")))
        full = tuple(key)
        if full not in self._values:
            with self._mode:
                self._values[full] = target(*values, **named)
        return self._values[full]

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
        new = self.graph.get_attr(self._keep(getattr(owner, str(node.target))))
        new.meta = dict(node.meta)
        return new

    def _keep(self, constant: Tensor) -> str:
        """A name for a tensor with values."""
        name = f"constant_{len(self._root._buffers)}"
        self._root.register_buffer(name, constant)
        return name

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
        full = (key, *map(_like, values))
        recorded = self._recorded.get(full)
        if recorded is None:
            recorded = self._record(function, values, decompositions or {})
            if key is not None:
                self._recorded[full] = recorded
        new: dict[fx.Node, fx.Node] = {}
        given = iter(args)
        for node in recorded.nodes:
            if node.op == "placeholder":
                new[node] = next(given)
            elif node.op == "output":
                return fx.map_arg(node.args[0], new.__getitem__)
            else:
                new[node] = self.graph.node_copy(node, new.__getitem__)
                new[node].meta = {"val": node.meta["val"], TAG: tag}
        raise AssertionError("a graph has an output")

    def _record(self, function: Callable[..., Any], values: list[Tensor], decompositions: Decompositions) -> fx.Graph:
        graph = fx.Graph()
        with self._mode:  # new tensors: they are known by identity, and nodes may share a value
            inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
            recorder = _Recorder(graph, decompositions, self._keep)
            for i, value in enumerate(inputs):
                recorder.is_made(value, graph.placeholder(f"x{i}"))
            with recorder:
                result = function(*inputs)
        graph.output(recorder.nodes_of(result))
        graph.eliminate_dead_code(lambda node: is_mutable(node) or node.op in ("placeholder", "output"))
        return graph

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        """The graph as a module that returns `outputs` as a tuple."""
        self.graph.output(tuple(outputs))
        return compat.graph_module(self._root, self.graph)


class _Recorder(compat.TorchDispatchMode):
    """Writes every op that runs under it into a graph, by `decompositions` where they have a form for it.

    Args:
        keep: gives a tensor with values, which a function may close over or make, a name among the graph's owner's.
    """

    def __init__(self, graph: fx.Graph, decompositions: Decompositions, keep: Callable[[Tensor], str]) -> None:
        super().__init__()
        self.graph = graph
        self.decompositions = decompositions
        self.keep = keep
        self._nodes = WeakTensorKeyDictionary()

    def is_made(self, value: Tensor, node: fx.Node) -> None:
        node.meta["val"] = value
        self._nodes[value] = node

    def nodes_of(self, values: Any) -> Any:
        """`values` with nodes in the place of tensors."""
        return pytree.tree_map_only(Tensor, self._node_of, values)

    def _node_of(self, value: Tensor) -> fx.Node:
        if value not in self._nodes:
            self.is_made(value, self.graph.get_attr(self.keep(value)))
        return self._nodes[value]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **kwargs)
        with self:
            form = self.decompositions.get(func, func.decompose)
            result = form(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if func in _SAME:
            self._nodes[result] = self._node_of(args[0])
            return result
        name = func.overloadpacket.__name__
        node = self.graph.call_function(func, self.nodes_of(args), self.nodes_of(kwargs), name=name)
        node.meta["val"] = result
        if isinstance(result, Tensor):
            self._nodes.setdefault(result, node)  # an op in place returns its argument
        elif isinstance(result, (tuple, list)):
            for i, value in enumerate(result):
                if isinstance(value, Tensor):
                    self.is_made(value, self.graph.call_function(operator.getitem, (node, i)))
        return result


def _like(value: Any) -> Hashable:
    """What a fake value is told apart by."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.storage_offset()
    return tuple(map(_like, value)) if isinstance(value, (tuple, list)) else repr(value)
