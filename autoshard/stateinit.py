"""Where a state's values come from: the module's own weights, a recorded construction, or a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoshard import compat
from autoshard.capture import Modules
from autoshard.errors import AutoshardError
from autoshard.manager import PassContext
from autoshard.materialize import Recording, record, record_reset
from autoshard.passes.update import slot_placements
from autoshard.passes.zero import at_rest
from autoshard.runtime import Runtime
from autoshard.state import Key, Layout, State, StateLayout

_consumed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose weights a state has taken


@dataclass
class Source:
    """The model as given, and how its tensors get their values.

    Args:
        modules: the model and frozen modules; tensors become meta once a state took them.
        recording: how to initialise a model that was built on meta, else None.
        seed: of that initialisation.
        consumed: a state has taken the module's own weights.
    """

    modules: Modules
    recording: Recording | None
    seed: int
    identity: str
    aliases: Mapping[str, str]
    consumed: bool = False

    @classmethod
    def of(cls, model: nn.Module | Callable[[], nn.Module], frozen: Mapping[str, nn.Module], seed: int) -> Source:
        """
        Raises:
            AutoshardError: nothing in the model is trainable, or a frozen module's names clash with the model's.
        """
        recording, consumed = None, False
        for root in (model, *frozen.values()):
            if isinstance(root, nn.Module):
                _check_traceable(root)
        if not isinstance(model, nn.Module):
            recording = record(model)
            model = recording.module
        elif any(t.is_meta for t in _tensors(model)):
            consumed = model in _consumed  # to be initialised anew is not what its owner expects
            recording = None if consumed else record_reset(model)
        for name in frozen:
            if any(own == name or own.startswith(name + ".") for own, _ in model.named_modules()):
                raise AutoshardError(f"frozen[{name!r}] has the name of a module of the model; choose another")
        for name, module in frozen.items():
            if any(t.is_meta for t in _tensors(module)):
                raise AutoshardError(f"frozen[{name!r}] is on the meta device; give it with its weights")
        modules = Modules(model, dict(frozen))
        if not modules.trainable():
            raise AutoshardError(
                f"{type(model).__name__} has no trainable parameter ({len(list(model.parameters()))} in all); set "
                "requires_grad=True on what is to be trained"
            )
        first = {id(p): name for name, p in modules.parameters().items()}
        every = {
            prefix + name: first[id(p)]
            for prefix, module in modules
            for name, p in module.named_parameters(remove_duplicate=False)
        }
        shapes = [f"parameter {n} {list(p.shape)} {p.dtype} {p.requires_grad}" for n, p in modules.parameters().items()]
        shapes += [f"buffer {n} {list(b.shape)} {b.dtype}" for n, b in modules.buffers().items()]
        aliases = {name: other for name, other in every.items() if name != other}
        return cls(modules, recording, seed, "\n".join(shapes), aliases, consumed)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parameters that are not trained."""
        trained = set(self.modules.trainable())
        return tuple(name for name in self.modules.parameters() if name not in trained)

    def state(self, layout: StateLayout, device: torch.device) -> State:
        """A state with initial values."""
        if self.consumed:
            raise AutoshardError(
                "this step's model has given its weights to a state already; keep that state, or call "
                "step.init(batch, keep_model=True) the first time, or give the model as a callable; "
                "step.load needs no weights"
            )
        held: dict[Key, Tensor] = {}

        def keep(name: str, whole: Tensor) -> None:
            key = ("params", name) if ("params", name) in layout.layouts else ("buffers", name)
            held[key] = layout.shard(key, whole.detach().to(device))

        if self.recording is not None:
            self.recording.replay(self.seed, keep)
        for name, tensor in {**self.modules.parameters(), **self.modules.buffers()}.items():
            if not tensor.is_meta:
                keep(name, _from_rank_zero(tensor.detach(), device))
        return State(layout, {**_fixed(layout, device, self.seed), **held})

    def empty_state(self, layout: StateLayout, device: torch.device) -> State:
        """A state to be filled from a checkpoint."""
        held = {
            key: torch.zeros(entry.local_shape(layout.axes), dtype=entry.dtype, device=device)
            for key, entry in layout.layouts.items()
        }
        return State(layout, {**held, **_fixed(layout, device, self.seed)})

    def consume(self) -> None:
        """The module's tensors become meta: their values live in the state."""
        if self.recording is None:
            self.consumed = True
            _consumed.update(module for _, root in self.modules for module in root.modules())
        for _, root in self.modules:
            made: dict[int, nn.Parameter] = {}
            for module in root.modules():
                for name, p in list(module._parameters.items()):
                    if p is not None and not p.is_meta:
                        if id(p) not in made:
                            meta = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
                            made[id(p)] = cast(nn.Parameter, compat.carry_over(p, meta))
                        module._parameters[name] = made[id(p)]
                for name, b in list(module._buffers.items()):
                    if b is not None:
                        module._buffers[name] = b.to("meta")


