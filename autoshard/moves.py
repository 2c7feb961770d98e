"""Changes of a local tensor's placements on several axes at once, where axes may split one dim together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoshard import collectives
from autoshard.collectives import Axis
from autoshard.placement import REPLICATE, Placement, Shard, local_outer, local_shape
from autoshard.program import Placements


def change(
    x: Tensor,
    axes: Sequence[Axis],
    source: Placements,
    target: Placements,
    shape: tuple[int, ...],
    coordinates: Sequence[Tensor],
) -> Tensor:
    """A local tensor of global `shape` from `source` to `target`, one axis after the other.

    Args:
        coordinates: this rank's coordinate on each axis, int64 of shape (1,); () where `target` is whole.
    """
    now = list(source)
    for i, axis in enumerate(axes):
        if now[i] == target[i]:
            continue
        before, after = within(now, axes, i), within([*now[:i], target[i], *now[i + 1 :]], axes, i)
        others = [REPLICATE if j == i else p for j, p in enumerate(now)]
        size = local_shape(shape, others, [a.ranks for a in axes])
        x = collectives.redistribute(x, axis, before, after, size, coordinates[i] if coordinates else x)
        now[i] = target[i]
    return x


def whole(x: Tensor, axes: Sequence[Axis], source: Placements, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor on every rank."""
    return change(x, axes, source, (REPLICATE,) * len(axes), shape, ())


def within(placements: Sequence[Placement], axes: Sequence[Axis], axis: int) -> Placement:
    """The placement on one axis as the collectives see it: of what the other axes leave of the tensor."""
    placement = placements[axis]
    if not isinstance(placement, Shard):
        return placement
    return Shard(placement.dim, local_outer(placements, [a.ranks for a in axes], axis))
