"""Runs a model's constructor without memory for its tensors, and logs what each op does to which storage."""

from __future__ import annotations

import linecache
import os
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard import compat
from autoshard.compat import TorchDispatchMode, pytree
from autoshard.errors import CaptureError
from autoshard.init_log import Call, Constant, Draw, Effects, Entry, GeneratorRef, Machine, Reseed, View, schedule

_LAZY = (nn.UninitializedParameter, nn.UninitializedBuffer)
_META = torch.device("meta")
_CPU = torch.device("cpu")
_aten = torch.ops.aten

# In-place ops whose result does not depend on what the tensor held before.
_BLIND = {
    _aten.bernoulli_,
    _aten.cauchy_,
    _aten.copy_,
    _aten.exponential_,
    _aten.fill_,
    _aten.geometric_,
    _aten.log_normal_,
    _aten.normal_,
    _aten.random_,
    _aten.uniform_,
    _aten.zero_,
}
# Arguments that an op writes although its schema does not say so.
_HIDDEN_WRITES = {_aten.native_batch_norm: ("running_mean", "running_var")}
# Ops that look only at the sizes and dtype of their tensor argument.
_SHAPES_ONLY = {
    _aten.empty_like,
    _aten.full_like,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.new_full,
    _aten.new_ones,
    _aten.new_zeros,
    _aten.ones_like,
    _aten.rand_like,
    _aten.randint_like,
    _aten.randn_like,
    _aten.zeros_like,
}
# These reach into memory without an op that the log would see.
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class Recorder(TorchDispatchMode):
    """Runs every op on meta tensors and logs it.

    A tensor is identified by its storage and how it lies on it, never by its Python object, so views,
    ``x.data = y`` and deep copies need no special care. The storages seen are held, so that ids are not reused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.nbytes: list[int] = []
        self._ids: dict[int, int] = {}  # id of a meta storage -> its number in the log
        self._storages: list[torch.UntypedStorage] = []
        self._twins: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # id -> (real, meta)
        self._written: set[int] = set()
        self._valueless: set[int] = set()  # storages that the model itself asked to have on meta
        self._randomness = _Randomness()
        self.busy = False
        self.meta_asked = False  # the running call is the model's own request for the meta device

    def begin(self) -> None:
        """Take the default generator over; the caller restores it."""
        self._randomness.begin()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        busy, self.busy = self.busy, True
        try:
            return self._run(func, args, dict(kwargs or {}))
        finally:
            self.busy = busy

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _aten.lift_fresh.default and not args[0].is_meta:  # torch.tensor(data), torch.from_numpy
            return self._constant(args[0].clone())
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._to_meta, (args, kwargs))
        if any(argument.name == "device" for argument in func._schema.arguments):
            if kwargs.get("device") is not None or not _tensors((args, kwargs)):
                kwargs["device"] = _META
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if func is _aten.index.Tensor:
            args = args[0], self._positions(args[1])
        if torch.Tag.data_dependent_output in func.tags:
            return func(*self._read_all(args), **self._read_all(kwargs))
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:
            if func._schema.is_mutable or _draws(func):
                raise
            if "device" in kwargs:
                kwargs["device"] = _CPU
            return pytree.tree_map_only(
                torch.Tensor, self._constant, func(*self._read_all(args), **self._read_all(kwargs))
            )
        self._log(func, args, kwargs, result)
        return result

    # -- reading the log

    def view(self, t: torch.Tensor) -> View:
        """How a meta tensor lies on its storage."""
        if t.layout is not torch.strided or t.is_neg():
            raise CaptureError(
                f"a tensor of layout {t.layout}{' with a negative bit' if t.is_neg() else ''} is made at "
                f"{source_line()}; only dense tensors can be initialised shard by shard: give the built module instead"
            )
        storage = t.untyped_storage()
        index = self._ids.get(id(storage))
        if index is None:
            index = self._ids[id(storage)] = len(self._storages)
            self._storages.append(storage)
            self.nbytes.append(0)
        self.nbytes[index] = max(self.nbytes[index], storage.nbytes())
        return View(index, t.dtype, tuple(t.size()), tuple(t.stride()), int(t.storage_offset()), t.is_conj())

    def known(self, t: torch.Tensor) -> bool:
        return t.is_meta and id(t.untyped_storage()) in self._ids

    def valueless(self, t: torch.Tensor) -> bool:
        return self.known(t) and self._ids[id(t.untyped_storage())] in self._valueless

    def untouched(self, t: torch.Tensor) -> bool:
        """Whether nothing in the log gives `t` values."""
        return not self.known(t) or self._ids[id(t.untyped_storage())] not in self._written

    def evaluate(self, t: torch.Tensor) -> torch.Tensor | None:
        """The values of a meta tensor, or None if they depend on random numbers."""
        view = self.view(t)
        steps = schedule(self.entries, {}, wanted=[view.storage], draws=False)
        if view.storage not in self._written or any(isinstance(s.entry, Call) and s.entry.draw for s in steps):
            return None
        with compat.without_modes():
            machine = Machine(self.nbytes, set())
            machine.run_all(steps)
            return machine.tensor(view).clone()

    def read(self, t: torch.Tensor) -> torch.Tensor:
        """As `evaluate`.

        Raises:
            CaptureError: the values depend on random numbers.
        """
        value = self.evaluate(t)
        if value is None:
            raise CaptureError(
                f"the model's construction reads the value of a randomly initialised tensor at {source_line()}; which "
                "values it has is only known later, shard by shard. Compute without reading it (torch.where, in-place "
                "ops), or give parallelize the built module instead of a callable"
            )
        return value

    # -- after the model was built

    def adopt(self, module: nn.Module) -> None:
        """Put what is still real among parameters and buffers on meta, and give plain attributes their values."""
        moved: dict[int, torch.Tensor] = {}
        for m in module.modules():
            for owned in (m._parameters, m._buffers):
                for name, t in owned.items():
                    if t is not None and not t.is_meta:
                        if id(t) not in moved:
                            meta = self._to_meta(t.detach())
                            parameter = isinstance(t, nn.Parameter)
                            moved[id(t)] = nn.Parameter(meta, requires_grad=t.requires_grad) if parameter else meta
                        owned[name] = moved[id(t)]  # type: ignore[assignment]
        own = {id(t) for _, t in named_tensors(module)}
        for path, m in module.named_modules():
            for name, value in vars(m).items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    vars(m)[name] = self._with_values(value, f"{path}.{name}".lstrip("."), own)

    def _with_values(self, value: Any, where: str, own: set[int]) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in own or not self.known(value) or self.valueless(value):
                return value
            found = self.evaluate(value)
            if found is None:
                raise CaptureError(
                    f"{where} is a tensor with random values that is neither a parameter nor a buffer; "
                    "register it (self.register_buffer) so that it becomes part of the state"
                )
            return found.requires_grad_(value.requires_grad)
        if type(value) in (dict, list, tuple) and id(value) not in own:
            own.add(id(value))  # once, also where a container holds itself
            items = value.items() if type(value) is dict else enumerate(value)
            found_items = {key: self._with_values(x, f"{where}[{key!r}]", own) for key, x in items}
            if type(value) is tuple:
                return tuple(found_items.values())
            for key, x in found_items.items():
                value[key] = x
        return value

    # -- writing the log

    def _log(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if torch.Tag.inplace_view in func.tags:
            return  # only how a tensor lies on its storage changed, and every use says that itself
        effects = self._argument_effects(func, args, kwargs)
        outputs = [None if id(t.untyped_storage()) in self._ids else self.view(t) for t in _tensors(result)]
        new = frozenset(v.storage for v in outputs if v is not None)
        if self.meta_asked or (effects.reads | effects.writes | effects.shapes) & self._valueless:
            self._valueless |= new
        elif effects.writes or new:  # else a view, or no tensor at all
            generator = self._randomness.generator_of(kwargs.get("generator")) if _draws(func) else None
            effects = replace(effects, writes=effects.writes | new, covers=effects.covers | new)
            self._log_call(func, args, kwargs, outputs, effects, generator)

    def trunc_normal_(self, original: Callable[..., Any], t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Log `original` as one op: it draws again until the values are in range, so its ops are not known before."""
        busy, self.busy = self.busy, True
        try:
            with compat.without_modes():
                meta = self._to_meta(t)
                if self.valueless(meta):
                    return t
                view = self.view(meta)
                written = frozenset({view.storage})
                covers = written if view.covers(self.nbytes[view.storage]) else frozenset()
                given = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None)
                generator = self._randomness.generator_of(given)
                effects = Effects(frozenset(), written, covers)
                self._log_call(original, (meta, *args), kwargs, [None], effects, generator)  # its output is `t`
                return t
        finally:
            self.busy = busy

    def _log_call(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        outputs: Sequence[View | None],
        effects: Effects,
        generator: int | None,
    ) -> None:
        draw = None
        if generator is not None:
            self.entries += self._randomness.changes(generator)
            draw = self._randomness.advance(generator)
        self._written |= effects.writes
        args, kwargs = pytree.tree_map(self._specify, (tuple(args), kwargs))
        self.entries.append(Call(func, args, kwargs, tuple(outputs), effects, draw, torch.get_default_dtype()))

    def _argument_effects(self, func: Any, args: Any, kwargs: Any) -> Effects:
        reads, writes, covers, shapes = set(), set(), set(), set()
        for i, argument in enumerate(func._schema.arguments):
            declared = argument.alias_info is not None and argument.alias_info.is_write
            written = declared or argument.name in _HIDDEN_WRITES.get(func.overloadpacket, ())
            replaced = written and (argument.is_out or func.overloadpacket in _BLIND)
            for t in _tensors(args[i] if i < len(args) else kwargs.get(argument.name)):
                view = self.view(t)
                if written:
                    writes.add(view.storage)
                if replaced and view.covers(self.nbytes[view.storage]):
                    covers.add(view.storage)
                elif func.overloadpacket in _SHAPES_ONLY:
                    shapes.add(view.storage)
                elif not replaced:
                    reads.add(view.storage)
        return Effects(frozenset(reads), frozenset(writes), frozenset(covers - reads), frozenset(shapes))

    def _specify(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.view(x)
        if isinstance(x, torch.Generator):
            return GeneratorRef(self._randomness.index(x))
        return _CPU if isinstance(x, torch.device) else x

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
        self._log_constant(meta, value.detach(), None)
        return meta

    def _log_constant(self, meta: torch.Tensor, value: torch.Tensor, source: torch.Tensor | None) -> None:
        view = self.view(meta)
        storage = frozenset({view.storage})
        self._written |= storage
        version = 0 if source is None else source._version
        self.entries.append(Constant(view, value, source, version, Effects(frozenset(), storage, storage)))

    def _to_meta(self, t: torch.Tensor) -> torch.Tensor:
        """The meta twin of a real tensor from outside; it is not copied, so that pretrained weights cost nothing."""
        if t.is_meta:
            return t
        if t.layout is not torch.strided:
            raise CaptureError(f"a tensor of layout {t.layout} is used at {source_line()}; only dense tensors work")
        real = t.untyped_storage()
        if id(real) not in self._twins:
            elements = real.nbytes() // t.dtype.itemsize
            whole = torch.empty(0, dtype=t.dtype, device=t.device).set_(real, 0, (elements,), (1,))
            twin = torch.empty(elements, dtype=t.dtype, device=_META)
            self._twins[id(real)] = real, twin.untyped_storage()
            self._log_constant(twin, whole, None if t.is_inference() else t)
        blank = torch.empty(0, dtype=t.dtype, device=_META)
        return blank.set_(self._twins[id(real)][1], t.storage_offset(), t.size(), t.stride())

    def _positions(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Indices with masks replaced by where they are true: only that decides the shape of the result."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                found += map(self._constant, self.read(index).nonzero(as_tuple=True))
            else:
                found.append(index)
        return found

    def _read_all(self, values: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self.read, values)


class _Randomness:
    """Follows generators through user code that seeds, saves and restores them.

    Recording draws nothing, so after each draw the generator gets a state of its own: a mark. A state that is found
    later and is one of the marks means "as it was after that draw"; any other was set by the user.
    """

    def __init__(self) -> None:
        self._generators: list[torch.Generator] = [torch.default_generator]
        self._marks: dict[bytes, int] = {}
        self._expected: dict[int, bytes] = {}
        self._base = random.SystemRandom().getrandbits(62)  # no seed that a user would choose

    def begin(self) -> None:
        self.advance(0)

    def index(self, generator: torch.Generator) -> int:
        for i, known in enumerate(self._generators):
            if known is generator:
                return i
        if generator.device != _CPU:
            raise CaptureError(
                f"a random generator on {generator.device} is used at {source_line()}; "
                "initialisation is on CPU, use torch.Generator()"
            )
        self._generators.append(generator)
        return len(self._generators) - 1

    def generator_of(self, generator: torch.Generator | None) -> int:
        return 0 if generator is None else self.index(generator)

    def changes(self, index: int) -> list[Entry]:
        generator = self._generators[index]
        found = _digest(generator)
        if found == self._expected.get(index):
            return []
        return [Reseed(index, self._marks[found] if found in self._marks else generator.get_state())]

    def advance(self, index: int) -> Draw:
        mark = len(self._marks)
        self._generators[index].manual_seed(self._base + mark)
        digest = _digest(self._generators[index])
        self._marks[digest] = mark
        self._expected[index] = digest
        return Draw(index, mark)


class AsOnOneDevice(TorchFunctionMode):
    """Model code sees its tensors on CPU, and may read those that do not depend on random numbers."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        seen = {"device": _CPU, "is_meta": False, "is_cpu": True}
        self._seen = {getattr(torch.Tensor, name).__get__: value for name, value in seen.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        t = args[0] if args else None
        if isinstance(t, torch.Tensor):
            ours = t.is_meta and not self._recorder.busy and (isinstance(t, _LAZY) or not self._recorder.valueless(t))
            if ours and func in self._seen:
                return self._seen[func]
            if ours and func in _READS:
                value = self._recorder.read(t)
                with compat.without_modes():
                    return func(value, *args[1:], **kwargs)
        elif _is_meta_device(kwargs.get("device")):
            self._recorder.meta_asked = True
            try:
                return func(*args, **kwargs)
            finally:
                self._recorder.meta_asked = False
        return func(*args, **kwargs)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, each tensor once under its first name."""
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(t, _LAZY):
            raise CaptureError(f"{name!r} is a lazy parameter without a shape; run a forward pass where you build it")
        yield name, t


def _digest(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _draws(func: Any) -> bool:
    """Whether an op moves a random generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _is_meta_device(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"


def source_line(error: BaseException | None = None) -> str:
    """The innermost line, of the running code or of `error`, that is neither torch's nor ours."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__) + os.sep)
    frames = (
        [(frame, line) for frame, line in traceback.walk_stack(None)]
        if error is None
        else [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
    )
    for frame, line in frames:
        path = frame.f_code.co_filename
        if not path.startswith(inside):
            return f"{path}:{line}, in {frame.f_code.co_name}: `{linecache.getline(path, line).strip()}`"
    return "an unknown line"
