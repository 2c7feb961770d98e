"""A loader that gives each data rank its slice of every global batch, and resumes exactly where it stopped.

Membership. An epoch is one permutation of the dataset, a function of (seed, epoch) alone. Optimizer step s of an
epoch takes the next `global_batch` samples of it, in order; they are cut into `accumulate` global micro-batches of
equal size, in order; global micro-batch k is the concatenation over data ranks of each rank's k-th chunk. Hence,
as long as `global_batch` stays the same:

- the same step consumes the same samples in the same order on any number of ranks;
- with the same `accumulate`, every global micro-batch is the same too;
- with another `accumulate`, micro-batches are unions or parts of consecutive ones.

The position counts the samples that were handed out, not those read ahead, and is the same on all ranks, so that
one rank's position resumes any number of ranks. A resumed loader may even use another `global_batch`: it goes on
with the next sample of the same permutation.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from autoshard.batch import Replicated
from autoshard.compat import pytree
from autoshard.errors import BatchError
from autoshard.placement import shard_bounds
from autoshard.plan import Mesh

Collate = Callable[[list[Any]], Any]

VALID = "valid"  # the key of the mask that `Tail.PAD` adds to each batch


class Samples(Protocol):
    """A map-style dataset: `torch.utils.data.Dataset`, a list, anything with a length and integer items."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Tail(enum.Enum):
    """What becomes of the last samples of an epoch, where they do not fill a global batch.

    DROP: they are left out; another epoch's permutation leaves out others.
    PAD: the last sample is repeated to fill the batch. Every batch is a mapping and has the key "valid", bool (B,),
        false for repeats: for losses that return `autoshard.Mean`.
    KEEP: the last batch is smaller, its slices uneven or empty (leading size 0). For evaluation.
    """

    DROP = "drop"
    PAD = "pad"
    KEEP = "keep"


@dataclass(frozen=True)
class Position:
    """How far the training has consumed the data: whole epochs, and samples of the current one over all ranks."""

    epoch: int = 0
    sample: int = 0


def data_rank(mesh: Mesh) -> tuple[int, int]:
    """(this process's coordinate on the data axis, size of that axis), from the process group or torchrun."""
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    resolved = mesh.resolve(world)
    return resolved.coordinates(rank)["data"], resolved.axis("data")


