"""One model of the zoo under one plan on every rank, and its comparison with one device.

`run_case` is what a rank runs; `compare` is what the test and the matrix make of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard import compat
from autoshard.api import Step
from autoshard.capture import Captured, capture_training
from autoshard.cost import Cost
from autoshard.placement import Shard
from autoshard.program import Role
from autoshard.state import State
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
        data, tensor: sizes of the mesh's axes; the global batch is the case's size times `accumulate`.
        threshold: `Zero.persistence_threshold`, in elements.
        optimizer: factory; a module-level function or a partial of one, since it travels to the ranks.
    """

    name: str
    stage: int
    backend: str = "debug"
    data: int = 2
    tensor: int = 1
    accumulate: int = 1
    steps: int = STEPS
    clip_norm: float | None = None
    threshold: int = 0
    optimizer: reference.OptimizerFactory = ADAMW
    schedule: reference.Schedule | None = None

    def __str__(self) -> str:
        extra = [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        extra += [self.backend] if self.backend != "debug" else []
        extra += [self.mesh] if self.tensor > 1 else []
        return "-".join([self.name, f"zero{self.stage}", *extra])

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    @property
    def mesh(self) -> str:
        return f"{self.data}x{self.tensor}"

    @property
    def case(self) -> ModelCase:
        """The zoo's; on a tensor axis without casts to float32, which round away what the bounds ask for."""
        case = find_case(self.name)
        return case.in_double() if self.tensor > 1 and case.casts_to_float32 else case

    def batches(self) -> list[Any]:
        return self.case.batches(self.steps, micro_batches=self.accumulate)

    def plan(self) -> Any:
        import autoshard

        return autoshard.Plan(
            mesh=autoshard.Mesh(data=self.data, tensor=self.tensor),
            zero=autoshard.Zero(stage=self.stage, persistence_threshold=self.threshold),
            accumulate=self.accumulate,
            clip_norm=self.clip_norm,
            backend=self.backend,
            device="cpu",
        )

    def parallelize(self) -> Step:
        import autoshard

        case = self.case
        return autoshard.parallelize(
            case.model(), self.plan(), loss=case.loss, optimizer=self.optimizer, schedule=self.schedule
        )

    def slices(self, data_rank: int) -> list[Any]:
        """What the ranks at coordinate `data_rank` of the data axis pass to their steps."""
        return [reference.rank_slice(batch, data_rank, self.data) for batch in self.batches()]

    def on_one_device(self) -> reference.Trace:
        """What one device computes, whatever the stage or backend."""
        return _on_one_device(dataclasses.replace(self, stage=0, backend="debug", threshold=0))


@functools.cache
def _on_one_device(combination: Combination) -> reference.Trace:
    recipe = reference.Recipe(
        combination.data,
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
        disagreements: names of what is not the same bits on every rank: whole parameters, buffers, slots, gradients.
        split: by parameter, how the tensor axis splits it, None where it stays whole.
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
    disagreements: tuple[str, ...]
    split: Mapping[str, Shard | None]
    at_rest: int
    cost: Cost
    seconds: tuple[float, float]


def train(step: Step, batches: Iterable[Any]) -> tuple[State, list[float]]:
    """A state after a step on each of this rank's batches, and their losses."""
    batches = list(batches)
    state, losses = step.init(batches[0]), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


_captures: dict[object, Captured] = {}  # of this process, the latest alone


@contextlib.contextmanager
def _captured_once(combination: Combination) -> Iterator[None]:
    """A rank traces a model once for combinations in a row: the captured graph knows no stage and no mesh."""
    key = combination.case.name, combination.case.casts_to_float32, combination.accumulate

    def kept(*args: Any, **kwargs: Any) -> Captured:
        if key not in _captures:
            _captures.clear()
            _captures[key] = capture_training(*args, **kwargs)
        return _captures[key]

    with mock.patch("autoshard.api.capture_training", kept):
        yield


def started(combination: Combination, batch: Any) -> tuple[Step, State]:
    """A step on this rank and its first state."""
    step = combination.parallelize()
    with _captured_once(combination):
        return step, step.init(batch)


def run_case(combination: Combination) -> Measured:
    """Train one model of the zoo on this rank. Call it on every rank."""
    begun = time.monotonic()
    batches = combination.slices(dist.get_rank() // combination.tensor)
    step, state = started(combination, batches[0])
    ready = time.monotonic()
    _, sharded = step.gradients(state, batches[0])
    gradients = {name: gradient.full_tensor() for name, gradient in sharded.items()}
    losses, norms, extras = [], [], []
    first_step = time.monotonic()
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        extras.append({name: float(value) for name, value in metrics.items()})
    ended = time.monotonic()
    parameters = {name: state.full(name) for name in state.params}
    buffers = {name: state.full(name) for name in state.buffers}
    cost = step.cost()
    slots = {f"{name}/{slot}": t.full_tensor() for name, held in state.optimizer.items() for slot, t in held.items()}
    first = dist.get_rank() == 0
    return Measured(
        losses=losses,
        grad_norms=norms,
        metrics=extras,
        gradients=gradients if first else {},
        parameters=parameters if first else {},
        buffers=buffers if first else {},
        disagreements=disagreements(
            {
                **{f"gradient {name}": t for name, t in gradients.items()},
                **{f"parameter {name}": t for name, t in parameters.items()},
                **{f"buffer {name}": t for name, t in buffers.items()},
                **{f"slot {name}": t for name, t in slots.items()},
            }
        ),
        split=tensor_splits(state),
        at_rest=held_bytes(state),
        cost=cost,
        seconds=(ready - begun, (ended - first_step) / len(batches)),
    )


def held_bytes(state: Any) -> int:
    """Bytes of memory that the tensors of a state really hold on this rank, padding counted."""
    tensors = [*state.params.values(), *state.buffers.values()]
    tensors += [slot for slots in state.optimizer.values() for slot in slots.values()]
    local = [state.step, state.rng, *(tensor.to_local() for tensor in tensors)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def tensor_splits(state: Any) -> dict[str, Shard | None]:
    """By parameter, how the tensor axis splits it; None without one, and where it stays whole."""
    found: dict[str, Shard | None] = {}
    for name, parameter in state.params.items():
        axes = parameter.device_mesh.mesh_dim_names or ()
        placement = parameter.placements[axes.index("tensor")] if "tensor" in axes else None
        dim = getattr(placement, "dim", None)
        found[name] = None if dim is None else Shard(dim, compat.split_factor(placement))
    return found


def disagreements(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of tensors that are not the same bits on all ranks."""
    mine = [hashlib.sha256(_bytes(t)).digest()[:7] for t in tensors.values()]
    digests = torch.tensor([int.from_bytes(d, "big") for d in mine], dtype=torch.int64)
    everyone = [torch.empty_like(digests) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, digests)
    same = (torch.stack(everyone) == digests).all(0).tolist()
    return tuple(name for name, equal in zip(tensors, same, strict=True) if not equal)


def _bytes(t: Tensor) -> bytes:
    return t.detach().contiguous().numpy().tobytes()


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
    metrics_agree: bool
    disagreements: tuple[str, ...]

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
        if not self.metrics_agree:
            found.append("ranks disagree in metrics")
        if self.disagreements:
            shown = ", ".join(self.disagreements[:4])
            found.append(f"ranks hold different bits of {len(self.disagreements)} tensors: {shown}")
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
    agree = all(m.metrics == first.metrics for m in measured)
    different = tuple(dict.fromkeys(name for m in measured for name in m.disagreements))
    loss = max(abs(found - wanted.item()) / max(1.0, abs(wanted.item())) for found, wanted in pairs)
    return Errors(loss, *gradient, *buffer, *parameter, agree, different)


# ---------------------------------------------------------------- what a stage and a mesh may cost

Split = Mapping[str, Shard | None]  # by parameter, as the tensor axis splits it


@dataclass(frozen=True)
class Allowed:
    """The most bytes that a rank may keep between steps.

    Args:
        share: global / N with padding, N = data x tensor.
        whole: beyond that, of vectors such as norm weights and biases, which may stay whole on the tensor axis.
    """

    share: int
    whole: int

    @property
    def total(self) -> int:
        return self.share + self.whole


def allowed_bytes(combination: Combination, split: Split) -> Allowed:
    """The most bytes that a rank may keep between steps under AdamW: global / N plus padding, by the stage.

    What the stage shards on the data axis is counted as its smallest padded shard along one dim, the rest whole; the
    tensor axis shards parameters at every stage. Buffers are whole: they are not part of the ZeRO states. Gradients
    are not at rest: no tensor of them outlives a step. Each parameter has two moments of its own dtype and, for
    torch's state dict, one 0-dim float32 step.
    """
    model, stage, tensor = combination.case.model(), combination.stage, combination.tensor
    share = sum(b.numel() * b.element_size() for b in model.buffers()) + 64  # the step counter, the rng key, numbers
    whole = 0
    for name, parameter in model.named_parameters():
        shape, size = tuple(parameter.shape), parameter.element_size()
        copies = [stage == 3, *[stage >= 1] * (2 * parameter.requires_grad)]  # whether data shards each
        share += 8 * parameter.requires_grad
        for data in (combination.data if sharded else 1 for sharded in copies):
            splits = [split[name]] if split[name] is not None else [None, *map(Shard, range(len(shape)))]
            least = min(held_elements(shape, each, tensor, data) for each in splits)
            share += least * size
            if is_vector(shape):
                whole += (held_elements(shape, split[name], tensor, data) - least) * size
    return Allowed(share, whole)


def whole_matrices(combination: Combination, split: Split) -> list[str]:
    """Parameters of more than one dim that stay whole on the tensor axis."""
    if combination.tensor == 1:
        return []
    named = combination.case.model().named_parameters()
    return [name for name, p in named if split[name] is None and not is_vector(tuple(p.shape))]


def is_vector(shape: tuple[int, ...]) -> bool:
    return sum(size > 1 for size in shape) <= 1


def held_elements(shape: tuple[int, ...], split: Shard | None, tensor: int, data: int) -> int:
    """Elements that a rank holds of a tensor that the tensor axis splits so, and the data axis along what is best.

    Two axes share a dim evenly only, and not one of which the first splits parts: DTensor, in which a state is given,
    puts two strided shards of one dim together wrongly (torch 2.14). So the bias of a fused q, k, v is whole on data.
    """
    dim = None if split is None else split.dim
    local = tuple(-(-size // tensor) if i == dim else size for i, size in enumerate(shape))
    if data == 1:
        return math.prod(local)
    alone = split is not None and tensor > 1 and (split.outer > 1 or shape[split.dim] % (tensor * data) != 0)
    return padded_shard(local, data, without=dim if alone else None)


def padded_shard(shape: tuple[int, ...], ranks: int, without: int | None = None) -> int:
    """Elements of the smallest shard of a tensor along one dim, with padding; a 0-dim tensor stays whole."""
    elements = math.prod(shape)
    if not shape or not elements:
        return elements
    shards = [-(-size // ranks) * (elements // size) for dim, size in enumerate(shape) if dim != without]
    return min([elements, *shards])


def allowed_traffic(combination: Combination, split: Split) -> int:
    """The most bytes that a rank may send on the data axis for parameters and gradients in a step of one micro-batch.

    The ZeRO paper's arithmetic (arXiv:1910.02054, section 7), on a ring: gradients are reduced and updated parameters
    gathered at stages 0 to 2 (an all-reduce is both), parameters are gathered twice at stage 3. What stays whole,
    such as a scalar, is all-reduced at every stage. A weight with two uses far apart is gathered for each.
    """
    case, data = combination.case, combination.data
    total = 0
    uses = 2 if case.tags & {"tied", "shared"} else 1
    for name, parameter in case.model().named_parameters():
        held = held_elements(tuple(parameter.shape), split[name], combination.tensor, data)
        times = 1 + 2 * uses if combination.stage == 3 else 2
        total += times * held * parameter.element_size() * (data - 1)
    return total


TRAFFIC = (Role.PARAM_GATHER, Role.GRAD_REDUCE)


def traffic(cost: Cost) -> int:
    """Bytes that a rank sends for parameters and gradients on the data axis in a step."""
    return sum(entry.sent for entry in cost.collectives if entry.role in TRAFFIC and entry.axis == "data")


def collectives(cost: Cost, axis: str, *roles: Role) -> int:
    """How many collectives a step runs on an axis for some roles, or for any."""
    return sum(e.count for e in cost.collectives if e.axis == axis and (not roles or e.role in roles))


def sent(cost: Cost, axis: str) -> int:
    """Bytes that a rank sends on an axis in a step."""
    return sum(entry.sent for entry in cost.collectives if entry.axis == axis)


def flops_share(combination: Combination) -> float:
    """Global FLOPs of a step over N."""
    return global_flops(combination.name, combination.data, combination.accumulate) / combination.ranks


@functools.cache
def global_flops(name: str, data: int, accumulate: int) -> float:
    """Floating-point operations of forward and backward of one step on one device, as torch counts them.

    Attention on the CPU it does not count: that is counted as on CUDA.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            sdpa_backward_flop_count(g, q, k, v)
        ),
    }

    case = find_case(name)
    batch = case.batches(1, micro_batches=accumulate)[0]
    micro = reference.global_micro_batches(batch, data, accumulate)
    plain = mock.patch("tests.zoo.checkpoint", lambda function, x, **_: function(x))  # recompute is not work asked for
    with plain, FlopCounterMode(display=False, custom_mapping=attention) as counter:
        reference.gradients_of(case.model(), micro, case.loss)
    return float(counter.get_total_flops())
