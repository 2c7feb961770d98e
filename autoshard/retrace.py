"""The only way to trace a graph again. Every new node inherits the tag of the node it came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoshard import compat
from autoshard.errors import CaptureError
from autoshard.program import TAG, Graph, Kind, Port, Tag

Decompositions = dict[Any, Callable[..., Any]]


def stamp(graph: fx.Graph, tag: Tag) -> None:
    """Give `tag` to the nodes at the end of `graph` that have none."""
    for node in reversed(graph.nodes):
        if TAG in node.meta:
            break
        node.meta[TAG] = tag


class _Stamping(fx.Interpreter):
    """Runs a graph under a tracer and stamps what each node emits with that node's tag."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if TAG in n.meta:
            stamp(compat.traced_graph(), n.meta[TAG])
        return result


def retrace(
    graph: Graph,
    decompositions: Decompositions | None = None,
    *,
    inputs: list[torch.Tensor] | None = None,
    functionalize: bool = False,
    may_write: Callable[[Port], bool] = lambda _: True,
) -> Graph:
    """`graph` traced again under `decompositions`, with the same signature.

    Args:
        inputs: fake tensors to trace on; None for those that `graph` was traced on.
        functionalize: replace in-place ops by pure ones; final writes into inputs are dropped, since a graph
            graph returns new buffers as outputs.
        may_write: which inputs such a write is dropped for.

    Raises:
        CaptureError: another input is written.
    """
    inputs = [node.meta["val"] for node in graph.placeholders()] if inputs is None else inputs
    first = default_tag(graph)

    def run(*args: torch.Tensor) -> Any:
        stamp(compat.traced_graph(), first)
        return _Stamping(graph.module).run(*args)

    mode = next((v.fake_mode for v in inputs if isinstance(v, compat.FakeTensor)), None) or compat.fake_mode()
    with mode:
        module = compat.make_fx(compat.functionalized(run) if functionalize else run, inputs, decompositions)
    if functionalize:
        ports = dict(zip(_placeholders(module), graph.signature.inputs, strict=True))
        for node in list(module.graph.nodes):
            if node.target is torch.ops.aten.copy_.default and node.args[0] in ports and not node.users:
                port = ports[node.args[0]]
                if not may_write(port):
                    what = (
                        port.name
                        if port.kind is Kind.PARAMETER
                        else f"a tensor of shape {port.shape} that is no buffer"
                    )
                    raise CaptureError(
                        f"the model or loss changes {what} in place, which would be lost: a step changes buffers "
                        "only. Keep what changes in a buffer (register_buffer), limit a weight by a parametrization "
                        "(torch.nn.utils.parametrize), and leave trained parameters to the optimizer"
                    )
                module.graph.erase_node(node)
    tag_the_rest(module, first)
    clean(module)
    return Graph(module, graph.signature, graph.local)


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def tag_the_rest(module: fx.GraphModule, given: Tag) -> None:
    """Give `given` to every node without a tag."""
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output") and TAG not in node.meta:
            node.meta[TAG] = given


def copied(graph: Graph) -> Graph:
    """`graph` with nodes of its own, for a pass that edits where it stands; values are shared."""
    new = fx.Graph()
    new.output(new.graph_copy(graph.module.graph, {}))
    for before, after in zip(graph.module.graph.nodes, new.nodes, strict=True):
        after.meta = dict(before.meta)
    return Graph(compat.graph_module(graph.module, new), graph.signature, graph.local)


def default_tag(graph: Graph) -> Tag:
    """The tag for what no node of `graph` accounts for: that of its first tagged node."""
    return next(node.meta[TAG] for node in graph.module.graph.nodes if TAG in node.meta)


def is_mutable(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def clean(module: fx.GraphModule) -> None:
    """Drop what nothing uses, keep placeholders and in-place ops, check and recompile."""

    module.graph.eliminate_dead_code(lambda node: is_mutable(node) or node.op in ("placeholder", "output"))
    module.graph.lint()
    module.recompile()
