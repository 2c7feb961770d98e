"""What a user calls, and the algorithm from top to bottom: capture, passes, compile, step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import batch as batches
from autoshard import checkpoint, replicas, runtime, stateinit
from autoshard.batch import BatchSpec
from autoshard.capture import Loss, Modules, call_model, capture_evaluation, capture_forward, capture_training
from autoshard.engine import Engine, Evaluation, Training
from autoshard.errors import AutoshardError, BatchError, CheckpointError, OptimizerError, StateError
from autoshard.manager import PassContext
from autoshard.optim import Binding, bind
from autoshard.plan import Plan
from autoshard.program import Program
from autoshard.schedules import trace_check
from autoshard.state import Layout, State, StateLayout
from autoshard.wishes import parameter_wishes

Model = nn.Module | Callable[[], nn.Module]
Metrics = dict[str, Tensor]


def parallelize(
    model: Model,
    plan: Plan | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    schedule: Callable[[Any], Any] | None = None,
    frozen: Mapping[str, nn.Module] | None = None,
) -> Step:
    """A model written for one device as the program that each rank of a plan runs.

    Args:
        model: a module, or a callable that returns one: then it is built on meta and initialised shard by shard,
            bit-equal to building it on one device under ``torch.manual_seed(plan.seed)``.
        plan: mesh, ZeRO stage and knobs; None is `Plan()`.
        loss: ``loss(model, batch)`` returns a 0-dim tensor, a `Mean`, or either with a dict of extras. None where
            the model returns its loss itself.
        optimizer: a factory of a torch optimizer, such as ``functools.partial(torch.optim.AdamW, lr=3e-4)``.
        schedule: ``schedule(n)`` is the factor on lr for update n + 1; must be torch ops on a 0-dim tensor.
        frozen: modules that the loss also uses and that are not trained.

    Nothing is traced yet: that is `Step.init`.

    Raises:
        AutoshardError: an argument cannot work; the message says what would.
    """
    return Step(model, plan or Plan(), loss=loss, optimizer=optimizer, schedule=schedule, frozen=frozen or {})


class Step:
    """A training step, and what else can be done with the same state. Made by `parallelize`."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        *,
        loss: Loss | None,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
        schedule: Callable[[Any], Any] | None,
        frozen: Mapping[str, nn.Module],
    ) -> None:
        _check_arguments(model, plan, loss, optimizer, schedule, frozen)
        self.runtime = runtime.start(plan)
        self.plan = _resolved(plan, self.runtime)
        self.source = stateinit.Source.of(model, frozen, self.plan.seed)
        self.loss: Loss = loss or call_model
        self.schedule = schedule
        self.binding = self._bind(optimizer)
        wishes = parameter_wishes(self.plan.rules, self.source.modules, self.plan.mesh.tensor)
        self.context = PassContext(
            self.plan, self.runtime.axes, self.binding, schedule, self.runtime.device, wishes=wishes
        )
        self.engine = Engine(self.runtime, self.plan, self.binding, schedule)
        self._training: dict[BatchSpec, Training] = {}
        self._others: dict[tuple[str, BatchSpec], Evaluation] = {}
        self._layouts: dict[BatchSpec, StateLayout] = {}
        self._example: Any = None

    @property
    def modules(self) -> Modules:
        return self.source.modules

    # ---------------------------------------------------------------- state

    @runtime.lost_rank_explained()
    def init(self, batch: Any, *, keep_model: bool = False) -> State:
        """Traces, rewrites and compiles for this batch's shapes; returns the sharded state.

        Args:
            batch: this rank's slice of the global batch; only structure, shapes and dtypes are read.
            keep_model: leave the module's own parameters as they are; else they become meta.

        Raises:
            CaptureError: the model or loss cannot be traced.
            BatchError: the batch does not fit the plan.
            DivergenceError: another rank has another plan, model or batch structure.
        """
        training = self._program_for(batch, call="init")
        state = self.source.state(self._layout(training), self.runtime.device)
        if not keep_model:
            self.source.consume()
        return state

    def save(
        self, state: State, path: str | Path, extra: Mapping[str, Any] | None = None, *, frozen: bool = True
    ) -> None:
        """Write a checkpoint: complete or not there at all. A collective call.

        Args:
            extra: JSON-able values to keep beside it, such as a data position; `load` leaves them in the file,
                ``autoshard.checkpoint.read_meta(path)["extra"]`` reads them.
            frozen: write the parameters that are not trained, too. Without them a checkpoint of adapters is as small as
                they are, and `load` takes the frozen ones from the model that its step was made of.
        """
        self._check_state(state)
        self.runtime.agree(f"save to {path}{'' if frozen else ' without frozen parameters'}")
        meta = {
            "batch": batches.to_json(self._example),
            "plan": str(self.plan),
            "autoshard": autoshard.__version__,
            "torch": torch.__version__,
            "extra": dict(extra or {}),
            "frozen": frozen,
        }
        checkpoint.write(path, stateinit.named_tensors(state, without=() if frozen else self.source.frozen), meta)

    def load(self, path: str | Path, batch: Any = None) -> State:
        """The state that was saved, under this plan, whatever plan saved it. A collective call.

        Without an optimizer the optimizer's state stays in the file.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """
        self.runtime.agree(f"load from {path}")
        meta = checkpoint.read_meta(path)
        if batch is None:
            batch = batches.rescaled(batches.from_json(meta["batch"]), self.plan.accumulate)
        training = self._program_for(batch, call="load")
        layout, without = self._layout(training), () if meta.get("frozen", True) else self.source.frozen
        if without and self.source.consumed:
            raise CheckpointError(
                f"{path} has no frozen parameters (such as {without[0]}), and this step's model has given its weights "
                "to a state already; load with a step that is made of the pretrained model again"
            )
        source = self.source.state if without else self.source.empty_state
        state = source(layout, self.runtime.device)
        unread = ("optimizer/",) if self.binding is None else ()  # to evaluate or export needs no optimizer
        checkpoint.read_into(path, stateinit.named_tensors(state, without=without), without=unread)
        self.source.consume()
        return state

    def export(self, state: State, path: str | Path) -> None:
        """Write the model's full ``state_dict`` as safetensors. A collective call."""
        self._check_state(state)
        self.runtime.agree(f"export to {path}")
        checkpoint.export(path, stateinit.full_state_dict(state, self.source))

    # ---------------------------------------------------------------- compute

    @runtime.lost_rank_explained()
    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One optimizer step. Donates `state`.

        Returns:
            The new state, and 0-dim metrics equal on every rank: loss, grad_norm, lr, samples, tokens, extras.
        """
        if self.binding is None:
            raise OptimizerError(
                "this step has no optimizer; pass optimizer=functools.partial(torch.optim.AdamW, lr=...) to "
                "parallelize, or use step.gradients or step.evaluate"
            )
        self._check_state(state)
        training = self._program_for(batch, call="step")
        self._check_optimizer_state(state, training)
        return self.engine.step(training, state, batch)

    @runtime.lost_rank_explained()
    def gradients(self, state: State, batch: Any) -> tuple[Metrics, dict[str, DTensor]]:
        """Gradients of the same program, without an update; `state` stays valid, its random key does not advance."""
        self._check_state(state)
        training = self._program_for(batch, call="gradients")
        return self.engine.gradients(training, state, batch)

    @runtime.lost_rank_explained()
    def evaluate(self, state: State, batch: Any) -> Metrics:
        """Eval mode, no gradient. Any leading size, another on every rank too; the tail is exact.

        A loss that is a plain scalar is taken as a mean over samples; return `Mean` for other weights.
        """
        self._check_state(state)
        spec = batches.describe(batch).of_any_rows()
        self.runtime.agree(f"evaluate\n{spec.told}\n{batches.told_values(batch)}")
        return self.engine.evaluate(self, state, batch)

    @runtime.lost_rank_explained()
    def forward(self, state: State, *args: Any, **kwargs: Any) -> Any:
        """The model's own call in eval mode: this rank's slice in, this rank's slice out, plain tensors."""
        self._check_state(state)
        evaluation = self.forward_program(args, kwargs)
        return self.engine.forward(evaluation, state, (args, kwargs))

    # ---------------------------------------------------------------- looking inside

    def program(self, phase: str = "micro", after: str | None = None) -> Program:
        """The program as it stood after a pass.

        Args:
            phase: "micro" or "epilogue"; the other graphs are left out.
            after: a pass's name, "capture", or None for the end.
        """
        return self._latest().snapshot(phase, after)

    def explain(self, path: str | Path | None = None) -> str:
        """What was placed where and why, and what it sends, as text.

        Args:
            path: also write it there: as one self-contained HTML page where the name ends in ``.html``, else as text.
                Every rank that is given a path writes it.
        """
        from autoshard.explain import explain, page

        text = explain(self, self._latest())
        if path is not None:
            as_page = Path(path).suffix == ".html"
            Path(path).write_text(page(self, self._latest()) if as_page else text + "\n", encoding="utf-8")
        return text

    def cost(self) -> Any:
        """FLOPs, bytes at rest and bytes per collective and axis, of this rank for one step."""
        from autoshard.cost import cost

        return cost(self, self._latest())

    def fingerprint(self) -> str:
        """A digest of the plan, the graphs and the versions of torch and autoshard."""
        training = self._latest()
        text = f"{self.plan}\n{training.program_text}\n{torch.__version__}\n{autoshard.__version__}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _latest(self) -> Training:
        if not self._training:
            raise AutoshardError("nothing is traced yet; call step.init(batch) first")
        return next(reversed(self._training.values()))

    # ---------------------------------------------------------------- programs

    def _program_for(self, batch: Any, call: str) -> Training:
        """The compiled program for a batch's shapes; made when they are new, within plan.max_compiles."""
        batches.check_tensors(batch)
        spec = batches.describe(batch)
        told = f"{call}\n{spec.told}"
        if call not in ("init", "load"):  # which read no values
            told += f"\n{batches.told_values(batch)}"
        if spec in self._training:
            self.runtime.agree(told, batches.RAGGED)
            return self._training[spec]
        self.runtime.agree(f"{told}\n{self._identity()}", batches.RAGGED)
        batches.check_divides(spec, self.plan.accumulate)
        self._check_budget(spec, len(self._training), next(reversed(self._training), None))
        captured = capture_training(
            self.modules,
            self.loss,
            batch,
            ranks=self.runtime.data_ranks,
            accumulate=self.plan.accumulate,
            device=self.runtime.device,
        )
        training = self.engine.build_training(captured, spec, self.context)
        self._training[spec] = training
        self.context = dataclasses.replace(self.context, parameters=self.context.parameters or training.placed)
        self._example = batches.as_meta(batch)
        return training

    def evaluation_program(self, batch: Any, *, compiled: bool = True) -> Evaluation:
        batches.check_tensors(batch)
        spec = batches.describe(batch)
        return self._other(f"evaluation{'' if compiled else ' tail'}", spec, compiled, batch, None)

    def forward_program(self, args: Any, kwargs: Any) -> Evaluation:
        spec = batches.describe((args, kwargs))
        self.runtime.agree(f"forward\n{spec.told}\n{batches.told_values((args, kwargs))}", batches.RAGGED)
        return self._other("forward", spec, True, (args, kwargs), kwargs)

    def _other(self, kind: str, spec: BatchSpec, compiled: bool, batch: Any, kwargs: Any) -> Evaluation:
        if (kind, spec) not in self._others:
            if compiled:
                known = [s for k, s in self._others if k == kind]
                self._check_budget(spec, len(known), known[-1] if known else None)
            ranks, device = self.runtime.data_ranks, self.runtime.device
            if kind == "forward":
                captured = capture_forward(self.modules, batch[0], batch[1], ranks=ranks, device=device)
            else:
                captured = capture_evaluation(self.modules, self.loss, batch, ranks=ranks, device=device)
            replicas.check_batch(self.runtime, spec, batch)
            self._others[kind, spec] = self.engine.build_evaluation(kind, captured, spec, self.context, compiled)
        return self._others[kind, spec]

    def _check_budget(self, spec: BatchSpec, made: int, last: BatchSpec | None) -> None:
        if made >= self.plan.max_compiles:
            raise BatchError(
                f"a batch with new shapes ({spec}) would be program {made + 1}, plan.max_compiles is "
                f"{self.plan.max_compiles}; pad batches to few shapes, or raise max_compiles"
            )
        if last is not None:
            from autoshard.compile import tell

            tell(
                self.runtime,
                f"new batch shapes ({spec}): compiling program {made + 1} of at most {self.plan.max_compiles}",
            )

    def _layout(self, training: Training) -> StateLayout:
        if training.spec not in self._layouts:
            self._layouts[training.spec] = stateinit.layout(
                self.source, training.with_gradient, self.context, self.runtime
            )
        return self._layouts[training.spec]

    @functools.cached_property
    def _weights(self) -> StateLayout:
        """The layout of what a state of this model holds whatever its optimizer."""
        return stateinit.layout(self.source, (), self.context, self.runtime)

    def _check_state(self, state: State) -> None:
        """
        Raises:
            StateError: this is no state, or one of another model or plan.
        """
        if not isinstance(state, State):
            raise StateError(
                f"the state is {_short(state)}; valid: what step.init, step.load or the last step returned"
            )
        if any(state.layout is known for known in self._layouts.values()):
            return
        wanted, found = self._weights.layouts, state.layout.layouts
        mine = {key for key in found if key[0] != "optimizer"}
        odd = sorted(key for key in mine | wanted.keys() if found.get(key) != wanted.get(key))
        if odd:
            key = odd[0]
            raise StateError(
                f"this state is of another model or plan: {'/'.join(key)} is {_lies(found.get(key))} in it, "
                f"{_lies(wanted.get(key))} here. Use the state that this step's init or load returned; save and load "
                "a checkpoint to go from one plan to another"
            )

    def _check_optimizer_state(self, state: State, training: Training) -> None:
        """
        Raises:
            StateError: the optimizer has state for other parameters than this batch has gradients for.
        """
        wanted = self._layout(training)
        if state.layout is wanted:
            return
        found = {key: entry for key, entry in state.layout.layouts.items() if key[0] == "optimizer"}
        expected = {key: entry for key, entry in wanted.layouts.items() if key[0] == "optimizer"}
        if found == expected:
            return
        changed = sorted({key[1] for key in found.keys() ^ expected.keys()})
        raise StateError(
            f"this batch reaches other parameters than the one that the state was made for: {', '.join(changed[:5])}"
            f"{f' and {len(changed) - 5} more' if len(changed) > 5 else ''}. An optimizer with state must update the "
            "same parameters at every step: let every batch reach all (add 0.0 * what the others compute to the loss, "
            "or put the branches into one batch), or use an optimizer without state, such as SGD without momentum"
        )

    def _identity(self) -> str:
        return f"plan {self.plan}\n{self.source.identity}\noptimizer {self.binding and self.binding.groups}"

    def _bind(self, optimizer: Callable[..., torch.optim.Optimizer] | None) -> Binding | None:
        if optimizer is None:
            return None
        named = {name: p for name, p in self.modules.model.named_parameters() if p.requires_grad}
        return bind(optimizer, named)


