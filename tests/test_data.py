"""autoshard.data: who gets which sample, exact resumption, the tail, and the reading thread."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.batch import Replicated
from autoshard.data import Loader, Tail, data_rank, epoch_order, evaluation_loader
from autoshard.datasets import ByteText, bigram_loss, random_tokens, stdlib_text, synthetic_images
from autoshard.errors import BatchError
from autoshard.plan import Mesh
from tests.multirank.runner import World


class Numbers:
    """Sample i is {"x": tensor(i)}; counts how often it was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.read.append(index)
        return {"x": torch.tensor(index)}


def micro_batches(
    length: int, *, ranks: int, accumulate: int, global_batch: int, steps: int, **kwargs: Any
) -> list[list[list[int]]]:
    """steps x accumulate global micro-batches: chunk k of every rank, concatenated over ranks."""
    loaders = [
        Loader(
            Numbers(length), global_batch=global_batch, rank=rank, ranks=ranks, accumulate=accumulate, **kwargs
        ).stream()
        for rank in range(ranks)
    ]
    found = []
    for _ in range(steps):
        chunks = [next(loader)["x"].chunk(accumulate) for loader in loaders]
        found.append([torch.cat([chunks[r][k] for r in range(ranks)]).tolist() for k in range(accumulate)])
    for loader in loaders:
        loader.close()
    return found


def joined(parts: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "autoshard-data"]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_global_micro_batches_are_the_same_on_any_number_of_ranks(accumulate: int) -> None:
    one, two, four = (
        micro_batches(50, ranks=ranks, accumulate=accumulate, global_batch=12, steps=9, seed=5) for ranks in (1, 2, 4)
    )
    assert one == two == four


def test_another_accumulation_keeps_the_samples_of_each_step_and_their_order() -> None:
    once, four_times = (
        micro_batches(50, ranks=2, accumulate=accumulate, global_batch=16, steps=6) for accumulate in (1, 4)
    )
    assert [joined(step) for step in once] == [joined(step) for step in four_times]


