"""One model of the zoo under one plan on every rank, and its comparison with one device.

`run_case` is what a rank runs; `compare` is what the test and the matrix make of it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.cost import Cost
from autoshard.program import Role
from tests import reference
from tests.zoo import ModelCase, find_case

STEPS = 5
ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)

# Bounds, float64. A gradient is compared norm-wise, with a floor for those that are zero but for rounding (a bias
# before a batch norm, an attention key's bias): reordering the samples on one device moves those by more than 100%.
LOSS = 1e-8
LOSS_IN_FLOAT32 = 2e-6  # transformers computes some losses in float32 whatever the model's dtype
GRADIENT = 1e-8
GRADIENT_FLOOR = 1e-6  # of the norm of the whole gradient
BUFFER = 1e-8
PARAMETER = 1e-4


@dataclass(frozen=True)
class Combination:
    """A model, a stage and how it is run.

    Args:
        ranks: data ranks; the global batch is the case's size times `accumulate`.
        threshold: `Zero.persistence_threshold`, in elements.
        optimizer: factory; a module-level function or a partial of one, since it travels to the ranks.
    """

    name: str
    stage: int
    backend: str = "debug"
    ranks: int = 2
    accumulate: int = 1
    steps: int = STEPS
    clip_norm: float | None = None
    threshold: int = 0
    optimizer: reference.OptimizerFactory = ADAMW
    schedule: reference.Schedule | None = None

    def __str__(self) -> str:
        extra = [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        extra += [self.backend] if self.backend != "debug" else []
        return "-".join([self.name, f"zero{self.stage}", *extra])

    @property
    def case(self) -> ModelCase:
        return find_case(self.name)

    def batches(self) -> list[Any]:
        return self.case.batches(self.steps, micro_batches=self.accumulate)

    def plan(self) -> Any:
        import autoshard

        return autoshard.Plan(
            mesh=autoshard.Mesh(data=self.ranks),
            zero=autoshard.Zero(stage=self.stage, persistence_threshold=self.threshold),
            accumulate=self.accumulate,
            clip_norm=self.clip_norm,
            backend=self.backend,
            device="cpu",
        )

    def parallelize(self) -> Any:
        import autoshard

        case = self.case
        return autoshard.parallelize(
            case.model(), self.plan(), loss=case.loss, optimizer=self.optimizer, schedule=self.schedule
        )

    def slices(self, rank: int) -> list[Any]:
        """What `rank` passes to its steps."""
        return [reference.rank_slice(batch, rank, self.ranks) for batch in self.batches()]

    def on_one_device(self) -> reference.Trace:
        """What one device computes, whatever the stage or backend."""
        return _on_one_device(dataclasses.replace(self, stage=0, backend="debug", threshold=0))


@functools.cache
def _on_one_device(combination: Combination) -> reference.Trace:
    recipe = reference.Recipe(
        combination.ranks,
        combination.accumulate,
        combination.clip_norm,
        combination.optimizer,
        combination.schedule,
    )
    return reference.train(combination.case.model(), combination.batches(), recipe, combination.case.loss)


@dataclass(frozen=True)
class Measured:
    """What one rank saw. `values` are whole tensors and only rank 0 sends them.

    Args:
        losses, grad_norms, metrics: one per step.
        gradients: of the first batch at the initial parameters, by name.
        parameters, buffers: after the last step, by name.
        at_rest: bytes of parameters, buffers and optimizer state that this rank really holds, padding counted.
        cost: `step.cost()`.
        seconds: to trace, rewrite and compile; per step.
    """

    losses: list[float]
    grad_norms: list[float]
    metrics: list[dict[str, float]]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    buffers_agree: bool
    at_rest: int
    cost: Cost
    seconds: tuple[float, float]


def run_case(combination: Combination) -> Measured:
    """Train one model of the zoo on this rank. Call it on every rank."""
    rank = dist.get_rank()
    step = combination.parallelize()
    batches = combination.slices(rank)
    started = time.monotonic()
    state = step.init(batches[0])
    ready = time.monotonic()
    _, sharded = step.gradients(state, batches[0])
    gradients = {name: gradient.full_tensor() for name, gradient in sharded.items()}
    losses, norms, extras = [], [], []
    begun = time.monotonic()
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        extras.append({name: float(value) for name, value in metrics.items()})
    ended = time.monotonic()
    parameters = {name: state.full(name) for name in state.params}
    buffers = {name: state.full(name) for name in state.buffers}
    cost = step.cost()
    first = rank == 0
    return Measured(
        losses=losses,
        grad_norms=norms,
        metrics=extras,
        gradients=gradients if first else {},
        parameters=parameters if first else {},
        buffers=buffers if first else {},
        buffers_agree=_agree(buffers),
        at_rest=held_bytes(state),
        cost=cost,
        seconds=(ready - started, (ended - begun) / len(batches)),
    )


def held_bytes(state: Any) -> int:
    """Bytes of memory that the tensors of a state really hold on this rank, padding counted."""
    tensors = [*state.params.values(), *state.buffers.values()]
    tensors += [slot for slots in state.optimizer.values() for slot in slots.values()]
    local = [state.step, state.rng, *(tensor.to_local() for tensor in tensors)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def _agree(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all ranks hold the same bits."""
    for value in tensors.values():
        everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, value.contiguous())
        if not all(torch.equal(value, other) for other in everyone):
            return False
    return True


