"""What a batch looks like: its structure, which of its leaves are sharded over the data axis, and its slices."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoshard.compat import pytree
from autoshard.errors import BatchError

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the repr of an object without one of its own; differs by process


@dataclass(frozen=True)
class Replicated:
    """Marks a tensor of a batch as having no batch dimension: it is the same on every rank."""

    tensor: Tensor


pytree.register_pytree_node(Replicated, lambda r: ([r.tensor], None), lambda children, _: Replicated(*children))


_SIZE = "a batch of leading size "
RAGGED = {
    _SIZE: "Every rank must pass the same number of samples: drop the tail, or pad it and keep the padding out of "
    "the loss by a mask. autoshard.data.Loader does either: tail=Tail.DROP; or tail=Tail.PAD, which adds "
    "batch['valid'], for a loss that returns autoshard.Mean((each * batch['valid']).sum(), batch['valid'].sum())"
}


@dataclass(frozen=True)
class Leaf:
    """One leaf of a batch.

    Args:
        path: where it is, such as ``["x"]``.
        shape: of this rank's slice, in elements; None for a leaf that is no tensor.
        dtype: element type; None for a leaf that is no tensor.
        sharded: has a batch dimension, split over the data axis.
        value: the leaf itself where it is no tensor.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    sharded: bool
    value: str = ""


@dataclass(frozen=True)
class BatchSpec:
    """The structure of one rank's batch. Equal specs run the same program."""

    leaves: tuple[Leaf, ...]
    tree: str

    @property
    def rows(self) -> int | None:
        """The leading size shared by the sharded leaves, in samples; None if there is none."""
        return next((leaf.shape[0] for leaf in self.leaves if leaf.sharded and leaf.shape is not None), None)

    @property
    def told(self) -> str:
        """Everything in which ranks must agree, in lines: the leading size, which has `RAGGED` for advice, the tensors,
        then what is no tensor or is marked."""
        size = "" if self.rows is None else f"{_SIZE}{self.rows}\n"
        rest = [f"{leaf.path}={_ADDRESS.sub('', leaf.value)}" for leaf in self.leaves if leaf.shape is None]
        rest += [f"{leaf.path} replicated" for leaf in self.leaves if leaf.shape and not leaf.sharded]
        return f"{size}batch {self}" + (f"\nbatch with {', '.join(rest)}" if rest else "")

    def of_any_rows(self) -> BatchSpec:
        """This spec with the leading size left open: in evaluation ranks may have different ones."""
        return dataclasses.replace(
            self,
            leaves=tuple(
                dataclasses.replace(leaf, shape=(-1, *leaf.shape[1:])) if leaf.sharded and leaf.shape else leaf
                for leaf in self.leaves
            ),
        )

    def __str__(self) -> str:
        return ", ".join(
            f"{leaf.path or 'batch'} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            for leaf in self.leaves
            if leaf.shape is not None
        )


def flatten(batch: Any) -> tuple[list[Any], list[bool], Any]:
    """(leaves, is replicated, tree) of a batch; `Replicated` wrappers are taken off the leaves."""
    paths_leaves, tree = pytree.tree_flatten_with_path(batch, is_leaf=lambda x: isinstance(x, Replicated))
    leaves = [leaf.tensor if isinstance(leaf, Replicated) else leaf for _, leaf in paths_leaves]
    wrapped = [isinstance(leaf, Replicated) for _, leaf in paths_leaves]
    return leaves, wrapped, tree


def describe(batch: Any) -> BatchSpec:
    """The spec of one rank's batch.

    Raises:
        BatchError: sharded tensors disagree in their leading size.
    """
    leaves, wrapped, tree = flatten(batch)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch, is_leaf=_is_wrapped)[0]]
    found = []
    for path, value, whole in zip(paths, leaves, wrapped, strict=True):
        _check_leaf(path or "the batch", value)
        if isinstance(value, Tensor):
            found.append(Leaf(path, tuple(value.shape), value.dtype, not whole and value.dim() > 0))
        else:
            found.append(Leaf(path, None, None, False, repr(value)))
    spec = BatchSpec(tuple(found), str(tree))
    sizes = {leaf.path or "batch": leaf.shape[0] for leaf in spec.leaves if leaf.sharded and leaf.shape}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise BatchError(
            f"the batch's tensors differ in their leading size ({listed}); every tensor has the batch dimension first. "
            "Wrap a tensor without one in autoshard.Replicated"
        )
    return spec


