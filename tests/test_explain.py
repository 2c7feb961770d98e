"""`step.explain()` says what was placed where, what it sends, and what is wrong with it.

Functions that begin with an underscore and take no fixture run on the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard import Mesh, Plan, explain, page
from autoshard.account import Account, account
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


@torch.library.custom_op("test_explain::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    return 2 * x


_doubled.register_fake(torch.empty_like)
_doubled.register_autograd(lambda ctx, grad: 2 * grad)


def _loss_with_an_own_op(model: nn.Module, batch: Any) -> Tensor:
    """No table has a rule for what a user defines: it runs whole."""
    return _doubled(model(batch["x"])).sub(batch["y"]).square().mean()


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
    text = run_ranks(_explained, 2, 3, 1, _loss_with_an_own_op)[0][0]
    assert "for want of a rule" in text
    row = _row(text, "test_explain.doubled")
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


# ---------------------------------------------------------------- several axes, and the page


class _Gated(nn.Module):
    """A block with one value that two products read, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate = nn.Linear(16, 32, bias=False)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(_Gated() for _ in range(3))
        self.last = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _accounted(stage: int, accumulate: int, folder: str | None) -> tuple[Account, str, str]:
    plan = Plan(
        mesh=Mesh(data=2, tensor=2), zero=stage, accumulate=accumulate, backend="debug", device="cpu", clip_norm=1.0
    )
    loss = _loss if accumulate > 1 else _loss_with_an_own_op
    step = autoshard.parallelize(_Tower(), plan, loss=loss, optimizer=ADAMW)
    step.init({"x": torch.zeros(8, 8), "y": torch.zeros(8, 4)})
    if folder is None or step.runtime.rank:
        return account(step, step._latest()), step.explain(), ""
    path = Path(folder) / "step.html"
    text = step.explain(path)
    step.explain(Path(folder) / "step.txt")
    assert (Path(folder) / "step.txt").read_text() == text + "\n"
    return account(step, step._latest()), text, path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def accounted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Account, str, str]:
    """A step under ZeRO 3 on 2 x 2 ranks: as data, as text and as a page."""
    found = run_ranks(_accounted, 4, 3, 1, str(tmp_path_factory.mktemp("page")))
    assert len({text for _, text, _ in found}) == 1
    return found[0]


def _attributed(a: Account) -> dict[str, int]:
    """Bytes by axis that parameters, layers and the clipping norm account for."""
    found = {axis.name: 0 for axis in a.axes}
    for p in a.parameters:
        for (axis, _), sent in p.sent.items():
            found[axis] += sent
    for layer in a.layers:
        for t in layer.traffic:
            found[t.axis] += t.sent
    for (axis, purpose), sent in a.by_purpose().items():
        found[axis] += sent if purpose == "gradient-norm reduce" else 0
    return found


def test_parameters_and_layers_account_for_every_byte_that_cost_has_on_every_axis(
    accounted: tuple[Account, str, str],
) -> None:
    a = accounted[0]
    assert set(a.cost.sent) == {"data", "tensor"}
    assert _attributed(a) == a.cost.sent


def test_so_they_do_with_micro_batches_and_what_the_update_sends() -> None:
    a = run_ranks(_accounted, 4, 1, 2, None)[0][0]
    assert _attributed(a) == a.cost.sent
    gathers = {p.name: p.sent.get(("data", "gather upd"), 0) for p in a.parameters}
    assert gathers["blocks.{0..2}.up.weight"] == 3 * 16 * 32 * 4 // 2 // 2  # the half that a tensor rank has
    down = next(layer for layer in a.layers if layer.name == "blocks.{0..2}.down")
    assert [t.count for t in down.traffic] == [3 * 2]


