"""Checks that ranks which must hold the same values do, bit for bit: copies of state, and batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard import batch as batches
from autoshard import compat
from autoshard.batch import BatchSpec
from autoshard.errors import DivergenceError
from autoshard.placement import Replicate
from autoshard.runtime import Runtime
from autoshard.state import Key, State

_CHUNK = 1 << 22  # elements at once: the sums are made of int64
_SHOWN = 8  # ranks in a message
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(t: Tensor) -> Tensor:
    """A number that changes with any one element of `t`, int64 of shape (), on its device."""
    flat = t.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=t.device)
        total = total + (part * (place * 0x9E3779B97F4A7C1 * 2 + 1)).sum()  # odd factors: no change of one is lost
    return total


def check_state(runtime: Runtime, state: State) -> None:
    """Compare what several ranks hold copies of. A collective call.

    Raises:
        DivergenceError: on every rank; names the first parameter, buffer or slot that differs, and the ranks.
    """
    keys = list(state.layout.layouts) if runtime.axes else []
    if not keys:
        return
    found = _gather(runtime, torch.stack([digest(state.local(key)) for key in keys]))
    for key, digests in zip(keys, found.unbind(1), strict=True):
        whole = [
            axis.name
            for axis, placement in zip(runtime.axes, state.layout.layouts[key].placements, strict=True)
            if isinstance(placement, Replicate)
        ]
        for ranks in _copies(runtime, whole):
            _refuse(ranks, digests, f"{_title(key)} has copies that differ", _ADVICE)


_ADVICE = (
    "A rank has computed something else: changed data on one rank only, a kernel that is not deterministic, or a "
    "faulty device. Go on from a checkpoint that is older"
)


def check_batch(runtime: Runtime, spec: BatchSpec, batch: Any) -> None:
    """Compare the batches of ranks that differ on other axes than data only. A collective call where there are such.

    Raises:
        DivergenceError: on every rank; names the tensor and the ranks.
    """
    others = [axis.name for axis in runtime.axes if axis.name != "data"]
    tensors = batches.tensors(batch)
    if not others or not tensors:
        return
    paths = [leaf.path or "the batch" for leaf in spec.leaves if leaf.shape is not None]
    found = _gather(runtime, torch.stack([_bytes_digest(t) for t in tensors]))
    for path, digests in zip(paths, found.unbind(1), strict=True):
        for ranks in _copies(runtime, others):
            _refuse(
                ranks,
                digests,
                f"batch tensor {path} differs",
                f"They differ on the {' and '.join(others)} axis only, so each must pass the same rows: slice the "
                "global batch by the data coordinate (autoshard.data.data_rank), not by the rank",
            )


def _bytes_digest(t: Tensor) -> Tensor:
    data = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return torch.tensor(int.from_bytes(hashlib.sha256(data).digest()[:7], "big"))


def _gather(runtime: Runtime, digests: Tensor) -> Tensor:
    """(ranks, tensors): what each rank found."""
    mine = digests.cpu()
    found = torch.empty(dist.get_world_size() * mine.numel(), dtype=torch.int64)
    compat.all_gather(found, mine, runtime.control)
    return found.view(-1, mine.numel())


def _copies(runtime: Runtime, axes: Sequence[str]) -> list[list[int]]:
    """The ranks, in groups that differ on `axes` only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(runtime.mesh.size):
        where = runtime.mesh.coordinates(rank)
        groups.setdefault(tuple(at for name, at in where.items() if name not in axes), []).append(rank)
    return list(groups.values())


def _refuse(ranks: Sequence[int], digests: Tensor, what: str, advice: str) -> None:
    values = [int(digests[rank]) for rank in ranks]
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != values[0]]
    if odd:
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        listed = ", ".join(map(str, odd[:_SHOWN])) + more
        raise DivergenceError(f"{what} between rank {ranks[0]} and rank {listed}. {advice}")


def _title(key: Key) -> str:
    match key:
        case ("params", name):
            return f"parameter {name}"
        case ("buffers", name):
            return f"buffer {name}"
        case ("optimizer", name, slot):
            return f"optimizer slot {slot} of {name}"
        case ("step",):
            return "the step counter"
    return "the random key"
