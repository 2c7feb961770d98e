"""Calls whose index tensors are known before anything runs, written so that samples stay apart.

``x[arange(B), i]`` reads each sample's own row, but an index op with a sharded index tensor cannot tell; the
same call as a gather along the other dims can. Index tensors that depend on no input are computed for real
here, so that any spelling of ``arange`` is seen. Before and after, the values are the same:

    index(x, [arange(B), i])                        ->  gather(x, 1, i)
    index_put(zeros, [arange(B), i], v, True)       ->  scatter_add(zeros, 1, i, v)
    index_put(zeros, [i], v, True)                  ->  embedding_dense_backward(v, i)
    embedding_bag(w, words, offsets=arange * n)     ->  embedding(w, words.view(-1, n)).sum(1)

`as_strided` is written by elements here too (see `strided`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard import compat, ops
from autoshard.compat import pytree
from autoshard.rules import strided

aten = torch.ops.aten

_LARGEST = 1 << 20  # elements; a larger index is not worth computing here
_INDEX = (aten.index.Tensor, aten._unsafe_index.Tensor)
_INDEX_PUT = (aten.index_put.default, aten._unsafe_index_put.default)
_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


@contextlib.contextmanager
def separate_samples(module: fx.GraphModule) -> Iterator[None]:
    """Within, the nodes of such calls point at functions that make the other form; a retrace inlines them."""
    known = _Known()
    changed: list[tuple[fx.Node, Any]] = []
    with compat.without_modes():
        for node in module.graph.nodes:
            form: Callable[..., Any] | None = None
            if node.target in _INDEX:
                form = _indexed(node, known)
            elif node.target in _INDEX_PUT:
                form = _summed(node, known)
            elif node.target in _BAGS:
                form = _bags(node, known)
            elif node.target is aten._embedding_bag_backward.default:
                form = _bags_gradient(node, known)
            else:
                form = strided.by_elements(node)
            if form is not None:
                changed.append((node, form))
    originals = [(node, node.target) for node, _ in changed]
    for node, form in changed:
        node.target = form
    try:
        yield
    finally:
        for node, target in originals:
            node.target = target


class _Known:
    """Values of nodes that depend on no input."""

    def __init__(self) -> None:
        self._found: dict[fx.Node, Any] = {}

    def __call__(self, node: Any) -> Any:
        """The node's value, None where it is not known."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self._found:
            self._found[node] = self._compute(node)
        return self._found[node]

    def _compute(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        target = node.target
        if not isinstance(value, Tensor) or value.numel() > _LARGEST or not isinstance(target, torch._ops.OpOverload):
            return None
        if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags or target.namespace != "aten":
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self)
        if any(self(n) is None for n in node.all_input_nodes):
            return None
        args, kwargs = pytree.tree_map(
            lambda x: torch.device("cpu") if isinstance(x, torch.device) else x, (args, kwargs)
        )
        return target(*args, **kwargs)


def _is_own_row(index: Any, shape: Sequence[int], rows: int) -> bool:
    """Whether an index that is broadcast to `shape` is, everywhere, the position along its first dim."""
    if index is None or index.dtype == torch.bool or not shape or shape[0] != rows:
        return False
    places = torch.arange(rows).view(-1, *[1] * (len(shape) - 1))
    return bool((torch.broadcast_to(index, tuple(shape)) == places).all())


def _indices(node: fx.Node) -> list[Tensor | None]:
    arguments: Any = node.args[1]
    return [i.meta["val"] if i is not None else None for i in arguments]