def test_equal_layers_are_one_row_and_what_a_sequence_numbers_is_not_a_layer(
    accounted: tuple[Account, str, str],
) -> None:
    a = accounted[0]
    copies = {layer.name: layer.copies for layer in a.layers}
    assert copies["blocks.{0..2}.down"] == 3
    assert copies["last.0"] == copies["last.2"] == 1
    forward = [(t.axis, t.phase, t.op, t.change, t.count) for t in _layer(a, "blocks.{0..2}.down")]
    assert forward == [("tensor", "forward", "all-reduce", "P -> R", 3)]
    # the gradients of what gate and up read are summed first: the sum is of the block that holds both
    backward = [(t.axis, t.phase, t.op, t.change, t.count) for t in _layer(a, "blocks.{0..2}")]
    assert backward == [("tensor", "backward", "all-reduce", "P -> R", 3)]
    assert _layer(a, "blocks.{0..2}.gate") == _layer(a, "blocks.{0..2}.up") == ()


def _layer(a: Account, name: str) -> tuple[Any, ...]:
    return next(layer.traffic for layer in a.layers if layer.name == name)


def test_a_block_has_its_products_in_order_with_the_collectives_between_them(
    accounted: tuple[Account, str, str],
) -> None:
    block = accounted[0].block
    assert block is not None
    assert (block.name, block.copies) == ("blocks.{0..2}", 3)
    assert [[p.module for p in column] for column in block.columns] == [["gate", "up"], ["down"]]
    assert [str(p.placements[1]) for column in block.columns for p in column] == ["S(0)", "S(0)", "S(1)"]
    assert [at for at, _ in block.forward] == [2]
    assert [at for at, _ in block.backward] == [0]


def test_what_runs_whole_is_listed_with_its_cost_on_each_axis(accounted: tuple[Account, str, str]) -> None:
    a, text, made = accounted
    first = next(w for w in a.whole if "doubled" in w.op)
    assert first.gathered["data"] == 16 * 4 * 4 // 2  # the outputs of the other data rank's samples
    assert "test_explain.doubled" in text
    assert "test_explain.doubled" in made


def test_the_text_is_at_most_120_columns_wide_and_has_each_axis(accounted: tuple[Account, str, str]) -> None:
    a, text, _ = accounted
    assert max(map(len, text.splitlines())) <= 120
    assert "mesh data=2, tensor=2" in text
    for p in a.parameters:
        assert _row(text, p.name)[0] == p.name
    longest = dataclasses.replace(a.parameters[0], name="a." * 80 + "end")
    text = explain.render(dataclasses.replace(a, parameters=(longest, *a.parameters)))
    assert max(map(len, text.splitlines())) <= 120
    assert "a.end " in text


class _Page(HTMLParser):
    """Text, tags that were left open, and what the page would load."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[tuple[str, str | None]] = []
        self.feed(made)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [(k, v) for k, v in attrs if k in ("src", "href", "xlink:href", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_the_page_parses_loads_nothing_and_has_each_parameter_and_layer(accounted: tuple[Account, str, str]) -> None:
    a, _, made = accounted
    parsed = _Page(made)
    assert parsed.open == []
    assert parsed.loads == []
    assert not {"script", "link", "img", "iframe"} & parsed.tags
    assert "url(http" not in made
    assert {p.name for p in a.parameters} | {layer.name for layer in a.layers} <= set(parsed.cells)
    assert parsed.tags >= {"svg", "table", "title"}


def test_names_from_the_model_are_escaped(accounted: tuple[Account, str, str]) -> None:
    a, odd = accounted[0], "<img src=x>&\"'"
    assert a.block is not None
    product = dataclasses.replace(a.block.columns[0][0], module=odd, weight=odd)
    made = page.render(
        dataclasses.replace(
            a,
            backend=odd,
            parameters=(dataclasses.replace(a.parameters[0], name=odd, note=odd),),
            layers=(dataclasses.replace(a.layers[0], name=odd),),
            whole=(dataclasses.replace(a.whole[0], op=odd, module=odd, output=odd),),
            block=dataclasses.replace(a.block, name=odd, columns=((product,),)),
            constants=((odd, odd, "float32", 1),),
        )
    )
    assert "<img" not in made
    assert _Page(made).cells.count(odd) >= 8
