"""What the tensor axis must not change: uneven sizes, long runs, accumulation, clipping, dropout, on real ranks.

Functions that begin with an underscore and take no fixture run on the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard import Mean, Mesh, Plan
from autoshard.program import Role
from tests import reference, zoo
from tests.multirank import zoo_run
from tests.multirank.runner import run_ranks

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=0.05)
VOCABULARY, HIDDEN = 51, 37
Build = Callable[[], nn.Module]


class Uneven(nn.Module):
    """A vocabulary of 51 and 37 hidden channels: padding would turn into infinity and count in every sum."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        h = self.up(x)
        x = x + self.down(torch.exp(-h) * F.gelu(h))
        return self.head(self.norm(x))


class ThreeHeads(nn.Module):
    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        query, key, value = (
            m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


def _model(kind: Build) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def _batches(rows: int, length: int) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [zoo._pair_batch(rows, generator, length, VOCABULARY) for _ in range(2)]


def _token_mean(model: nn.Module, batch: Any) -> Mean:
    """Rows count unequally, so that the mean is neither of rows nor of micro-batches."""
    kept = batch["x"] % 3 != 0
    losses = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")
    return Mean((losses * kept.flatten()).sum(), kept.sum())


Case = tuple[Build, Any, Any, dict[str, Any], tuple[int, int]]  # model, loss, optimizer, fields of the plan, batch


@dataclass(frozen=True)
class Trained:
    """Two steps on one rank. `whole` are the parameters, `placed` how they lie, `disagree` which ranks have unlike.

    Args:
        activations: bytes sent for activations on the tensor axis in a step, by kind of collective.
    """

    losses: list[float]
    norms: list[float]
    whole: dict[str, Tensor]
    disagree: tuple[str, ...]
    placed: dict[str, str]
    activations: dict[str, int]


def _trained(case: Case) -> Trained:
    kind, loss, optimizer, fields, size = case
    plan = Plan(backend="debug", device="cpu", **fields)
    step = autoshard.parallelize(_model(kind), plan, loss=loss, optimizer=optimizer)
    mine = [reference.rank_slice(b, step.runtime.data_coordinate, plan.mesh.data) for b in _batches(*size)]
    state = step.init(mine[0])
    losses, norms = [], []
    for batch in mine:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    whole = {name: state.full(name) for name in state.params}
    placed = {name: str(p.placements) for name, p in state.params.items()}
    roles = (Role.ACTIVATION_GATHER, Role.ACTIVATION_REDUCE)
    sent = [c for c in step.cost().collectives if c.axis == "tensor" and c.role in roles]
    return Trained(
        losses, norms, whole, zoo_run.disagreements(whole), placed, {c.op: c.sent for c in sent if c.graph == "micro"}
    )


def _check(kind: Build, loss: Any, optimizer: Any, rows: int = 4, length: int = 6, **fields: Any) -> Trained:
    """As one device, on every rank; returns what rank 0 saw."""
    mesh = fields["mesh"]
    recipe = reference.Recipe(mesh.data, fields.get("accumulate", 1), fields.get("clip_norm"), optimizer)
    trace = reference.train(_model(kind), _batches(rows, length), recipe, loss)
    found = run_ranks(_trained, mesh.data * mesh.tensor, (kind, loss, optimizer, fields, (rows, length)))
    for seen in found:
        assert not seen.disagree
        assert seen.losses == pytest.approx([float(x) for x in trace.losses], rel=1e-9)
        assert seen.norms == pytest.approx([float(x) for x in trace.grad_norms], rel=1e-9)
        assert reference.worst(seen.whole, trace.parameters)[0] < 1e-9
    first: Trained = found[0]
    return first


@pytest.mark.parametrize("tensor", [2, 4])
def test_an_uneven_vocabulary_and_hidden_width_are_exact(tensor: int) -> None:
    rules = {"up": "column", "down.weight": "row", "head": "column", "embed": "vocab"}
    fields: dict[str, Any] = {"mesh": Mesh(data=1, tensor=tensor), "rules": rules, "clip_norm": 0.5}
    placed = _check(Uneven, zoo._pair_loss, SGD, **fields).placed
    assert placed["up.weight"] == placed["head.weight"] == placed["embed.weight"] == "(Shard(dim=0),)"
    assert placed["down.weight"] == "(Shard(dim=1),)"


_HEADS_SPLIT = {"query": "column", "key": "column", "value": "column", "out.weight": "row"}


@pytest.mark.parametrize("rules", [{}, _HEADS_SPLIT], ids=["chosen", "wished"])
def test_three_heads_on_two_ranks_are_exact(rules: dict[str, str]) -> None:
    _check(ThreeHeads, zoo._pair_loss, SGD, mesh=Mesh(data=1, tensor=2), rules=rules)


def test_activations_split_along_the_sequence_are_exact_and_sent_as_shards() -> None:
    llama = functools.partial(zoo.Llama, vocab=VOCABULARY, dim=32, layers=2, heads=4, length=32)
    found = []
    for plan in ({}, {"tensor": autoshard.Tensor(sequence=True)}):
        fields: dict[str, Any] = {"mesh": Mesh(data=1, tensor=2), **plan}
        found.append(_check(llama, zoo._pair_loss, SGD, length=32, **fields).activations)
    whole, split = found
    assert split["all_reduce"] < whole["all_reduce"] / 2
    assert split["all_gather_into_tensor"] > whole.get("all_gather_into_tensor", 0)


def test_stage_3_accumulation_clipping_and_a_token_mean_work_together_on_two_axes() -> None:
    fields: dict[str, Any] = {"mesh": Mesh(data=2, tensor=2), "zero": 3, "accumulate": 2, "clip_norm": 0.05}
    _check(Uneven, _token_mean, SGD, rows=8, **fields)


# ---------------------------------------------------------------- long runs

LONG = 300
TOLERANCE = 1e-9  # of the losses, and of each parameter's norm: float64, and SGD does not amplify rounding as Adam does


def _small_llama() -> nn.Module:
    torch.manual_seed(0)
    return zoo.Llama(vocab=24, dim=16, layers=1, heads=2, length=8).double()


def _long_batches() -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [zoo._pair_batch(4, generator, 8, 24) for _ in range(10)]


def _long() -> tuple[list[float], dict[str, Tensor], tuple[str, ...]]:
    plan = Plan(mesh=Mesh(data=2, tensor=2), zero=1, backend="debug", device="cpu", check_replicas=50)
    step = autoshard.parallelize(_small_llama(), plan, loss=zoo._pair_loss, optimizer=SGD)
    mine = [reference.rank_slice(batch, step.runtime.data_coordinate, 2) for batch in _long_batches()]
    state, losses = zoo_run.train(step, (mine[number % len(mine)] for number in range(LONG)))
    whole = {name: state.full(name) for name in state.params}
    return losses, whole, zoo_run.disagreements(whole)


def test_300_steps_on_two_axes_track_one_device_and_copies_stay_bit_equal() -> None:
    batches = _long_batches()
    trace = reference.train(
        _small_llama(),
        [batches[n % len(batches)] for n in range(LONG)],
        reference.Recipe(optimizer=SGD),
        zoo._pair_loss,
    )
    assert float(trace.losses[-1]) < 0.9 * float(trace.losses[0])
    for losses, whole, different in run_ranks(_long, 4, timeout=240.0):
        assert not different
        assert losses == pytest.approx([float(x) for x in trace.losses], rel=TOLERANCE)
        assert reference.worst(whole, trace.parameters)[0] < TOLERANCE


# ---------------------------------------------------------------- dropout


def _dropout(data: int, tensor: int) -> list[float]:
    case = zoo.find_case("gpt")
    torch.manual_seed(0)
    model = zoo.GPT(layers=1).double()  # its dropout is on
    plan = Plan(mesh=Mesh(data=data, tensor=tensor), zero=1, backend="debug", device="cpu")
    step = autoshard.parallelize(model, plan, loss=case.loss, optimizer=SGD)
    mine = [reference.rank_slice(b, step.runtime.data_coordinate, data) for b in case.batches(2)]
    return zoo_run.train(step, mine)[1]


def test_dropout_drops_the_same_elements_on_every_mesh() -> None:
    one = run_ranks(_dropout, 1, 1, 1)[0]
    for data, tensor in ((1, 2), (2, 2)):
        for found in run_ranks(_dropout, data * tensor, data, tensor):
            assert found == pytest.approx(one, rel=1e-12)
    torch.manual_seed(0)
    plain = zoo.without_randomness(zoo.GPT(layers=1).double())
    case = zoo.find_case("gpt")
    assert case.loss is not None
    assert abs(one[0] - float(case.loss(plain, case.batches(1)[0]).detach())) > 1e-3