def _leading(indices: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The index tensors where they are a run from dim 0 of integers, else None."""
    run = [i for i in indices if i is not None]
    if not run or any(i is None for i in indices[: len(run)]) or any(i.dtype == torch.bool for i in run):
        return None
    return run


def _by_row(node: fx.Node, known: _Known) -> bool:
    run = _leading(_indices(node))
    if run is None or len(run) < 2:
        return False
    x: Any = node.args[0]
    arguments: Any = node.args[1]
    shape = torch.broadcast_shapes(*(i.shape for i in run))
    return _is_own_row(known(arguments[0]), shape, x.meta["val"].shape[0])


def _flat(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Several indices as one into the flattened dims; negative ones count from the end."""
    flat: Any = 0
    for index, size in zip(indices, sizes, strict=True):
        flat = flat * size + torch.where(index < 0, index + size, index)
    return flat


def _indexed(node: fx.Node, known: _Known) -> Callable[..., Any] | None:
    if not _by_row(node, known):
        return None

    def gathered(x: Tensor, indices: list[Tensor]) -> Tensor:
        others = [i for i in indices[1:] if i is not None]
        shape = torch.broadcast_shapes(*(i.shape for i in indices if i is not None))
        rest = x.shape[1 + len(others) :]
        flat = _flat(others, x.shape[1 : 1 + len(others)])
        rows = x.reshape(x.shape[0], -1, *rest)
        if flat.dim() < len(shape) or flat.shape[0] == 1:  # the same for every sample
            flat = flat.reshape(flat.shape[flat.dim() - len(shape) + 1 :] if flat.dim() == len(shape) else flat.shape)
            return aten.index.Tensor(rows, [None, flat.expand(shape[1:])])
        flat = flat.expand(shape).reshape(shape[0], -1, *[1] * len(rest))
        found = rows.gather(1, flat.expand(shape[0], flat.shape[1], *rest))
        return found.reshape(*shape, *rest)

    return gathered


def _is_zeros(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    return node.target in _ZEROS or (node.target is aten.full.default and bool(node.args[1] == 0))


def _summed(node: fx.Node, known: _Known) -> Callable[..., Any] | None:
    accumulate = len(node.args) > 3 and node.args[3]
    run = _leading(_indices(node))
    if not accumulate or run is None or not _is_zeros(node.args[0]) or not node.meta["val"].dtype.is_floating_point:
        return None

    def by_row(x: Tensor, indices: list[Tensor], values: Tensor, _accumulate: bool, *_: Any) -> Tensor:
        others = [i for i in indices[1:] if i is not None]
        shape = torch.broadcast_shapes(*(i.shape for i in indices if i is not None))
        rest = x.shape[1 + len(others) :]
        flat = _flat(others, x.shape[1 : 1 + len(others)]).expand(shape).reshape(shape[0], -1, *[1] * len(rest))
        values = values.expand(*shape, *rest).reshape(shape[0], -1, *rest)
        rows = torch.zeros((x.shape[0], math.prod(x.shape[1 : 1 + len(others)]), *rest), dtype=x.dtype, device=x.device)
        return rows.scatter_add(1, flat.expand(values.shape), values).reshape(x.shape)

    def by_index(x: Tensor, indices: list[Tensor], values: Tensor, _accumulate: bool, *_: Any) -> Tensor:
        used = [i for i in indices if i is not None]
        sizes, rest = x.shape[: len(used)], x.shape[len(used) :]
        shape = torch.broadcast_shapes(*(i.shape for i in used))
        flat = _flat(used, sizes).expand(shape).flatten()
        rows = values.expand(*shape, *rest).reshape(flat.shape[0], math.prod(rest))
        found = aten.embedding_dense_backward.default(rows, flat, math.prod(sizes), -1, False)
        return found.reshape(x.shape)

    return by_row if _by_row(node, known) else by_index


def _argument(node: fx.Node, name: str) -> Any:
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _bag_length(node: fx.Node, known: _Known) -> int | None:
    """Words in each bag where all have the same number and no weight, scale or padding is used."""
    offsets = known(_argument(node, "offsets"))
    plain = (
        _argument(node, "mode") in (0, 1)
        and not _argument(node, "scale_grad_by_freq")
        and _argument(node, "per_sample_weights") is None
        and not _argument(node, "include_last_offset")
        and _argument(node, "padding_idx") == -1
    )
    if offsets is None or not plain:
        return None
    words = _argument(node, "indices").meta["val"].numel()
    count = offsets.numel()
    length = words // count if count and words % count == 0 else 0
    return length if length and torch.equal(offsets, torch.arange(count) * length) else None


def _bags(node: fx.Node, known: _Known) -> Callable[..., Any] | None:
    length = _bag_length(node, known)
    mean = _argument(node, "mode") == 1
    # The other outputs are only for the op's own gradient, which is rewritten too.
    if length is None or any(
        user.args[1] != 0 and any(u.target is not aten._embedding_bag_backward.default for u in user.users)
        for user in node.users
    ):
        return None

    def bags(weight: Tensor, words: Tensor, offsets: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        total = ops.wide(aten.embedding.default(weight, words.view(-1, length))).sum(1)
        empty = torch.zeros((0,), dtype=torch.int64, device=words.device)
        return ops.rounded(total / length if mean else total, weight.dtype), empty, empty, empty

    return bags


def _bags_gradient(node: fx.Node, known: _Known) -> Callable[..., Any] | None:
    length = _bag_length(node, known)
    mean = _argument(node, "mode") == 1
    if length is None or _argument(node, "sparse"):
        return None

    def gradient(given: Tensor, words: Tensor, *rest: Any, **_: Any) -> Tensor:
        words_each = rest[4] if len(rest) > 4 else None
        assert isinstance(words_each, int)
        share = given / length if mean else given
        every = share.unsqueeze(1).expand(-1, length, -1)
        return aten.embedding_dense_backward.default(every, words.view(-1, length), words_each, -1, False)

    return gradient
