"""Random numbers depend on the seed, the counter, the call and the global position, and on nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.randomness import uniform_op
from tests.multirank.runner import run_ranks


def draw(seed: int = 7, counter: int = 0, call: int = 0, shape: tuple[int, ...] = (8, 6)) -> torch.Tensor:
    return uniform_op(torch.tensor([seed, counter]), call, list(shape), torch.float64, [], [], [], [])


def test_draws_are_uniform_and_uncorrelated() -> None:
    x = draw(shape=(400, 500)).flatten()
    assert abs(x.mean().item() - 0.5) < 2e-3
    assert abs(x.var().item() - 1 / 12) < 1e-3
    assert x.min() >= 0
    assert x.max() < 1
    for lag in (1, 2, 500):
        assert abs(torch.corrcoef(torch.stack([x[:-lag], x[lag:]]))[0, 1].item()) < 0.01
    counts = torch.histc(x, 16, 0, 1)
    assert ((counts - x.numel() / 16).abs() < 5 * (x.numel() / 16) ** 0.5).all()


@pytest.mark.parametrize("changed", [{"seed": 8}, {"seed": 7 + 2**32}, {"counter": 1}, {"call": 1}])
def test_another_seed_counter_or_call_is_another_stream(changed: dict[str, int]) -> None:
    a, b = draw(shape=(100, 100)).flatten(), draw(**changed, shape=(100, 100)).flatten()
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.05


@pytest.mark.parametrize(("dim", "outer", "ranks"), [(0, 1, 2), (0, 2, 2), (1, 1, 3), (0, 1, 4)])
def test_a_shard_has_the_values_of_the_whole_at_its_positions(dim: int, outer: int, ranks: int) -> None:
    whole = draw()
    for rank in range(ranks):
        at = [torch.tensor([rank])]
        part = uniform_op(torch.tensor([7, 0]), 0, [8, 6], torch.float64, at, [dim], [outer], [ranks])
        wanted = whole.unflatten(dim, (outer, ranks, -1)).select(dim + 1, rank).flatten(dim, dim + 1)
        assert torch.equal(part, wanted)


def trained_with_dropout(rows: int) -> tuple[list[float], torch.Tensor]:
    """Two steps on this rank's share of `rows` samples, dropout on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 1)).double()
    plan = autoshard.Plan(zero=3, backend="debug", device="cpu", seed=3)
    step = autoshard.parallelize(
        model, plan, loss=lambda m, b: F.mse_loss(m(b), b[:, :1]), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    mine = rows // step.runtime.data_ranks
    start = mine * step.runtime.data_coordinate
    x = torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[start : start + mine]
    state = step.init(x)
    losses = []
    for _ in range(2):
        state, metrics = step(state, x)
        losses.append(metrics["loss"].item())
    return losses, state.full("0.weight")


def test_dropout_is_the_same_on_two_ranks_as_on_one() -> None:
    (losses, weight), *_ = run_ranks(trained_with_dropout, 1, 8)
    for other_losses, other_weight in run_ranks(trained_with_dropout, 2, 8):
        assert other_losses == pytest.approx(losses, rel=1e-12)
        assert torch.allclose(other_weight, weight, rtol=1e-12, atol=0)
    assert losses[0] != losses[1]
