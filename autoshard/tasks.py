"""Losses for the presets in conf/, and text from a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.data import VALID
from autoshard.loss import Mean

NO_LABEL = -100


def next_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Mean:
    """Cross-entropy of each next token, in nats; the count is of the tokens that have a label.

    Args:
        model: tokens (B, T) to logits (B, T, vocabulary), or to an object that has them as `.logits`.
        batch: "x", "y" int64 (B, T), -100 in y is no label; where "valid" bool (B,) is given, the other samples
            do not count.
    """
    labels = batch["y"]
    if VALID in batch:
        labels = labels.masked_fill(~batch[VALID][:, None], NO_LABEL)
    logits = logits_of(model(batch["x"]))
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
    return Mean(total, (labels != NO_LABEL).sum())


def classify(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Mean, dict[str, Mean]]:
    """Cross-entropy in nats, with the share of correct answers as the extra "accuracy".

    Args:
        model: inputs (B, ...) to logits (B, classes), or to an object that has them as `.logits`.
        batch: "x" (B, ...), "y" int64 (B,), and perhaps "valid" as in `next_token`.
    """
    logits = logits_of(model(batch["x"]))
    correct = (logits.detach().argmax(-1) == batch["y"]).to(logits.dtype)
    loss = F.cross_entropy(logits, batch["y"], reduction="none")
    return _mean(loss, batch), {"accuracy": _mean(correct, batch)}


def logits_of(output: Any) -> Tensor:
    """The logits of a model that returns them bare, or as `.logits` (Hugging Face)."""
    return getattr(output, "logits", output)


def _mean(terms: Tensor, batch: Mapping[str, Tensor]) -> Mean:
    """Of terms (B,), the valid ones."""
    if VALID not in batch:
        return Mean(terms.sum(), terms.numel())
    return Mean((terms * batch[VALID]).sum(), batch[VALID].sum())


def generate(
    forward: Callable[[Tensor], Any], prompt: bytes, *, length: int, context: int, temperature: float, seed: int
) -> bytes:
    """`prompt` and `length` further bytes drawn from a byte-level causal model.

    Every call has the same shape, so that the model is compiled once: the text so far is followed by zeros, which a
    causal model does not see. Given the same logits, every rank draws the same bytes.

    Args:
        forward: int64 (1, context) to logits (1, context, 256), bare or as `.logits`.
        temperature: 0 takes the likeliest byte.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt) or [0]
    for _ in range(length):
        seen = text[-context:]
        window = torch.zeros(1, context, dtype=torch.int64)
        window[0, : len(seen)] = torch.tensor(seen)
        scores = logits_of(forward(window))[0, len(seen) - 1].float().cpu()
        if temperature == 0:
            text.append(int(scores.argmax()))
        else:
            text.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
    return bytes(text)
