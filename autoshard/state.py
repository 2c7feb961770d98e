"""The sharded state of a run: parameters, buffers, optimizer slots, step counter, random key.

Every tensor is held as this rank's padded local shard, of the same shape on every rank; what users see are
DTensors that are views of the part without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as DReplicate

from autoshard import moves, placement
from autoshard.collectives import Axis
from autoshard.compat import pytree
from autoshard.errors import StateError
from autoshard.names import hint
from autoshard.placement import to_dtensors
from autoshard.program import Placements

Key = tuple[str, ...]  # ("params", name) | ("buffers", name) | ("optimizer", name, slot) | ("step",) | ("rng",)


@dataclass(frozen=True)
class Layout:
    """How one tensor of the state lies at rest.

    Args:
        shape: global, in elements.
        dtype: element type.
        placements: one per mesh axis in use.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements

    def local_shape(self, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """What every rank holds, padding counted."""
        return placement.local_shape(self.shape, self.placements, [axis.ranks for axis in axes])


@dataclass(frozen=True)
class StateLayout:
    """The layout of every tensor of a state, where it lies, the other names of tied parameters, the values that
    optimizer slots start from, and how ranks make sure that all make the same call."""

    layouts: Mapping[Key, Layout]
    axes: tuple[Axis, ...]
    device_mesh: DeviceMesh
    coordinates: Mapping[str, int]
    aliases: Mapping[str, str]
    fills: Mapping[Key, float]
    agree: Callable[[str], None]

    def shard(self, key: Key, whole: Tensor) -> Tensor:
        """This rank's padded shard of a whole tensor, in memory of its own, zeros as padding."""
        layout = self.layouts[key]
        local = torch.zeros(layout.local_shape(self.axes), dtype=layout.dtype, device=whole.device)
        self.valid(key, local).copy_(placement.take(whole, self._owned(layout)))
        return local

    def valid(self, key: Key, local: Tensor) -> Tensor:
        """The view of a padded local shard that is not padding."""
        return placement.without_padding(local, self._owned(self.layouts[key]))

    def _owned(self, layout: Layout) -> Sequence[placement.Ranges]:
        ranks = [axis.ranks for axis in self.axes]
        return placement.owned(layout.shape, layout.placements, ranks, [self.coordinates[a.name] for a in self.axes])

    def dtensor(self, key: Key, local: Tensor) -> DTensor:
        return self.as_dtensor(self.layouts[key], local)

    def whole(self, layout: Layout, local: Tensor) -> Tensor:
        """The whole tensor of a padded local shard, on every rank; the shard itself where that is whole.

        Not by DTensor, which refuses to gather strided shards in torch 2.11.
        """
        return moves.whole(local, self.axes, layout.placements, layout.shape)

    def as_dtensor(self, layout: Layout, local: Tensor) -> DTensor:
        """A padded local shard of `layout` as a DTensor that shares its memory."""
        placements = to_dtensors(layout.placements, [axis.ranks for axis in self.axes]) or [DReplicate()]
        stride = torch.empty(layout.shape, device="meta").stride()
        return DTensor.from_local(
            placement.without_padding(local, self._owned(layout)),
            self.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(layout.shape),
            stride=stride,
        )


def unknown_entry(what: str, name: object, known: Sequence[str]) -> KeyError:
    """The error for a name that a state does not have."""
    listed = ", ".join(known[:8]) + (f", ... ({len(known)} in all)" if len(known) > 8 else "") if known else "none"
    return KeyError(f"no {what} {name!r}; {hint(str(name), known)}valid: {listed}")


class _Section(Mapping[str, Any]):
    """A part of a state as a mapping from names to DTensors, made when asked for."""

    def __init__(self, state: State, prefix: Key) -> None:
        self._state = state
        self._prefix = prefix
        depth = len(prefix)
        keys = (key for key in state.layout.layouts if key[:depth] == prefix and len(key) > depth)
        self._names = list(dict.fromkeys(key[depth] for key in keys))

    def __getitem__(self, name: str) -> Any:
        key = self._key(name)
        if key in self._state.layout.layouts:
            return self._state.layout.dtensor(key, self._state.local(key))
        if key[-1] in self._names:
            return _Section(self._state, key)
        raise unknown_entry(self._what, name, self._names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._key(name)[-1] in self._names

    def _key(self, name: str) -> Key:
        first = self._state.layout.aliases.get(name, name) if self._prefix == ("params",) else name
        return (*self._prefix, first)

    @property
    def _what(self) -> str:
        section, *parameter = self._prefix
        if parameter:
            return f"optimizer slot of {parameter[0]!r}"
        return {"params": "parameter", "buffers": "buffer", "optimizer": "optimizer state of a parameter"}[section]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<{len(self)} entries: {', '.join(self._names[:4])}{', ...' if len(self) > 4 else ''}>"


class State:
    """An immutable pytree of a run's tensors. A step donates it: the old one then raises when it is used."""

    scaler = None

    def __init__(self, layout: StateLayout, tensors: Mapping[Key, Tensor]) -> None:
        self.layout = layout
        self._tensors: dict[Key, Tensor] | None = dict(tensors)

    def local(self, key: Key) -> Tensor:
        """This rank's padded local shard.

        Raises:
            StateError: the state was donated.
        """
        return self._alive()[key]

    def _alive(self) -> dict[Key, Tensor]:
        if self._tensors is None:
            raise StateError(
                "this state was donated to a step and its memory is in use by the state that the step returned; "
                "write `state, metrics = step(state, batch)`"
            )
        return self._tensors

    def donate(self, changed: Mapping[Key, Tensor]) -> State:
        """A state with this one's tensors, `changed` replaced; this one is spent."""
        tensors = self._alive()
        tensors.update(changed)
        self._tensors = None
        return State(self.layout, tensors)

    @property
    def params(self) -> Mapping[str, DTensor]:
        """Parameters by the model's own names; a tied weight under its first, the others resolve to it."""
        self._alive()
        return _Section(self, ("params",))

    @property
    def buffers(self) -> Mapping[str, DTensor]:
        self._alive()
        return _Section(self, ("buffers",))

    @property
    def optimizer(self) -> Mapping[str, Mapping[str, DTensor]]:
        """Per parameter, its optimizer slots by torch's own names."""
        self._alive()
        return _Section(self, ("optimizer",))

    @property
    def step(self) -> Tensor:
        """Updates made so far, int64 of shape ()."""
        return self.local(("step",))

    @property
    def rng(self) -> Tensor:
        """The random key, int64 (2,): seed, and micro-batches drawn so far."""
        return self.local(("rng",))

    def full(self, name: str) -> Tensor:
        """The whole value of a parameter or buffer on every rank. A collective call.

        Raises:
            KeyError: there is no such parameter or buffer.
        """
        key = ("buffers", name) if name in self.buffers else ("params", self.layout.aliases.get(name, name))
        if key not in self.layout.layouts:
            raise unknown_entry("parameter or buffer", name, [*self.params, *self.buffers])
        self.layout.agree(f"state.full({name!r})")  # a rank that does not call it would read another's message
        local = self.local(key)
        whole = self.layout.whole(self.layout.layouts[key], local)
        return whole.clone() if whole is local else whole  # the next step writes where the state lies

    def __repr__(self) -> str:
        if self._tensors is None:
            return "State(donated)"
        nbytes = sum(t.numel() * t.element_size() for t in self._tensors.values())
        return f"State({len(self.params)} parameters, {len(self.buffers)} buffers, {nbytes:,} bytes on this rank)"


def _flatten(state: State) -> tuple[list[Tensor], tuple[StateLayout, tuple[Key, ...]]]:
    tensors = state._alive()
    return list(tensors.values()), (state.layout, tuple(tensors))


def _unflatten(leaves: Any, context: tuple[StateLayout, tuple[Key, ...]]) -> State:
    layout, keys = context
    return State(layout, dict(zip(keys, leaves, strict=True)))


pytree.register_pytree_node(State, _flatten, _unflatten)