def _check_traceable(model: nn.Module) -> None:
    """
    Raises:
        AutoshardError: a part of the model is compiled, scripted or not built yet.
    """
    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__})"
        if compat.is_compiled(module):
            raise AutoshardError(f"{what} is compiled by torch.compile; give the plain module: autoshard compiles it")
        if isinstance(module, torch.jit.ScriptModule):
            raise AutoshardError(f"{what} is a TorchScript module, which cannot be traced; give the Python module")
        lazy = [n for n, p in module.named_parameters(recurse=False) if is_lazy(p)]
        if lazy:
            raise AutoshardError(
                f"{what} has no shape for {', '.join(lazy)} yet; call the model once on a sample before"
            )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _from_rank_zero(tensor: Tensor, device: torch.device) -> Tensor:
    """Rank 0's value on every rank: modules initialised under other seeds agree from here on."""
    whole = tensor.to(device).clone(memory_format=torch.contiguous_format)
    if dist.get_world_size() > 1 and whole.numel():
        dist.broadcast(whole, 0)
    return whole


def _fixed(layout: StateLayout, device: torch.device, seed: int) -> dict[Key, Tensor]:
    held: dict[Key, Tensor] = {
        ("step",): torch.zeros((), dtype=torch.int64, device=device),
        ("rng",): torch.tensor([seed, 0], dtype=torch.int64, device=device),
    }
    for key, entry in layout.layouts.items():
        if key[0] == "optimizer":
            fill = layout.fills.get(key, 0.0)
            whole = torch.full(entry.local_shape(layout.axes), fill, dtype=entry.dtype, device=device)
            held[key] = whole
    return held


def layout(source: Source, with_gradient: Iterable[str], context: PassContext, runtime: Runtime) -> StateLayout:
    """What a state of this model holds under a plan, and where."""
    layouts: dict[Key, Layout] = {}
    fills: dict[Key, float] = {}
    for name, p in source.modules.parameters().items():
        resting = at_rest(tuple(p.shape), context.placed(name), context)
        layouts["params", name] = Layout(tuple(p.shape), p.dtype, resting.parameter)
    for name, b in source.modules.buffers().items():
        layouts["buffers", name] = Layout(tuple(b.shape), b.dtype, context.replicate())
    if context.binding is not None:
        parameters = source.modules.parameters()
        for name in with_gradient:
            if name in context.binding.unassigned:
                continue
            shape, dtype = tuple(parameters[name].shape), parameters[name].dtype
            resting = at_rest(shape, context.placed(name), context)
            for slot in context.binding.slot_templates(name, shape, dtype):
                placements = slot_placements(slot, resting, context)
                layouts["optimizer", name, slot.name] = Layout(slot.shape, slot.dtype, placements)
                fills["optimizer", name, slot.name] = slot.fill
    layouts["step",] = Layout((), torch.int64, context.replicate())
    layouts["rng",] = Layout((2,), torch.int64, context.replicate())
    where = runtime.mesh.coordinates(runtime.rank)
    return StateLayout(layouts, context.axes, runtime.device_mesh, where, source.aliases, fills, runtime.agree)


def named_tensors(state: State, *, without: Iterable[str] = ()) -> dict[str, Tensor]:
    """Every tensor of a state under a flat name, as DTensors that share its memory; `without` some parameters."""
    left = {("params", name) for name in without}
    keys = [key for key in state.layout.layouts if key not in left]
    return {"/".join(key): state.layout.dtensor(key, state.local(key)) for key in keys}


def full_state_dict(state: State, source: Source) -> Iterator[tuple[str, Tensor]]:
    """The model's state_dict, one whole tensor at a time, tied weights under every name."""
    for name in source.modules.model.state_dict():
        yield name, state.full(source.aliases.get(name, name))