@dataclass(frozen=True)
class Errors:
    """How far a run is from one device; every number has its bound in this module."""

    loss: float
    gradient: float
    gradient_name: str
    buffer: float
    buffer_name: str
    parameter: float
    parameter_name: str
    ranks_agree: bool

    def complaints(self, case: ModelCase) -> list[str]:
        """What exceeds its bound, in words; empty if the run is exact."""
        loss_bound = LOSS_IN_FLOAT32 if "float32_loss" in case.tags else LOSS
        found = []
        if not self.loss <= loss_bound:
            found.append(f"loss off by {self.loss:.1e} (bound {loss_bound})")
        if not self.gradient <= GRADIENT:
            found.append(f"gradient of {self.gradient_name} off by {self.gradient:.1e} (bound {GRADIENT})")
        if not self.buffer <= BUFFER:
            found.append(f"buffer {self.buffer_name} off by {self.buffer:.1e} (bound {BUFFER})")
        if not self.parameter <= PARAMETER:
            found.append(f"parameter {self.parameter_name} off by {self.parameter:.1e} (bound {PARAMETER})")
        if not self.ranks_agree:
            found.append("ranks disagree in metrics or buffers")
        return found


def compare(combination: Combination, measured: list[Measured]) -> Errors:
    """The distance of a run from one device.

    Raises:
        AssertionError: a name, shape or dtype is not what one device has.
    """
    trace = combination.on_one_device()
    first = measured[0]
    pairs = [*zip(first.losses, trace.losses, strict=True), *zip(first.grad_norms, trace.grad_norms, strict=True)]
    whole = torch.stack([torch.linalg.vector_norm(g) for g in trace.gradients.values()]).norm().item()
    gradient = reference.worst(first.gradients, trace.gradients, floor=GRADIENT_FLOOR * whole)
    buffer = reference.worst(first.buffers, trace.buffers, floor=1e-6)
    parameter = reference.worst(first.parameters, trace.parameters, floor=1e-6)
    agree = all(m.metrics == first.metrics and m.buffers_agree for m in measured)
    loss = max(abs(found - wanted.item()) / max(1.0, abs(wanted.item())) for found, wanted in pairs)
    return Errors(loss, *gradient, *buffer, *parameter, agree)


# ---------------------------------------------------------------- what a stage may cost


def allowed_bytes(case: ModelCase, stage: int, ranks: int) -> int:
    """The most bytes that a rank may keep between steps under AdamW: global / N plus padding, by the stage.

    What the stage shards is counted as its smallest padded shard along one dim, the rest whole. Buffers are whole
    at every stage: they are not part of the ZeRO states. Gradients are not at rest: no tensor of them outlives a
    step. Each parameter has two moments of its own dtype and, for torch's state dict, one 0-dim float32 step.
    """
    total = sum(b.numel() * b.element_size() for b in case.model().buffers())
    for parameter in case.model().parameters():
        whole = parameter.numel() * parameter.element_size()
        shard = padded_shard(tuple(parameter.shape), ranks) * parameter.element_size()
        total += shard if stage == 3 else whole
        if parameter.requires_grad:
            total += 2 * (shard if stage >= 1 else whole) + 8
    return total + 64  # the step counter, the rng key and what else is one number


def padded_shard(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of the smallest shard of a tensor along one dim, with padding; a 0-dim tensor stays whole."""
    elements = 1
    for size in shape:
        elements *= size
    if not shape or not elements:
        return elements
    return min(-(-size // ranks) * (elements // size) for size in shape)


def allowed_traffic(case: ModelCase, stage: int, ranks: int) -> int:
    """The most bytes that a rank may send for parameters and gradients in a step of one micro-batch.

    The ZeRO paper's arithmetic (arXiv:1910.02054, section 7), on a ring: gradients are reduced and updated parameters
    gathered at stages 0 to 2 (an all-reduce is both), parameters are gathered twice at stage 3. What stays whole,
    such as a scalar, is all-reduced at every stage. A weight with two uses far apart is gathered for each.
    """
    total = 0
    uses = 2 if case.tags & {"tied", "shared"} else 1
    for parameter in case.model().parameters():
        shard = padded_shard(tuple(parameter.shape), ranks) * parameter.element_size()
        times = 1 + 2 * uses if stage == 3 else 2
        total += times * shard * (ranks - 1)
    return total


TRAFFIC = (Role.PARAM_GATHER, Role.GRAD_REDUCE)


def traffic(cost: Cost) -> int:
    """Bytes that a rank sends for parameters and gradients in a step."""
    return sum(entry.sent for entry in cost.collectives if entry.role in TRAFFIC)


def activation_gathers(cost: Cost) -> int:
    """How many collectives a step runs to make a sharded activation whole."""
    return sum(entry.count for entry in cost.collectives if entry.role is Role.ACTIVATION_GATHER)


@functools.cache
def global_flops(name: str, ranks: int, accumulate: int) -> float:
    """Floating-point operations of forward and backward of one step on one device, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    case = find_case(name)
    batch = case.batches(1, micro_batches=accumulate)[0]
    micro = reference.global_micro_batches(batch, ranks, accumulate)
    plain = mock.patch("tests.zoo.checkpoint", lambda function, x, **_: function(x))  # recompute is not work asked for
    with plain, FlopCounterMode(display=False) as counter:
        reference.gradients_of(case.model(), micro, case.loss)
    return float(counter.get_total_flops())
