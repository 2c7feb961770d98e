"""How a reshape carries a shard from its input dims to its output dims, or back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.placement import Shard


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Split two shapes of equal numel into the smallest runs of dims that hold the same elements.

    Returns:
        Pairs (dims of `before`, dims of `after`); sizes of 1 are in no pair.
    """
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    found: list[tuple[list[int], list[int]]] = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (m := math.prod(before[d] for d in a)) != (n := math.prod(after[d] for d in b)):
            if m < n:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        found.append((a, b))
    return found


def carry(before: Sequence[int], after: Sequence[int], shard: Shard, ranks: int) -> Shard | None:
    """Where `shard` of a tensor of shape `before` lies once it is viewed as `after`.

    A shard splits the run of dims it is in as (outer, ranks, rest): `outer` counts the positions of slower
    dims. It survives where one dim of the other side holds the whole of the split factor.
    """
    if 0 in before:
        return None
    even = before[shard.dim] % (shard.outer * ranks) == 0
    for a, b in groups(before, after):
        if shard.dim not in a:
            continue
        outer = math.prod(before[d] for d in a[: a.index(shard.dim)]) * shard.outer
        for d in b:
            size = after[d]
            if outer == 1 or (size % outer == 0 and size > outer):
                kept = outer == 1 and len(a) == len(b) == 1  # the dim itself, which may be split unevenly
                return Shard(d, outer) if kept or (even and size % (outer * ranks) == 0) else None
            if outer % size:
                return None
            outer //= size
    return None
