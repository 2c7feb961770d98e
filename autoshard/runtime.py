"""The process group, the device mesh and this rank's place in it."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import compat
from autoshard.collectives import Axis
from autoshard.errors import DivergenceError, PlanError, RankLostError
from autoshard.plan import Mesh, Plan


@dataclass(frozen=True)
class Runtime:
    """Where a program runs.

    Args:
        mesh: resolved.
        device: this rank's device.
        device_mesh: the mesh axes of more than one rank (or the data axis alone), for DTensors.
        axes: the same axes as the passes see them.
        coordinates: per axis, this rank's coordinate, int64 (1,) on `device`.
        control: a CPU group of all ranks for small messages that must not wait for the device.
    """

    mesh: Mesh
    device: torch.device
    device_mesh: DeviceMesh
    axes: tuple[Axis, ...]
    coordinates: tuple[torch.Tensor, ...]
    control: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def backend(self) -> str:
        """Name of the default group's backend."""
        return dist.get_backend().removeprefix("autoshard_")

    @property
    def data_ranks(self) -> int:
        return self.mesh.axis("data")

    @property
    def data_coordinate(self) -> int:
        return self.mesh.coordinates(self.rank)["data"]

    def peers(self, *names: str) -> list[int]:
        """The ranks that differ from this one on the axes `names` only, in the order of the mesh."""
        return self._peers_of(self.rank, names)

    def _peers_of(self, rank: int, names: Sequence[str]) -> list[int]:
        own = self.mesh.coordinates(rank)
        fixed = {name: at for name, at in own.items() if name not in names}
        return [r for r in range(self.mesh.size) if fixed.items() <= self.mesh.coordinates(r).items()]

    def group_of(self, axes: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of all ranks on some of `self.axes`, by position; None for the default group, or for no axis.

        Made when it is first asked for, so every rank asks alike.
        """
        names = tuple(self.axes[i].name for i in axes)
        if len(names) == 1:
            return self.device_mesh.get_group(names[0])
        backend = _backend(self.device)
        if not names or (len(names) == len(self.axes) and backend is None):
            return None
        key = (names, self.mesh, id(dist.group.WORLD))
        if key not in _joint_groups:
            every = {tuple(self._peers_of(rank, names)) for rank in range(self.mesh.size)}
            group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in sorted(every)], backend=backend)
            assert isinstance(group, dist.ProcessGroup)
            _joint_groups[key] = group
        return _joint_groups[key]

    def agree(self, text: str, advice: Mapping[str, str] | None = None) -> None:
        """As `agree`, on this runtime's control group."""
        agree(text, self.control, advice)


def agree(text: str, control: dist.ProcessGroup | None, advice: Mapping[str, str] | None = None) -> None:
    """Every rank calls this with the same text, or every rank gets an error that names who differs.

    Args:
        control: as in `Runtime`.
        advice: what to do where the first lines that differ begin with a key.

    Raises:
        DivergenceError: the texts differ.
    """
    if dist.get_world_size() == 1:
        return
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    found = torch.empty(dist.get_world_size(), dtype=torch.int64)
    compat.all_gather(found, torch.tensor([digest]), control)
    if (found == found[0]).all():
        return
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text, group=control)
    odd = next(rank for rank, other in enumerate(texts) if other != texts[0])
    ours, theirs = _difference(texts[0], texts[odd])
    same = "Every rank must make the same calls with the same plan, model and batch structure"
    fitting = [what for start, what in (advice or {}).items() if ours.startswith(start) and theirs.startswith(start)]
    raise DivergenceError(f"ranks disagree: rank 0 has {ours}; rank {odd} has {theirs}. {next(iter(fitting), same)}")


def pick_device(plan: Plan) -> torch.device:
    """The plan's device, else CUDA where there is one, on this process's local rank."""
    kind = plan.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise PlanError("Plan.device is 'cuda' but torch sees no CUDA device; valid here: 'cpu' or None")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device(kind)


