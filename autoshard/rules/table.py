"""The rule table: one row an op. See the package's docstring for how a row reads."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoshard.placement import Shard
from autoshard.rules import INDEXED, Labels, Localize, Op, Row, Rule, Shape, parse, pieces, shifted, splits
from autoshard.rules.views import carry

aten = torch.ops.aten
LETTERS = string.ascii_letters


def _fixed(text: str) -> Callable[[Op], Labels | None]:
    labels = parse(text)
    return lambda op: labels


def _together(*inputs: int) -> Callable[[Op], tuple[frozenset[int], ...]]:
    return lambda op: (frozenset(inputs),)


def _each(*inputs: int) -> Callable[[Op], tuple[frozenset[int], ...]]:
    return lambda op: tuple(frozenset((i,)) for i in inputs)


def _all(op: Op) -> tuple[frozenset[int], ...]:
    return (frozenset(range(len(op.inputs))),)


def _none(op: Op) -> tuple[frozenset[int], ...]:
    return ()


def broadcast(op: Op) -> Labels | None:
    """Right-aligned dims of every input and output carry the output's label, unless they are stretched."""
    shape = next(t.shape for t in op.outputs if t is not None)
    names = "".join(LETTERS[d] if size > 1 else "." for d, size in enumerate(shape))

    def dims(t: torch.Tensor) -> str:
        offset = len(shape) - t.dim()
        return "".join(names[offset + d] if size == shape[offset + d] else "." for d, size in enumerate(t.shape))

    return Labels(tuple(map(dims, op.inputs)), tuple((dims(t) if t is not None else "", "") for t in op.outputs))


POINTWISE = Rule(labels=broadcast)


def _buffered(op: Op) -> Labels | None:
    """As pointwise, with a buffer that is empty on some devices."""
    shape = op.inputs[0].shape
    names = "".join(LETTERS[d] if size > 1 else "." for d, size in enumerate(shape))

    def dims(t: torch.Tensor | None) -> str:
        return names if t is not None and t.shape == shape else _dots(t)

    return Labels(tuple(map(dims, op.inputs)), tuple((dims(t), "") for t in op.outputs))


