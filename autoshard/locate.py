"""Which pass and node made a program compute something else: every pass's program, run on the same values.

Programs up to `zero` have global shapes and run on one process. What `lower` made is run on every rank, and each
node's local values are put together again as its placements say. A node is named by walking back from an output
that differs, through nodes whose value does not occur in the program before, to the earliest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autoshard import batch as batches
from autoshard import moves
from autoshard.api import Step
from autoshard.compile import compile_graph
from autoshard.engine import Executable, Training
from autoshard.passes.place import redistribute
from autoshard.placement import REPLICATE, Partial, Shard
from autoshard.program import TAG, Graph, Kind, Placements, Program, Tag, tag
from autoshard.state import State

Outcome = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]  # loss, gradients, new buffers
Values = dict[fx.Node, Any]

_GLOBAL = ("capture", "canonicalize", "place", "zero")


@dataclass(frozen=True)
class Difference:
    """The first pass after which a program computes something else.

    Args:
        pass_name: a pass, "capture", "compile" (the backend), or "step" (the code that runs programs).
        graph: the graph that differs.
        node: the first node whose value the program before did not have, "" where no node can be blamed.
        module: path of the module that owns the node.
        output: the output in which it shows.
        error: relative error of that output.
        detail: the node's op, placements and rule, and what to look at.
    """

    pass_name: str
    graph: str
    node: str
    module: str
    output: str
    error: float
    detail: str

    def __str__(self) -> str:
        where = f"node {self.node} of graph {self.graph}" if self.node else f"graph {self.graph}"
        return (
            f"first difference: pass {self.pass_name}, {where}, in {self.module or 'the loss or root module'}\n"
            f"  it shows in {self.output}{'' if math.isnan(self.error) else f' by {self.error:.1e}'}\n  {self.detail}"
        )


def relative_error(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """The norm of the difference over the norm of `theirs` (at least `floor`); infinite where only one is finite."""
    a, b = ours.detach().double(), theirs.detach().double()
    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), a - b).norm()
    if not bool(difference.isfinite()):
        return float("inf")
    scale = max(float(torch.where(b.isfinite(), b, torch.zeros_like(b)).norm()), floor)
    return 0.0 if float(difference) == 0 else float(difference) / max(scale, 1e-300)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def values(self, args: Sequence[Any]) -> Values:
        with torch.no_grad():
            self.run(*args)
        return dict(self.env)


def _run(graph: Graph, args: Sequence[Any]) -> Sequence[Tensor]:
    """A graph's outputs. Its generated code would not know the placements that are arguments of redistribute nodes."""
    with torch.no_grad():
        found: Sequence[Tensor] = fx.Interpreter(graph.module).run(*args)
    return found