def _short(value: object) -> str:
    return repr(value) if value is None else f"a {type(value).__name__}"


def _lies(layout: Layout | None) -> str:
    if layout is None:
        return "absent"
    where = ", ".join(str(placement) for placement in layout.placements)
    return f"{str(layout.dtype).removeprefix('torch.')}{list(layout.shape)}{f' at {where}' if where else ''}"


def _check_arguments(
    model: Any, plan: Any, loss: Any, optimizer: Any, schedule: Any, frozen: Mapping[str, Any]
) -> None:
    if not isinstance(model, nn.Module) and not callable(model):
        raise AutoshardError(f"model is {model!r}; valid: an nn.Module, or a callable that returns one")
    if not isinstance(plan, Plan):
        raise AutoshardError(f"plan is {plan!r}; valid: autoshard.Plan(...)")
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise OptimizerError(
            f"optimizer is of type {name} and exists already; valid: a factory, "
            f"functools.partial(torch.optim.{name}, lr=...)"
        )
    for what, value in (("loss", loss), ("optimizer", optimizer), ("schedule", schedule)):
        if value is not None and not callable(value):
            raise AutoshardError(f"{what} is {value!r}; valid: a callable, or None")
    if schedule is not None:
        if optimizer is None:
            raise AutoshardError("schedule is given without an optimizer, which it would act on; pass optimizer= too")
        trace_check(schedule)
    if loss is not None and not isinstance(loss, nn.Module):
        try:
            inspect.signature(loss).bind(None, None)
        except TypeError as error:
            raise AutoshardError(f"loss must take (model, batch): {error}") from error
        except ValueError:
            pass
    for name, module in frozen.items():
        if not isinstance(module, nn.Module):
            raise AutoshardError(f"frozen[{name!r}] is {type(module).__name__}; valid: an nn.Module")


def _resolved(plan: Plan, rt: runtime.Runtime) -> Plan:
    values = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    return Plan(**{**values, "mesh": rt.mesh})