def _norm_dims(dim: Any, rank: int) -> set[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return set(range(rank))
    return {d % rank if rank else 0 for d in (dim if isinstance(dim, (list, tuple)) else [dim])}


def _extreme(reduce: str) -> Callable[[Op], Labels | None]:
    """amax and amin: a shard of a reduced dim leaves a partial maximum or minimum."""

    def labels(op: Op) -> Labels | None:
        # No collective compares truth values.
        found = _reduction(1, 2, sums=op.inputs[0].dtype != torch.bool)(op)
        return replace(found, reduce=reduce) if found is not None else None

    return labels


def _reduction(dim_arg: int | None, keep_arg: int | None, *, sums: bool) -> Callable[[Op], Labels | None]:
    """Reduced dims disappear; where the op `sums`, a shard of one leaves a partial sum, else it cannot be split."""

    def labels(op: Op) -> Labels | None:
        x = op.inputs[0]
        reduced = _norm_dims(op.arg(dim_arg) if dim_arg is not None else None, x.dim())
        keep = bool(op.arg(keep_arg)) if keep_arg is not None else False
        before = "".join("." if d in reduced and not sums else LETTERS[d] for d in range(x.dim()))
        if keep:
            after = "".join("." if d in reduced else LETTERS[d] for d in range(x.dim()))
        else:
            after = "".join(LETTERS[d] for d in range(x.dim()) if d not in reduced)
        partial = "".join(LETTERS[d] for d in sorted(reduced)) if sums else ""
        return Labels((before,), tuple((after, partial) for _ in op.outputs))

    return labels


def _along(dim_arg: int | None, *, default: int = -1, inputs: int | None = None) -> Callable[[Op], Labels | None]:
    """Every tensor has the same rank; the dim(s) that the op works along cannot be split, the others can."""

    def labels(op: Op) -> Labels | None:
        rank = op.inputs[0].dim()
        dim = op.arg(dim_arg, default) if dim_arg is not None else default
        names = "".join("." if d in _norm_dims(dim, rank) else LETTERS[d] for d in range(rank))
        return Labels(tuple(_same(t, names, op) for t in op.inputs), tuple((names, "") for _ in op.outputs))

    return labels


def _same(t: torch.Tensor, names: str, op: Op) -> str:
    """`names` where `t` has the size of the first input, else '.'; all '.' where its rank differs."""
    first = op.inputs[0]
    if t.dim() != first.dim():
        return "." * t.dim()
    return names


def _planes(core: int) -> Callable[[Op], Labels | None]:
    """All but the last `core` dims of the first input are batch: of every operand that has them they split together."""

    def labels(op: Op) -> Labels | None:
        batch = op.inputs[0].shape[: op.inputs[0].dim() - core]

        def dims(t: torch.Tensor | None) -> str:
            if t is None or t.shape[: len(batch)] != batch:
                return _dots(t)
            return LETTERS[: len(batch)] + "." * (t.dim() - len(batch))

        if any(t.dim() >= len(batch) and t.shape[: len(batch)] != batch for t in op.inputs):
            return None
        return Labels(tuple(map(dims, op.inputs)), tuple((dims(t), "") for t in op.outputs))

    return labels


def _batch(t: torch.Tensor) -> str:
    return "b" + "." * (t.dim() - 1)


def _samples(op: Op) -> Labels | None:
    """Only the first dim of a batched image splits: channels and space are mixed."""
    x, y = op.inputs[0], op.outputs[0]
    assert y is not None
    if x.shape[0] != y.shape[0]:
        return None
    return Labels(tuple(map(_batch, op.inputs)), ((_batch(y), ""),))


def _aligned(t: torch.Tensor, names: str, shape: torch.Size) -> str:
    """`names` of an output of `shape` at the dims of an operand that is broadcast to it."""
    offset = len(shape) - t.dim()
    return "".join(names[offset + d] if size == shape[offset + d] > 1 else "." for d, size in enumerate(t.shape))


def _view(op: Op, index: int, shard: Shard, output: bool, ranks: int) -> Row | None:
    before, after = op.inputs[0].shape, op.outputs[0].shape  # type: ignore[union-attr]
    if output:
        source = carry(after, before, shard, ranks)
        return Row((source,), (shard,)) if source is not None and splits(after[shard.dim], shard, ranks) else None
    target = carry(before, after, shard, ranks) if splits(before[shard.dim], shard, ranks) else None
    return Row((shard,), (target,)) if target is not None else None


def _permuted(order: Callable[[Op], list[int]]) -> Callable[[Op], Labels | None]:
    def labels(op: Op) -> Labels | None:
        dims = order(op)
        return Labels((LETTERS[: len(dims)],), (("".join(LETTERS[d] for d in dims), ""),))

    return labels


def _swap(op: Op) -> list[int]:
    rank = op.inputs[0].dim()
    order = list(range(rank))
    if rank:
        a, b = (op.arg(1), op.arg(2)) if len(op.args) > 2 else (0, rank - 1)
        order[a], order[b] = order[b], order[a]
    return order


def _without(dims: Callable[[Op], set[int]]) -> Callable[[Op], Labels | None]:
    """Some dims of the input are gone from the output."""

    def labels(op: Op) -> Labels | None:
        rank, gone = op.inputs[0].dim(), dims(op)
        before = "".join("." if d in gone else LETTERS[d] for d in range(rank))
        after = before.replace(".", "") if len(gone) else before
        return Labels((before,), tuple((after, "") for _ in op.outputs))

    return labels


def _unsqueezed(op: Op) -> Labels | None:
    rank = op.inputs[0].dim()
    names = LETTERS[:rank]
    at = op.arg(1) % (rank + 1)
    return Labels((names,), ((names[:at] + "." + names[at:], ""),))


def _stacked(op: Op) -> Labels | None:
    rank = op.inputs[0].dim()
    names = LETTERS[:rank]
    at = op.arg(1, 0) % (rank + 1)
    return Labels((names,) * len(op.inputs), ((names[:at] + "." + names[at:], ""),))


def _joined(op: Op) -> Labels | None:
    rank = max(t.dim() for t in op.inputs)
    at = op.arg(1, 0) % rank
    names = "".join("." if d == at else LETTERS[d] for d in range(rank))
    return Labels(tuple(names if t.dim() == rank else "." * t.dim() for t in op.inputs), ((names, ""),))


def _embedding_gradient(op: Op) -> Labels | None:
    rank = op.inputs[1].dim()
    if op.arg(4):  # scaled by how often a word occurs in the whole batch
        return Labels(("." * rank + "Z", "." * rank), (("VZ", ""),))
    return Labels((LETTERS[:rank] + "Z", LETTERS[:rank]), (("VZ", LETTERS[:rank]),))


def _embedding(op: Op) -> Labels | None:
    rank = op.inputs[1].dim()
    return Labels(("VZ", LETTERS[:rank]), ((LETTERS[:rank] + "Z", "V"),))


def _normalized(op: Op) -> tuple[str, int]:
    """Labels of the leading dims that a layer norm does not reduce, and how many it does."""
    shape = next(a for a in op.args if isinstance(a, (list, tuple)) and a and isinstance(a[0], int))
    lead = op.inputs[0].dim() - len(shape)
    return LETTERS[:lead], len(shape)


def _layer_norm(op: Op) -> Labels | None:
    lead, n = _normalized(op)
    x, w, m = lead + "." * n, "." * n, lead + "." * n
    outputs = ((x, ""), (m, ""), (m, ""))
    return Labels((x, *(w for _ in op.inputs[1:])), outputs[: len(op.outputs)])


def _layer_norm_gradient(op: Op) -> Labels | None:
    lead, n = _normalized(op)
    x, w = lead + "." * n, "." * n
    inputs = tuple(x if t.dim() == op.inputs[0].dim() else w for t in op.inputs)
    return Labels(inputs, ((x, ""), (w, lead), (w, lead))[: len(op.outputs)])


def _group_norm(op: Op) -> Labels | None:
    """Samples split, and channels where whole groups stay together."""
    x = "bg" + "." * (op.inputs[0].dim() - 2)
    return Labels((x, *("g" for _ in op.inputs[1:])), ((x, ""), ("bg", ""), ("bg", "")), units={"g": op.arg(6)})


def _group_norm_gradient(op: Op) -> Labels | None:
    x = "bg" + "." * (op.inputs[0].dim() - 2)
    inputs = (x, x, "bg", "bg", *("g" for _ in op.inputs[4:]))
    return Labels(inputs, ((x, ""), ("g", "b"), ("g", "b")), units={"g": op.arg(8)})


def _group_norm_sizes(batch: int, x: int) -> Localize:
    """The local sizes of input `x` at arguments from `batch` on: samples, channels, and two on the groups."""

    def localize(op: Op, args: list[Any], inputs: tuple[Shape, ...], outputs: tuple[Shape | None, ...]) -> list[Any]:
        args[batch], args[batch + 1] = inputs[x][:2]
        args[batch + 3] //= op.inputs[x].shape[1] // inputs[x][1]
        return args

    return localize


def _convolution(op: Op) -> Labels | None:
    """Samples split, channels too; those of a grouped convolution where whole groups stay together."""
    x, y, weight, units = _channels(op)
    # Each rank would add the bias to its term of the sum.
    summed = "" if op.arg(8) > 1 or len(op.inputs) > 2 else x
    x = x if summed or op.arg(8) > 1 else "."
    weight = weight if x != "." else weight.replace("i", ".")
    space = "." * (op.inputs[0].dim() - 2)
    bias = [y for _ in op.inputs[2:]]
    return Labels(("b" + x + space, weight + space, *bias), (("b" + y + space, summed),), units=units)


def _convolution_gradient(op: Op) -> Labels | None:
    x, y, weight, units = _channels(op)
    space = "." * (op.inputs[0].dim() - 2)
    of_x = ("b" + x + space, y if op.arg(9) == 1 else "")
    inputs = ("b" + y + space, "b" + x + space, weight + space)
    return Labels(inputs, (of_x, (weight + space, "b"), (y, "b")), units=units)


def _channels(op: Op) -> tuple[str, str, str, dict[str, int]]:
    """Labels of a convolution's channels in and out, of the first dims of its weight, and their units."""
    gradient = op.target is aten.convolution_backward.default
    transposed, groups = (op.arg(7), op.arg(9)) if gradient else (op.arg(6), op.arg(8))
    if groups > 1:
        return "g", "g", "g.", {"g": groups}
    return "i", "o", "io" if transposed else "oi", {}


def _convolution_groups(op: Op, args: list[Any], inputs: tuple[Shape, ...], outputs: Any) -> list[Any]:
    if args[8] > 1:
        args[8] //= op.inputs[0].shape[1] // inputs[0][1]
    return args


def _convolution_gradient_groups(op: Op, args: list[Any], inputs: tuple[Shape, ...], outputs: Any) -> list[Any]:
    if args[9] > 1:
        args[9] //= op.inputs[0].shape[1] // inputs[0][1]
    if args[3] is not None and args[3] != [0]:
        args[3] = [inputs[0][1]]
    return args


def _attention(op: Op) -> Labels | None:
    """(batch, heads, length, width): batch and heads split; an attn bias or mask where it has those dims.

    Heads of queries that share a head of keys stay with it; one head of keys that all share is whole everywhere.
    """
    q, k = op.inputs[:2]
    keys, units = _heads(q, k)
    rest = [_mask_dims(t, q) for t in op.inputs[3:]]
    outputs = [("bh..", "")]
    for y in op.outputs[1:]:
        batched = y is not None and y.dim() >= 2 and y.shape[:2] == q.shape[:2]
        outputs.append(("bh" + "." * (y.dim() - 2) if batched and y is not None else _dots(y), ""))
    return Labels(("bh..", keys, keys, *rest), tuple(outputs), units=units)


def _attention_gradient(op: Op) -> Labels | None:
    q, k = op.inputs[1], op.inputs[2]
    keys, units = _heads(q, k)
    inputs = [keys if i in (2, 3) else _mask_dims(t, q) for i, t in enumerate(op.inputs)]
    outputs = []
    for i, t in enumerate(op.outputs):
        dims = "" if t is None else keys if i in (1, 2) else _mask_dims(t, q)
        # What is shared by the batch or the heads, as a bias may be, gets the sum of their gradients.
        outputs.append((dims, "".join(x for x in ("b", "h") if dims and x not in dims)))
    return Labels(tuple(inputs), tuple(outputs), units=units)


def _heads(q: torch.Tensor, k: torch.Tensor) -> tuple[str, dict[str, int]]:
    """Labels of keys and values, and the parts that heads may be split in."""
    shared = k.shape[1] == 1 < q.shape[1]
    return "b" + ("." if shared else "h") + "..", {"h": q.shape[1] if shared else k.shape[1]}


def _mask_dims(t: torch.Tensor, q: torch.Tensor) -> str:
    if t.dim() < 3:
        return "." * t.dim()
    b = "b" if t.shape[0] == q.shape[0] and q.shape[0] > 1 else "."
    h = "h" if t.shape[1] == q.shape[1] and q.shape[1] > 1 else "."
    return b + h + "." * (t.dim() - 2)


def _dots(t: torch.Tensor | None) -> str:
    return "." * (t.dim() if t is not None else 0)


def _sliced(dim_arg: int, default: int = 0) -> Callable[[Op], Labels | None]:
    """A slice leaves the dims that it does not cut."""

    def labels(op: Op) -> Labels | None:
        rank = op.outputs[0].dim()  # type: ignore[union-attr]
        at = op.arg(dim_arg, default) % rank
        names = "".join("." if d == at else LETTERS[d] for d in range(rank))
        return Labels(tuple(names if t.dim() == rank else "." * t.dim() for t in op.inputs), ((names, ""),))

    return labels


def _selected(op: Op) -> set[int]:
    return {op.arg(1) % op.inputs[0].dim()}


def _select_gradient(op: Op) -> Labels | None:
    rank = op.outputs[0].dim()  # type: ignore[union-attr]
    at = op.arg(2) % rank
    names = "".join("." if d == at else LETTERS[d] for d in range(rank))
    return Labels((names.replace(".", ""),), ((names, ""),))


def _expanded(op: Op) -> Labels | None:
    x, y = op.inputs[0], op.outputs[0]
    assert y is not None
    names = LETTERS[: y.dim()]
    return Labels((_aligned(x, names, y.shape),), ((names, ""),))


def _beside(op: Op) -> tuple[str, int]:
    """Labels of the dims other than the indexed one that have one size in every tensor, and the indexed dim."""
    x = op.inputs[0]
    at = op.arg(1) % max(x.dim(), 1)
    names = "".join(
        LETTERS[d] if d != at and all(t.dim() == x.dim() and t.shape[d] == x.shape[d] for t in op.inputs) else "."
        for d in range(x.dim())
    )
    return names, at


def _counted(names: str, at: int) -> str:
    """`names` with the indexed dim, which is of places that another operand counts."""
    return names[:at] + INDEXED + names[at + 1 :]


def _gathered(op: Op) -> Labels | None:
    names, at = _beside(op)
    return Labels((_counted(names, at), names), ((names, INDEXED),)) if names else None


def _scattered(op: Op) -> Labels | None:
    names, at = _beside(op)
    whole = _counted(names, at) if names else ""
    return Labels((whole, *(names for _ in op.inputs[1:])), ((whole, ""),))


def _index_selected(op: Op) -> Labels | None:
    x = op.inputs[0]
    at = op.arg(1) % x.dim()
    names = "".join("." if d == at else LETTERS[d] for d in range(x.dim()))
    return Labels((_counted(names, at), "I"), ((names[:at] + "I" + names[at + 1 :], INDEXED),))


def _indexed(op: Op) -> Labels | None:
    """x[..., i, :]: dims before and after one run of indexed dims split, and so do the index's own dims."""
    x = op.inputs[0]
    indices = op.arg(1)
    where = [d for d, index in enumerate(indices) if index is not None]
    if where != list(range(where[0], where[-1] + 1)) or any(
        op.inputs[i + 1].dtype == torch.bool for i in range(len(where))
    ):
        return None
    rank = max(op.inputs[i + 1].dim() for i in range(len(where)))
    shape = torch.broadcast_shapes(*(op.inputs[i + 1].shape for i in range(len(where))))
    lead, names = LETTERS[: where[0]], LETTERS[26 : 26 + rank]
    tail = LETTERS[where[-1] + 1 : x.dim()]

    def own(t: torch.Tensor) -> str:
        offset = rank - t.dim()
        return "".join(names[offset + d] if t.shape[d] == shape[offset + d] else "." for d in range(t.dim()))

    one = len(where) == 1
    return Labels(
        (lead + (INDEXED if one else "." * len(where)) + tail, *(own(t) for t in op.inputs[1:])),
        ((lead + names + tail, INDEXED if one else ""),),
    )


def _product(left: str, right: str, out: str) -> Callable[[Op], Labels | None]:
    """A product added to an input that is broadcast to it, and would be added twice if the inner dim were split."""

    def labels(op: Op) -> Labels | None:
        y = op.outputs[0]
        assert y is not None
        return Labels((_aligned(op.inputs[0], out, y.shape), left, right), ((out, ""),))

    return labels


def _padded(op: Op) -> Labels | None:
    x, pad = op.inputs[0], op.arg(1)
    touched = {x.dim() - 1 - i // 2 for i, amount in enumerate(pad) if amount}
    names = "".join("." if d in touched else LETTERS[d] for d in range(x.dim()))
    return Labels((names,), ((names, ""),))


def _index_written(op: Op) -> Labels | None:
    """x[..., i, :] = values: dims before and after one run of indexed dims split."""
    x, where = op.inputs[0], [d for d, index in enumerate(op.arg(1)) if index is not None]
    indices, values = op.inputs[1:-1], op.inputs[-1]
    if where != list(range(where[0], where[-1] + 1)) or any(t.dtype == torch.bool for t in indices):
        return None
    shape = torch.broadcast_shapes(*(t.shape for t in indices))
    lead, tail = LETTERS[: where[0]], LETTERS[where[-1] + 1 : x.dim()]
    written = torch.Size((*x.shape[: where[0]], *shape, *x.shape[where[-1] + 1 :]))
    dims = _aligned(values, lead + "." * len(shape) + tail, written)
    whole = lead + (INDEXED if len(where) == 1 else "." * len(where)) + tail
    return Labels((whole, *map(_dots, indices), dims), ((whole, ""),))


def _index_added(op: Op) -> Labels | None:
    x = op.inputs[0]
    names = "".join("." if d == op.arg(1) % max(x.dim(), 1) else LETTERS[d] for d in range(x.dim()))
    rest = [names if t.dim() == x.dim() > 1 else _dots(t) for t in op.inputs[2:]]
    whole = names.replace(".", INDEXED)
    return Labels((whole, _dots(op.inputs[1]), *rest), ((whole, ""),))


def _distances(op: Op) -> Labels | None:
    a, b = op.inputs
    lead = LETTERS[: a.dim() - 2]
    if a.shape[:-2] != b.shape[:-2]:
        return None
    return Labels((lead + "M.", lead + "N."), ((lead + "MN", ""),))


def _distances_gradient(op: Op) -> Labels | None:
    gradient, a, b, found = op.inputs
    lead = LETTERS[: a.dim() - 2]
    if not gradient.dim() == a.dim() == b.dim() == found.dim():
        return None
    return Labels((lead + "MN", lead + "M.", lead + "N.", lead + "MN"), ((lead + "M.", "N"),))


def _windows(op: Op) -> Labels | None:
    """unfold: windows along one dim, a new last dim within them."""
    x = op.inputs[0]
    names = "".join("." if d == op.arg(1) % max(x.dim(), 1) else LETTERS[d] for d in range(x.dim()))
    return Labels((names,), ((names + ".", ""),))


def _windows_gradient(op: Op) -> Labels | None:
    rank = len(op.arg(1))
    names = "".join("." if d == op.arg(2) % rank else LETTERS[d] for d in range(rank))
    return Labels((names + ".",), ((names, ""),))


def _diagonal_dims(op: Op, rank: int, first: int) -> str:
    pair = {op.arg(first) % rank, op.arg(first + 1) % rank}
    return "".join("." if d in pair else LETTERS[d] for d in range(rank))


def _diagonal(op: Op) -> Labels | None:
    names = _diagonal_dims(op, op.inputs[0].dim(), 2)
    return Labels((names,), ((names.replace(".", "") + ".", ""),))


def _diagonal_made(first: int) -> Callable[[Op], Labels | None]:
    """diag_embed and the gradient of diagonal."""

    def labels(op: Op) -> Labels | None:
        y = op.outputs[0]
        assert y is not None
        names = _diagonal_dims(op, y.dim(), first)
        return Labels((names.replace(".", "") + ".",), ((names, ""),))

    return labels


def _sought(op: Op) -> Labels | None:
    """searchsorted: a row of values in its own row of bounds, or all in one."""
    bounds, values, *sorter = op.inputs
    shared = bounds.dim() == 1 and values.dim() != 1
    if bounds.dim() == 1:
        shared = True
    names = LETTERS[: values.dim()] if shared else LETTERS[: values.dim() - 1] + "."
    rows = "." if shared else names
    return Labels((rows, names, *(rows for _ in sorter)), ((names, ""),))


def _first_only(op: Op) -> Labels | None:
    """Elements of the first input are looked up in the others, which are whole."""
    x = LETTERS[: op.inputs[0].dim()]
    return Labels((x, *map(_dots, op.inputs[1:])), ((x, ""),))


def _resampled(op: Op) -> Labels | None:
    space = "." * (op.inputs[0].dim() - 2)
    return Labels(("bc" + space, "b" + space + "."), (("bc" + space, ""),))


def _resampled_gradient(op: Op) -> Labels | None:
    space = "." * (op.inputs[0].dim() - 2)
    return Labels(("bc" + space, "bc" + space, "b" + space + "."), (("bc" + space, ""), ("b" + space + ".", "c")))


def _as_pairs(op: Op) -> Labels | None:
    names = LETTERS[: op.inputs[0].dim()]
    return Labels((names,), ((names + ".", ""),))


def _from_pairs(op: Op) -> Labels | None:
    names = LETTERS[: op.inputs[0].dim() - 1]
    return Labels((names + ".",), ((names, ""),))


def _cast_is_linear(op: Op) -> tuple[frozenset[int], ...]:
    """Rounding to integers or truth values is not linear."""
    source, target = op.inputs[0].dtype, op.outputs[0].dtype  # type: ignore[union-attr]
    exact = source == target or target.is_floating_point or target.is_complex
    return (frozenset((0,)),) if exact else ()


def _zero_padded(op: Op) -> tuple[frozenset[int], ...]:
    return (frozenset((0,)),) if op.arg(2, 0) == 0 else ()


def _written_together(op: Op) -> tuple[frozenset[int], ...]:
    return (frozenset((0, len(op.inputs) - 1)),)


def _counts_no_words(op: Op) -> tuple[frozenset[int], ...]:
    return () if op.arg(4) else (frozenset((0,)),)


def _created(op: Op) -> Labels | None:
    """A tensor of one value: any dim of the output splits; what it is like does not matter to the values."""
    y = op.outputs[0]
    assert y is not None
    names = LETTERS[: y.dim()]
    return Labels(tuple(names if t.shape == y.shape else "." * t.dim() for t in op.inputs), ((names, ""),))


def _pooling() -> dict[Any, Rule]:
    """Pooling, padding and resampling work on each plane of each sample alone."""
    found = {}
    for n in (1, 2, 3):
        pools = [f"reflection_pad{n}d", f"replication_pad{n}d"]
        if n > 1:
            pools += [
                f"max_pool{n}d_with_indices",
                f"avg_pool{n}d",
                f"_adaptive_avg_pool{n}d",
                f"adaptive_max_pool{n}d",
            ]
        for name in [op for pool in pools for op in (pool, pool + "_backward")]:
            found[getattr(aten, name).default] = Rule(_planes(n))
        samplings = [f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"]
        samplings += {
            1: ["upsample_linear1d"],
            2: ["upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"],
            3: ["upsample_trilinear3d"],
        }[n]
        for name in samplings:
            found[getattr(aten, name).default] = Rule(_planes(n), linear=_together(0))
            found[getattr(aten, name + "_backward").default] = Rule(_planes(n), linear=_together(0), sizes={2: 0})
    return found


_SPLIT = Rule(_along(2, default=0), pieces.spread(pieces.along(2)), linear=_together(0), localize=pieces.split_size)
_SPLIT_SIZES = Rule(
    _along(2, default=0), pieces.spread(pieces.along(2)), linear=_together(0), localize=pieces.split_sizes
)
_VIEW = Rule(spread=_view, linear=_together(0), sizes={1: 0})

TABLE: dict[Any, Rule] = {
    # reshapes and dims
    aten.view.default: _VIEW,
    aten._unsafe_view.default: _VIEW,
    aten.reshape.default: _VIEW,
    aten.t.default: Rule(_permuted(lambda op: list(range(op.inputs[0].dim()))[::-1]), linear=_together(0)),
    aten.transpose.int: Rule(_permuted(_swap), linear=_together(0)),
    aten.permute.default: Rule(_permuted(lambda op: [d % op.inputs[0].dim() for d in op.arg(1)]), linear=_together(0)),
    aten.unsqueeze.default: Rule(_unsqueezed, linear=_together(0)),
    aten.expand.default: Rule(_expanded, linear=_together(0), sizes={1: 0}),
    aten.select.int: Rule(_without(_selected), linear=_together(0)),
    aten.slice.Tensor: Rule(
        _sliced(1), pieces.spread(pieces.sliced(1)), linear=_together(0), localize=pieces.slice_bounds(1)
    ),
    aten.split.Tensor: _SPLIT,
    aten.unsafe_split.Tensor: _SPLIT,
    aten.split_with_sizes.default: _SPLIT_SIZES,
    aten.unsafe_split_with_sizes.default: _SPLIT_SIZES,
    aten.chunk.default: Rule(_along(2, default=0), pieces.spread(pieces.along(2)), linear=_together(0)),
    aten.unbind.int: Rule(_without(lambda op: {op.arg(1, 0) % op.inputs[0].dim()}), linear=_together(0)),
    aten.cat.default: Rule(_joined, pieces.spread(pieces.along(1)), linear=_all),
    aten.stack.default: Rule(_stacked, linear=_all),
    aten.flip.default: Rule(_along(1), linear=_together(0)),
    aten.roll.default: Rule(_along(2), linear=_together(0)),
    aten.constant_pad_nd.default: Rule(
        _padded, pieces.spread(pieces.padded), linear=_zero_padded, localize=pieces.pads
    ),
    aten.slice_backward.default: Rule(
        _sliced(2),
        pieces.spread(pieces.sliced(2)),
        linear=_together(0),
        sizes={1: 0},
        localize=pieces.slice_bounds(2),
    ),
    aten.select_backward.default: Rule(_select_gradient, linear=_together(0), sizes={1: 0}),
    aten.slice_scatter.default: Rule(
        _sliced(2), pieces.spread(pieces.sliced(2)), linear=_all, localize=pieces.slice_bounds(2)
    ),
    aten.diagonal.default: Rule(_diagonal, linear=_together(0)),
    aten.diagonal_backward.default: Rule(_diagonal_made(3), linear=_together(0), sizes={1: 0}),
    aten.diag_embed.default: Rule(_diagonal_made(2), linear=_together(0)),
    aten.unfold.default: Rule(_windows, linear=_together(0)),
    aten.unfold_backward.default: Rule(_windows_gradient, linear=_together(0), sizes={1: 0}),
    aten.view_as_real.default: Rule(_as_pairs, linear=_together(0)),
    aten.view_as_complex.default: Rule(_from_pairs, linear=_together(0)),
    aten.clone.default: Rule(broadcast, linear=_together(0)),
    aten.alias.default: Rule(broadcast, linear=_together(0)),
    aten.detach.default: Rule(broadcast, linear=_together(0)),
    aten.contiguous.default: Rule(broadcast, linear=_together(0)),
    aten.copy.default: Rule(broadcast, linear=_together(1)),
    aten._to_copy.default: Rule(broadcast, linear=_cast_is_linear),
    torch.ops.prims.convert_element_type.default: Rule(broadcast),  # a rounding that comes after the sum: `ops.rounded`
    # made from nothing
    aten.full.default: Rule(_created, sizes={0: 0}),
    aten.zeros.default: Rule(_created, sizes={0: 0}),
    aten.ones.default: Rule(_created, sizes={0: 0}),
    aten.empty.memory_format: Rule(_created, sizes={0: 0}),
    aten.new_zeros.default: Rule(_created, sizes={1: 0}),
    aten.new_ones.default: Rule(_created, sizes={1: 0}),
    aten.new_full.default: Rule(_created, sizes={1: 0}),
    aten.new_empty.default: Rule(_created, sizes={1: 0}),
    aten.full_like.default: Rule(_created),
    aten.zeros_like.default: Rule(_created),
    aten.zero.default: Rule(_created),
    aten.ones_like.default: Rule(_created),
    aten.empty_like.default: Rule(_created),
    # linear arithmetic, through which partial sums flow
    aten.add.Tensor: Rule(broadcast, linear=lambda op: _all(op) if len(op.inputs) == 2 else ()),
    aten.sub.Tensor: Rule(broadcast, linear=lambda op: _all(op) if len(op.inputs) == 2 else ()),
    aten.neg.default: Rule(broadcast, linear=_together(0)),
    aten.mul.Tensor: Rule(broadcast, linear=_each(0, 1)),
    aten.mul.Scalar: Rule(broadcast, linear=_each(0)),
    aten.div.Tensor: Rule(broadcast, linear=_each(0)),
    aten.div.Scalar: Rule(broadcast, linear=_each(0)),
    aten.where.self: Rule(broadcast, linear=_together(1, 2)),
    # matrix products
    aten.mm.default: Rule(_fixed("mk, kn -> mn/k")),
    aten.bmm.default: Rule(_fixed("bmk, bkn -> bmn/k")),
    aten.addmm.default: Rule(_product("m.", ".n", "mn")),
    aten.baddbmm.default: Rule(_product("bm.", "b.n", "bmn")),
    aten.addmv.default: Rule(_product("m.", ".", "m")),
    aten.dot.default: Rule(_fixed("k, k -> /k")),
    aten.mv.default: Rule(_fixed("mk, k -> m/k")),
    # reductions
    aten.sum.default: Rule(_reduction(None, None, sums=True), linear=_together(0)),
    aten.sum.dim_IntList: Rule(_reduction(1, 2, sums=True), linear=_together(0)),
    aten.amax.default: Rule(_extreme("max")),
    aten.amin.default: Rule(_extreme("min")),
    aten.max.dim: Rule(_reduction(1, 2, sums=False)),
    aten.min.dim: Rule(_reduction(1, 2, sums=False)),
    aten.argmax.default: Rule(_reduction(1, 2, sums=False)),
    aten.argmin.default: Rule(_reduction(1, 2, sums=False)),
    aten.any.dim: Rule(_reduction(1, 2, sums=False)),
    aten.all.dim: Rule(_reduction(1, 2, sums=False)),
    aten.prod.dim_int: Rule(_reduction(1, 2, sums=False)),
    aten.logsumexp.default: Rule(_reduction(1, 2, sums=False)),
    aten.any.dims: Rule(_reduction(1, 2, sums=False)),
    aten.all.dims: Rule(_reduction(1, 2, sums=False)),
    aten.median.dim: Rule(_reduction(1, 2, sums=False)),
    aten.nanmedian.dim: Rule(_reduction(1, 2, sums=False)),
    aten.mode.default: Rule(_reduction(1, 2, sums=False)),
    aten.kthvalue.default: Rule(_reduction(2, 3, sums=False)),
    aten.aminmax.default: Rule(_reduction(1, 2, sums=False)),
    aten.nansum.default: Rule(_reduction(1, 2, sums=True)),
    aten.count_nonzero.dim_IntList: Rule(_reduction(1, None, sums=True)),
    # along one dim
    aten._softmax.default: Rule(_along(1)),
    aten._log_softmax.default: Rule(_along(1)),
    aten._softmax_backward_data.default: Rule(_along(2)),
    aten._log_softmax_backward_data.default: Rule(_along(2)),
    aten.cumsum.default: Rule(_along(1), linear=_together(0)),
    aten.cumprod.default: Rule(_along(1)),
    aten.logcumsumexp.default: Rule(_along(1)),
    aten.sort.default: Rule(_along(1)),
    aten.sort.stable: Rule(_along(2)),
    aten.argsort.default: Rule(_along(1)),
    aten.argsort.stable: Rule(_along(2)),
    aten.topk.default: Rule(_along(2)),
    aten.cummax.default: Rule(_along(1)),
    aten.cummin.default: Rule(_along(1)),
    aten.glu.default: Rule(_along(1), pieces.spread(pieces.along(1, -1))),
    aten.glu_backward.default: Rule(_along(2), pieces.spread(pieces.along(2, -1))),
    aten._safe_softmax.default: Rule(_along(1)),
    aten.linalg_cross.default: Rule(_along(2)),
    aten._fft_r2c.default: Rule(_along(1), linear=_together(0)),
    aten._fft_c2r.default: Rule(_along(1), linear=_together(0)),
    aten._fft_c2c.default: Rule(_along(1), linear=_together(0)),
    aten._weight_norm_interface_backward.default: Rule(linear=_together(0)),
    # matrices in batches
    aten.linalg_cholesky_ex.default: Rule(_planes(2)),
    aten.linalg_inv_ex.default: Rule(_planes(2)),
    aten.linalg_solve_triangular.default: Rule(_planes(2)),
    aten.linalg_qr.default: Rule(_planes(2)),
    aten._linalg_eigh.default: Rule(_planes(2)),
    aten._linalg_det.default: Rule(_planes(2)),
    aten._linalg_slogdet.default: Rule(_planes(2)),
    aten._linalg_svd.default: Rule(_planes(2)),
    aten.tril.default: Rule(_along(None, default=[-1, -2]), linear=_together(0)),  # type: ignore[arg-type]
    aten.triu.default: Rule(_along(None, default=[-1, -2]), linear=_together(0)),  # type: ignore[arg-type]
    # indexing
    aten.embedding.default: Rule(_embedding, linear=_together(0), shifted=shifted.embedding),
    aten.embedding_dense_backward.default: Rule(
        _embedding_gradient, linear=_counts_no_words, shifted=shifted.embedding_gradient
    ),
    aten.gather.default: Rule(_gathered, linear=_together(0), shifted=shifted.gather),
    aten.scatter.src: Rule(_scattered, linear=_together(0, 2), shifted=shifted.scatter),
    aten.scatter.value: Rule(_scattered, shifted=shifted.scatter),
    aten.scatter.reduce: Rule(_scattered, shifted=shifted.write),
    aten.scatter.value_reduce: Rule(_scattered, shifted=shifted.write),
    aten.scatter_reduce.two: Rule(_scattered, shifted=shifted.write),
    aten.scatter_add.default: Rule(_scattered, linear=_together(0, 2), shifted=shifted.write),
    aten.index_select.default: Rule(_index_selected, linear=_together(0), shifted=shifted.select),
    aten.index_add.default: Rule(_index_added, linear=_together(0, 2), shifted=shifted.write),
    aten.index_copy.default: Rule(_index_added, linear=_together(0, 2), shifted=shifted.write),
    aten.index_fill.int_Scalar: Rule(_index_added, shifted=shifted.write),
    aten.index.Tensor: Rule(_indexed, linear=_together(0), shifted=shifted.index),
    aten._unsafe_index.Tensor: Rule(_indexed, linear=_together(0), shifted=shifted.index),
    aten.index_put.default: Rule(_index_written, linear=_written_together, shifted=shifted.index_put),
    aten._unsafe_index_put.default: Rule(_index_written, linear=_written_together, shifted=shifted.index_put),
    aten.searchsorted.Tensor: Rule(_sought),
    aten.bucketize.Tensor: Rule(_first_only),
    aten.isin.Tensor_Tensor: Rule(_first_only),
    aten._cdist_forward.default: Rule(_distances),
    aten._cdist_backward.default: Rule(_distances_gradient),
    # norms
    aten.native_layer_norm.default: Rule(_layer_norm),
    aten.native_layer_norm_backward.default: Rule(_layer_norm_gradient),
    aten._fused_rms_norm.default: Rule(_layer_norm),
    aten._fused_rms_norm_backward.default: Rule(_layer_norm_gradient),
    aten.native_group_norm.default: Rule(_group_norm, localize=_group_norm_sizes(3, 0)),
    aten.native_group_norm_backward.default: Rule(_group_norm_gradient, localize=_group_norm_sizes(5, 1)),
    # convolution, pooling, resampling
    aten.convolution.default: Rule(_convolution, localize=_convolution_groups),
    aten.convolution_backward.default: Rule(_convolution_gradient, localize=_convolution_gradient_groups),
    **_pooling(),
    aten.grid_sampler_2d.default: Rule(_resampled),
    aten.grid_sampler_2d_backward.default: Rule(_resampled_gradient),
    aten.grid_sampler_3d.default: Rule(_resampled),
    aten.grid_sampler_3d_backward.default: Rule(_resampled_gradient),
    aten.pixel_shuffle.default: Rule(_planes(3)),
    aten.pixel_unshuffle.default: Rule(_planes(3)),
    aten.im2col.default: Rule(_samples, linear=_together(0)),
    aten.col2im.default: Rule(_samples, linear=_together(0)),
    # attention
    aten._scaled_dot_product_flash_attention_for_cpu.default: Rule(_attention),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Rule(_attention_gradient),
    aten._scaled_dot_product_efficient_attention.default: Rule(_attention),
    aten._scaled_dot_product_efficient_attention_backward.default: Rule(_attention_gradient),
    aten._scaled_dot_product_flash_attention.default: Rule(_attention),
    aten._scaled_dot_product_flash_attention_backward.default: Rule(_attention_gradient),
    aten._scaled_dot_product_cudnn_attention.default: Rule(_attention),
    aten._scaled_dot_product_cudnn_attention_backward.default: Rule(_attention_gradient),
    # not tagged pointwise by torch, but they are
    aten.gelu_backward.default: POINTWISE,
    aten.threshold_backward.default: POINTWISE,
    aten.silu_backward.default: POINTWISE,
    aten.hardswish_backward.default: POINTWISE,
    aten.hardsigmoid_backward.default: POINTWISE,
    aten.hardtanh_backward.default: POINTWISE,
    aten.tanh_backward.default: POINTWISE,
    aten.sigmoid_backward.default: POINTWISE,
    aten.elu_backward.default: POINTWISE,
    aten.leaky_relu_backward.default: POINTWISE,
    aten.softplus_backward.default: POINTWISE,
    aten.hardswish.default: POINTWISE,
    aten.mish_backward.default: POINTWISE,
    aten.hardshrink_backward.default: POINTWISE,
    aten.softshrink_backward.default: POINTWISE,
    aten._prelu_kernel.default: POINTWISE,
    aten._prelu_kernel_backward.default: POINTWISE,
    aten.log_sigmoid_backward.default: Rule(_buffered),
    aten.log_sigmoid_forward.default: Rule(_buffered),
    aten.rsub.Tensor: POINTWISE,
    aten.floor_divide.default: POINTWISE,
    aten.isclose.default: POINTWISE,
    aten.complex.default: POINTWISE,
    aten.polar.default: POINTWISE,
    aten.where.ScalarSelf: POINTWISE,
    aten.where.ScalarOther: POINTWISE,
    aten.where.Scalar: POINTWISE,
    aten.fill.Scalar: POINTWISE,
    aten.fill.Tensor: POINTWISE,
    aten.masked_fill.Scalar: Rule(broadcast),
    aten.masked_fill.Tensor: Rule(broadcast),
    aten.lerp.Scalar: Rule(broadcast),
}


# Views that cost nothing to make again, so that what they view need not be kept for them.
CHEAP_VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.select.int,
        aten.slice.Tensor,
    }
)
