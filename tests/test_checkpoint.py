"""A checkpoint is whole or not there, says what is wrong with it on every rank, and any number of ranks can read it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from autoshard import checkpoint
from autoshard.errors import CheckpointError
from autoshard.placement import shard_bounds
from tests.multirank.runner import End, Outcome, run_outcomes, run_ranks

META = {"step": 7, "batch": {"x": [4, 2]}, "text": "\u00e4"}
SHAPES: dict[str, tuple[int, ...]] = {
    "layers.0.weight": (5, 7),
    "layers.0.bias": (3,),
    "layers.1.weight": (8, 4),
    "one": (1,),
    "empty": (0,),
    "scalar": (),
}


def _whole(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    t = torch.randn(shape, generator=generator, dtype=torch.float64)
    return t.to(torch.bfloat16) if name.endswith("bias") else t


def _distributed(whole: torch.Tensor, dim: int | None) -> DTensor:
    """`whole` over all ranks of a 1-D mesh as autoshard's states lie: a view of a local tensor padded with zeros."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    placement: Placement = Replicate()
    local = whole.clone()
    if dim is not None and whole.dim():
        placement = Shard(dim)
        low, high = shard_bounds(whole.shape[dim], ranks, rank)
        padded = whole.new_zeros([-(-n // ranks) if d == dim else n for d, n in enumerate(whole.shape)])
        local = padded.narrow(dim, 0, high - low)
        local.copy_(whole.narrow(dim, low, high - low))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def _tensors(dim: int | None, *, seed: int | None = 0) -> dict[str, torch.Tensor]:
    """Sharded tensors, and one plain one; zeros where `seed` is None."""
    found: dict[str, torch.Tensor] = {"plain": torch.full((3,), float(seed or 0), dtype=torch.float64)}
    for name, shape in SHAPES.items():
        whole = _whole(name, shape, seed or 0)
        usable = dim if dim is not None and dim < len(shape) else (0 if dim is not None and shape else None)
        found[name] = _distributed(whole if seed is not None else torch.zeros_like(whole), usable)
    return found


def _assert_values(tensors: dict[str, torch.Tensor], seed: int = 0) -> None:
    for name, t in tensors.items():
        if isinstance(t, DTensor):
            assert torch.equal(t.full_tensor(), _whole(name, SHAPES[name], seed)), name
        else:
            assert t.tolist() == [float(seed)] * 3


def _write(path: str, dim: int | None, seed: int = 0) -> None:
    checkpoint.write(path, _tensors(dim, seed=seed), META)


def _read(path: str, dim: int | None, seed: int = 0) -> dict[str, Any]:
    tensors = _tensors(dim, seed=None)
    checkpoint.read_into(path, tensors)
    _assert_values(tensors, seed)
    return checkpoint.read_meta(path)


def _write_on_a_grid(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = {
        name: distribute_tensor(_whole(name, shape), mesh, [Shard(0), Shard(1)])
        for name, shape in SHAPES.items()
        if len(shape) == 2
    }
    checkpoint.write(path, tensors, {})


def _read_from_the_grid(path: str) -> None:
    names = [name for name, shape in SHAPES.items() if len(shape) == 2]
    tensors = {name: t for name, t in _tensors(1, seed=None).items() if name in names}
    checkpoint.read_into(path, tensors)
    _assert_values(tensors)


def test_any_number_of_ranks_and_any_placement_reads_what_another_wrote(tmp_path: Path) -> None:
    path = str(tmp_path)
    run_ranks(_write, 2, path, 0)
    assert run_ranks(_read, 4, path, 1) == [META] * 4
    run_ranks(_write, 4, path, 1, 1)
    assert run_ranks(_read, 1, path, 0, 1) == [META]
    run_ranks(_write, 1, path, 0, 2)
    run_ranks(_read, 3, path, 0, 2)
    run_ranks(_write, 3, path, None, 3)
    run_ranks(_read, 2, path, 0, 3)


def test_a_two_dimensional_mesh_is_read_by_one_dimension(tmp_path: Path) -> None:
    run_ranks(_write_on_a_grid, 4, str(tmp_path))
    run_ranks(_read_from_the_grid, 3, str(tmp_path))


def test_works_without_a_process_group_and_leaves_one_save(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for value in (1.0, 2.0):
        checkpoint.write(tmp_path / "deep" / "er", {"a.b": torch.full((2,), value)}, {"value": value})
    t = torch.zeros(2)
    checkpoint.read_into(tmp_path / "deep" / "er", {"a.b": t})
    assert t.tolist() == [2.0, 2.0]
    assert checkpoint.read_meta(tmp_path / "deep" / "er") == {"value": 2.0}
    assert len(list((tmp_path / "deep" / "er").iterdir())) == 2, "the pointer and the last save"
    assert not [w for w in recwarn if "distributed" in str(w.message)]


# -- bad input: an error on all ranks, within seconds


def _refusals(function: Callable[..., Any], ranks: int, *args: Any) -> list[Outcome]:
    outcomes = run_outcomes(function, ranks, *args, timeout=60.0)
    assert [o.end for o in outcomes] == [End.RAISED] * ranks, [o.details for o in outcomes]
    assert all("CheckpointError" in o.kind for o in outcomes), [o.details for o in outcomes]
    assert max(o.seconds for o in outcomes) < 20
    return outcomes


def _save_folder(path: Path) -> Path:
    (folder,) = path.glob("save-*")
    return folder


def _truncate(path: Path) -> str:
    file = sorted(_save_folder(path).glob("*.distcp"))[1]
    file.write_bytes(file.read_bytes()[:-5])
    return r"__1_0.distcp has \d+ bytes instead of \d+"


def _flip_a_bit(path: Path) -> str:
    file = sorted(_save_folder(path).glob("*.distcp"))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    return "__0_0.distcp does not have the checksum that was recorded"


def _remove_a_shard(path: Path) -> str:
    sorted(_save_folder(path).glob("*.distcp"))[1].unlink()
    return "__1_0.distcp is missing"


def _remove_the_description(path: Path) -> str:
    (_save_folder(path) / ".metadata").unlink()
    return r"\.metadata is missing"


def _damage_the_manifest(path: Path) -> str:
    file = _save_folder(path) / "manifest.json"
    file.write_text(file.read_text().replace('"step": 7', '"step": 8'))
    return "is damaged: its description does not have the checksum"


def _remove_the_manifest(path: Path) -> str:
    (_save_folder(path) / "manifest.json").unlink()
    return "manifest.json is missing"


def _empty_the_pointer(path: Path) -> str:
    (path / "latest").write_text("")
    return "is damaged"


def _remove_the_pointer(path: Path) -> str:
    (path / "latest").unlink()
    return "is not a complete checkpoint: its first save was interrupted"


def _remove_everything(path: Path) -> str:
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    path.rmdir()
    return "there is no checkpoint at .*: no such folder; check the path"


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip_a_bit,
        _remove_a_shard,
        _remove_the_description,
        _damage_the_manifest,
        _remove_the_manifest,
        _empty_the_pointer,
        _remove_the_pointer,
        _remove_everything,
    ],
)
def test_damage_is_an_error_on_every_rank(damage: Callable[[Path], str], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(_write, 2, str(path), 0)
    message = damage(path)
    for outcome in _refusals(_read, 2, str(path), 0):
        with pytest.raises(CheckpointError, match=message):
            raise CheckpointError(outcome.message)


def _read_another_model(path: str) -> None:
    tensors = _tensors(0, seed=None)
    tensors["head.weight"] = torch.zeros(2)
    tensors["layers.0.weight"] = _distributed(torch.zeros(5, 8), 0)
    del tensors["layers.0.bias"], tensors["one"]
    checkpoint.read_into(path, tensors)


def test_a_checkpoint_of_another_model_lists_what_differs(tmp_path: Path) -> None:
    run_ranks(_write, 2, str(tmp_path), 0)
    for outcome in _refusals(_read_another_model, 2, str(tmp_path)):
        assert "another model or optimizer" in outcome.message
        assert "missing there: head.weight" in outcome.message
        assert "unknown here: layers.0.bias, one" in outcome.message
        assert "different: layers.0.weight (float64[5, 7] there, float32[5, 8] here)" in outcome.message


def test_many_differences_are_counted(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, {f"a{i}": torch.zeros(1) for i in range(9)}, {})
    with pytest.raises(CheckpointError, match="unknown here: a1, a2, a3, a4, a5 and 3 more"):
        checkpoint.read_into(tmp_path, {"a0": torch.zeros(1)})


def _write_nan(path: str) -> None:
    tensors = _tensors(0)
    t = tensors["layers.0.weight"]
    assert isinstance(t, DTensor)
    if dist.get_rank() == 1:
        t.to_local()[-1, 0] = float("nan")
    checkpoint.write(path, tensors, {})


def _read_nan(path: str, allow_nan: bool) -> int:
    tensors = _tensors(0, seed=None)
    checkpoint.read_into(path, tensors, allow_nan=allow_nan)
    t = tensors["layers.0.weight"]
    assert isinstance(t, DTensor)
    return int(t.full_tensor().isnan().sum())


def test_nan_is_refused_with_its_name_on_every_rank_unless_allowed(tmp_path: Path) -> None:
    run_ranks(_write_nan, 2, str(tmp_path))
    for outcome in _refusals(_read_nan, 2, str(tmp_path), False):
        assert "NaN in layers.0.weight; the run had diverged" in outcome.message
        assert "allow_nan=True" in outcome.message
    assert run_ranks(_read_nan, 2, str(tmp_path), True) == [1, 1]


def _write_with_other_tensors(path: str) -> None:
    tensors = _tensors(0)
    if dist.get_rank() == 1:
        tensors["extra"] = torch.zeros(1)
    checkpoint.write(path, tensors, {})


def _write_to_a_path_per_rank(path: str) -> None:
    checkpoint.write(f"{path}/{dist.get_rank()}", _tensors(0), {})


def test_ranks_that_were_given_different_things_are_told(tmp_path: Path) -> None:
    for outcome in _refusals(_write_with_other_tensors, 2, str(tmp_path)):
        assert "rank 0: 7 tensors, rank 1: 8 tensors" in outcome.message
    for outcome in _refusals(_write_to_a_path_per_rank, 2, str(tmp_path)):
        assert "give all ranks the same one" in outcome.message
    assert not list(tmp_path.iterdir())


def _on_a_disk_of_its_own(path: str, action: str) -> None:
    """Rank 1 is a node on which the same path is another folder: a mount namespace of its own."""
    if dist.get_rank() == 1:
        other = f"{path}-of-rank-1"
        os.makedirs(other, exist_ok=True)
        _bind(other, path)
    dist.barrier()
    if action == "write":
        checkpoint.write(path, _tensors(0), {})
    else:
        checkpoint.read_into(path, _tensors(0, seed=None))


def _bind(source: str, target: str) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_bind, ms_rec, ms_private = 0x20000, 0x1000, 0x4000, 0x40000
    assert libc.unshare(clone_newns) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, ms_rec | ms_private, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(source.encode(), target.encode(), None, ms_bind, None) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
@pytest.mark.parametrize("action", ["write", "read"])
def test_nodes_without_a_shared_disk_are_told_so(action: str, tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    if action == "read":
        run_ranks(_write, 2, str(path), 0)
    for outcome in _refusals(_on_a_disk_of_its_own, 2, str(path), action):
        assert "all nodes share" in outcome.message or "(on rank 1)" in outcome.message
        assert "on rank 1" in outcome.message


def test_a_folder_with_other_things_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="holds other things"):
        checkpoint.write(tmp_path, {"a": torch.zeros(1)}, {})
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        checkpoint.write(tmp_path / "thesis.tex", {"a": torch.zeros(1)}, {})
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]


def test_metadata_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="JSON"):
        checkpoint.write(tmp_path, {"a": torch.zeros(1)}, {"tensor": torch.zeros(1)})
    assert not list(tmp_path.iterdir())


# -- kill -9 at any moment

_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(["tests.multirank.preload"])


def _write_and_die(path: str, moment: int) -> None:
    """Write value 2, killed at the `moment`-th time that a file or folder under `path` is touched."""
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        touches = event == "open" or event.startswith(("os.", "shutil."))
        if touches and any(isinstance(a, (str, bytes, os.PathLike)) and path in os.fsdecode(a) for a in args):
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)
    checkpoint.write(path, _big(2.0), {"value": 2.0})


def _big(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{i}": torch.full((100,), value) for i in range(20)}


def _value_at(path: Path) -> float:
    found = _big(0.0)
    checkpoint.read_into(path, found)
    values = {x for t in found.values() for x in t.tolist()}
    assert len(values) == 1, f"a mixture of saves: {values}"
    value = values.pop()
    assert checkpoint.read_meta(path) == {"value": value}
    return value


def test_killed_at_any_touch_of_the_disk_the_last_complete_checkpoint_is_read(tmp_path: Path) -> None:
    found = []
    for moment in range(200):
        path = tmp_path / f"{moment:03d}"
        checkpoint.write(path, _big(1.0), {"value": 1.0})
        process = _fork.Process(target=_write_and_die, args=(str(path), moment))
        process.start()
        process.join(60)
        found.append(_value_at(path))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        checkpoint.write(path, _big(3.0), {"value": 3.0})
        assert _value_at(path) == 3.0, "a killed writer is in nobody's way"
        assert len(list(path.iterdir())) == 2, "what it left is removed"
    assert len(found) > 10, "the writer was killed at many moments"
    assert found == sorted(found), "old until published, new from then on"
    assert {found[0], found[-2], found[-1]} == {1.0, 2.0}


def _write_for_ever(path: str, said: Any) -> None:
    value = 0.0
    while True:
        value += 1
        checkpoint.write(path, _big(value), {"value": value})
        said.send(value)


def test_killed_at_random_the_last_announced_checkpoint_or_the_next_is_read(tmp_path: Path) -> None:
    for milliseconds in (3, 17, 40, 80):
        here, there = _fork.Pipe(duplex=False)
        path = tmp_path / str(milliseconds)
        process = _fork.Process(target=_write_for_ever, args=(str(path), there))
        process.start()
        there.close()
        announced = here.recv()
        time.sleep(milliseconds / 1000)
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                announced = here.recv()
        assert _value_at(path) in (announced, announced + 1)


def _die_while_writing(path: str) -> None:
    if dist.get_rank() == 1:

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and "__1_0.distcp" in str(args[0]):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
    checkpoint.write(path, _tensors(0, seed=5), {})


def test_a_rank_that_dies_while_writing_is_an_error_on_the_others_and_costs_nothing(tmp_path: Path) -> None:
    run_ranks(_write, 2, str(tmp_path), 0)
    first, second = run_outcomes(_die_while_writing, 2, str(tmp_path), timeout=60.0)
    assert second.end is End.DIED
    assert first.end is End.RAISED
    assert "CheckpointError" in first.kind, first.details
    assert "what was complete there before is untouched" in first.message
    run_ranks(_read, 2, str(tmp_path), 0)


def _fail_to_write(path: str) -> None:
    if dist.get_rank() == 1:

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and "__1_0.distcp" in str(args[0]):
                raise OSError(28, "No space left on device")

        sys.addaudithook(hook)
    checkpoint.write(path, _tensors(0, seed=5), {})


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(_write, 2, str(tmp_path), 0)
    for outcome in _refusals(_fail_to_write, 2, str(tmp_path)):
        assert "No space left on device" in outcome.message
        assert f"writing {tmp_path} failed, what was complete there before is untouched" in outcome.message
    assert len(list(tmp_path.iterdir())) == 2, "the incomplete save does not go on filling the disk"
    run_ranks(_read, 2, str(tmp_path), 0)


# -- export


def _exported(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            assert f.metadata() == {"format": "pt"}
            found |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return found


def _export(path: str, limit: int) -> int:
    """Gathers every tensor; returns how many this rank iterated over."""
    count = 0

    def full() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal count
        for name, t in _tensors(0).items():
            count += 1
            yield name, t.full_tensor() if isinstance(t, DTensor) else t

    checkpoint.export(path, full(), limit=limit)
    return count


def _assert_exported(path: Path) -> None:
    found = _exported(path)
    assert found.keys() == {*SHAPES, "plain"}
    for name, shape in SHAPES.items():
        assert torch.equal(found[name], _whole(name, shape)), name
        assert found[name].dtype is _whole(name, shape).dtype


def test_export_writes_one_file_or_a_folder_or_shards_with_an_index(tmp_path: Path) -> None:
    run_ranks(_export, 2, str(tmp_path / "one.safetensors"), 10_000)
    _assert_exported(tmp_path / "one.safetensors")
    run_ranks(_export, 2, str(tmp_path / "folder"), 10_000)
    assert [f.name for f in (tmp_path / "folder").iterdir()] == ["model.safetensors"]
    _assert_exported(tmp_path / "folder")

    (tmp_path / "folder" / "config.json").write_text("{}")
    run_ranks(_export, 2, str(tmp_path / "folder"), 300)
    names = {f.name for f in (tmp_path / "folder").iterdir()}
    shards = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert names == shards | {"config.json", "model.safetensors.index.json"}, "the old file is gone, the rest is left"
    _assert_exported(tmp_path / "folder")
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == shards
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "folder" / file, "pt") as f:
            assert torch.equal(f.get_tensor(name), _exported(tmp_path / "folder")[name])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in _exported(tmp_path / "folder").values())


def test_export_accepts_tied_and_reused_and_strided_tensors(tmp_path: Path) -> None:
    buffer = torch.empty(2, 3)

    def full() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(3):
            yield f"reused.{i}", buffer.fill_(i)
        tied = torch.randn(4, 4)
        yield "tied.a", tied
        yield "tied.b", tied
        yield "tied.t", tied.T

    checkpoint.export(tmp_path / "m.safetensors", full())
    found = _exported(tmp_path / "m.safetensors")
    assert [found[f"reused.{i}"].unique().tolist() for i in range(3)] == [[0.0], [1.0], [2.0]]
    assert torch.equal(found["tied.a"], found["tied.b"])
    assert torch.equal(found["tied.t"], found["tied.a"].T)


def test_export_that_fails_on_rank_0_is_an_error_on_all_and_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for outcome in _refusals(_export, 2, str(tmp_path / "file"), 10_000):
        assert f"exporting to {tmp_path / 'file'} failed: NotADirectoryError" in outcome.message
    for outcome in _refusals(_export, 2, str(tmp_path / "small.safetensors"), 100):
        assert "does not fit in one file of 100 bytes; give export a folder" in outcome.message
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'a' twice"):
        checkpoint.export(tmp_path / "x.safetensors", [("a", torch.zeros(1)), ("a", torch.zeros(1))])


def test_without_safetensors_the_command_to_install_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install autoshard\[train\]"):
        checkpoint.export(tmp_path / "x.safetensors", [])