class Loader:
    """Iterates over this rank's slices of the global batches. One `for` goes to the end of the current epoch.

    A background thread reads ahead. What a dataset or `collate` raises is raised in the consumer, at the batch it
    belongs to. The thread ends when the epoch does, or when the iterator is closed, dropped, or the program exits.

    Args:
        dataset: samples by index; all ranks must have the same one.
        global_batch: samples per optimizer step over all data ranks: accumulate x ranks x micro-batch.
        rank, ranks: this process's coordinate on the data axis and that axis' size; see `data_rank`.
        accumulate: micro-batches per optimizer step.
        seed: of the shuffling, with the epoch.
        shuffle: False goes through the dataset in order.
        tail: what becomes of samples that do not fill a global batch.
        collate: makes a batch of a list of samples; the default stacks tensors, tuples and mappings of them.
        read_ahead: batches to hold ready.
        device: where the batches' tensors are put; None leaves them.

    Raises:
        BatchError: sizes that do not fit together; the message lists some that do.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        global_batch: int,
        rank: int = 0,
        ranks: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = Tail.DROP,
        collate: Collate = default_collate,
        read_ahead: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in (("global_batch", global_batch), ("accumulate", accumulate), ("read_ahead", read_ahead)):
            if value < 1:
                raise BatchError(f"Loader.{name} is {value}; valid: an integer >= 1")
        if not 0 <= rank < ranks:
            raise BatchError(f"Loader.rank is {rank}; valid: 0 to {ranks - 1}, as ranks is {ranks}")
        if global_batch % (accumulate * ranks):
            raise BatchError(_advise(global_batch, accumulate, ranks))
        if len(dataset) == 0 or (tail is Tail.DROP and len(dataset) < global_batch):
            raise BatchError(
                f"the dataset has {len(dataset)} samples, no full global batch of {global_batch}; valid: global_batch "
                f"up to {len(dataset)}, or tail=Tail.PAD with a loss that uses batch['{VALID}']"
            )
        self.dataset = dataset
        self.global_batch = global_batch
        self.rank, self.ranks = rank, ranks
        self.accumulate = accumulate
        self.seed = seed
        self.shuffle = shuffle
        self.tail = tail
        self.position = Position()
        self._collate = collate
        self._read_ahead = read_ahead
        self._device = None if device is None else torch.device(device)
        self._active: weakref.ref[_Reader] | None = None

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on all ranks."""
        full, rest = divmod(len(self.dataset), self.global_batch)
        return full + (1 if rest and self.tail is not Tail.DROP else 0)

    def __iter__(self) -> _Reader:
        """The rest of the current epoch; the next `for` takes the next epoch."""
        return self._read(self._epoch(self.position))

    def stream(self) -> _Reader:
        """Batches without end: epoch after epoch, read ahead across their border."""
        return self._read(self._forever(self.position))

    def example(self) -> Any:
        """The batch at the current position, which stays where it is: for `step.init`."""
        return self._fetch(next(self._forever(self.position)))

    def state_dict(self) -> dict[str, int | bool]:
        """The position, and what it means something with. Equal on all ranks; plain values for JSON."""
        return dataclasses.asdict(self.position) | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position. An iterator in use is closed.

        Raises:
            BatchError: it was saved with another dataset length, seed or shuffling.
        """
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise BatchError(
                    f"the saved position has {name}={state.get(name)!r} but this loader has {name}={mine!r}; the order "
                    f"of samples would differ. Set it to the saved value, or start from the beginning"
                )
        self._close_active()
        self.position = Position(int(state["epoch"]), int(state["sample"]))

    def close(self) -> None:
        """Ends the background thread, if an iterator still has one."""
        self._close_active()

    def _identity(self) -> dict[str, int | bool]:
        return {"seed": self.seed, "shuffle": self.shuffle, "length": len(self.dataset)}

    def _read(self, work: Iterator[_Work]) -> _Reader:
        self._close_active()
        reader = _Reader(self, work, self._fetch, self._read_ahead)
        self._active = weakref.ref(reader)
        return reader

    def _close_active(self) -> None:
        reader = self._active() if self._active is not None else None
        if reader is not None:
            reader.close()

    def _forever(self, position: Position) -> Iterator[_Work]:
        while True:
            for work in self._epoch(position):
                yield work
                position = work.after

    def _epoch(self, position: Position) -> Iterator[_Work]:
        size, length = self.global_batch, len(self.dataset)
        if not self._left(position.sample):  # saved with a smaller global batch, and the tail is dropped
            position = Position(position.epoch + 1)
        order = epoch_order(length, self.seed, position.epoch) if self.shuffle else np.arange(length)
        while self._left(position.sample):
            chosen = order[position.sample : position.sample + size]
            end = position.sample + len(chosen)
            after = Position(position.epoch, end) if self._left(end) else Position(position.epoch + 1)
            yield _Work(*self._slice(chosen), after)
            if after.epoch != position.epoch:
                return
            position = after

    def _left(self, sample: int) -> bool:
        """Whether an epoch has another batch after `sample` samples."""
        left = len(self.dataset) - sample
        return left >= self.global_batch if self.tail is Tail.DROP else left > 0

    def _slice(self, chosen: np.ndarray) -> tuple[list[int], list[bool]]:
        """This rank's sample indices, chunk by chunk, and whether each is a sample rather than padding."""
        real = len(chosen)
        if real < self.global_batch and self.tail is Tail.KEEP:
            first, last = shard_bounds(real, self.ranks, self.rank)
            return chosen[first:last].tolist(), [True] * (last - first)
        chosen = np.concatenate([chosen, np.repeat(chosen[-1:], self.global_batch - real)])
        mask = np.arange(self.global_batch) < real
        chunks = (self.accumulate, self.ranks, -1)
        return (
            chosen.reshape(chunks)[:, self.rank].flatten().tolist(),
            mask.reshape(chunks)[:, self.rank].flatten().tolist(),
        )

    def _fetch(self, work: _Work) -> Any:
        # A slice without samples still has the structure and the shapes of one.
        samples = [self.dataset[i] for i in work.indices or [0]]
        batch = self._collate(samples)
        if self.tail is Tail.PAD:
            batch = _with_mask(batch, work.valid)
        if not work.indices:
            batch = _map_tensors(lambda t, sharded: t[:0] if sharded else t, batch)
        if self._device is not None:
            device = self._device
            batch = _map_tensors(lambda t, _: _move(t, device), batch)
        return batch


def evaluation_loader(
    dataset: Samples,
    *,
    global_batch: int,
    rank: int = 0,
    ranks: int = 1,
    collate: Collate = default_collate,
    read_ahead: int = 2,
    device: torch.device | str | None = None,
) -> Loader:
    """A loader whose every epoch gives each sample exactly once over all ranks, in order.

    All ranks get the same number of batches; in the last one the slices may be uneven or empty, which
    `step.evaluate` takes. Weigh the batches' means by ``metrics["samples"]`` (or ``"tokens"``).
    """
    return Loader(
        dataset,
        global_batch=global_batch,
        rank=rank,
        ranks=ranks,
        shuffle=False,
        tail=Tail.KEEP,
        collate=collate,
        read_ahead=read_ahead,
        device=device,
    )


