"""plan.rules: which parameter a pattern takes, which dim a style splits, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import Modules
from autoshard.errors import PlanError
from autoshard.placement import REPLICATE, Shard
from autoshard.plan import Mesh, Plan
from autoshard.wishes import parameter_wishes


class Conv1D(nn.Module):
    """As transformers has it: a Linear whose weight is (input, output)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.empty(nf))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 6)
        self.o = nn.Linear(6, 4)
        self.fused = Conv1D(12, 4)
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.patches = nn.ConvTranspose2d(3, 8, 2)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.wte.weight


def wishes(rules: Any) -> dict[str, Any]:
    return parameter_wishes(Plan(mesh=Mesh(tensor=2), rules=rules).rules, Modules(Model(), {}), 2)


def test_a_style_splits_the_dim_that_its_module_s_kind_says() -> None:
    found = wishes({"*.0.q": "column", "*.0.o": "row", "*.0.fused": "column", "patches": "column", "wte": "vocab"})
    assert found == {
        "blocks.0.q.weight": Shard(0),
        "blocks.0.q.bias": Shard(0),
        "blocks.0.o.weight": Shard(1),
        "blocks.0.o.bias": REPLICATE,
        "blocks.0.fused.weight": Shard(1),
        "blocks.0.fused.bias": Shard(0),
        "patches.weight": Shard(1),
        "patches.bias": Shard(0),
        "wte.weight": Shard(0),
    }


def test_the_first_pattern_that_matches_counts_and_dims_count_from_the_end_too() -> None:
    found = wishes({"blocks.0.q.weight": -1, "*.q": "column", "*.norm": "replicate", "*.fused.weight": Shard(1, 3)})
    assert found["blocks.0.q.weight"] == Shard(1)
    assert found["blocks.1.q.weight"] == Shard(0)
    assert found["blocks.1.norm.bias"] == REPLICATE
    assert found["blocks.1.fused.weight"] == Shard(1, 3)


def test_a_tied_parameter_may_be_named_by_any_of_its_names() -> None:
    assert wishes({"head": "column"}) == wishes({"wte": "vocab"}) == {"wte.weight": Shard(0)}
    with pytest.raises(PlanError, match=r"head\.weight.*tied to wte\.weight"):
        wishes({"wte": "vocab", "head": "row"})


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"*.qq": "column"}, ["'*.qq'", "matches no parameter", "blocks.0.q"]),
        ({"blocks.0": "column"}, ["'blocks.0'", "without parameters of its own", "'blocks.0.*'"]),
        ({"*.q.bias": 1}, ["'*.q.bias'", "blocks.0.q.bias", "[6]", "no dim 1", "0 to 0"]),
        ({"*.norm": "column"}, ["'column'", "blocks.0.norm", "LayerNorm", "Shard(dim)"]),
        ({"*.q": "vocab"}, ["'vocab'", "blocks.0.q", "Linear"]),
        ({"*.q": "column", "blocks.0.q.weight": 1}, ["'blocks.0.q.weight'", "never used", "'*.q'", "narrower"]),
        ({"*.fused.weight": Shard(1, 5)}, ["blocks.0.fused.weight", "12 elements", "5 parts over 2 ranks"]),
    ],
)
def test_a_rule_that_cannot_hold_is_refused_by_name(rules: Any, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        wishes(rules)
    assert [word for word in words if word not in str(caught.value)] == []
