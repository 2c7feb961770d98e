"""A state on a mesh of data and tensor axes: shards, DTensors, initialisation and checkpoints, with placements by hand.

Functions that begin with an underscore and take no fixture run on the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from autoshard import checkpoint, runtime, stateinit
from autoshard.collectives import Axis
from autoshard.manager import PassContext
from autoshard.optim import bind
from autoshard.passes.zero import at_rest
from autoshard.placement import PARTIAL, REPLICATE, Shard, local_outer, owned, take
from autoshard.plan import Mesh, Plan, Zero
from autoshard.state import State
from tests.multirank.runner import run_ranks

R, S = REPLICATE, Shard
CPU = torch.device("cpu")
ADAMW = functools.partial(torch.optim.AdamW, lr=0.1)


# ---------------------------------------------------------------- placements


@pytest.mark.parametrize(
    ("size", "placements"),
    [
        (24, (S(0), S(0, 2))),
        (24, (S(0, 2), S(0))),
        (24, (S(0, 6), S(0, 3))),
        (24, (S(0, 3), S(0, 12))),
        (7, (R, S(0))),
    ],
)
def test_each_element_is_held_by_one_rank_and_lies_where_the_nested_factors_say(size: int, placements: Any) -> None:
    whole = torch.arange(size)
    held = {
        c: take(whole, owned((size,), placements, (2, 2), c)).tolist() for c in itertools.product(range(2), range(2))
    }
    copies = math.prod(2 for p in placements if p == R)
    assert sorted(itertools.chain(*held.values())) == sorted([*range(size)] * copies)
    if all(isinstance(p, Shard) for p in placements):
        for c, part in held.items():
            expected = whole
            for i in sorted(range(2), key=lambda i: -placements[i].outer):
                expected = expected.unflatten(0, (placements[i].outer, 2, -1))[:, c[i]].flatten()
            assert part == expected.tolist()


def test_an_outer_counts_only_the_coarser_axes_of_its_own_dim() -> None:
    assert local_outer((S(0), S(0, 2)), (2, 4), 1) == 1
    assert local_outer((S(0, 4), S(0)), (2, 4), 0) == 1
    assert local_outer((S(0, 12), S(0, 3)), (2, 4), 0) == 3
    assert local_outer((S(0, 12), S(0, 3)), (2, 4), 1) == 3
    assert local_outer((S(1), S(0, 3)), (2, 4), 1) == 3


def _context(data: int, tensor: int, accumulate: int = 1, **zero: int) -> PassContext:
    plan = Plan(
        mesh=Mesh(data=data, tensor=tensor), zero=Zero(**zero), backend="debug", device="cpu", accumulate=accumulate
    )
    return PassContext(plan, tuple(Axis(n, size, n) for n, size in (("data", data), ("tensor", tensor)) if size > 1))


@pytest.mark.parametrize(
    ("shape", "tensor", "on_data"),
    [
        ((8, 6), S(0), S(1)),  # the dim that tensor leaves
        ((8, 6), S(1), S(0)),
        ((8, 5), S(0), S(0, 2)),  # within the tensor shard, where the free dim needs padding
        ((6, 5), S(0), S(1)),  # padding, where nothing divides
        ((8,), S(0), S(0, 2)),
        ((6,), S(0), R),  # 3 a tensor rank do not divide
        ((24,), S(0, 3), R),  # DTensor cannot say two strided shards of one dim
        ((8,), R, S(0)),
        ((), R, R),
    ],
)
def test_data_takes_a_dim_of_its_own_or_splits_the_tensor_shard(shape: Any, tensor: Any, on_data: Any) -> None:
    found = at_rest(shape, (R, tensor), _context(2, 2, stage=3))
    assert found.parameter == found.slot == found.gradient == (on_data, tensor)


def test_the_stage_says_what_is_split_and_the_threshold_counts_the_whole_parameter() -> None:
    placed = (R, S(0))
    split = (S(1), S(0))
    by_stage = [at_rest((8, 6), placed, _context(2, 2, stage=stage)) for stage in range(4)]
    assert [found.parameter for found in by_stage] == [placed, placed, placed, split]
    assert [found.slot for found in by_stage] == [placed, split, split, split]
    assert [found.gradient for found in by_stage] == [placed, split, split, split]
    assert at_rest((8, 6), placed, _context(2, 2, accumulate=2, stage=1)).gradient == (PARTIAL, S(0))
    assert at_rest((8, 6), placed, _context(2, 2, stage=3, persistence_threshold=48)).parameter == split
    assert at_rest((8, 6), placed, _context(2, 2, stage=3, persistence_threshold=49)).parameter == placed
    assert at_rest((8, 6), (S(0),), _context(1, 2, stage=3)).parameter == (S(0),)


# ---------------------------------------------------------------- states


class Net(nn.Module):
    """A parameter of each kind of placement."""

    def __init__(self) -> None:
        super().__init__()
        self.column = nn.Linear(6, 8)
        self.row = nn.Linear(8, 5)
        self.fused = nn.Linear(7, 24)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("count", torch.ones(3))


TENSOR = {
    "column.weight": S(0),
    "column.bias": S(0),
    "row.weight": S(1),
    "fused.weight": S(0, 3),
    "fused.bias": S(0, 3),
}


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _build() -> nn.Module:
    return Net().double()


def _state(data: int, tensor: int, stage: int = 3, *, empty: bool = False) -> tuple[State, stateinit.Source]:
    """A state with the placements of `TENSOR`."""
    plan = Plan(mesh=Mesh(data=data, tensor=tensor), zero=stage, backend="debug", device="cpu")
    here = runtime.start(plan)
    source = stateinit.Source.of(_build, {}, 3)
    named = dict(source.modules.model.named_parameters())
    context = PassContext(plan, here.axes, bind(ADAMW, named))
    placed = {name: tuple(TENSOR.get(name, R) if a.name == "tensor" else R for a in here.axes) for name in named}
    context = dataclasses.replace(context, parameters=placed)
    layout = stateinit.layout(source, named, context, here)
    return (source.empty_state if empty else source.state)(layout, CPU), source


def _initialised(data: int, tensor: int) -> dict[str, Any]:
    state, source = _state(data, tensor)
    full = {name: state.full(name) for name in [*state.params, *state.buffers]}
    exported = dict(stateinit.full_state_dict(state, source))
    held = {name: tuple(state.local(("params", name)).shape) for name in state.params}
    slots = {name: slots["exp_avg"].full_tensor().shape for name, slots in state.optimizer.items()}
    return {"full": full, "exported": exported, "held": held, "slots": slots}


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (1, 4), (1, 2)])
def test_a_state_is_bit_equal_to_one_device_s_model_whatever_the_axes(data: int, tensor: int) -> None:
    torch.manual_seed(3)
    expected = _named(_build())
    for found in run_ranks(_initialised, data * tensor, data, tensor):
        assert found["full"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found["full"][name], value), name
            assert torch.equal(found["exported"][name], value), name
        assert all(found["slots"][name] == expected[name].shape for name in found["slots"])
        if (data, tensor) == (2, 2):
            assert found["held"] == {
                "column.weight": (4, 3),
                "column.bias": (2,),
                "row.weight": (5, 2),
                "row.bias": (3,),
                "fused.weight": (12, 4),
                "fused.bias": (12,),
                "norm.weight": (3,),
                "norm.bias": (3,),
            }


# ---------------------------------------------------------------- checkpoints


def _values(state: State) -> dict[str, Tensor]:
    named = stateinit.named_tensors(state)
    return {name: t.full_tensor() for name, t in named.items()}  # type: ignore[attr-defined]


def _fill(state: State) -> None:
    """Other numbers in every element, the same whatever the mesh."""
    for number, key in enumerate(state.layout.layouts):
        layout = state.layout.layouts[key]
        whole = torch.arange(math.prod(layout.shape)).view(layout.shape) + 1000 * number
        state.local(key).copy_(state.layout.shard(key, whole.to(layout.dtype)))


def _save(path: str, data: int, tensor: int) -> dict[str, Tensor]:
    state, _ = _state(data, tensor)
    _fill(state)
    checkpoint.write(path, stateinit.named_tensors(state), {})
    return _values(state)


def _load(path: str, data: int, tensor: int, again: str) -> tuple[dict[str, Tensor], bool]:
    """The values, and whether all padding is zero."""
    state, _ = _state(data, tensor, empty=True)
    checkpoint.read_into(path, stateinit.named_tensors(state))
    checkpoint.write(again, stateinit.named_tensors(state), {})
    clean = True
    for key in state.layout.layouts:
        padded = state.local(key).clone()
        state.layout.valid(key, padded).zero_()
        clean = clean and not padded.count_nonzero()
    return _values(state), clean


def test_a_checkpoint_goes_from_mesh_to_mesh_without_a_changed_bit(tmp_path: Path) -> None:
    expected = run_ranks(_save, 4, f"{tmp_path}/0", 2, 2)[0]
    for step, (data, tensor) in enumerate([(4, 1), (1, 2), (1, 1), (1, 4), (2, 2), (2, 1)]):
        path, again = f"{tmp_path}/{step}", f"{tmp_path}/{step + 1}"
        for found, clean in run_ranks(_load, data * tensor, path, data, tensor, again):
            assert clean
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (data, tensor, name)


def _written(path: str) -> int:
    _save(path, 2, 2)
    entries = FileSystemReader(f"{path}/{Path(path, 'latest').read_text().split()[0]}").read_metadata()
    chunks = [chunk for t in entries.state_dict_metadata.values() for chunk in t.chunks]  # type: ignore[union-attr]
    return sum(chunk.sizes.numel() for chunk in chunks)


def test_what_several_ranks_hold_is_written_once(tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in _build().parameters())
    small = 3 + 1 + 2  # the buffer, the step, the random key
    assert run_ranks(_written, 4, f"{tmp_path}/x") == [3 * parameters + small] * 4