def ensure_process_group(device: torch.device) -> None:
    """An existing process group, else torchrun's environment, else a world of one."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else compat.gloo_in_order()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        path = os.path.join(tempfile.mkdtemp(prefix="autoshard-"), "store")
        dist.init_process_group(backend, init_method=f"file://{path}", rank=0, world_size=1)


def _difference(a: str, b: str) -> tuple[str, str]:
    """The first differing lines of two texts."""
    left, right = a.splitlines(), b.splitlines()
    for one, other in itertools.zip_longest(left, right, fillvalue="nothing"):
        if one != other:
            return one[:400], other[:400]
    return a[:400], b[:400]


_LOST = re.compile(r"\b(connection|peer|gloo|nccl|(tcp|file|prefix|hash)?store|socket)", re.IGNORECASE)


@contextmanager
def lost_rank_explained() -> Iterator[None]:
    """A collective that fails because another rank is gone says so, and what to do.

    Raises:
        RankLostError: in the place of the backend's own error.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, RankLostError) or not _LOST.search(text):
            raise
        raise RankLostError(
            f"another rank ended or cannot be reached ({text.splitlines()[0][:300]}); its own output says why. "
            "Restart all ranks and go on from the last checkpoint: step.load(path), or resume=PATH for autoshard.train"
        ) from error


_device_meshes: dict[tuple[object, ...], DeviceMesh] = {}
_control_groups: dict[int, dist.ProcessGroup] = {}
_joint_groups: dict[tuple[object, ...], dist.ProcessGroup] = {}


def start(plan: Plan) -> Runtime:
    """The runtime of a plan.

    Raises:
        PlanError: the mesh does not fit the world.
    """
    device = pick_device(plan)
    ensure_process_group(device)
    control = _control_group(device)
    mesh = plan.mesh.resolve(dist.get_world_size())
    used = [name for name, size in mesh.axes if size > 1] or ["data"]
    key = (device.type, mesh, id(dist.group.WORLD))
    if key not in _device_meshes:  # groups are made once: two plans in one process share them
        _device_meshes[key] = _device_mesh(device, control, mesh, used)
    device_mesh = _device_meshes[key]
    shape = "-".join(f"{name}{mesh.axis(name)}" for name in used)
    axes = []
    for name in used:
        if mesh.axis(name) == 1:
            continue
        group = f"autoshard:{device.type}:{shape}:{name}"
        compat.register_group(group, device_mesh.get_group(name))
        axes.append(Axis(name, mesh.axis(name), group, emulate_reduce_scatter=device.type == "cpu"))
    where = mesh.coordinates(dist.get_rank())
    coordinates = tuple(torch.tensor([where[axis.name]], device=device) for axis in axes)
    return Runtime(mesh, device, device_mesh, tuple(axes), coordinates, control)


@lost_rank_explained()
def _device_mesh(device: torch.device, control: dist.ProcessGroup | None, mesh: Mesh, used: list[str]) -> DeviceMesh:
    # Making a group waits for its ranks until the timeout: one that has ended or has another mesh is noticed before.
    agree(f"plan.mesh {mesh}", control)
    backend = _backend(device)
    return init_device_mesh(
        device.type,
        tuple(mesh.axis(name) for name in used),
        mesh_dim_names=tuple(used),
        backend_override=dict.fromkeys(used, backend) if backend else None,
    )


def _backend(device: torch.device) -> str | None:
    """The backend of the groups that a program's collectives run on; None is that of the default group."""
    gloo = device.type == "cpu" and "cpu:gloo" in dist.get_backend_config()
    return compat.gloo_in_order() if gloo and dist.get_world_size() > 1 else None


def _control_group(device: torch.device) -> dist.ProcessGroup | None:
    if device.type == "cpu":
        return None
    world = id(dist.group.WORLD)
    if world not in _control_groups:
        group = dist.new_group(backend=compat.gloo_in_order())
        assert isinstance(group, dist.ProcessGroup)
        _control_groups[world] = group
    return _control_groups[world]


@contextmanager
def one_rank_per_machine_first(runtime: Runtime) -> Iterator[None]:
    """What runs within is run by local rank 0 of every machine, then by the others, who find its caches filled."""
    local = int(os.environ.get("LOCAL_RANK", str(runtime.rank)))
    wait = runtime.device.type == "cpu" and dist.get_world_size() > 1  # CUDA caches are per device
    if wait and local != 0:
        dist.barrier()
    try:
        yield
    finally:
        if wait and local == 0:
            dist.barrier()
    if wait:
        dist.barrier()
