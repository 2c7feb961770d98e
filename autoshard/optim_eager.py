"""Steps for optimizer classes without a rule of ours: the class's own eager step, exact on sharded state.

In mode SHARD each rank steps the parts that it holds. In mode OWNER each parameter has one owner among the ranks over
which it is split, on however many axes: one all-to-all brings the owner its whole parameters, gradients and state, the
owner steps them, and a second all-to-all takes the parts back. Both run in buckets, so that no rank ever holds the
whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.optim_binding import Binding, Mode, SlotTemplate
from autoshard.placement import Ranges, owned, put, take, without_padding
from autoshard.program import Placements

Slots = Mapping[str, Mapping[str, Tensor]]

_BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class LocalShard:
    """What one rank holds of one parameter.

    Args:
        local: the padded part, zeros at the end; the whole tensor if replicated.
        shape: global shape.
        placements: of the axes that split it, the outermost first; () if replicated.
        ranks: of each of those axes.
        coordinate: this rank's place on each of them.
        group: the process group of all ranks on those axes, the last axis innermost; None if replicated, or for the
            default group.
    """

    local: Tensor
    shape: tuple[int, ...]
    placements: Placements = ()
    ranks: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()
    group: dist.ProcessGroup | None = None

    @property
    def sharded(self) -> bool:
        return self.members > 1

    @property
    def members(self) -> int:
        """The number of ranks in `group`."""
        return math.prod(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's place in `group`."""
        found = 0
        for n, coordinate in zip(self.ranks, self.coordinate, strict=True):
            found = found * n + coordinate
        return found

    def _held(self, member: int) -> list[Ranges]:
        where: list[int] = []
        for n in reversed(self.ranks):
            member, coordinate = divmod(member, n)
            where.insert(0, coordinate)
        return owned(self.shape, self.placements, self.ranks, where)

    def valid(self, padded: Tensor) -> Tensor:
        """The view of `padded`, a tensor that lies as `local` does, that is not padding."""
        return without_padding(padded, self._held(self.rank))

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The global tensor from the padded part of every rank of the group, in its order."""
        found = parts[0].new_empty(self.shape)
        for member, part in enumerate(parts):
            put(found, self._held(member), part)
        return found

    def parts(self, whole: Tensor) -> list[Tensor]:
        """The padded part of each rank of the group."""
        found = []
        for member in range(self.members):
            part, ranges = whole.new_zeros(self.local.shape), self._held(member)
            without_padding(part, ranges).copy_(take(whole, ranges))
            found.append(part)
        return found


class EagerUpdate:
    """Runs the step of a `Binding` in mode SHARD or OWNER on padded local shards, in place.

    Raises:
        ValueError: the binding is in mode GRAPH.
    """

    def __init__(self, binding: Binding, bucket_bytes: int = _BUCKET_BYTES) -> None:
        if binding.mode is Mode.GRAPH:
            raise ValueError(f"{binding.class_name} has a rule for the update graph")
        self._binding = binding
        self._bucket_bytes = bucket_bytes  # of parameters, on each owner
        self._known: dict[tuple[str, tuple[int, ...], torch.dtype], tuple[SlotTemplate, ...]] = {}

    def step(
        self,
        params: Mapping[str, LocalShard],
        grads: Mapping[str, Tensor],
        slots: Slots,
        *,
        lr_factor: float,
        first: bool,
    ) -> None:
        """One update, in place in `params` and `slots`; every rank calls it alike.

        Args:
            params: the parameters that have a gradient. Those in no group, and those without elements, stay.
            grads: for each, its gradient, padded and placed as the parameter, in its dtype.
            slots: for each, one tensor per slot of `binding.slot_templates`: padded and placed as the parameter
                where the template is like it, else whole and the same on every rank.
            lr_factor: what the schedule says; every group's lr is multiplied by it.
            first: no update was made yet: the optimizer makes its state itself, `slots` are only written.
        """
        grouped = [name for group in self._binding.groups for name in group.names]
        names = [name for name in grouped if name in params and 0 not in params[name].shape]
        here = [name for name in names if self._binding.mode is Mode.SHARD or not params[name].sharded]
        held = {name: params[name].valid(params[name].local) for name in here}
        local_grads = {name: params[name].valid(grads[name]) for name in here}
        local_slots = {
            name: {
                t.name: params[name].valid(slots[name][t.name]) if t.like_parameter else slots[name][t.name]
                for t in self._templates(name, params[name])
            }
            for name in here
        }
        self._step_tensors(params, held, local_grads, local_slots, lr_factor, first)
        for group in _by_group({n: params[n] for n in names if n not in held}):
            for each in _assign_owners(group, self._bucket_bytes):
                self._step_owned(each, params, grads, slots, lr_factor, first)

    def _templates(self, name: str, shard: LocalShard) -> tuple[SlotTemplate, ...]:
        key = (name, shard.shape, shard.local.dtype)
        if key not in self._known:
            self._known[key] = self._binding.slot_templates(*key)
        return self._known[key]

    def _step_tensors(
        self,
        params: Mapping[str, LocalShard],
        tensors: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        slots: Slots,
        lr_factor: float,
        first: bool,
    ) -> None:
        """Steps `tensors`, parts or whole, in place by the user's class, with its state in `slots`."""
        if not tensors:
            return
        leaves = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
        optimizer = self._binding.instantiate(leaves)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * lr_factor
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
            if not first:
                templates = self._templates(name, params[name])
                optimizer.state[leaf] = {t.name: _as_kept(t, slots[name][t.name]) for t in templates}
        optimizer.step()
        for name, leaf in leaves.items():
            for key, value in optimizer.state[leaf].items():
                held = slots[name][key]
                if not isinstance(value, Tensor):
                    held.fill_(value)
                elif value is not held:
                    held.copy_(value)

    def _step_owned(
        self,
        owners: list[list[str]],
        params: Mapping[str, LocalShard],
        grads: Mapping[str, Tensor],
        slots: Slots,
        lr_factor: float,
        first: bool,
    ) -> None:
        """Steps one bucket; `owners[r]` are the parameters that rank r steps."""
        some = params[next(name for names in owners for name in names)]
        templates = {name: self._templates(name, params[name]) for names in owners for name in names}
        sharded = {name: [t.name for t in templates[name] if t.like_parameter] for name in templates}
        small = {name: [t.name for t in templates[name] if not t.like_parameter] for name in templates}

        def parts_of(name: str) -> list[Tensor]:
            # At the first update the state that travels holds nothing yet; it goes along for its shape.
            return [params[name].local, grads[name], *(slots[name][key] for key in sharded[name])]

        outgoing = [[part for name in names for part in parts_of(name)] for names in owners]
        received = iter(zip(*_exchange(outgoing, [outgoing[some.rank]] * some.members, some.group), strict=True))
        whole: dict[str, Tensor] = {}
        whole_grads: dict[str, Tensor] = {}
        state: dict[str, dict[str, Tensor]] = {}
        for name in owners[some.rank]:
            whole[name], whole_grads[name], *rest = [params[name].whole(next(received)) for _ in parts_of(name)]
            state[name] = dict(zip(sharded[name], rest, strict=True)) | {k: slots[name][k] for k in small[name]}
        self._step_tensors(params, whole, whole_grads, state, lr_factor, first)

        results: list[list[Tensor]] = [[] for _ in range(some.members)]
        for name in whole:
            shares = [params[name].parts(t) for t in (whole[name], *(state[name][key] for key in sharded[name]))]
            for rank, result in enumerate(results):
                result += [share[rank] for share in shares] + [state[name][key] for key in small[name]]
        targets = [
            [t for n in names for t in (params[n].local, *(slots[n][key] for key in sharded[n] + small[n]))]
            for names in owners
        ]
        for held, new in zip(targets, _exchange(results, targets, some.group), strict=True):
            for target, value in zip(held, new, strict=True):
                target.copy_(value)


