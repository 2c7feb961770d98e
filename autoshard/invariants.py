"""Invariants that hold after every pass: see `check_program`."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autoshard.errors import VerifyError
from autoshard.manager import PassContext
from autoshard.placement import Shard
from autoshard.program import TAG, Graph, Kind, Program, render, tag
from autoshard.rules import candidates, rule_of, spread
from autoshard.rules.options import op_of, tensor_inputs

_GLOBAL_PASSES = ("place", "zero")


def check_program(program: Program, context: PassContext, after: str) -> None:
    """
    Raises:
        VerifyError: a graph is not well formed after the pass `after`; the message holds an excerpt.
    """
    for name, graph in program.graphs.items():
        try:
            graph.module.graph.lint()
        except RuntimeError as error:
            raise VerifyError(f"after {after}, graph {name}: {error}") from error
        _check_signature(name, graph, after)
        if after in _GLOBAL_PASSES:
            _check_placements(name, graph, context, after)
        if graph.local:
            _check_collectives(name, graph, after)


def _excerpt(graph: Graph, node: fx.Node, around: int = 3) -> str:
    lines = render(graph).splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith(f"  {node.name}:")), 0)
    return "\n".join(lines[max(0, at - around) : at + around + 1])


def _check_signature(name: str, graph: Graph, after: str) -> None:
    inputs, outputs = graph.placeholders(), graph.output_nodes()
    if len(inputs) != len(graph.signature.inputs) or len(outputs) != len(graph.signature.outputs):
        raise VerifyError(
            f"after {after}, graph {name} has {len(inputs)} inputs and {len(outputs)} outputs, its signature "
            f"{len(graph.signature.inputs)} and {len(graph.signature.outputs)}"
        )
    finals = [(port.kind, port.name) for port in graph.signature.outputs if port.kind in (Kind.BUFFER, Kind.GRADIENT)]
    if len(set(finals)) != len(finals):
        raise VerifyError(f"after {after}, graph {name} returns a state value twice: {finals}")
    written = [n.args[0] for n in graph.module.graph.nodes if n.target is torch.ops.aten.copy_.default]
    if len(set(written)) != len(written):
        raise VerifyError(f"after {after}, graph {name} writes an input twice")
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and TAG not in node.meta:
            raise VerifyError(f"after {after}, graph {name}: {node.name} has no tag\n{_excerpt(graph, node)}")


def _check_placements(name: str, graph: Graph, context: PassContext, after: str) -> None:
    """Every op's placements are a row of its rule: so no partial sum reaches an op that is not linear in it."""
    from autoshard.passes.place import redistribute
    from autoshard.randomness import uniform_op

    for node in graph.module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or node.target is uniform_op:
            continue
        for i, axis in enumerate(context.axes):
            outputs = tuple(p[i] for p in tag(node).placements)
            if node.target is redistribute:
                ok = node.args[1] != i or (
                    tag(node.args[0]).placements[0][i] == node.args[2] and outputs == (node.args[3],)
                )
            else:
                op, rule = op_of(node), rule_of(node.target)
                placed = tuple(tag(n).placements[0][i] for n in tensor_inputs(node))
                rows = list(candidates(rule, op, placed, axis.ranks))
                if rule is not None and len(outputs) == 1 and isinstance(outputs[0], Shard):
                    made = spread(rule, op, 0, outputs[0], True, axis.ranks)
                    rows += [made] if made is not None else []
                ok = any(row.inputs == placed and row.outputs == outputs for row in rows)
            if not ok:
                raise VerifyError(
                    f"after {after}, graph {name}: no rule allows the placements of {node.name} on axis {axis.name}\n"
                    + _excerpt(graph, node)
                )


def _check_collectives(name: str, graph: Graph, after: str) -> None:
    for node in graph.module.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
            continue
        if target is torch.ops._c10d_functional.wait_tensor.default:
            continue
        if any(user.target is not torch.ops._c10d_functional.wait_tensor.default for user in node.users):
            raise VerifyError(
                f"after {after}, graph {name}: {node.name} is used before it is awaited\n{_excerpt(graph, node)}"
            )
        if tag(node).role is None:
            raise VerifyError(
                f"after {after}, graph {name}: collective {node.name} has no role\n{_excerpt(graph, node)}"
            )
