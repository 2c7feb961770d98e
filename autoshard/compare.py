"""A plan and one device side by side: what differs, by how much, and which pass and node made it differ.

The reference is the user's module in plain eager PyTorch, on this process, with the same global micro-batches in
order. An update is compared on its own: the user's optimizer steps the reference with the plan's gradients, so that
AdamW does not amplify the rounding of gradients that are almost zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard import batch as batches
from autoshard import locate
from autoshard.api import Step, parallelize
from autoshard.capture import Loss, Modules
from autoshard.compat import pytree
from autoshard.errors import AutoshardError, BatchError
from autoshard.locate import Difference, OneDevice
from autoshard.loss import Objective, as_objective
from autoshard.plan import Plan
from autoshard.program import Graph, tag
from autoshard.randomness import uniform_op
from autoshard.runtime import lost_rank_explained
from autoshard.state import State

# Relative to the norm of the reference: what reassociated sums may change, with a margin for deep models.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
_BUFFER_FLOOR = 1e-6  # of the largest buffer's norm: so too the running mean of what another norm has centred
_GRADIENT_FLOOR = 1e-6  # of the norm of the whole gradient: a gradient that is zero but for rounding has no digits


@dataclass(frozen=True)
class Row:
    """One comparison.

    Args:
        step: the optimizer step, from 1.
        kind: "initial", "loss", "gradient", "parameter" or "buffer".
        name: the model's own name.
        error: norm of the difference, relative to the reference's norm.
        tolerance: the largest error that counts as equal for this dtype.
    """

    step: int
    kind: str
    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Report:
    """What `verify` found; printing it gives a table.

    Args:
        rows: every comparison, in order.
        first: the first pass and node that differ, None where nothing does.
        notes: what the comparison could not cover, and why.
    """

    rows: tuple[Row, ...]
    first: Difference | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        wrong = [row for row in self.rows if not row.ok]
        verdict = "the plan computes what one device computes" if self.ok else f"{len(wrong)} comparisons differ"
        lines = [f"{verdict} ({len(self.rows)} comparisons)", ""]
        lines.append(f"{'kind':10} {'compared':>8} {'differ':>6} {'worst':>9} {'allowed':>9}  worst at")
        for kind in dict.fromkeys(row.kind for row in self.rows):
            rows = [row for row in self.rows if row.kind == kind]
            worst = max(rows, key=_badness)
            differ = sum(not row.ok for row in rows)
            lines.append(
                f"{kind:10} {len(rows):8} {differ:6} {worst.error:9.1e} {worst.tolerance:9.0e}  "
                f"{worst.name}, step {worst.step}"
            )
        lines += [
            f"  differs: {row.kind} {row.name} by {row.error:.1e} at step {row.step}"
            for row in sorted(wrong, key=_badness, reverse=True)[:8]
        ]
        if self.first is not None:
            lines += ["", str(self.first)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _badness(row: Row) -> float:
    return row.error / max(row.tolerance, 1e-16)


def verify(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    global_batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    steps: int = 1,
) -> Report:
    """Run a plan on this world's ranks and the same steps on one device, and compare. A collective call.

    Args:
        model: as for `parallelize`; it is copied, not consumed. Every rank holds the whole reference.
        global_batch: the whole global batch, the same on every rank. Its rows are global micro-batch 0, then 1, ...;
            rank r's chunk of a micro-batch of R x m rows is rows r x m to (r + 1) x m of it.
        loss, optimizer: as for `parallelize`. Without an optimizer only losses and gradients are compared.
        steps: optimizer steps, each on the same batch. It stops at the first step that differs.

    Compared are the initial values, and at every step the loss, every gradient before clipping, and every updated
    parameter and buffer, norm-wise, to `TOLERANCE` of the reference's dtype, or of a shorter one that the model itself
    rounds to on the way, which a note then says. Where they differ, every pass's program is run on the same values,
    and `Report.first` names the first pass and node whose values changed.

    Raises:
        AutoshardError: the arguments cannot work together.
        DivergenceError: the global batch differs between ranks.
    """
    if steps < 1:
        raise AutoshardError(f"verify: steps is {steps}; valid: an integer >= 1")
    if isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters()):
        raise AutoshardError(
            "verify: the model's parameters are on meta, so there is nothing to compare with. step.init consumes its "
            "module: call verify before it, or step.init(batch, keep_model=True), or pass a callable that builds one"
        )
    given = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    step = parallelize(given, plan, loss=loss, optimizer=optimizer)
    runtime, accumulate = step.runtime, step.plan.accumulate
    runtime.agree(_told(global_batch), _SAME_BATCH)
    local = local_batch(global_batch, runtime.data_coordinate, runtime.data_ranks, accumulate)
    state = step.init(local, keep_model=True)
    return _Verification(step, _reference_module(model, step), global_batch, local).run(state, steps)


_TENSOR = "the global batch's tensor "
_SAME_BATCH = {
    _TENSOR: "verify takes the whole global batch, the same on every rank, and gives each rank its slice of it"
}


def _told(global_batch: Any) -> str:
    """Every tensor of a batch by its content."""
    paths = [leaf.path for leaf in batches.describe(global_batch).leaves if leaf.shape is not None]
    found = zip(paths, batches.tensors(global_batch), strict=True)
    return "\n".join(f"{_TENSOR}{path} {list(t.shape)} with the digest {batches.digest(t)}" for path, t in found)


def local_batch(global_batch: Any, rank: int, ranks: int, accumulate: int) -> Any:
    """The slice of a whole global batch that data rank `rank` passes to its step.

    Raises:
        BatchError: accumulate x ranks does not divide the batch.
    """
    spec = batches.describe(global_batch)
    rows = spec.rows
    if rows is None:
        return global_batch
    if rows % (ranks * accumulate) or rows == 0:
        raise BatchError(
            f"the global batch has {rows} samples, which {ranks} data ranks x {accumulate} micro-batches do not "
            f"divide; give a multiple of {ranks * accumulate}"
        )
    each = rows // (ranks * accumulate)

    def slice_of(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0:
            return x
        return x.unflatten(0, (accumulate, ranks, each))[:, rank].flatten(0, 1)

    return pytree.tree_map(slice_of, global_batch, is_leaf=lambda x: isinstance(x, batches.Replicated))


def global_micro_batches(global_batch: Any, accumulate: int) -> Iterator[Any]:
    """Global micro-batches in order."""
    rows = batches.describe(global_batch).rows
    for k in range(accumulate):
        size = 0 if rows is None else rows // accumulate
        yield global_batch if rows is None else batches.take_rows(global_batch, k * size, (k + 1) * size)


def _reference_module(model: nn.Module | Callable[[], nn.Module], step: Step) -> nn.Module:
    """The module as one device has it: rank 0's weights, or built under the plan's seed."""
    device = step.runtime.device
    if isinstance(model, nn.Module):
        module = copy.deepcopy(model).to(device)
        for tensor in [*module.parameters(), *module.buffers()]:
            if dist.get_world_size() > 1 and tensor.numel():
                dist.broadcast(tensor.detach(), 0)
        return module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step.plan.seed)
        return model().to(device)


@dataclass(frozen=True)
class _Result:
    """Loss, gradients (absent without a path to the loss) and new buffers of one step."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class _Verification:
    def __init__(self, step: Step, module: nn.Module, global_batch: Any, local: Any) -> None:
        self.step = step
        self.module = module
        self.names = Modules(module, {})
        self.local = local
        on_device = pytree.tree_map(lambda x: x.to(step.runtime.device) if isinstance(x, Tensor) else x, global_batch)
        self.micro = list(global_micro_batches(on_device, step.plan.accumulate))
        self.training = step._latest()
        canonical = self.training.snapshots["canonicalize"].graphs["micro"]
        self.random = any(node.target is uniform_op for node in canonical.module.graph.nodes)
        self.optimizer = self._optimizer()
        self.rounding = _coarsest_rounding(self.training.captured.graph)
        least = 0.0 if self.rounding is None else TOLERANCE.get(self.rounding[1], 0.0)
        self.tolerance = {dtype: max(bound, least) for dtype, bound in TOLERANCE.items()}
        self.rows: list[Row] = []

    def run(self, state: State, steps: int) -> Report:
        for name, p in {**self.names.parameters(), **self.names.buffers()}.items():
            self._compare(1, "initial", name, state.full(name), p.detach())
        for number in range(1, steps + 1):
            before = pytree.tree_map(torch.clone, state)
            state, expected = self._one(state, number)
            if not self._everywhere(all(row.ok for row in self.rows)):
                return Report(tuple(self.rows), self._locate(before, expected), self._notes())
        return Report(tuple(self.rows), None, self._notes())

    def _one(self, state: State, number: int) -> tuple[State, _Result]:
        expected = self._reference(state.rng.clone())
        with lost_rank_explained():
            metrics, gradients = self.step.engine.whole_gradients(self.training, state, self.local)
        self._compare(number, "loss", "loss", metrics["loss"], expected.loss)
        whole = _norm(list(expected.gradients.values()))
        for name, p in self.names.parameters().items():
            ours, theirs = gradients.get(name), expected.gradients.get(name)
            if ours is None and theirs is None:
                continue
            nothing = torch.zeros_like(p)
            self._compare(
                number,
                "gradient",
                name,
                nothing if ours is None else ours,
                nothing if theirs is None else theirs,
                floor=_GRADIENT_FLOOR * whole,
            )
        if self.optimizer is None:
            return state, expected
        state, _ = self.step(state, self.local)
        self._update(gradients, expected.buffers)
        for name, p in self.names.parameters().items():
            self._compare(number, "parameter", name, state.full(name), p.detach())
        buffers = self.names.buffers()
        floor = _BUFFER_FLOOR * max((_norm([b]) for b in buffers.values()), default=0.0)
        for name, b in buffers.items():
            self._compare(number, "buffer", name, state.full(name), b, floor=floor)
        return state, expected

    # ---------------------------------------------------------------- one device

    def _reference(self, rng: Tensor) -> _Result:
        """One step's loss, gradients and buffers on one device; the module's own tensors stay as they are."""
        if self.random:
            return self._interpreted(rng)
        module = copy.deepcopy(self.module)
        counts = self._counts(module)
        total = torch.zeros((), dtype=torch.float64, device=rng.device)
        for micro in self.micro:
            value = _weighted(self._objective(module, micro), counts, len(self.micro))
            value.backward()
            total = total + value.detach()
        modules = Modules(module, {})
        found = {name: p.grad for name, p in modules.parameters().items() if p.grad is not None}
        return _Result(total, found, modules.buffers())

    def _interpreted(self, rng: Tensor) -> _Result:
        """The same from the canonical graph at global shapes, whose random numbers are the plan's."""
        program = self.training.snapshots["canonicalize"]
        values = {name: p.detach() for name, p in {**self.names.parameters(), **self.names.buffers()}.items()}
        one = OneDevice(self.training, values, [batches.tensors(m) for m in self.micro], rng)
        return _Result(*one.step(program))

    def _objective(self, module: nn.Module, micro: Any) -> Objective:
        return as_objective(self.step.loss(module, micro))

    def _counts(self, module: nn.Module) -> list[Any]:
        """Per loss term, its count over all micro-batches; a constant count is of each micro-batch."""
        if len(self.micro) == 1:
            return []
        trial = copy.deepcopy(module)
        counts: list[Any] = []
        with torch.no_grad():
            for micro in self.micro:
                found = [mean.count for mean in self._objective(trial, micro).terms]
                counts = [a + b for a, b in zip(counts, found, strict=True)] if counts else found
        return counts

    def _optimizer(self) -> torch.optim.Optimizer | None:
        binding = self.step.binding
        if binding is None:
            return None
        return binding.instantiate({name: p for name, p in self.names.parameters().items() if p.requires_grad})

    def _update(self, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        assert self.optimizer is not None
        parameters = self.names.parameters()
        for name, p in parameters.items():
            p.grad = gradients[name].clone() if name in gradients else None
        taken = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.step.plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(taken, self.step.plan.clip_norm)
        self.optimizer.step()
        for name, b in self.names.buffers().items():
            if name in buffers:
                b.copy_(buffers[name])

    # ---------------------------------------------------------------- comparing

    def _compare(self, step: int, kind: str, name: str, ours: Tensor, theirs: Tensor, floor: float = 0.0) -> None:
        table = TOLERANCE if kind == "initial" else self.tolerance
        tolerance = table.get(theirs.dtype if kind != "loss" else ours.dtype, 0.0)
        self.rows.append(Row(step, kind, name, locate.relative_error(ours, theirs, floor), tolerance))

    def _everywhere(self, ok: bool) -> bool:
        """Whether every rank says so; all take the same way from here."""
        found = torch.tensor([int(ok)], device=self.step.runtime.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found.item())

    def _locate(self, before: State, expected: _Result) -> Difference:
        values = {name: before.full(name) for name in [*before.params, *before.buffers]}
        one = OneDevice(self.training, values, [batches.tensors(m) for m in self.micro], before.rng)
        eager = None if self.random else (expected.loss, expected.gradients, expected.buffers)
        updated = {name: p.detach() for name, p in {**self.names.parameters(), **self.names.buffers()}.items()}
        wrong = {row.name: updated[row.name] for row in self.rows if not row.ok and row.kind in ("parameter", "buffer")}
        upstream = any(not row.ok and row.kind in ("loss", "gradient") for row in self.rows)
        finder = locate.Finder(self.step, self.training, one, before, self.local, self.tolerance, self._everywhere)
        return finder.find(eager, wrong, gradients_differ=upstream)

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.random:
            notes.append(
                "the model draws random numbers, which the plan makes by a counter and eager PyTorch by a generator; "
                "the reference is our own capture, run on one device, so the capture itself is not compared"
            )
        if self.rounding is not None:
            module, dtype = self.rounding
            short = str(dtype).removeprefix("torch.")
            notes.append(
                f"{module or 'the loss'} rounds to {short}, which turns a reordered sum upstream into a difference of "
                f"{short}'s last digit: all is compared to {short}'s bound"
            )
        if self.optimizer is None:
            notes.append("without an optimizer no parameter or buffer is updated, so none is compared")
        return tuple(notes)


def _weighted(objective: Objective, counts: Sequence[Any], micro_batches: int) -> Tensor:
    """One micro-batch's part of the loss of the whole batch, 0-dim."""
    parts = []
    for i, mean in enumerate(objective.terms):
        if micro_batches == 1:
            parts.append(mean.value)
        elif isinstance(mean.count, Tensor):
            parts.append(mean.total / counts[i])
        else:
            parts.append(mean.total / (mean.count * micro_batches))
    return torch.stack(parts).sum()


def _coarsest_rounding(graph: Graph) -> tuple[str, torch.dtype] | None:
    """The module that rounds floating-point values to the shortest dtype, and that dtype; None where none rounds."""
    found: tuple[str, torch.dtype] | None = None
    for node in graph.module.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        given = [n.meta.get("val") for n in node.all_input_nodes]
        eps = torch.finfo(value.dtype).eps
        longer = any(isinstance(t, Tensor) and t.is_floating_point() and torch.finfo(t.dtype).eps < eps for t in given)
        if longer and (found is None or eps > torch.finfo(found[1]).eps):
            found = tag(node).module, value.dtype
    return found


def _norm(tensors: Sequence[Tensor]) -> float:
    return sum(float(t.double().norm()) ** 2 for t in tensors) ** 0.5