def _as_kept(template: SlotTemplate, slot: Tensor) -> Any:
    if template.number is not None:
        return template.number(slot.item())
    # torch, when it loads a state, leaves "step" on the host too: reading it must not wait for the device.
    return slot.cpu() if template.name == "step" and template.shape == () else slot


def _by_group(params: Mapping[str, LocalShard]) -> list[dict[str, LocalShard]]:
    """The parameters by the ranks that hold their parts, in an order that is the same on all ranks."""
    found: dict[Any, dict[str, LocalShard]] = {}
    for name, shard in params.items():
        found.setdefault((shard.ranks, shard.coordinate, shard.group), {})[name] = shard
    return list(found.values())


def _assign_owners(params: Mapping[str, LocalShard], bucket_bytes: int) -> Iterator[list[list[str]]]:
    """Buckets of, for each rank, the names of the parameters that it steps: the next to whom has fewest bytes."""
    ranks = next(iter(params.values())).members
    loads = [0] * ranks
    bucket: list[list[str]] = [[] for _ in range(ranks)]
    inside = 0
    for name, shard in params.items():
        size = shard.local.numel() * shard.local.element_size() * ranks
        if inside and inside + size > bucket_bytes * ranks:
            yield bucket
            bucket, inside = [[] for _ in range(ranks)], 0
        owner = min(range(ranks), key=loads.__getitem__)
        loads[owner] += size
        inside += size
        bucket[owner].append(name)
    yield bucket


def _exchange(
    outgoing: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None
) -> list[list[Tensor]]:
    """An all-to-all of lists of tensors as one of bytes: `outgoing[r]` goes to rank r of `group`.

    Returns, for each rank, the tensors that it sent, which have the shapes and dtypes of `expected[r]`.
    """
    device = next(t.device for tensors in (*outgoing, *expected) for t in tensors)
    flat = [
        [t.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
        for tensors in outgoing
    ]
    sent = [sum(t.numel() for t in tensors) for tensors in flat]
    coming = [sum(t.numel() * t.element_size() for t in tensors) for tensors in expected]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    source = torch.cat([empty, *(t for tensors in flat for t in tensors)])
    target = torch.empty(sum(coming), dtype=torch.uint8, device=device)
    dist.all_to_all_single(target, source, coming, sent, group=group)
    result: list[list[Tensor]] = []
    offset = 0
    for tensors in expected:
        result.append([])
        for t in tensors:
            size = t.numel() * t.element_size()
            # A copy, because a view as a wider dtype must be aligned.
            piece = target[offset : offset + size].clone()
            result[-1].append(piece.view(t.dtype).view(t.shape))
            offset += size
    return result
