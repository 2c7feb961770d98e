"""A local graph to something callable: Inductor, or the graph as it stands."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from autoshard import compat, randomness
from autoshard.outline import has_regions, outlined
from autoshard.program import Graph, Signature
from autoshard.retrace import Decompositions, retrace
from autoshard.runtime import Runtime, one_rank_per_machine_first

Compiled = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]

_BEAT = 15.0  # seconds
_purpose: ContextVar[str] = ContextVar("_purpose", default="")


def compile_graph(name: str, graph: Graph, backend: str, runtime: Runtime) -> tuple[Compiled, float]:
    """The callable for a graph and the seconds it took. It takes a list of local tensors and may empty it.

    A graph with regions (`autoshard.outline`) is interpreted around its compiled regions, any other compiled whole.
    """
    started = time.perf_counter()
    if backend == "debug":
        return _interpreted(graph.module), time.perf_counter() - started
    tell(runtime, f"compiling {name} ({len(graph.module.graph.nodes)} nodes) with Inductor{_purpose.get()} ...")
    with _heartbeat(runtime, f"still compiling {name}"), one_rank_per_machine_first(runtime):
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


@contextmanager
def compiled_for(what: str) -> Iterator[None]:
    """What is compiled within is announced as being for `what`."""
    token = _purpose.set(f", for {what}")
    try:
        yield
    finally:
        _purpose.reset(token)


@contextmanager
def _heartbeat(runtime: Runtime, message: str) -> Iterator[None]:
    """`message` and the seconds so far, time and again until the end of what runs within; on rank 0 only."""
    if runtime.rank != 0:
        yield
        return
    started, ended = time.perf_counter(), threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT):
            tell(runtime, f"{message}, {time.perf_counter() - started:.0f} s")

    thread = threading.Thread(target=beat, name="autoshard-compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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