class OneDevice:
    """Runs programs of global shapes on one process.

    Args:
        training: whose captured graph says what the ports mean.
        values: whole parameters and buffers by name.
        micro: the tensors of each global micro-batch.
        rng: the random key of the first micro-batch.
    """

    def __init__(
        self, training: Training, values: Mapping[str, Tensor], micro: Sequence[Sequence[Tensor]], rng: Tensor
    ) -> None:
        self.training = training
        self.given = values
        self.micro = micro
        self.rng = rng

    def arguments(self, graph: Graph, k: int, buffers: Mapping[str, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        batch, given = iter(self.micro[k]), iter(weights)
        args: list[Tensor] = []
        for port in graph.signature.inputs:
            match port.kind:
                case Kind.PARAMETER:
                    args.append(self.given[port.name])
                case Kind.BUFFER:
                    args.append(buffers.get(port.name, self.given[port.name]))
                case Kind.BATCH:
                    args.append(next(batch))
                case Kind.WEIGHT:
                    args.append(next(given, torch.ones((), dtype=port.dtype, device=self.rng.device)))
                case Kind.RNG:
                    args.append(self.rng + torch.tensor([0, k], device=self.rng.device))
                case Kind.CONSTANT:
                    args.append(self.training.captured.constants[port.name])
                case _:
                    raise AssertionError(port)
        return args

    def weights(self, program: Program) -> list[Tensor]:
        """1 / count over all micro-batches, per loss term whose count is a tensor."""
        prologue = program.graphs.get("prologue")
        if prologue is None:
            return []
        totals: list[Tensor] = []
        for k in range(len(self.micro)):
            counts = [c.double() for c in _run(prologue, self.arguments(prologue, k, {}, []))]
            totals = [a + b for a, b in zip(totals, counts, strict=True)] if totals else counts
        return [1.0 / total for total in totals]

    def step(self, program: Program) -> Outcome:
        """Loss, gradients and new buffers of all micro-batches."""
        graph, weights = program.graphs["micro"], self.weights(program)
        buffers: dict[str, Tensor] = {}
        sums: dict[tuple[Kind, str], Tensor] = {}
        for k in range(len(self.micro)):
            outputs = _run(graph, self.arguments(graph, k, buffers, weights))
            for port, value in zip(graph.signature.outputs, outputs, strict=True):
                if port.kind is Kind.BUFFER:
                    buffers[port.name] = value
                else:
                    key = (port.kind, port.name)
                    sums[key] = sums[key] + value if key in sums else value
        loss = torch.zeros((), dtype=torch.float64, device=self.rng.device)
        for i, term in enumerate(self.training.captured.terms):
            count = term.constant_count
            n: Any = sums[Kind.LOSS, f"loss.{i}.count"] if count is None else count * len(self.micro)
            loss = loss + sums[Kind.LOSS, f"loss.{i}.total"] / n
        return loss, {name: g for (kind, name), g in sums.items() if kind is Kind.GRADIENT}, buffers

    def record(self, graph: Graph, weights: Sequence[Tensor]) -> Values:
        """Every node's value in the first micro-batch."""
        return _Recorder(graph.module).values(self.arguments(graph, 0, {}, weights))


class Finder:
    """Looks for the first pass and node that differ."""

    def __init__(
        self,
        step: Step,
        training: Training,
        one: OneDevice,
        state: State,
        local: Any,
        tolerance: Mapping[torch.dtype, float],
        everywhere: Callable[[bool], bool],
    ) -> None:
        self.step = step
        self.training = training
        self.one = one
        self.state = state
        self.local = local
        self.tolerance = tolerance
        self.everywhere = everywhere

    def find(self, eager: Outcome | None, updated: Mapping[str, Tensor], *, gradients_differ: bool) -> Difference:
        """
        Args:
            eager: what one device computed; None where it cannot be compared with a capture.
            updated: what one device has after the update, of the parameters and buffers that differ then.
            gradients_differ: the loss or a gradient does, too.
        """
        snapshots = self.training.snapshots
        names = [name for name in _GLOBAL if name in snapshots]
        if eager is None:
            names = [name for name in names if name != "capture"]
        else:
            found = self._outcome_difference("capture", eager, self.one.step(snapshots["capture"]))
            if found is not None:
                return found
        last = names[0]
        weights = self.one.weights(snapshots[last])
        for graph in self._graphs(snapshots[last]):
            before = self.one.record(snapshots[last].graphs[graph], weights)
            previous = last
            for name in names[1:]:
                now = self.one.record(snapshots[name].graphs[graph], weights)
                difference = self._compare(name, graph, previous, before, now)
                if difference is not None:
                    return difference
                before, previous = now, name
            difference = self._compare("lower", graph, previous, before, self._lowered(graph, weights))
            if difference is not None:
                return difference
        return self._after_lower(last, updated, gradients_differ)

    @staticmethod
    def _graphs(program: Program) -> list[str]:
        return [name for name in ("prologue", "micro") if name in program.graphs]

    # ---------------------------------------------------------------- graphs of one micro-batch

    def _compare(self, name: str, graph: str, previous: str, before: Values, now: Values) -> Difference | None:
        """What pass `name` changed in the values of a graph, if anything."""
        earlier = self.training.snapshots[previous].graphs[graph]
        later = self.training.snapshots[name].graphs[graph]
        old = {(p.kind, p.name): before[n] for n, p in _outputs(earlier)}
        known = _Known(before, self.tolerance)
        for node, port in sorted(_outputs(later), key=lambda item: item[1].kind is Kind.GRADIENT):
            error = relative_error(now[node], old[port.kind, port.name], self._floor(port.kind, old))
            if self.everywhere(error <= self._allowed(now[node])):
                continue
            first = _earliest(node, now, known)
            return self._named(name, graph, first, f"{port.kind.value} {port.name}", error)
        return None

    @staticmethod
    def _floor(kind: Kind, values: Mapping[tuple[Kind, str], Tensor]) -> float:
        if kind is not Kind.GRADIENT:
            return 0.0
        norms = [float(v.double().norm()) for (k, _), v in values.items() if k is Kind.GRADIENT]
        return 1e-6 * sum(norm**2 for norm in norms) ** 0.5

    def _allowed(self, value: Tensor) -> float:
        return self.tolerance.get(value.dtype, 0.0)

    def _named(self, name: str, graph: str, node: fx.Node, output: str, error: float) -> Difference:
        found: Tag | None = node.meta.get(TAG)
        placements = " | ".join(" ".join(map(str, p)) for p in found.placements) if found else ""
        detail = f"{node.name} = {node.target}"
        if placements:
            detail += f", placements {placements}"
        if found is not None and found.rule:
            detail += f", rule: {found.rule}"
        if name == "lower" and node.target is not redistribute and found is not None and found.role is None:
            detail += "\n  its shards do not make up the whole op's value: look at its row in autoshard/rules/table.py"
        return Difference(name, graph, node.name, found.module if found else "", output, error, detail)

    def _lowered(self, graph: str, weights: Sequence[Tensor]) -> Values:
        """Every node of the local graph, put together from all ranks; as it is where its placements do not fit it."""
        lowered = self.training.snapshots["lower"].graphs[graph]
        engine, spec = self.step.engine, self.training.spec
        piece = next(batches.micro_batches(self.local, spec, self.step.plan.accumulate))
        piece = [t.to(self.step.runtime.device).contiguous() for t in piece]
        args = engine._arguments(
            lowered.signature, self.training.captured, self.state, piece, self.state.rng, {}, list(weights), {}
        )
        values = _Recorder(lowered.module).values(args)
        ports = dict(zip(lowered.placeholders(), lowered.signature.inputs, strict=True))
        leaving = dict(_outputs(lowered))
        whole: Values = {}
        for node in lowered.module.graph.nodes:
            value = values.get(node)
            if not isinstance(value, Tensor):
                continue
            port = leaving.get(node) or ports.get(node)
            if port is not None:
                placements, shape = port.placements, port.shape
            else:
                placements, shape = _placements(node), None
            whole[node] = self._together(value, placements, shape)
        return whole

    def _together(self, local: Tensor, placements: Placements, shape: tuple[int, ...] | None) -> Tensor:
        mesh, axes = self.step.runtime.device_mesh, self.step.runtime.axes
        left = list(placements)
        for i, axis in reversed(list(enumerate(axes[: len(placements)]))):
            placement, left[i] = moves.within(left, axes, i), REPLICATE
            parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(axis.ranks)]
            dist.all_gather(parts, local.contiguous(), group=mesh.get_group(axis.name))
            if isinstance(placement, Partial):
                stacked = torch.stack(parts)
                summed = {"max": stacked.amax(0), "min": stacked.amin(0)} if placement.op != "sum" else {}
                local = summed.get(placement.op, stacked.sum(0))
            elif isinstance(placement, Shard) and placement.dim < local.dim():
                if local.shape[placement.dim] % placement.outer:
                    continue
                split = [p.unflatten(placement.dim, (placement.outer, -1)) for p in parts]
                local = torch.cat(split, placement.dim + 1).flatten(placement.dim, placement.dim + 1)
                if shape is not None and local.shape[placement.dim] > shape[placement.dim]:
                    local = local.narrow(placement.dim, 0, shape[placement.dim])
        return local

    # ---------------------------------------------------------------- what runs the graphs

    def _after_lower(self, base: str, updated: Mapping[str, Tensor], gradients_differ: bool) -> Difference:
        runtime = self.step.runtime
        debug = {
            name: Executable(graph.signature, *compile_graph(name, graph, "debug", runtime))
            for name, graph in self.training.program.graphs.items()
        }
        uncompiled = dataclasses.replace(self.training, executables=debug)
        engine = self.step.engine
        if gradients_differ:
            metrics, gradients = engine.whole_gradients(uncompiled, self.state, self.local)
            ours: Outcome = (metrics["loss"], gradients, {})
            expected = self.one.step(self.training.snapshots[base])
            name = "accumulate" if self.step.plan.accumulate > 1 else "step"
            found = self._outcome_difference(name, expected, ours)
            return found or self._unnamed("compile", "micro", "the loss or a gradient")
        state, _ = engine.step(uncompiled, self.state, self.local)
        right = [relative_error(state.full(name), value) <= self._allowed(value) for name, value in updated.items()]
        if self.everywhere(all(right)):
            return self._unnamed("compile" if updated else "step", "epilogue", ", ".join(updated) or "the step")
        return self._update_node(list(updated))

    def _update_node(self, parameters: list[str]) -> Difference:
        """The write of the first parameter that differs, though its gradient does not."""
        epilogue = self.training.program.graphs.get("epilogue")
        if epilogue is None:
            return self._unnamed("step", "micro", "the step")
        held = dict(zip(epilogue.placeholders(), epilogue.signature.inputs, strict=True))
        for node in epilogue.module.graph.nodes:
            if node.target is torch.ops.aten.copy_.default and held[node.args[0]].name in parameters:
                name = held[node.args[0]].name
                detail = f"its gradient is right, and {len(parameters)} updated values are not"
                return Difference(
                    "update", "epilogue", node.name, tag(node).module, f"parameter {name}", math.nan, detail
                )
        return self._unnamed("step", "epilogue", f"parameter or buffer {parameters[0]}")

    @staticmethod
    def _unnamed(name: str, graph: str, output: str) -> Difference:
        return Difference(name, graph, "", "", output, math.nan, "every graph computes what the one before does")

    def _outcome_difference(self, name: str, expected: Outcome, found: Outcome) -> Difference | None:
        """The first of loss, buffers and gradients that differs, with the node that returns it."""
        graph = self.training.snapshots["capture"].graphs["micro"]
        floor = 1e-6 * sum(float(g.double().norm()) ** 2 for g in expected[1].values()) ** 0.5
        pairs: list[tuple[Kind, str, Tensor, Tensor, float]] = [(Kind.LOSS, "loss.0.total", expected[0], found[0], 0.0)]
        pairs += [(Kind.BUFFER, n, expected[2][n], b, 0.0) for n, b in found[2].items() if n in expected[2]]
        pairs += [
            (Kind.GRADIENT, n, expected[1][n], g, floor) for n, g in reversed(found[1].items()) if n in expected[1]
        ]
        for kind, output, theirs, ours, least in pairs:
            error = relative_error(ours, theirs, least)
            if self.everywhere(error <= self.tolerance.get(theirs.dtype if kind is not Kind.LOSS else ours.dtype, 0.0)):
                continue
            node = next(n for n, port in _outputs(graph) if (port.kind, port.name) == (kind, output))
            return self._named(name, "micro", node, f"{kind.value} {output}", error)
        return None


def _outputs(graph: Graph) -> list[tuple[fx.Node, Any]]:
    return list(zip(graph.output_nodes(), graph.signature.outputs, strict=True))


def _placements(node: fx.Node) -> Placements:
    found: Tag | None = node.meta.get(TAG)
    return found.placements[0] if found is not None and found.placements else ()


class _Known:
    """The values of one program, to be found again in the next: by node name, else by value."""

    def __init__(self, values: Values, tolerance: Mapping[torch.dtype, float]) -> None:
        self.tolerance = tolerance
        self.by_size: dict[int, list[tuple[float, Tensor]]] = {}
        for value in _tensors(values.values()):
            self.by_size.setdefault(value.numel(), []).append((float(value.double().norm()), value))

    def has(self, value: Any) -> bool:
        """Whether every tensor in `value` is a value of the program, in this shape or another of its size."""
        return all(self._has(t) for t in _tensors([value]))

    def _has(self, value: Tensor) -> bool:
        allowed = self.tolerance.get(value.dtype, 0.0)
        norm = float(value.double().norm())
        for other, candidate in self.by_size.get(value.numel(), ()):
            near = abs(norm - other) <= 2 * allowed * max(norm, other) or norm == other
            if near and relative_error(value.flatten(), candidate.flatten()) <= allowed:
                return True
        return False


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


def _earliest(output: fx.Node, values: Values, known: _Known) -> fx.Node:
    """The first node, in graph order, of those that `output` depends on through values that are not known."""
    order = {node: i for i, node in enumerate(output.graph.nodes)}
    unknown: set[fx.Node] = {output}
    waiting = [output]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source in unknown or source.op == "placeholder":
                continue
            if source not in values or not known.has(values[source]):
                unknown.add(source)
                waiting.append(source)
    return min(unknown, key=order.__getitem__)
