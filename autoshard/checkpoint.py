"""Checkpoints that any number of ranks can read, and that are whole or not there.

A checkpoint is a folder on a disk that all nodes share::

    path/
      latest             "save-<id> <sha256 of its manifest>": replaced in one rename, when all ranks have finished
      save-<id>/
        manifest.json    size and sha256 of every file, name, shape and dtype of every tensor, the caller's metadata
        __0_0.distcp ... the shards, as torch.distributed.checkpoint writes them
        .metadata        where each part of each tensor lies
      .writing-<id>/     a save that is not complete; the next one removes it

The previous save is deleted only after `latest` names the new one, so whatever is killed at whatever moment, the last
complete checkpoint is the one that is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from autoshard.checkpoint_blocks import LoadBlocks, SaveBlocks
from autoshard.errors import AutoshardError, CheckpointError

_FORMAT = 1
_LATEST = "latest"
_MANIFEST = "manifest.json"
_SHOWN = 5  # names per kind in a message

_T = TypeVar("_T")


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
    """Write `tensors` and `meta` to `path`, replacing the checkpoint there once the new one is complete.

    A collective call: every rank passes the same path and names. Each rank writes its own part.

    Args:
        path: a folder, made if missing, on a disk that all ranks see. If it exists it is a checkpoint or empty.
        tensors: flat name -> DTensor (sharded or replicated; shards may be uneven or empty), or Tensor, which has the
            same value on every rank.
        meta: what `read_meta` gives back; JSON values with string keys. Rank 0's is written.

    Raises:
        CheckpointError: on all ranks, whichever failed; what was readable at `path` before still is.
    """
    root = Path(path).absolute()
    _agree(root, tensors)
    name = _from_first(lambda: uuid.uuid4().hex[:16])
    partial, final = root / f".writing-{name}", root / f"save-{name}"

    def prepare() -> None:
        if _rank() == 0:
            _check_replaceable(root)
            _as_json(meta)
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            partial.mkdir()

    def see() -> None:
        if not _appears(partial):
            raise CheckpointError(
                f"{partial}, which rank 0 made, is not seen here; a checkpoint's path must be on a disk that all nodes "
                "share (NFS, Lustre, ...): save to such a path"
            )

    with _discarding(partial), _telling(f"writing {root} failed, what was complete there before is untouched"):
        _together(prepare)
        _together(see)
        with _quiet():
            detached = {name: t.detach() for name, t in tensors.items()}
            save(detached, storage_writer=FileSystemWriter(partial), planner=SaveBlocks())
        sums = _checksums(partial, _from_first(lambda: _written_files(partial)))

        def publish() -> None:
            if _rank() == 0:
                manifest = {
                    "format": _FORMAT,
                    "torch": torch.__version__,
                    "files": {file: {"bytes": size, "sha256": digest} for file, (size, digest) in sums.items()},
                    "tensors": _description(tensors),
                    "meta": meta,
                }
                text = _as_json(manifest).encode()
                _write_durably(partial / _MANIFEST, text)
                _sync_folder(partial)
                partial.rename(final)
                _sync_folder(root)
                _write_durably(root / ".latest", f"{final.name} {hashlib.sha256(text).hexdigest()}\n".encode())
                (root / ".latest").replace(root / _LATEST)
                _sync_folder(root)
                _remove_leftovers(root)

        _together(publish)


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata that was written with the checkpoint at `path`. A collective call.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint or its description is damaged.
    """
    root = Path(path).absolute()
    with _telling(f"reading {root} failed"):
        return _together(lambda: _open(root)[1])["meta"]


