"""Strided shards in a checkpoint: each contiguous block that a rank holds is written and read by itself.

torch.distributed.checkpoint knows one block per rank and tensor, which a shard of every one of several parts of a dim
(half of each of q, k and v) is not. Written as blocks with their places in the whole tensor, any mesh can read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Shard

from autoshard import compat
from autoshard.placement import blocks, narrowed

Blocks = dict[tuple[int, ...], Tensor]  # offsets in the whole tensor -> the view of the local tensor that lies there


def strided_blocks(t: DTensor) -> Blocks:
    """The contiguous blocks of a DTensor that this rank holds."""
    ranges = []
    for dim, size in enumerate(t.shape):
        held = torch.arange(size)
        for axis, placement in enumerate(t.placements):
            outer = compat.split_factor(placement)
            if (outer > 1 or isinstance(placement, Shard)) and placement.dim == dim:  # type: ignore[attr-defined]
                held = _part(held, outer, t.device_mesh.size(axis), t.device_mesh.get_local_rank(axis))
        ranges.append(_ranges(held.tolist()))
    local = t.to_local()
    return {tuple(start for start, _ in there): narrowed(local, here) for there, here in blocks(ranges)}


def _part(held: Tensor, outer: int, ranks: int, coordinate: int) -> Tensor:
    if outer > 1:
        return held.unflatten(0, (outer, ranks, -1))[:, coordinate].flatten()
    parts = held.chunk(ranks)
    return parts[coordinate] if coordinate < len(parts) else held[:0]


def _ranges(held: list[int]) -> tuple[tuple[int, int], ...]:
    """Sorted numbers as the half-open ranges that they fill."""
    found: list[tuple[int, int]] = []
    for i in held:
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return tuple(found)


def _strided(tensors: Mapping[str, Any]) -> dict[str, Blocks]:
    return {
        name: strided_blocks(t)
        for name, t in tensors.items()
        if isinstance(t, DTensor) and any(compat.split_factor(p) > 1 for p in t.placements)
    }


class SaveBlocks(DefaultSavePlanner):
    """torch's planner, but for strided shards."""

    def create_local_plan(self) -> SavePlan:
        self.strided = _strided(self.state_dict)
        every = dict(self.state_dict)
        self.state_dict = {name: value for name, value in every.items() if name not in self.strided}
        plan = super().create_local_plan()
        self.state_dict = every
        items = [_write_item(n, o, b, every[n]) for n, found in self.strided.items() for o, b in found.items()]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self.strided:
            assert index.offset is not None
            return self.strided[index.fqn][tuple(index.offset)]
        return super().lookup_object(index)


def _write_item(name: str, offsets: tuple[int, ...], block: Tensor, whole: DTensor) -> WriteItem:
    where = torch.Size(offsets)
    chunk = ChunkStorageMetadata(offsets=where, sizes=block.size())
    properties = TensorProperties.create_from_tensor(block)
    data = TensorWriteData(chunk=chunk, properties=properties, size=whole.size())
    return WriteItem(index=MetadataIndex(name, where), type=WriteItemType.SHARD, tensor_data=data)


class LoadBlocks(DefaultLoadPlanner):
    """torch's planner, but for strided shards."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        metadata, self.strided = self.metadata, _strided(self.state_dict)
        others = {name: value for name, value in self.state_dict.items() if name not in self.strided}
        plan = create_default_local_load_plan(others, metadata)
        items = list(plan.items)
        for name, found in self.strided.items():
            written = metadata.state_dict_metadata[name]
            assert isinstance(written, TensorStorageMetadata)
            chunks = [ChunkStorageMetadata(torch.Size(offsets), block.size()) for offsets, block in found.items()]
            items += create_read_items_for_chunk_list(name, written, chunks)
        return dataclasses.replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn in self.strided:
            assert index.offset is not None
            return self.strided[index.fqn][tuple(index.offset)]
        return super().lookup_tensor(index)
