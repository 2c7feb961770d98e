"""A local graph to something callable: Inductor, or the graph as it stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoshard import compat, randomness
from autoshard.outline import has_regions, outlined
from autoshard.program import Graph, Signature
from autoshard.retrace import Decompositions, retrace
from autoshard.runtime import Runtime, one_rank_per_machine_first

Compiled = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]


def compile_graph(name: str, graph: Graph, backend: str, runtime: Runtime) -> tuple[Compiled, float]:
    """The callable for a graph and the seconds it took. It takes a list of local tensors and may empty it.

    A graph with regions (`autoshard.outline`) is interpreted around its compiled regions, any other compiled whole.
    """
    started = time.perf_counter()
    if backend == "debug":
        return _interpreted(graph.module), time.perf_counter() - started
    tell(runtime, f"compiling {name} ({len(graph.module.graph.nodes)} nodes) with Inductor ...")
    with one_rank_per_machine_first(runtime):
        if has_regions(graph):
            module, kernels = outlined(graph, _compile_region)
            run, made = _interpreted(module), f", {kernels} kernel{'s' if kernels > 1 else ''}"
        else:
            lowered = decompose(graph)
            inputs = [node.meta["val"] for node in lowered.placeholders()]
            run, made = _without_gradients(compat.compile_inductor(lowered.module, inputs)), ""
    seconds = time.perf_counter() - started
    tell(runtime, f"compiled {name} in {seconds:.1f} s{made}")
    return run, seconds


def decompose(graph: Graph) -> Graph:
    """The last change of ops: Inductor's decompositions, and random draws to integer arithmetic."""
    inputs = compat.fresh_inputs([node.meta["val"] for node in graph.placeholders()])
    return retrace(graph, _decompositions(), inputs=inputs)


def _decompositions() -> Decompositions:
    return {**compat.inductor_decompositions(), randomness.uniform_op: randomness.uniform_reference}


def _compile_region(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], Any]:
    lowered = retrace(Graph(module, Signature((), ())), _decompositions(), inputs=inputs)
    return compat.compile_inductor(lowered.module, inputs)


def _interpreted(module: fx.GraphModule) -> Compiled:
    return _without_gradients(lambda args: module(*args))


def _without_gradients(run: Callable[[list[torch.Tensor]], Any]) -> Compiled:
    def call(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(run(args))

    return call


def tell(runtime: Runtime, message: str) -> None:
    """A line of progress, on rank 0 only."""
    if runtime.rank == 0:
        print(f"autoshard: {message}", file=sys.stderr, flush=True)