def test_an_epoch_gives_each_sample_once_in_an_order_of_seed_and_epoch() -> None:
    def epochs(seed: int) -> list[list[int]]:
        loader = Loader(Numbers(24), global_batch=6, seed=seed)
        return [torch.cat([batch["x"] for batch in loader]).tolist() for _ in range(2)]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(1) != [first, second]
    # seed 0's second epoch must not be seed 1's first, as it would be with seed + epoch
    assert epochs(1)[0] != second
    assert first == epoch_order(24, 0, 0).tolist()


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert [b["x"].tolist() for b in Loader(Numbers(6), global_batch=2, shuffle=False)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("consumed", [0, 1, 4, 5, 11])
def test_resuming_from_a_saved_position_continues_exactly(consumed: int) -> None:
    def values(stream: Iterator[Any], count: int) -> list[list[int]]:
        return [batch["x"].tolist() for batch in itertools.islice(stream, count)]

    whole = values(Loader(Numbers(22), global_batch=4, seed=3).stream(), 20)
    stopped = Loader(Numbers(22), global_batch=4, seed=3, read_ahead=5)
    before = values(stopped.stream(), consumed)
    time.sleep(0.05)  # lets the thread read ahead of what was consumed
    saved = stopped.state_dict()
    resumed = Loader(Numbers(22), global_batch=4, seed=3)
    resumed.load_state_dict(saved)
    assert before + values(resumed.stream(), 20 - consumed) == whole


def test_a_position_saved_on_two_ranks_resumes_on_four_and_one() -> None:
    whole = micro_batches(48, ranks=1, accumulate=2, global_batch=8, steps=8)
    saved = []
    for rank in range(2):
        loader = Loader(Numbers(48), global_batch=8, rank=rank, ranks=2, accumulate=2)
        list(itertools.islice(loader.stream(), 3))
        saved.append(loader.state_dict())
    assert saved[0] == saved[1]
    for ranks in (1, 4):
        streams = []
        for rank in range(ranks):
            loader = Loader(Numbers(48), global_batch=8, rank=rank, ranks=ranks, accumulate=2)
            loader.load_state_dict(saved[0])
            streams.append(loader.stream())
        chunks = [next(stream)["x"].chunk(2) for stream in streams]
        assert [torch.cat([c[k] for c in chunks]).tolist() for k in range(2)] == whole[3]


def test_a_resumed_loader_may_use_another_global_batch_without_repeating_or_skipping() -> None:
    loader = Loader(Numbers(24), global_batch=4)
    first = [b["x"].tolist() for b in itertools.islice(loader.stream(), 3)]
    wider = Loader(Numbers(24), global_batch=6)
    wider.load_state_dict(loader.state_dict())
    assert joined(first + [b["x"].tolist() for b in wider]) == epoch_order(24, 0, 0).tolist()


@pytest.mark.parametrize(
    "loader",
    [
        Loader(Numbers(8), global_batch=2, seed=1),
        Loader(Numbers(8), global_batch=2, shuffle=False),
        Loader(Numbers(9), global_batch=2),
    ],
    ids=["seed", "shuffle", "length"],
)
def test_a_position_of_another_order_is_refused(loader: Loader) -> None:
    saved = Loader(Numbers(8), global_batch=2).state_dict()
    with pytest.raises(BatchError, match="the saved position has"):
        loader.load_state_dict(saved)


def test_leaving_a_loop_early_and_iterating_again_goes_on_with_the_epoch() -> None:
    loader = Loader(Numbers(12), global_batch=3)
    seen = []
    for batch in loader:
        seen += batch["x"].tolist()
        if len(seen) == 6:
            break
    for batch in loader:
        seen += batch["x"].tolist()
    assert seen == epoch_order(12, 0, 0).tolist()


def test_a_dropped_tail_is_other_samples_in_another_epoch() -> None:
    loader = Loader(Numbers(10), global_batch=4)
    assert len(loader) == 2
    left_out = [set(range(10)) - set(torch.cat([b["x"] for b in loader]).tolist()) for _ in range(2)]
    assert [len(samples) for samples in left_out] == [2, 2]
    assert left_out[0] != left_out[1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_padded_tail_counts_each_sample_once_under_the_mask(ranks: int) -> None:
    counted: list[int] = []
    for rank in range(ranks):
        loader = Loader(Numbers(13), global_batch=8, rank=rank, ranks=ranks, accumulate=2, tail=Tail.PAD)
        batches = list(loader)
        assert len(batches) == len(loader) == 2
        for batch in batches:
            assert batch["valid"].dtype == torch.bool
            assert batch["x"].shape == batch["valid"].shape == (8 // ranks,)
            counted += batch["x"][batch["valid"]].tolist()
    assert sorted(counted) == list(range(13))


@pytest.mark.parametrize("length", [1, 8, 9, 10, 13])
def test_evaluation_gives_each_sample_once_and_every_rank_as_many_batches(length: int) -> None:
    per_rank = [list(evaluation_loader(Numbers(length), global_batch=8, rank=r, ranks=4)) for r in range(4)]
    assert len({len(batches) for batches in per_rank}) == 1
    in_order = [torch.cat([rank[i]["x"] for rank in per_rank]) for i in range(len(per_rank[0]))]
    assert torch.cat(in_order).tolist() == list(range(length))


def test_an_empty_slice_keeps_structure_dtype_and_trailing_shape() -> None:
    class Pairs(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(3, 2), {"label": index}

    batch = next(iter(evaluation_loader(Pairs(1), global_batch=2, rank=1, ranks=2)))
    assert batch[0].shape == (0, 3, 2)
    assert batch[1]["label"].shape == (0,)
    assert batch[1]["label"].dtype == torch.int64


def test_tensors_tuples_and_mappings_are_collated_and_a_collate_function_is_used() -> None:
    tensors = [torch.full((2,), i) for i in range(4)]
    assert next(iter(Loader(tensors, global_batch=4, shuffle=False))).tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    pairs = [(torch.tensor(i), float(i)) for i in range(4)]
    first, second = next(iter(Loader(pairs, global_batch=4, shuffle=False)))
    assert first.tolist() == second.tolist() == [0, 1, 2, 3]

    def ragged(samples: list[Tensor]) -> dict[str, Any]:
        padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return {"x": padded, "shared": Replicated(torch.ones(7)), "scale": torch.tensor(2.0)}

    sequences = [torch.ones(i + 1) for i in range(3)]
    batches = list(evaluation_loader(sequences, global_batch=2, rank=1, ranks=2, collate=ragged))
    assert batches[0]["x"].shape == (1, 2)
    assert batches[1]["x"].shape[0] == 0
    assert batches[1]["shared"].tensor.shape == (7,)
    assert batches[1]["scale"].shape == ()


def test_the_example_batch_leaves_the_position_where_it_is() -> None:
    loader = Loader(Numbers(8), global_batch=2)
    assert loader.example()["x"].tolist() == next(loader.stream())["x"].tolist()


def test_the_thread_reads_ahead_but_no_further_than_asked() -> None:
    dataset = Numbers(100)
    stream = Loader(dataset, global_batch=1, read_ahead=3).stream()
    next(stream)
    deadline = time.monotonic() + 10
    while len(dataset.read) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(dataset.read) == 5  # one consumed, three ready, one waiting for room
    stream.close()


class Broken(Numbers):
    def __init__(self, length: int, error: Exception) -> None:
        super().__init__(length)
        self.error = error

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 5:
            raise self.error
        return super().__getitem__(index)


def test_an_error_in_the_dataset_is_raised_at_its_batch_with_the_samples_named() -> None:
    loader = Loader(Broken(8, KeyError("label")), global_batch=2, shuffle=False)
    seen: list[list[int]] = []
    with pytest.raises(KeyError, match="label") as caught:
        seen.extend(batch["x"].tolist() for batch in loader)
    assert seen == [[0, 1], [2, 3]]
    assert "samples [4, 5]" in "".join(traceback.format_exception(caught.value))
    assert loader.position.sample == 4
    assert not reading_threads()


def test_a_stray_stop_iteration_does_not_end_the_epoch_in_silence() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Loader(Broken(8, StopIteration()), global_batch=2, shuffle=False))


@pytest.mark.parametrize("how", ["close", "drop", "restart", "finish"])
def test_the_thread_ends_with_its_iterator(how: str) -> None:
    loader = Loader(Numbers(40), global_batch=2)
    reader = iter(loader)
    next(reader)
    assert len(reading_threads()) == 1
    if how == "close":
        reader.close()
        assert list(reader) == []
    elif how == "drop":
        del reader
        gc.collect()
    elif how == "restart":
        reader = iter(loader)
        assert len(reading_threads()) == 1
        loader.close()
    else:
        assert len(list(reader)) == 19
    assert not reading_threads()


@pytest.mark.parametrize("stuck", [False, True])
def test_the_program_exits_while_the_thread_reads(stuck: bool) -> None:
    program = f"""
import time, torch
from autoshard.data import Loader

class Slow:
    def __len__(self): return 1000
    def __getitem__(self, i):
        if {stuck} and i > 0: time.sleep(3600)
        return torch.tensor(i)

stream = Loader(Slow(), global_batch=1, shuffle=False).stream()
next(stream)
print("done")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"global_batch": 30, "ranks": 4, "accumulate": 4}, "global_batch 16 or 32"),
        ({"global_batch": 32, "ranks": 2, "accumulate": 3}, "2 x 2 x 8"),
        ({"global_batch": 0}, "an integer >= 1"),
        ({"global_batch": 128}, "up to 64"),
        ({"global_batch": 4, "rank": 2, "ranks": 2}, "0 to 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_some_that_do(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Loader(Numbers(64), **sizes)  # type: ignore[arg-type]


def test_padding_a_batch_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(BatchError, match="mappings"):
        list(Loader([torch.zeros(1)] * 3, global_batch=2, tail=Tail.PAD))


def _data_ranks(*meshes: Mesh) -> list[tuple[int, int]]:
    os.environ.update(RANK="5", WORLD_SIZE="8")
    return [data_rank(mesh) for mesh in meshes]


def test_the_data_rank_comes_from_torchruns_environment() -> None:
    world = World(1, (("TESTS_NO_GROUP", "1"),))
    try:
        [outcome] = world.run(_data_ranks, Mesh(), Mesh(data=4, tensor=2), timeout=60)
    finally:
        world.close()
    assert outcome.value == [(5, 8), (2, 4)], outcome


def test_the_standard_library_text_is_deterministic_and_its_splits_share_no_file() -> None:
    first, again = stdlib_text(sequence=64, megabytes=1.0), stdlib_text(sequence=64, megabytes=1.0)
    assert isinstance(first.train, ByteText)
    assert isinstance(first.heldout, ByteText)
    assert isinstance(again.train, ByteText)
    assert torch.equal(first.train.text, again.train.text)
    assert len(first.train.text) + len(first.heldout.text) <= 1e6
    files = [set(bytes(text.tolist()).split(b"\0")) for text in (first.train.text, first.heldout.text)]
    assert len(files[0]) > 10
    assert len(files[1]) > 1
    assert not files[0] & files[1]


def test_a_share_of_the_standard_library_that_holds_no_file_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"megabytes=0\.001 leaves 0 bytes of .* text.*more megabytes"):
        stdlib_text(sequence=64, megabytes=0.001)


def test_a_sample_of_text_predicts_each_next_byte_and_windows_meet() -> None:
    text = ByteText(torch.arange(11, dtype=torch.uint8), sequence=5)
    assert len(text) == 2
    assert [(text[i]["x"].tolist(), text[i]["y"].tolist()) for i in range(2)] == [
        ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10]),
    ]


@pytest.mark.parametrize("most", [1, 7, 399, 400, 1000])
def test_a_limited_text_spreads_its_windows_evenly_and_has_them_whole(most: int) -> None:
    text = ByteText((torch.arange(2001) % 251).to(torch.uint8), sequence=5, most=most)
    assert len(text) == min(most, 400)
    assert all(text[i]["y"].shape == (5,) for i in range(len(text)))
    firsts = [text[i]["x"][0].item() for i in range(len(text))]
    gaps = {(b - a) % 251 for a, b in itertools.pairwise(firsts)}
    assert len(gaps) <= 1


def test_the_bigram_loss_equals_counting_by_hand() -> None:
    train, heldout = b"abab" * 200, b"ababbab"
    datasets = [ByteText(torch.tensor(list(text), dtype=torch.uint8), sequence=6) for text in (train, heldout)]
    pairs = list(itertools.pairwise(train))
    log_likelihood = 0.0
    for a, b in itertools.pairwise(heldout):
        unigram = (sum(second == b for _, second in pairs) + 1) / (len(pairs) + 256)
        joint, first = pairs.count((a, b)), sum(x == a for x, _ in pairs)
        log_likelihood += torch.tensor((joint + 25.6 * unigram) / (first + 25.6), dtype=torch.float64).log().item()
    assert bigram_loss(*datasets) == pytest.approx(-log_likelihood / 6, abs=1e-12)


def test_made_up_samples_are_the_same_on_every_reading() -> None:
    tokens, images = random_tokens(samples=4), synthetic_images(samples=8, heldout_samples=4, size=16)
    assert torch.equal(tokens.train[3]["x"], random_tokens(samples=4).train[3]["x"])
    assert not torch.equal(tokens.train[2]["x"], tokens.train[3]["x"])
    assert images.train[7]["x"].shape == (3, 16, 16)
    assert torch.equal(images.train[7]["x"], images.train[7]["x"])
    assert not torch.equal(images.train[0]["x"], images.heldout[0]["x"])
