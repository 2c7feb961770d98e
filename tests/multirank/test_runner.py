"""The ranks that other tests run on are real, are reused, and cannot hide a failure or a hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.multirank.runner import End, RanksFailedError, run_outcomes, run_ranks


def _sum_of_ranks() -> tuple[int, float, int]:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), os.getpid()


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()


def _hang_on(rank: int) -> str:
    if dist.get_rank() == rank:
        time.sleep(600)
    return "done"


def _die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os._exit(7)
    return "alive"


def test_ranks_are_processes_with_a_gloo_group_between_them() -> None:
    values = run_ranks(_sum_of_ranks, 2)
    assert [value[:2] for value in values] == [(0, 3.0), (1, 3.0)]
    assert len({value[2] for value in values} | {os.getpid()}) == 3


def test_a_world_is_reused_between_calls_and_other_sizes_stand_beside_it() -> None:
    first = run_ranks(_sum_of_ranks, 2)
    four = run_ranks(_sum_of_ranks, 4)
    assert [value[1] for value in four] == [10.0] * 4
    assert run_ranks(_sum_of_ranks, 2) == first


def test_an_error_on_one_rank_is_reported_with_every_rank_s_story_and_the_next_call_works() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 says no") as caught:
        run_ranks(_raise_on, 2, 1)
    assert time.monotonic() - started < 60
    assert caught.value.outcomes[1].kind[:2] == ("ValueError", "Exception")
    assert caught.value.outcomes[0].end is not End.RETURNED
    assert [value[1] for value in run_ranks(_sum_of_ranks, 2)] == [3.0, 3.0]


def test_a_hang_is_ended_and_its_stack_shown() -> None:
    outcomes = run_outcomes(_hang_on, 2, 0, timeout=3.0)
    assert [outcome.end for outcome in outcomes] == [End.HUNG, End.RETURNED]
    assert "_hang_on" in outcomes[0].details


def test_a_death_is_reported_with_exit_code_and_last_output() -> None:
    outcomes = run_outcomes(_die_on, 2, 1, timeout=20.0)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.DIED]
    assert "exit code 7" in outcomes[1].details
    assert "last words" in outcomes[1].details
