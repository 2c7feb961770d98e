"""Runs programs: micro-batches, update, evaluation. Owns no numerics of the model's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard import batch as batches
from autoshard import compat, moves, replicas
from autoshard.batch import BatchSpec
from autoshard.capture import Captured, Term
from autoshard.compat import pytree
from autoshard.compile import Compiled, compile_graph
from autoshard.errors import DivergenceError
from autoshard.manager import PassContext, run_passes
from autoshard.optim import Binding, EagerUpdate, LocalShard, Mode
from autoshard.passes.accumulate import accumulator
from autoshard.placement import REPLICATE, Partial, Shard
from autoshard.plan import Plan
from autoshard.program import Graph, Kind, Placements, Port, Program, Signature
from autoshard.retrace import clean, copied
from autoshard.runtime import Runtime
from autoshard.state import Key, Layout, State

if TYPE_CHECKING:
    from autoshard.api import Step

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class Executable:
    """A compiled graph with its signature and the seconds that compiling took."""

    signature: Signature
    run: Compiled
    seconds: float


@dataclass(frozen=True)
class Training:
    """Everything that one batch shape needs for a step."""

    spec: BatchSpec
    captured: Captured
    program: Program
    executables: Mapping[str, Executable]
    snapshots: Mapping[str, Program] = field(repr=False)

    @functools.cached_property
    def gradients(self) -> tuple[Port, ...]:
        """Gradient ports as the micro graph leaves them, accumulated or not."""
        return tuple(port for port in self.outcomes if port.kind is Kind.GRADIENT)

    @functools.cached_property
    def outcomes(self) -> tuple[Port, ...]:
        """Losses, extras and gradients, in the order of the lowered micro graph's outputs."""
        kinds = (Kind.LOSS, Kind.EXTRA, Kind.GRADIENT)
        return tuple(p for p in self.snapshots["lower"].graphs["micro"].signature.outputs if p.kind in kinds)

    @functools.cached_property
    def placed(self) -> dict[str, Placements]:
        """How `place` laid the parameters: whole on the data axis."""
        inputs = self.snapshots["place"].graphs["micro"].signature.find_inputs(Kind.PARAMETER)
        return {port.name: port.placements for _, port in inputs}

    @property
    def with_gradient(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.gradients)

    @property
    def program_text(self) -> str:
        return str(Program(self.program.graphs))

    @property
    def compile_seconds(self) -> float:
        return sum(e.seconds for e in self.executables.values())

    def snapshot(self, phase: str, after: str | None) -> Program:
        stage = after or list(self.snapshots)[-1]
        if stage not in self.snapshots:
            raise ValueError(f"no pass {stage!r}; valid: {', '.join(self.snapshots)}")
        program = self.snapshots[stage]
        if phase not in program.graphs:
            raise ValueError(f"no graph {phase!r} after {stage}; valid: {', '.join(program.graphs)}")
        return Program({phase: program.graphs[phase]}, program.history)


@dataclass(frozen=True)
class Evaluation:
    """A compiled forward pass."""

    captured: Captured
    program: Program
    executable: Executable


