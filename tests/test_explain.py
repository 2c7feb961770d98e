"""`step.explain()` says what was placed where, what it sends, and what is wrong with it.

Functions that begin with an underscore and take no fixture run on the ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard import Mesh, Plan
from tests.multirank.runner import run_ranks

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
_TABLE = torch.arange(4.0)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x).tanh()


class _Net(nn.Module):
    """Three equal blocks, a parameter that nothing uses, one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.idle = nn.Parameter(torch.zeros(4))
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.fixed


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]) + _TABLE, batch["y"])


def _loss_along_the_batch(model: nn.Module, batch: Any) -> Tensor:
    """A running maximum over the samples cannot be split over them."""
    return torch.cummax(model(batch["x"]), 0).values.square().mean() + batch["y"].mean()


def _explained(stage: int, accumulate: int = 1, loss: Any = _loss, optimizer: Any = ADAMW) -> tuple[str, int, int]:
    """The text, and the bytes that parameters and gradients send as `cost()` has them."""
    plan = Plan(mesh=Mesh(data=-1), zero=stage, accumulate=accumulate, backend="debug", device="cpu", clip_norm=1.0)
    step = autoshard.parallelize(_Net(), plan, loss=loss, optimizer=optimizer)
    step.init({"x": torch.zeros(4, 8), "y": torch.zeros(4, 4)})
    return step.explain(), sum(c.sent for c in step.cost().collectives), step.cost().bytes_at_rest


def _row(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_equal_layers_are_one_row_with_what_all_of_them_send() -> None:
    text = run_ranks(_explained, 2, 3)[0][0]
    assert max(map(len, text.splitlines())) <= 120
    weight = 8 * 8 * 4 // 2  # bytes that one rank sends to gather one block's weight
    row = _row(text, "blocks.{0..2}.mlp.weight")
    assert row[1:5] == ["8x8", "S(0)", "S(0)", "S(0)"]
    assert row[5:7] == [str(3 * weight), "B"]
    assert row[-3:] == [str(3 * weight), "B", "-"]
    assert len([line for line in text.splitlines() if "mlp.weight" in line]) == 1


@pytest.mark.parametrize(
    ("stage", "accumulate", "placements", "updates"),
    [(0, 1, ["R", "R", "R"], False), (1, 1, ["R", "S(0)", "S(0)"], True), (1, 2, ["R", "P", "S(0)"], True),
     (2, 2, ["R", "S(0)", "S(0)"], True), (3, 2, ["S(0)", "S(0)", "S(0)"], False)],
)  # fmt: skip
def test_the_table_has_the_stages_placements_and_the_gather_after_the_update(
    stage: int, accumulate: int, placements: list[str], updates: bool
) -> None:
    text = run_ranks(_explained, 2, stage, accumulate)[0][0]
    row = _row(text, "head.weight")
    assert row[2:5] == placements
    assert (row[-1] != "-") == updates
    assert ("stages 1 and 2 are the same program" in text) == (stage in (1, 2) and accumulate == 1)


def test_what_has_no_gradient_and_what_the_loss_closed_over_is_listed() -> None:
    text = run_ranks(_explained, 2, 3)[0][0]
    assert "idle: has no path to the loss" in text
    assert "fixed: is not trained" in text
    assert _row(text, "_tensor_constant")[1:] == ["4", "float32", "16", "B"]
    assert "every op that a shard or a partial sum reaches is split by a rule" in text


def test_an_op_that_runs_whole_on_every_rank_is_named_with_what_gathering_for_it_sends() -> None:
    text = run_ranks(_explained, 2, 3, 1, _loss_along_the_batch)[0][0]
    assert "for want of a rule" in text
    row = _row(text, "cummax.default")
    assert row[-2:] == [str(8 * 4 * 4 // 2), "B"]


@pytest.mark.parametrize(
    ("optimizer", "mode"), [(ADAMW, "GRAPH"), (functools.partial(torch.optim.Rprop, lr=1e-3), "SHARD"), (None, None)]
)
def test_the_mode_of_the_optimizer_is_said(optimizer: Any, mode: str | None) -> None:
    text = run_ranks(_explained, 2, 3, 1, _loss, optimizer)[0][0]
    assert (f"({mode})" in text) if mode else ("no optimizer" in text)


def test_explain_adds_up_to_what_cost_says_is_sent() -> None:
    text, sent, _ = run_ranks(_explained, 2, 0)[0]
    assert f"data {sent}" in text or f"data {sent / 1024:.1f} KiB" in text


def test_one_rank_sends_nothing_and_says_so() -> None:
    text = _explained(0)[0]
    assert "nothing is sharded and nothing is sent" in text
    assert _row(text, "head.weight")[2:] == ["R", "R", "R", "-", "-", "-", "-"]
