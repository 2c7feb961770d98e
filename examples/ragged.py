"""For users with their own data and loop: sequences of unequal length, an exact token mean, evaluation, resumption.

    torchrun --nproc-per-node 2 examples/ragged.py

A mean over tokens is not the mean of the ranks' means when ranks hold different numbers of tokens. A loss that
returns `autoshard.Mean(total, count)` is exact under any number of ranks and micro-batches.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard import checkpoint
from autoshard.data import Loader, Tail, data_rank, evaluation_loader

LONGEST = 24
CHECKPOINT = Path("outputs/ragged")


class Counter(nn.Module):
    """Predicts, after each number of a sequence, the sum of all so far modulo 8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 32)
        self.memory = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.memory:
            x = x + torch.tanh(layer(x.cumsum(1)))
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> autoshard.Mean:
    each = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["sums"].flatten(), reduction="none")
    counts = (torch.arange(LONGEST) < batch["length"][:, None]) & batch["valid"][:, None]
    return autoshard.Mean((each * counts.flatten()).sum(), counts.sum())


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = torch.randint(1, LONGEST + 1, (), generator=generator)
        tokens = torch.randint(8, (LONGEST,), generator=generator)
        found.append({"tokens": tokens, "sums": tokens.cumsum(0) % 8, "length": length, "valid": torch.tensor(True)})
    return found


def main() -> None:
    plan = autoshard.Plan(zero=2, accumulate=2, backend="debug")
    step = autoshard.parallelize(Counter(), plan, loss=loss, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2))
    rank, ranks = data_rank(plan.mesh)
    say = functools.partial(print, flush=True) if rank == 0 else lambda *_: None

    # 1003 samples do not fill batches of 16: the last one is padded, and "valid" says which samples are real.
    train = [{k: v for k, v in sample.items() if k != "valid"} for sample in samples(1003, seed=0)]
    loader = Loader(train, global_batch=16, rank=rank, ranks=ranks, accumulate=plan.accumulate, tail=Tail.PAD)
    # The held-out samples as one batch: 51 for one of two ranks, 50 for the other.
    heldout = evaluation_loader(samples(101, seed=1), global_batch=128, rank=rank, ranks=ranks).example()

    state = step.init(loader.example())
    for epoch in range(2):
        for batch in loader:
            state, metrics = step(state, batch)
        mean = step.evaluate(state, heldout)["loss"]
        say(f"epoch {epoch + 1}: training loss {metrics['loss']:.4f}, held-out {mean:.4f}")

    # A checkpoint with the data position resumes exactly, on any number of ranks and under any plan.
    if rank == 0:
        shutil.rmtree(CHECKPOINT, ignore_errors=True)
    step.save(state, CHECKPOINT, extra={"data": loader.state_dict()})
    again = step.load(CHECKPOINT, loader.example())
    loader.load_state_dict(checkpoint.read_meta(CHECKPOINT)["extra"]["data"])
    say(f"saved and loaded at {json.dumps(loader.state_dict())}; step {int(again.step)}")


if __name__ == "__main__":
    main()