class Engine:
    """Runs compiled programs on this rank."""

    def __init__(
        self, runtime: Runtime, plan: Plan, binding: Binding | None, schedule: Callable[[Any], Any] | None
    ) -> None:
        self.runtime = runtime
        self.plan = plan
        self.binding = binding
        self.schedule = schedule
        self.eager = EagerUpdate(binding) if binding is not None and binding.mode is not Mode.GRAPH else None
        self.steps = 0  # taken in this process
        self.checked: set[BatchSpec] = set()  # of batches that were compared between the ranks that must share them
        self.coordinates = dict(zip((axis.name for axis in runtime.axes), runtime.coordinates, strict=True))

    # ---------------------------------------------------------------- building

    def build_training(self, captured: Captured, spec: BatchSpec, context: PassContext) -> Training:
        graphs = {"micro": captured.graph}
        if captured.weighted:
            graphs["prologue"] = _counts_only(captured)
        snapshots: dict[str, Program] = {}
        program = run_passes(Program(graphs), context, watch=snapshots.__setitem__)
        self._agree(program, captured)
        executables = {
            name: Executable(graph.signature, *compile_graph(name, graph, self.plan.backend, self.runtime))
            for name, graph in program.graphs.items()
        }
        return Training(spec, captured, program, executables, snapshots)

    def build_evaluation(
        self, kind: str, captured: Captured, spec: BatchSpec, context: PassContext, compiled: bool
    ) -> Evaluation:
        program = run_passes(Program({kind: captured.graph}), context)
        self._agree(program, captured)
        graph = program.graphs[kind]
        backend = self.plan.backend if compiled else "debug"
        executable = Executable(graph.signature, *compile_graph(kind, graph, backend, self.runtime))
        return Evaluation(captured, program, executable)

    def _agree(self, program: Program, captured: Captured) -> None:
        """Every rank runs the same graphs on the same constants."""
        closed_over = [
            f"constant {name}, which the loss or model closes over, with the digest {batches.digest(value)}"
            for name, value in captured.constants.items()
        ]
        self.runtime.agree("\n".join([*closed_over, f"program {Program(program.graphs)}"]))

    # ---------------------------------------------------------------- running

    def step(self, training: Training, state: State, batch: Any) -> tuple[State, Metrics]:
        self._check(training, state, batch)
        values, buffers, rng = self._micro_batches(training, state, batch)
        gradients = {port.name: values[port] for port in training.gradients}
        changed: dict[Key, Tensor] = {("buffers", name): value for name, value in buffers.items()}
        changed["rng",] = rng
        norm, lr = self._update(training, state, gradients)
        metrics = self._metrics(training, values)
        metrics["grad_norm"], metrics["lr"] = norm, lr
        return state.donate(changed), metrics

    def _check(self, training: Training, state: State, batch: Any) -> None:
        """That ranks hold the same where they must, before anything is changed.

        Raises:
            DivergenceError: they do not.
        """
        every = self.plan.check_replicas
        due = every is not None and self.steps % every == 0
        self.steps += 1
        if due or training.spec not in self.checked:
            self.check_batch(training.spec, batch)
        if due:
            replicas.check_state(self.runtime, state)

    def check_batch(self, spec: BatchSpec, batch: Any) -> None:
        self.checked.add(spec)
        replicas.check_batch(self.runtime, spec, batch)

    def gradients(self, training: Training, state: State, batch: Any) -> tuple[Metrics, dict[str, DTensor]]:
        metrics, found = self._gradients(training, state, batch)
        return metrics, {name: state.layout.as_dtensor(layout, local) for name, (layout, local) in found.items()}

    def whole_gradients(self, training: Training, state: State, batch: Any) -> tuple[Metrics, dict[str, Tensor]]:
        """As `gradients`, the whole of each on every rank."""
        metrics, found = self._gradients(training, state, batch)
        return metrics, {name: state.layout.whole(layout, local) for name, (layout, local) in found.items()}

    def _gradients(
        self, training: Training, state: State, batch: Any
    ) -> tuple[Metrics, dict[str, tuple[Layout, Tensor]]]:
        """Padded local shards of the gradients, summed over the axes on which they are partial."""
        if training.spec not in self.checked:
            self.check_batch(training.spec, batch)
        values, _, _ = self._micro_batches(training, state, batch)
        found, axes = {}, self.runtime.axes
        for port in training.gradients:
            reduced = tuple(REPLICATE if isinstance(p, Partial) else p for p in port.placements)
            local = moves.change(values[port], axes, port.placements, reduced, port.shape, self.runtime.coordinates)
            found[port.name] = Layout(port.shape, port.dtype, reduced), local
        return self._metrics(training, values), found

    def _micro_batches(
        self, training: Training, state: State, batch: Any
    ) -> tuple[dict[Port, Tensor], dict[str, Tensor], Tensor]:
        """Run every micro-batch. Returns losses, extras and gradients by port, new buffers, the new random key."""
        micro, count = training.executables["micro"], self.plan.accumulate
        pieces = [self._on_device(piece) for piece in batches.micro_batches(batch, training.spec, count)]
        rng = state.rng
        buffers: dict[str, Tensor] = {}
        held = {accumulator(port): self._zeros(port) for port in training.outcomes} if count > 1 else {}
        with batches.indices_explained(batch):
            weights = self._weights(training, state, pieces, rng)
        outputs: Sequence[Tensor] = ()
        for piece in pieces:
            args = self._arguments(micro.signature, training.captured, state, piece, rng, buffers, weights, held)
            with batches.indices_explained(batch):
                outputs = micro.run(args)
            for i, port in micro.signature.find_outputs(Kind.BUFFER):
                buffers[port.name] = outputs[i].contiguous()
            rng = rng + self._tick(rng)
        if count > 1:
            return {port: held[accumulator(port)] for port in training.outcomes}, buffers, rng
        found = zip(micro.signature.outputs, outputs, strict=True)
        return {port: value for port, value in found if port.kind is not Kind.BUFFER}, buffers, rng

    def _tick(self, rng: Tensor) -> Tensor:
        return torch.tensor([0, 1], dtype=rng.dtype, device=rng.device)

    def _zeros(self, port: Port) -> Tensor:
        shape = Layout(port.shape, port.dtype, port.placements).local_shape(self.runtime.axes)
        return torch.zeros(shape, dtype=port.dtype, device=self.runtime.device)

    def _on_device(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.to(self.runtime.device, non_blocking=True).contiguous() for t in tensors]

    def _weights(self, training: Training, state: State, pieces: list[list[Tensor]], rng: Tensor) -> list[Tensor]:
        """1 / count over all micro-batches, per loss term whose count is a tensor."""
        if "prologue" not in training.executables:
            return []
        prologue = training.executables["prologue"]
        totals: list[Tensor] = []
        for piece in pieces:
            args = self._arguments(prologue.signature, training.captured, state, piece, rng, {}, None, {})
            counts = [c.to(torch.float64) for c in prologue.run(args)]
            totals = [a + b for a, b in zip(totals, counts, strict=True)] if totals else counts
            rng = rng + self._tick(rng)
        return [1.0 / total for total in totals]

    def _arguments(
        self,
        signature: Signature,
        captured: Captured,
        state: State,
        piece: Sequence[Tensor],
        rng: Tensor,
        buffers: Mapping[str, Tensor],
        weights: Sequence[Tensor] | None,
        held: Mapping[Port, Tensor],
    ) -> list[Tensor]:
        batch = iter(piece)
        given = iter(weights or ())
        args: list[Tensor] = []
        for port in signature.inputs:
            match port.kind:
                case Kind.PARAMETER:
                    args.append(state.local(("params", port.name)))
                case Kind.BUFFER:
                    own = buffers.get(port.name)
                    args.append(own if own is not None else state.local(("buffers", port.name)))
                case Kind.BATCH:
                    args.append(next(batch))
                case Kind.WEIGHT:
                    args.append(
                        next(given) if weights is not None else torch.ones((), dtype=port.dtype, device=rng.device)
                    )
                case Kind.RNG:
                    args.append(rng)
                case Kind.CONSTANT:
                    args.append(captured.constants[port.name])
                case Kind.COORDINATE:
                    args.append(self.coordinates[port.name])
                case Kind.ACCUMULATOR:
                    args.append(held[port])
                case _:
                    raise AssertionError(port)
        return args

    # ---------------------------------------------------------------- update

    def _update(self, training: Training, state: State, gradients: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        epilogue = training.executables["epilogue"]
        args: list[Tensor] = []
        for port in epilogue.signature.inputs:
            match port.kind:
                case Kind.PARAMETER:
                    args.append(state.local(("params", port.name)))
                case Kind.GRADIENT:
                    args.append(gradients.pop(port.name).contiguous())
                case Kind.SLOT:
                    name, _, slot = port.name.rpartition(":")
                    args.append(state.local(("optimizer", name, slot)))
                case Kind.STEP:
                    args.append(state.step)
                case Kind.COORDINATE:
                    args.append(self.coordinates[port.name])
                case _:
                    raise AssertionError(port)
        before = int(state.step) if self.eager is not None else 0
        norm, lr, *reduced = epilogue.run(args)
        if self.eager is not None:
            self._eager_update(epilogue.signature, state, reduced, before)
        return norm, lr

    def _eager_update(self, signature: Signature, state: State, reduced: list[Tensor], before: int) -> None:
        """The optimizer's own step on shards; parameters that are whole on the data axis are gathered again."""
        assert self.eager is not None
        axes, coordinates = self.runtime.axes, self.runtime.coordinates
        params: dict[str, LocalShard] = {}
        grads: dict[str, Tensor] = {}
        slots: dict[str, dict[str, Tensor]] = {}
        moved: list[Port] = []
        ports = [port for _, port in signature.find_outputs(Kind.GRADIENT)]
        for port, gradient in zip(ports, reduced, strict=True):
            at_rest = state.layout.layouts["params", port.name].placements
            held = state.local(("params", port.name))
            local = moves.change(held, axes, at_rest, port.placements, port.shape, coordinates)
            if at_rest != port.placements:
                moved.append(port)
            split = [i for i, p in enumerate(port.placements) if isinstance(p, Shard)]
            params[port.name] = LocalShard(
                local,
                port.shape,
                tuple(port.placements[i] for i in split),
                tuple(axes[i].ranks for i in split),
                tuple(state.layout.coordinates[axes[i].name] for i in split),
                self.runtime.group_of(split),
            )
            grads[port.name] = gradient
            slots[port.name] = {
                key[2]: state.local(key) for key in state.layout.layouts if key[:2] == ("optimizer", port.name)
            }
        factor = 1.0 if self.schedule is None else float(self.schedule(before))
        self.eager.step(params, grads, slots, lr_factor=factor, first=before == 0)
        for port in moved:
            at_rest = state.layout.layouts["params", port.name].placements
            new = moves.change(params[port.name].local, axes, port.placements, at_rest, port.shape, coordinates)
            state.local(("params", port.name)).copy_(new)

    # ---------------------------------------------------------------- metrics

    def _metrics(self, training: Training, values: Mapping[Port, Tensor]) -> Metrics:
        found: dict[tuple[Kind, str], Tensor] = {(p.kind, p.name): v for p, v in values.items()}
        captured, count = training.captured, self.plan.accumulate
        losses = list(_means(Kind.LOSS, captured.terms, found, count))
        extras = list(_means(Kind.EXTRA, captured.extras, found, count))
        return self._report(captured, losses, extras, (training.spec.rows or 0) * self.runtime.data_ranks)

    def _report(
        self,
        captured: Captured,
        losses: Sequence[tuple[Tensor, Any]],
        extras: Sequence[tuple[Tensor, Any]],
        rows: int,
    ) -> Metrics:
        """Metrics from the (total, count) of every loss term and extra, summed over ranks and pieces.

        "tokens" is the sum of the counts that are tensors, as a `Mean` over tokens has.
        """
        metrics = {"loss": _total([total / n for total, n in losses])}
        metrics |= {term.name: total / n for term, (total, n) in zip(captured.extras, extras, strict=True)}
        metrics["samples"] = torch.tensor(rows, device=self.runtime.device)
        counted = [n for term, (_, n) in zip(captured.terms, losses, strict=True) if term.constant_count is None]
        if counted:
            metrics["tokens"] = _total([torch.as_tensor(n) for n in counted])
        return metrics

    # ---------------------------------------------------------------- evaluation

    def forward(self, evaluation: Evaluation, state: State, call: Any) -> Any:
        outputs = self._run_evaluation(evaluation, state, call)
        tree, count, static = evaluation.captured.result
        tensors = iter(t.clone() for t in outputs)
        return pytree.tree_unflatten([static[i] if i in static else next(tensors) for i in range(count)], tree)

    def _run_evaluation(self, evaluation: Evaluation, state: State, batch: Any) -> tuple[Tensor, ...]:
        executable = evaluation.executable
        piece = self._on_device(batches.tensors(batch))
        args = self._arguments(executable.signature, evaluation.captured, state, piece, state.rng, {}, None, {})
        with batches.indices_explained(batch):
            return executable.run(args)

    def evaluate(self, step: Step, state: State, batch: Any) -> Metrics:
        """Full pieces run as in training; what is left over all ranks is gathered and run on every rank."""
        sums: list[tuple[Tensor, Any]] = []
        captured: Captured | None = None
        seen = 0
        for piece, rows, compiled in self._pieces(step, batch):
            evaluation = step.evaluation_program(piece, compiled=compiled)
            outputs = self._run_evaluation(evaluation, state, piece)
            ports = evaluation.executable.signature.outputs
            found: dict[tuple[Kind, str], Tensor] = {}
            found.update({(p.kind, p.name): v for p, v in zip(ports, outputs, strict=True)})
            captured = evaluation.captured
            terms = (*captured.terms, *captured.extras)
            values = [
                *_means(Kind.LOSS, captured.terms, found, 1),
                *_means(Kind.EXTRA, captured.extras, found, 1),
            ]
            for i, term in enumerate(terms):
                if term.constant_count is not None:  # a plain scalar is a mean over the rows
                    total, n = values[i]
                    values[i] = total / n * rows, rows
            sums = [(a + c, b + d) for (a, b), (c, d) in zip(sums, values, strict=True)] if sums else values
            seen += rows
        if captured is None:
            return {"samples": torch.tensor(seen, device=self.runtime.device)}
        return self._report(captured, sums[: len(captured.terms)], sums[len(captured.terms) :], seen)

    def _pieces(self, step: Step, batch: Any) -> Iterator[tuple[Any, int, bool]]:
        """(piece, its rows over all ranks, whether to compile for it)."""
        spec = batches.describe(batch)
        if spec.rows is None:
            yield batch, 1, True
            return
        rows = spec.rows
        ranks = self.runtime.data_ranks
        sizes = self._sizes(rows)
        trained = next(reversed(step._training), None)
        piece = min((trained.rows or 1) // self.plan.accumulate if trained else min(sizes), max(min(sizes), 1))
        full = min(sizes) // piece
        for i in range(full):
            yield batches.take_rows(batch, i * piece, (i + 1) * piece), piece * ranks, True
        rest = batches.take_rows(batch, full * piece, rows)
        left = sum(sizes) - full * piece * ranks
        if not left:
            return
        whole = self._gathered(rest) if ranks > 1 else rest
        for start in range(0, left, piece * ranks):
            stop = min(start + piece * ranks, left)
            yield batches.all_replicated(batches.take_rows(whole, start, stop)), stop - start, False

    def _sizes(self, rows: int) -> list[int]:
        """The rows of each data rank; ranks that differ on the other axes only have the same ones.

        Raises:
            DivergenceError: they have not.
        """
        found = torch.empty(dist.get_world_size(), dtype=torch.int64)
        compat.all_gather(found, torch.tensor([rows]), self.runtime.control)
        sizes: dict[int, tuple[int, int]] = {}
        for rank, size in enumerate(found.tolist()):
            first, expected = sizes.setdefault(self.runtime.mesh.coordinates(rank)["data"], (rank, size))
            if size != expected:
                raise DivergenceError(
                    f"evaluate: rank {first} has {expected} samples and rank {rank} has {size}, though they have the "
                    "same data coordinate; give both the same rows (autoshard.data.data_rank says which)"
                )
        return [sizes[data][1] for data in range(self.runtime.data_ranks)]

    def _gathered(self, rest: Any) -> Any:
        """Every data rank's rows, in their order, on every rank."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            parts, pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, rest), group=self.runtime.control
        )

        def joined(*leaves: Any) -> Any:
            first = leaves[0]
            return torch.cat(leaves) if isinstance(first, Tensor) and first.dim() > 0 else first

        slices = [parts[rank] for rank in self.runtime.peers("data")]
        return pytree.tree_map(joined, *slices, is_leaf=lambda x: isinstance(x, batches.Replicated))


def _means(
    kind: Kind, terms: Sequence[Term], found: Mapping[tuple[Kind, str], Tensor], micro_batches: int
) -> Iterator[tuple[Tensor, Any]]:
    """(total, count) of each term over the micro-batches that were summed."""
    for i, term in enumerate(terms):
        total = found[kind, f"{term.name}.{i}.total"]
        if term.constant_count is not None:
            yield total, term.constant_count * micro_batches
        else:
            yield total, found[kind, f"{term.name}.{i}.count"]


def _total(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _counts_only(captured: Captured) -> Graph:
    """The captured graph cut down to the counts of the loss terms that need a weight."""
    graph = captured.graph
    module = copied(graph).module
    wanted = {f"loss.{i}.count" for i in map(int, captured.weighted)}
    kept = [i for i, port in enumerate(graph.signature.outputs) if port.kind is Kind.LOSS and port.name in wanted]
    output = next(iter(reversed(module.graph.nodes)))
    output.args = (tuple(output.args[0][i] for i in kept),)
    clean(module)
    return Graph(module, Signature(graph.signature.inputs, tuple(graph.signature.outputs[i] for i in kept)))
