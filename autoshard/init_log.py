"""The log of a model's initialisation: what an entry is, which entries must run, and running them.

entries (in order)                           live while they run
w = empty(4, 4)                              (nothing: the content is never wanted)
uniform_(w)     moves the generator          w
b = zeros(4)                                 b, complete
normal_(w)      overwrites all of w          w, complete
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.compat import pytree
from autoshard.errors import CaptureError

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor lies on a storage of the log: sizes, strides and offset in elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool

    @property
    def nbytes(self) -> int:
        """Bytes of storage that this view reaches into, from its beginning."""
        if 0 in self.size:
            return 0
        last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def covers(self, nbytes: int) -> bool:
        """Whether every byte of a storage of `nbytes` belongs to exactly one element."""
        expected = 1
        for step, n in sorted(zip(self.stride, self.size, strict=True)):
            if n != 1 and step != expected:
                return 0 in self.size and nbytes == 0
            expected *= n
        return self.offset == 0 and expected * self.dtype.itemsize == nbytes


@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """Stands for a random generator among the arguments of an op; 0 is torch's default one."""

    index: int


@dataclass(frozen=True, slots=True)
class Draw:
    """An op moves the generator; `mark` numbers the state that it leaves, for code that sets it back later."""

    generator: int
    mark: int


@dataclass(frozen=True, slots=True)
class Effects:
    """What an entry does to storages.

    `covers` are those of `writes` whose whole content it replaces, `shapes` those of which it needs only the sizes.
    """

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    covers: frozenset[int] = frozenset()
    shapes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Call:
    """An op or function; `outputs` are its new tensors, None where an output lies on a storage that existed."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View | None, ...]
    effects: Effects
    draw: Draw | None
    default_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Constant:
    """A storage whose values came from outside of the log: data, numpy, a checkpoint.

    `source` is the caller's own tensor, not copied, and `version` says how often it had been written by then.
    """

    view: View
    value: torch.Tensor
    source: torch.Tensor | None
    version: int
    effects: Effects

    def check_unchanged(self) -> None:
        if self.source is not None and self.source._version != self.version:
            raise CaptureError(
                f"a tensor of shape {tuple(self.source.shape)} that the model callable uses was changed in place after "
                "the model was recorded; initialise the state before changing it, or give the callable a copy"
            )


@dataclass(frozen=True, slots=True)
class Reseed:
    """User code set a generator: to a given state, or back to the one after the draw of that mark."""

    generator: int
    state: torch.Tensor | int
    effects: Effects = field(default_factory=Effects)


Entry = Call | Constant | Reseed


@dataclass(frozen=True, slots=True)
class Step:
    """An entry to run, the names whose tensors are then complete, the storages that are then not wanted any more.

    `borrow`: a constant that nothing writes, used where it lies.
    """

    entry: Entry
    complete: tuple[str, ...]
    drop: tuple[int, ...]
    borrow: bool


def schedule(
    entries: Sequence[Entry], targets: Mapping[str, int], wanted: Iterable[int] = (), draws: bool = True
) -> list[Step]:
    """The entries that must run, and when each storage is complete or dead.

    Backwards through the log, as liveness in a compiler. `targets` (name -> storage) are wanted right after their
    last write, `wanted` at the end. Draws whose result nobody wants still move the generator: they run if `draws`.
    """
    last = {storage: i for i, entry in enumerate(entries) for storage in entry.effects.writes}
    due: dict[int, list[str]] = {}
    for name, storage in targets.items():
        due.setdefault(last[storage], []).append(name)
    changed = {storage for entry in entries if isinstance(entry, Call) for storage in entry.effects.writes}
    live = set(wanted)
    steps: list[Step] = []
    for i in reversed(range(len(entries))):
        entry, effects = entries[i], entries[i].effects
        after = live.union(targets[name] for name in due.get(i, ()))
        moves = isinstance(entry, Reseed) or (isinstance(entry, Call) and entry.draw is not None)
        if not (effects.writes & after or (draws and moves)):
            continue
        drop = tuple(sorted((effects.reads | effects.writes | effects.shapes) - live))
        borrow = isinstance(entry, Constant) and entry.view.storage not in changed
        steps.append(Step(entry, tuple(due.get(i, ())), drop, borrow))
        live = (after - effects.covers) | effects.reads
    steps.reverse()
    return steps


class Machine:
    """Runs entries on CPU. Storages are made when first touched; `drop` forgets one."""

    def __init__(self, nbytes: Sequence[int], marks: set[int]) -> None:
        self._nbytes = nbytes
        self._wanted_marks = marks
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._generators: dict[int, torch.Generator] = {0: torch.default_generator}
        self._marks: dict[int, torch.Tensor] = {}

    def storage(self, index: int) -> torch.UntypedStorage:
        if index not in self._storages:
            self._storages[index] = torch.empty(self._nbytes[index], dtype=torch.uint8, device=_CPU).untyped_storage()
        return self._storages[index]

    def drop(self, index: int) -> None:
        self._storages.pop(index, None)

    def tensor(self, view: View) -> torch.Tensor:
        blank = torch.empty(0, dtype=view.dtype, device=_CPU)
        t = blank.set_(self.storage(view.storage), view.offset, view.size, view.stride)
        return t.conj() if view.conjugated else t

    def mark(self, generator: int, mark: int) -> None:
        if mark in self._wanted_marks:
            self._marks[mark] = self._generators[generator].get_state()

    def run_all(self, steps: Iterable[Step], after: Callable[[Step], None] = lambda step: None) -> None:
        """Run every step, call `after` with it, then drop what it says. The default dtype is restored."""
        default = torch.get_default_dtype()
        try:
            with torch.no_grad():
                for step in steps:
                    self._run(step)
                    after(step)
                    for storage in step.drop:
                        self.drop(storage)
        finally:
            torch.set_default_dtype(default)

    def _run(self, step: Step) -> None:
        match step.entry:
            case Call() as call:
                self._call(call)
            case Constant(view, value) as constant:
                constant.check_unchanged()
                if step.borrow:
                    self._storages[view.storage] = value.untyped_storage()
                else:
                    self.tensor(view).copy_(value)
            case Reseed(index, state):
                generator = self._generators.setdefault(index, torch.Generator() if index else torch.default_generator)
                generator.set_state(self._marks[state] if isinstance(state, int) else state)

    def _call(self, call: Call) -> None:
        if torch.get_default_dtype() is not call.default_dtype:  # arange(3) / 2 depends on it
            torch.set_default_dtype(call.default_dtype)
        args, kwargs = pytree.tree_map(self._real, (call.args, call.kwargs))
        results = [t for t in pytree.tree_leaves(call.func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        for view, result in zip(call.outputs, results, strict=True):
            if view is not None:
                self._adopt(view, result)
        if call.draw is not None:
            self.mark(call.draw.generator, call.draw.mark)

    def _real(self, x: Any) -> Any:
        if isinstance(x, View):
            return self.tensor(x)
        return self._generators[x.index] if isinstance(x, GeneratorRef) else x

    def _adopt(self, view: View, result: torch.Tensor) -> None:
        storage = result.untyped_storage()
        same = (result.size(), result.stride(), result.storage_offset()) == (view.size, view.stride, view.offset)
        aliased = any(storage is other for other in self._storages.values())
        if same and not aliased and storage.nbytes() >= self._nbytes[view.storage]:
            self._storages[view.storage] = storage
        else:  # the CPU kernel chose other strides than the meta kernel
            self.tensor(view).copy_(result)