def epoch_order(length: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of `length` samples for an epoch, int64 (length,): the same on every rank and machine."""
    # One stream per (seed, epoch): seed + epoch would make neighbouring seeds share their epochs.
    mixed = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(mixed >> np.uint64(1)))
    return torch.randperm(length, generator=generator).numpy()


@dataclass(frozen=True)
class _Work:
    """One batch to read: sample indices, which of them are no padding, and the position once it is consumed."""

    indices: list[int]
    valid: list[bool]
    after: Position


class _Channel:
    """What the reading thread and the consumer share. It knows neither, so that both can be collected."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[tuple[Any, Position] | BaseException] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._closed = False
        self._finished = False

    def put(self, item: tuple[Any, Position] | BaseException) -> bool:
        """Waits for room. False: closed, nobody will take it."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> tuple[Any, Position] | BaseException | None:
        """Waits for an item; None: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._finished or bool(self._items))
            if self._closed or not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _read_into(channel: _Channel, work: Iterator[_Work], fetch: Callable[[_Work], Any]) -> None:
    item: _Work | None = None
    try:
        for item in work:
            if not channel.put((fetch(item), item.after)):
                return
    except BaseException as error:  # of any kind: it belongs to the consumer
        if item is not None:
            shown = ", ".join(map(str, item.indices[:8])) + (", ..." if len(item.indices) > 8 else "")
            error.add_note(f"while autoshard.data was reading samples [{shown}] in the background")
        channel.put(error)
    finally:
        channel.finish()


class _Reader:
    """The iterator of a `Loader`. Advances the loader's position as it hands batches out."""

    def __init__(self, loader: Loader, work: Iterator[_Work], fetch: Callable[[_Work], Any], capacity: int) -> None:
        self._loader = loader
        self._channel = _Channel(capacity)
        thread = threading.Thread(
            target=_read_into, args=(self._channel, work, fetch), name="autoshard-data", daemon=True
        )
        thread.start()
        # Runs when this iterator is dropped, and at exit, while the interpreter still works.
        self._end = weakref.finalize(self, _stop, self._channel, thread)

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Any:
        item = self._channel.get()
        if item is None:
            self.close()
            raise StopIteration
        if isinstance(item, BaseException):
            self.close()
            if isinstance(item, StopIteration):  # would end the caller's loop in silence
                raise RuntimeError("the dataset or collate function raised StopIteration") from item
            raise item
        batch, self._loader.position = item
        return batch

    def close(self) -> None:
        """Ends the reading thread; further items are StopIteration."""
        self._end()


def _stop(channel: _Channel, thread: threading.Thread) -> None:
    channel.close()
    if thread is not threading.current_thread():
        # A dataset that never returns must not keep the program: the thread is a daemon.
        thread.join(timeout=2.0)


def _advise(global_batch: int, accumulate: int, ranks: int) -> str:
    unit = accumulate * ranks
    sizes = [size for size in (global_batch // unit * unit, -(-global_batch // unit) * unit) if size]
    found = f"global_batch {global_batch} is not accumulate {accumulate} x ranks {ranks} x micro-batch"
    advice = f"valid: global_batch {' or '.join(map(str, sizes))}"
    if global_batch % ranks == 0:
        per_rank = global_batch // ranks
        divisors = [k for k in range(1, per_rank + 1) if per_rank % k == 0]
        near = sorted(sorted(divisors, key=lambda k: abs(k - accumulate))[:4])
        triples = ", ".join(f"{k} x {ranks} x {per_rank // k}" for k in near)
        advice += f"; or, as accumulate x ranks x micro-batch: {triples}"
    return f"{found}; {advice}"


def _with_mask(batch: Any, valid: Sequence[bool]) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"Tail.PAD adds the key '{VALID}' to the batch, which is of type {type(batch).__name__}; valid: samples "
            "that are mappings, or a collate function that returns one, or tail=Tail.DROP"
        )
    if VALID in batch:
        raise BatchError(f"the batch already has the key '{VALID}' that Tail.PAD adds; rename the dataset's key")
    return {**batch, VALID: torch.tensor(valid, dtype=torch.bool)}


def _map_tensors(function: Callable[[Tensor, bool], Tensor], batch: Any) -> Any:
    """`function(tensor, has a batch dimension)` on every tensor of a batch."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Replicated):
            return Replicated(function(leaf.tensor, False))
        return function(leaf, leaf.dim() > 0) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(one, batch, is_leaf=lambda leaf: isinstance(leaf, Replicated))


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