def read_into(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    allow_nan: bool = False,
    without: tuple[str, ...] = (),
) -> None:
    """Fill `tensors` in place from the checkpoint at `path`. A collective call.

    The number of ranks, the mesh and the placements are those of `tensors`; they need not be those of the writer.
    Every file is checked against its sha256, by one rank, before anything is read.

    Args:
        tensors: flat name -> DTensor or Tensor, of the names, shapes and dtypes that were written.
        allow_nan: accept tensors that hold NaN.
        without: beginnings of names that are left in the file.

    Raises:
        CheckpointError: on all ranks: nothing at `path`, a file missing or damaged, other names or shapes or dtypes,
            a tensor with NaN. `tensors` are unchanged but in the last case.
    """
    root = Path(path).absolute()
    _agree(root, tensors)
    with _telling(f"reading {root} failed"):
        folder, manifest = _together(lambda: _open(root))
        if len(set(_gather(folder.name))) > 1:
            raise CheckpointError(
                f"ranks see different checkpoints at {root}; its path must be on a disk that all nodes share, and "
                "nothing may write there while it is read"
            )
        written = {name: t for name, t in manifest["tensors"].items() if not name.startswith(without)}
        _together(lambda: _compare(root, written, _description(tensors)))
        _together(lambda: _verify(folder, manifest["files"]))
        with _quiet():
            detached = {name: t.detach() for name, t in tensors.items()}
            load(detached, storage_reader=FileSystemReader(folder), planner=LoadBlocks())
        if not allow_nan:
            bad = sorted(set().union(*_gather([key for key, t in tensors.items() if _has_nan(t)])))
            if bad:
                raise CheckpointError(
                    f"{root}: NaN in {_some(bad)}; the run had diverged before it was saved: load an earlier "
                    "checkpoint. To look at this one: autoshard.checkpoint.read_into(path, tensors, allow_nan=True)"
                )


