"""Micro-batches add up in place: losses, extras and gradients go into accumulators that are inputs.

Before: the micro graph returns totals, counts and gradients of one micro-batch.
After: with plan.accumulate > 1 each is added to an accumulator of the same local shape right after it is
made, so that one copy of the gradients exists; the graph then returns new buffers only.

    return loss, dw                a, b inputs;  copy_(a, a + loss);  copy_(b, b + dw);  return ()
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard import compat
from autoshard.manager import PassContext
from autoshard.passes.lower import local_shape
from autoshard.program import TAG, Graph, Kind, Port, Program, Signature, tag
from autoshard.retrace import clean, copied

_ADDED = (Kind.LOSS, Kind.EXTRA, Kind.GRADIENT)


def accumulator(port: Port) -> Port:
    """The accumulator of an output of the micro graph; its name says which."""
    return Port(Kind.ACCUMULATOR, f"{port.kind.value}:{port.name}", port.shape, port.dtype, port.placements)


def accumulate(program: Program, context: PassContext) -> Program:
    if context.plan.accumulate == 1 or "micro" not in program.graphs:
        return program
    return program.with_graph("micro", _accumulating(copied(program.graphs["micro"]), context))


def _accumulating(graph: Graph, context: PassContext) -> Graph:
    fx_graph = graph.module.graph
    output = next(iter(reversed(fx_graph.nodes)))
    last = graph.placeholders()[-1]
    inputs, outputs, kept = list(graph.signature.inputs), [], []
    copies: list[tuple[fx.Node, fx.Node]] = []
    for value, port in zip(graph.output_nodes(), graph.signature.outputs, strict=True):
        if port.kind not in _ADDED:
            outputs.append(port)
            kept.append(value)
            continue
        with fx_graph.inserting_after(last):
            held = last = fx_graph.placeholder(f"accumulator_{len(copies)}")
        with compat.fake_mode():
            shape = local_shape(port.shape, port.placements, context)
            held.meta["val"] = torch.empty(shape, dtype=port.dtype, device=context.device)
        held.meta[TAG] = tag(value).but(role=None)
        inputs.append(accumulator(port))
        # An output that is an input, or is returned twice, is still added where it is returned.
        with fx_graph.inserting_before(output) if value.op == "placeholder" else fx_graph.inserting_after(value):
            added = fx_graph.call_function(torch.ops.aten.add.Tensor, (held, value))
        added.meta["val"], added.meta[TAG] = held.meta["val"], tag(value).but(role=None)
        copies.append((held, added))
    with fx_graph.inserting_before(output):
        for held, added in copies:
            copy = fx_graph.call_function(torch.ops.aten.copy_.default, (held, added))
            copy.meta["val"], copy.meta[TAG] = held.meta["val"], tag(added)
    output.args = (tuple(kept),)
    clean(graph.module)
    return Graph(graph.module, Signature(tuple(inputs), tuple(outputs)), local=True)
