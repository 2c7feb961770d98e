"""A local graph to something callable: Inductor, or the graph as it stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from autoshard import compat, randomness
from autoshard.program import Graph
from autoshard.retrace import retrace
from autoshard.runtime import Runtime, one_rank_per_machine_first

Compiled = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]


def decompose(graph: Graph) -> Graph:
    """The last change of ops: Inductor's decompositions, and random draws to integer arithmetic."""
    table: dict[Any, Callable[..., Any]] = compat.inductor_decompositions()
    table[randomness.uniform_op] = randomness.uniform_reference
    return retrace(graph, table)


def compile_graph(name: str, graph: Graph, backend: str, runtime: Runtime) -> tuple[Compiled, float]:
    """The callable for a graph and the seconds it took. It takes a list of local tensors and may empty it."""
    started = time.perf_counter()
    if backend == "debug":
        module = graph.module

        def interpret(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return tuple(module(*args))

        return interpret, time.perf_counter() - started
    nodes = len(graph.module.graph.nodes)
    tell(runtime, f"compiling {name} ({nodes} nodes) with Inductor ...")
    with one_rank_per_machine_first(runtime):
        lowered = decompose(graph)
        inputs = [node.meta["val"] for node in lowered.placeholders()]
        run = compat.compile_inductor(lowered.module, inputs)

    def call(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(run(args))

    seconds = time.perf_counter() - started
    tell(runtime, f"compiled {name} in {seconds:.1f} s")
    return call, seconds


def tell(runtime: Runtime, message: str) -> None:
    """A line of progress, on rank 0 only."""
    if runtime.rank == 0:
        print(f"autoshard: {message}", file=sys.stderr, flush=True)