def export(
    path: str | os.PathLike[str], full: Iterable[tuple[str, torch.Tensor]], *, limit: int = 5_000_000_000
) -> None:
    """Write whole tensors as safetensors, on rank 0. A collective call: every rank iterates over `full`.

    Args:
        path: "*.safetensors" for one file. Anything else is a folder, which gets model.safetensors, or above `limit`
            model-00001-of-0000N.safetensors and model.safetensors.index.json, as Hugging Face reads them. An export
            that is there is replaced; other files in the folder are left alone.
        full: (name, whole tensor), gathered as it is iterated over; each name once. Rank 0 copies it to host memory.
        limit: bytes of tensors per file, which is also what rank 0 holds at once.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: on all ranks: rank 0 cannot write, a name comes twice, or one file would exceed `limit`.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("export needs safetensors: pip install autoshard[train]") from error
    target = Path(path).absolute()
    single = target.suffix == ".safetensors"
    partial = (target.parent if single else target) / f".exporting-{uuid.uuid4().hex[:16]}"
    held: dict[str, torch.Tensor] = {}
    shards: list[list[str]] = []
    total = 0

    def flush() -> None:
        save_file(held, partial / str(len(shards)), metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    def add(name: str, t: torch.Tensor) -> None:
        if name in held or any(name in shard for shard in shards):
            raise CheckpointError(f"export was given {name!r} twice")
        if held and sum(x.nbytes for x in held.values()) + t.nbytes > limit:
            if single:
                raise CheckpointError(
                    f"the model does not fit in one file of {limit} bytes; give export a folder instead of {target}"
                )
            flush()
        held[name] = t.detach().to("cpu", copy=True).contiguous()

    def publish() -> None:
        if held or not shards:
            flush()
        if single:
            _move_durably(partial / "0", target)
        else:
            _publish_folder(partial, target, shards, total)

    failure: Exception | None = None

    def attempt(action: Callable[..., None], *args: Any) -> None:
        # After a failure rank 0 goes on iterating: the other ranks wait for it in the next gather.
        nonlocal failure
        if _rank() == 0 and failure is None:
            try:
                action(*args)
            except Exception as error:
                failure = error

    with _telling(f"exporting to {target} failed"):
        attempt(lambda: partial.mkdir(parents=True))
        for name, t in full:
            total += t.nbytes
            attempt(add, name, t)
        attempt(publish)
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)

        def report() -> None:
            if failure is not None:
                raise failure

        _together(report)


def _publish_folder(partial: Path, target: Path, shards: list[list[str]], total: int) -> None:
    index = target / "model.safetensors.index.json"
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    # Without its index a folder of shards is refused by readers; with an old one it would be a mixture.
    index.unlink(missing_ok=True)
    for i, file in enumerate(files):
        _move_durably(partial / str(i), target / file)
    for old in (*target.glob("model-*-of-*.safetensors"), target / "model.safetensors"):
        if old.name not in files:
            old.unlink(missing_ok=True)
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        _write_durably(partial / "index", text.encode())
        _move_durably(partial / "index", index)


# -- ranks


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(value: _T) -> list[_T]:
    """The value of every rank, on every rank."""
    if _world() == 1:
        return [value]
    found: list[Any] = [None] * _world()
    dist.all_gather_object(found, value)
    return found


class _UnexpectedError(CheckpointError):
    """Something on a rank failed that we did not expect, such as a full disk."""


def _together(action: Callable[[], _T]) -> _T:
    """Run `action` on every rank; where it fails on one, all raise the same CheckpointError."""
    value: _T | None = None
    error: Exception | None = None
    try:
        value = action()
    except Exception as caught:
        error = caught
    expected = isinstance(error, AutoshardError)
    mine = None if error is None else (expected, str(error) if expected else f"{type(error).__name__}: {error}")
    found = _gather(mine)
    failures: dict[tuple[bool, str], list[int]] = {}
    for rank, failure in enumerate(found):
        if failure is not None:
            failures.setdefault(failure, []).append(rank)
    if failures:
        stories = [
            text if len(ranks) == len(found) else f"{text} (on rank {', '.join(map(str, ranks))})"
            for (_, text), ranks in failures.items()
        ]
        kind = CheckpointError if all(known for known, _ in failures) else _UnexpectedError
        raise kind("; ".join(stories)) from error
    return value  # type: ignore[return-value]


def _from_first(action: Callable[[], _T]) -> _T:
    """What `action` gives on rank 0, on every rank; where it fails there, all raise."""
    mine = _together(lambda: action() if _rank() == 0 else None)
    return _gather(mine)[0]  # type: ignore[return-value]


@contextmanager
def _telling(doing: str) -> Iterator[None]:
    """Unexpected failures within, such as a full disk or a rank that died, say what was being done."""
    try:
        yield
    except _UnexpectedError as error:
        raise CheckpointError(f"{doing}: {error}") from error
    except (AutoshardError, ImportError):
        raise
    except (Exception, CheckpointException) as error:
        story = f"{doing}: {type(error).__name__}: {error}"
        raise CheckpointError(f"{story}. If a rank died or lost its connection, restart the job") from error


@contextmanager
def _discarding(folder: Path) -> Iterator[None]:
    """A save that fails does not go on filling the disk."""
    try:
        yield
    except CheckpointError:
        if _rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """A world of one is no reason for a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _agree(root: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse ranks that were given different things, which would wait for each other for ever."""
    description = _description(tensors)
    digest = hashlib.sha256(_as_json(description).encode()).hexdigest()
    found = _gather((str(root), digest, len(description)))
    others = sorted({path for path, _, _ in found} - {str(root)})
    if others:
        raise CheckpointError(
            f"rank {_rank()} was given the path {root}, others {_some(others)}; give all ranks the same one"
        )
    if len({digest for _, digest, _ in found}) > 1:
        counts = ", ".join(f"rank {rank}: {count} tensors" for rank, (_, _, count) in enumerate(found))
        raise CheckpointError(f"ranks have tensors of different names, shapes or dtypes ({counts}); use one model")


# -- what is in a checkpoint


def _description(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in sorted(tensors.items())
    }


def _compare(root: Path, written: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    def differs(name: str) -> str:
        def text(t: Mapping[str, Any]) -> str:
            return f"{t['dtype']}{t['shape']}"

        return f"{name} ({text(written[name])} there, {text(wanted[name])} here)"

    lists = {
        "missing there": sorted(wanted.keys() - written.keys()),
        "unknown here": sorted(written.keys() - wanted.keys()),
        "different": [differs(n) for n in sorted(wanted.keys() & written.keys()) if written[n] != wanted[n]],
    }
    found = [f"{kind}: {_some(names)}" for kind, names in lists.items() if names]
    if found:
        raise CheckpointError(
            f"{root} is a checkpoint of another model or optimizer; {'; '.join(found)}. "
            "Load it with the model and optimizer that wrote it"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _has_nan(t: torch.Tensor) -> bool:
    local: torch.Tensor = t.to_local() if isinstance(t, DTensor) else t
    return bool((local.is_floating_point() or local.is_complex()) and local.isnan().any())


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the metadata of a checkpoint must be JSON values with string keys: {error}") from error


# -- files


def _open(root: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the last complete save, and its manifest."""
    if not root.is_dir():
        raise CheckpointError(
            f"there is no checkpoint at {root}: no such folder; check the path, "
            "which must be on a disk that all nodes share"
        )
    latest = root / _LATEST
    if not latest.is_file():
        started = any(root.glob(".writing-*")) or any(root.glob("save-*"))
        found = "its first save was interrupted" if started else "it holds no file 'latest'"
        raise CheckpointError(f"{root} is not a complete checkpoint: {found}; give the path that a save was given")
    words = latest.read_text(errors="replace").split()
    damaged = CheckpointError(f"the checkpoint at {root} is damaged: {_advice('its description')}")
    if len(words) != 2:
        raise damaged
    folder, digest = root / words[0], words[1]
    if not (folder / _MANIFEST).is_file():
        raise CheckpointError(f"the checkpoint at {root} is damaged: {folder.name}/{_MANIFEST} is missing; {_RESTORE}")
    text = (folder / _MANIFEST).read_bytes()
    if hashlib.sha256(text).hexdigest() != digest:
        raise damaged
    manifest = json.loads(text)
    if manifest["format"] != _FORMAT:
        raise CheckpointError(
            f"{root} has format {manifest['format']}, this version reads {_FORMAT}; use the autoshard that wrote it"
        )
    return folder, manifest


_RESTORE = "restore it from a copy, or load another checkpoint"


def _advice(what: str) -> str:
    return f"{what} does not have the checksum that was recorded; {_RESTORE}"


def _written_files(folder: Path) -> list[str]:
    """The files of a finished save; told by its description, as listing a folder on a network disk may lag."""
    storage = FileSystemReader(folder).read_metadata().storage_data or {}
    return sorted({entry.relative_path for entry in storage.values()} | {".metadata"})


def _appears(folder: Path, seconds: float = 5.0) -> bool:
    """Whether a folder that another node made is seen here; a network disk may take a moment."""
    deadline = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _mine(files: Iterable[str]) -> list[str]:
    """The files that this rank checks: each is read by one rank."""
    return sorted(files)[_rank() :: _world()]


def _digest(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _checksums(folder: Path, files: Sequence[str]) -> dict[str, tuple[int, str]]:
    """File -> (bytes, sha256), computed by all ranks together."""
    mine = _together(lambda: {f: ((folder / f).stat().st_size, _digest(folder / f)) for f in _mine(files)})
    return {file: entry for part in _gather(mine) for file, entry in part.items()}


def _verify(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name in files:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; {_RESTORE}")
        size = (folder / name).stat().st_size
        if size != files[name]["bytes"]:
            raise CheckpointError(f"{folder / name} has {size} bytes instead of {files[name]['bytes']}; {_RESTORE}")
    for name in _mine(files):
        if _digest(folder / name) != files[name]["sha256"]:
            raise CheckpointError(_advice(str(folder / name)))


def _check_replaceable(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{root} is a file; a checkpoint is a folder: save to another path")
    if root.is_dir() and not (root / _LATEST).is_file():
        foreign = [f.name for f in root.iterdir() if not f.name.startswith((".writing-", "save-", ".latest"))]
        if foreign:
            raise CheckpointError(
                f"{root} holds other things ({_some(sorted(foreign))}) and no checkpoint; save to a folder of its own"
            )


def _remove_leftovers(root: Path) -> None:
    """Everything of ours that `latest` does not name."""
    latest = root / _LATEST
    kept = latest.read_text(errors="replace").split()[:1] if latest.is_file() else []
    for folder in (*root.glob(".writing-*"), *root.glob("save-*")):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _write_durably(file: Path, data: bytes) -> None:
    with file.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _move_durably(source: Path, target: Path) -> None:
    with source.open("rb") as f:
        os.fsync(f.fileno())
    source.replace(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