def _check_leaf(path: str, value: Any) -> None:
    """
    Raises:
        BatchError: tensors would be taken for constants, or cannot be split.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise BatchError(f"{path} is a {value.layout} tensor; valid: dense ones (to_dense(), or its parts)")
        return
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        raise BatchError(f"{path} is a numpy array; valid: tensors (torch.from_numpy(...))")
    inside = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    held = [name for name, part in inside.items() if isinstance(part, (Tensor, np.ndarray))]
    if held and not isinstance(value, (type, nn.Module)):
        how = "dict(batch)" if isinstance(value, Mapping) else "a dict, tuple or named tuple of its tensors"
        raise BatchError(
            f"{path} is a {kind} that holds tensors ({', '.join(map(str, held[:3]))}) which cannot be seen; "
            f"pass {how}, or register the class with torch.export.register_dataclass"
        )


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, Replicated)


def told_values(batch: Any) -> str:
    """What ranks must agree on beside a spec: tensors that are the same everywhere, those on a device unread."""
    leaves, wrapped, _ = flatten(batch)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch, is_leaf=_is_wrapped)[0]]
    found = [
        f"{path} with the value {value.item()}" if value.numel() == 1 else f"{path} with the digest {digest(value)}"
        for path, value, whole in zip(paths, leaves, wrapped, strict=True)
        if isinstance(value, Tensor) and (whole or value.dim() == 0) and value.device.type == "cpu"
    ]
    return "\n".join(found)


def digest(value: Tensor) -> str:
    """A few letters that tell one content from another."""
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:12]


def check_tensors(batch: Any) -> None:
    """
    Raises:
        BatchError: a batch to train or evaluate on is numbers alone, which would be taken for constants.
    """
    leaves = flatten(batch)[0]
    if any(isinstance(x, (int, float)) for x in leaves) and not any(isinstance(x, Tensor) for x in leaves):
        raise BatchError(f"the batch is a {type(batch).__name__} of numbers; valid: tensors (torch.tensor(batch))")


def check_divides(spec: BatchSpec, accumulate: int) -> None:
    """
    Raises:
        BatchError: the leading size is not a positive multiple of `accumulate`.
    """
    rows = spec.rows
    if rows is not None and (rows % accumulate or rows == 0):
        near = max(accumulate, rows - rows % accumulate)
        raise BatchError(
            f"this rank's batch has {rows} samples ({spec}), which plan.accumulate={accumulate} micro-batches do not "
            f"divide; give each rank a multiple of {accumulate}, such as {near} (autoshard.data drops or pads the tail)"
        )


def tensors(batch: Any) -> list[Tensor]:
    """The tensor leaves, in order."""
    return [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]


def micro_batches(batch: Any, spec: BatchSpec, accumulate: int) -> Iterator[list[Tensor]]:
    """The tensor leaves of each micro-batch in turn: views, nothing is copied."""
    found = tensors(batch)
    sharded = [leaf.sharded for leaf in spec.leaves if leaf.shape is not None]
    rows = (spec.rows or 0) // accumulate
    for k in range(accumulate):
        yield [t.narrow(0, k * rows, rows) if s else t for t, s in zip(found, sharded, strict=True)]


def as_meta(batch: Any) -> Any:
    """The batch with meta tensors in the place of its tensors: structure, shapes and dtypes only."""

    def meta(x: Any) -> Any:
        if isinstance(x, Replicated):
            return Replicated(meta(x.tensor))
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x

    return pytree.tree_map(meta, batch, is_leaf=_is_wrapped)


def to_json(batch: Any) -> Any:
    """The structure, shapes and dtypes of a batch as JSON values; None where it holds something JSON cannot say."""
    match batch:
        case Replicated(tensor):
            return {"replicated": to_json(tensor)}
        case Tensor():
            return {"shape": list(batch.shape), "dtype": str(batch.dtype).removeprefix("torch.")}
        case None | bool() | int() | float() | str():
            return {"value": batch}
        case Mapping() if all(isinstance(key, str) for key in batch):
            items = {key: to_json(value) for key, value in batch.items()}
            return None if None in items.values() else {"mapping": items}
        case list() | tuple():
            parts = [to_json(value) for value in batch]
            return None if None in parts else {"tuple" if isinstance(batch, tuple) else "list": parts}
    return None


def from_json(found: Any) -> Any:
    """The batch of meta tensors that `to_json` described.

    Raises:
        BatchError: it could not be described.
    """
    if found is None:
        raise BatchError("the checkpoint could not store this batch's structure; pass one: step.load(path, batch)")
    if "shape" in found:
        return torch.empty(found["shape"], dtype=getattr(torch, found["dtype"]), device="meta")
    if "replicated" in found:
        return Replicated(from_json(found["replicated"]))
    if "mapping" in found:
        return {key: from_json(value) for key, value in found["mapping"].items()}
    if "list" in found:
        return [from_json(value) for value in found["list"]]
    return tuple(from_json(value) for value in found["tuple"]) if "tuple" in found else found["value"]


def rescaled(batch: Any, accumulate: int) -> Any:
    """A meta batch whose leading size is made a multiple of `accumulate`, for a plan that has another one."""
    spec = describe(batch)
    rows = spec.rows
    if rows is None or (rows % accumulate == 0 and rows):
        return batch
    wanted = max(accumulate, -(-rows // accumulate) * accumulate)

    def resize(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dim() > 0:
            return torch.empty((wanted, *x.shape[1:]), dtype=x.dtype, device="meta")
        return x

    return pytree.tree_map(resize, batch, is_leaf=_is_wrapped)


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Rows of every sharded tensor; the rest as it is."""

    def rows(x: Any) -> Any:
        return x[start:stop] if isinstance(x, Tensor) and x.dim() > 0 else x

    return pytree.tree_map(rows, batch, is_leaf=_is_wrapped)


def all_replicated(batch: Any) -> Any:
    """The batch with every tensor marked as the same on every rank."""
    return pytree.tree_map(lambda x: Replicated(x) if isinstance(x, Tensor) else x, batch, is_leaf=_is_wrapped)


_OUT_OF_RANGE = re.compile(r"(index|target)\b.*\bout of (range|bounds)", re.IGNORECASE)


@contextmanager
def indices_explained(batch: Any) -> Iterator[None]:
    """An index that is out of range while a program runs on `batch` says what the batch holds.

    Raises:
        BatchError: in the place of torch's own error.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        text = str(error)
        if not _OUT_OF_RANGE.search(text):
            raise
        leaves, _ = pytree.tree_flatten_with_path(batch)
        ranges = [
            f"batch{pytree.keystr(path)} is {int(leaf.min())} to {int(leaf.max())}"
            for path, leaf in leaves
            if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_floating_point() and leaf.dtype != torch.bool
        ]
        raise BatchError(
            f"an index is out of range ({text.splitlines()[0][-200:]}). {'; '.join(ranges)}. Token ids must be below "
            "the embedding's rows, class labels below the number of classes, but for the loss's ignore_index"
        ) from error
