"""A schedule gives the same factor for an int and inside a traced graph, and refuses what it cannot do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard import schedules as s
from autoshard.errors import PlanError

ALL = [
    s.constant(),
    s.warmup_cosine(10, 50),
    s.warmup_cosine(0, 50, final=0.1),
    s.warmup_linear(10, 50, final=0.2),
    s.inverse_sqrt(10),
    s.wsd(5, 20, 10),
    s.wsd(0, 0, 10, final=0.5),
    s.step_decay(7, 0.5),
]


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_the_traced_factor_equals_the_python_one_at_every_update(schedule: Any, dtype: torch.dtype) -> None:
    graph = make_fx(schedule, tracing_mode="fake")(torch.zeros((), dtype=dtype))
    for n in range(70):
        factor = schedule(n)
        traced = graph(torch.tensor(n, dtype=dtype))
        assert isinstance(factor, float)
        assert 0 <= factor <= 1
        assert (traced.dtype, traced.shape) == (torch.float64, ())
        assert traced.item() == pytest.approx(factor, rel=1e-14, abs=1e-15)
    s.trace_check(schedule)


def test_constant_is_one() -> None:
    assert [s.constant()(n) for n in (0, 5, 10**9)] == [1.0, 1.0, 1.0]


def test_warmup_reaches_one_at_its_last_update_and_wastes_none() -> None:
    for schedule in (s.warmup_cosine(4, 8), s.warmup_linear(4, 8), s.inverse_sqrt(4), s.wsd(4, 2, 2)):
        assert [schedule(n) for n in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_falls_from_one_by_half_a_cosine_to_final_and_stays() -> None:
    schedule = s.warmup_cosine(2, 10, final=0.2)
    assert schedule(2) == 1.0
    assert schedule(6) == pytest.approx(0.6)
    assert schedule(4) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert [schedule(n) for n in (10, 11, 1000)] == pytest.approx([0.2, 0.2, 0.2])


def test_linear_falls_on_a_line() -> None:
    schedule = s.warmup_linear(0, 10, final=0.5)
    assert [schedule(n) for n in (0, 5, 10, 20)] == pytest.approx([1.0, 0.75, 0.5, 0.5])


def test_inverse_sqrt_follows_the_transformer_paper() -> None:
    paper = [min(step**-0.5, step * 16**-1.5) * 4 for step in range(1, 100)]
    assert [s.inverse_sqrt(16)(n) for n in range(99)] == pytest.approx(paper)


def test_wsd_holds_one_and_then_decays() -> None:
    schedule = s.wsd(2, 3, 4)
    assert [schedule(n) for n in range(2, 10)] == [1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_step_decay_multiplies_after_every_so_many_updates() -> None:
    assert [s.step_decay(2, 0.5)(n) for n in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_schedules_are_hashable_equal_by_value_and_printable() -> None:
    assert s.warmup_cosine(1, 9) == s.warmup_cosine(1, 9)
    assert len({s.warmup_cosine(1, 9), s.warmup_cosine(1, 9), s.warmup_cosine(1, 8)}) == 2
    assert str(s.warmup_cosine(1, 9)) == "WarmupCosine(warmup=1, total=9, final=0.0)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: s.warmup_cosine(-1, 9), "WarmupCosine.warmup is -1; valid: an integer >= 0"),
        (lambda: s.warmup_cosine(1, 9, final=1.5), "WarmupCosine.final is 1.5; valid: a number from 0 to 1"),
        (lambda: s.warmup_linear(9, 9), "WarmupLinear.total is 9 but warmup is 9; valid: total > warmup"),
        (lambda: s.warmup_linear(1.5, 9), "WarmupLinear.warmup is 1.5"),  # type: ignore[arg-type]
        (lambda: s.inverse_sqrt(0), "InverseSqrt.warmup is 0; valid: an integer >= 1"),
        (lambda: s.wsd(1, 1, 0), "WarmupStableDecay.decay is 0"),
        (lambda: s.step_decay(0), "StepDecay.every is 0"),
        (lambda: s.step_decay(True), "StepDecay.every is True"),
        (lambda: s.step_decay(2, math.nan), "StepDecay.factor is nan"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_field(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def _own(n: Tensor) -> Tensor:
    return torch.where(n < 10, (n + 1) / 10, 1.0)


def _branches(n: Any) -> Any:
    return 0.5 if n < 10 else 1.0


def _python_math(n: Any) -> Any:
    return math.cos(n)


def _vector(n: Tensor) -> Tensor:
    return torch.ones(2) * n


def test_a_users_schedule_of_torch_operations_passes_and_so_does_a_constant() -> None:
    s.trace_check(_own)
    s.trace_check(lambda n: 0.5)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (_branches, r"_branches cannot be traced .*torch\.where"),
        (_python_math, r"_python_math cannot be traced .*torch\.cos"),
        (_vector, r"_vector returned a tensor of shape \(2,\); valid: a 0-dim tensor"),
        (lambda n: "0.5", "returned '0.5'"),
    ],
)
def test_a_schedule_that_cannot_be_traced_is_refused_with_advice(schedule: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        s.trace_check(schedule)
