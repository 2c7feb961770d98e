"""Every row of the rule table that a call of the zoo's graphs could use is right by value.

For each distinct call, and each dim of each input, the row that `spread` gives is run on two shards and compared
with the whole: a sharded output must be the shard, a partial one must sum to the whole.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autoshard import batch as batches
from autoshard import capture
from autoshard.placement import REPLICATE, Partial, Placement, Shard, shard_bounds
from autoshard.rules import Op, Row, Rule, make_op, rule_of, spread
from autoshard.rules.propose import join, run_on_shards
from tests import reference
from tests.zoo import ZOO, ModelCase

RANKS = 2


def _piece(tensor: Tensor, placement: Placement, rank: int) -> Tensor:
    if not isinstance(placement, Shard):
        return tensor
    if placement.outer == 1:  # without the padding
        start, end = shard_bounds(tensor.shape[placement.dim], RANKS, rank)
        return tensor.narrow(placement.dim, start, end - start)
    split = tensor.unflatten(placement.dim, (placement.outer, RANKS, -1))
    return split.select(placement.dim + 1, rank).flatten(placement.dim, placement.dim + 1).contiguous()


def _complaint(op: Op, rule: Rule, row: Row) -> str | None:
    """What is wrong with a row for this call, in words."""
    results = run_on_shards(op, rule, row, RANKS)
    for index, (whole, placement) in enumerate(zip(op.outputs, row.outputs, strict=True)):
        if whole is None:
            continue
        for rank in range(RANKS):
            found, wanted = results[rank][index], _piece(whole, placement, rank)
            if isinstance(placement, Shard) and placement.outer == 1:
                found = found.narrow(placement.dim, 0, min(wanted.shape[placement.dim], found.shape[placement.dim]))
            if isinstance(placement, Partial):
                found, wanted = join([result[index] for result in results], placement), whole
                assert found is not None
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                return f"output {index} is {found.dtype} {tuple(found.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
            exact = 1e-5 if wanted.dtype is torch.float32 else 1e-10
            if not torch.allclose(found.double(), wanted.double(), rtol=exact, atol=exact, equal_nan=True):
                return f"output {index} on rank {rank} is off by {(found.double() - wanted.double()).abs().max():.1e}"
    return None


class _Checker(fx.Interpreter):
    """Runs a captured graph on real values and tries the rows of every call once."""

    seen: set[str] = set()  # noqa: RUF012 - shared on purpose: a call that one model makes need not be tried again

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.tried = 0
        self.complaints: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = n.target(*args, **kwargs)
        key = f"{n.target} {reference.map_tensors((args, dict(kwargs)), _type)}"
        rule = rule_of(n.target)
        if rule is not None and key not in self.seen and "empty" not in str(n.target):
            self.seen.add(key)
            self._try(make_op(n.target, args, kwargs, result), rule)
        return result

    def _try(self, op: Op, rule: Rule) -> None:
        for index, tensor in enumerate(op.inputs):
            outers = (1, 2, 3) if rule.spread is not None or rule.localize is not None else (1,)
            for dim, outer in itertools.product(range(tensor.dim()), outers):
                row = spread(rule, op, index, Shard(dim, outer), False, RANKS)
                if row is None:
                    continue
                self.tried += 1
                try:
                    found = _complaint(op, rule, row)
                except RuntimeError as error:
                    found = str(error).splitlines()[0]
                if found:
                    shapes = reference.map_tensors((op.args, dict(op.kwargs)), lambda t: tuple(t.shape))
                    where = f"{' '.join(map(str, row.inputs))} -> {' '.join(map(str, row.outputs))}"
                    self.complaints.append(f"{op.target} {shapes}, {where}: {found}")


def _type(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_every_row_that_a_call_could_use_is_right_by_value(case: ModelCase) -> None:
    modules = capture.Modules(case.model(), {})
    batch = case.batches(1)[0]
    captured = capture.capture_training(
        modules, case.loss or capture.call_model, batch, ranks=1, accumulate=1, device=torch.device("cpu")
    )
    parameters = [p.detach() for p in modules.parameters().values()]
    buffers = [b.clone() for b in modules.buffers().values()]
    key = torch.zeros(2, dtype=torch.int64)
    checker = _Checker(captured.graph.module)
    checker.run(*parameters, *buffers, *batches.tensors(batch), key, *captured.constants.values())
    assert not checker.complaints, "\n".join(checker.complaints)


def test_the_check_notices_a_wrong_row() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    softmax = torch.ops.aten._softmax.default
    op = make_op(softmax, (x, -1, False), {}, softmax(x, -1, False))
    rule = rule_of(softmax)
    assert rule is not None
    assert _complaint(op, rule, Row((Shard(0),), (Shard(0),))) is None
    assert "off by" in (_complaint(op, rule, Row((Shard(1),), (Shard(1),))) or "")
    total = torch.ops.aten.sum.default
    op = make_op(total, (x,), {}, total(x))
    rule = rule_of(total)
    assert rule is not None
    assert _complaint(op, rule, Row((Shard(0),), (Partial(),))) is None
    assert "off by" in (_complaint(op, rule, Row((Shard(0),), (REPLICATE,))) or "")
