"""A stack of linear layers: the smallest model a preset can train."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Inputs (B, ...) with `features` elements per sample to (B, outputs).

    Args:
        features: elements of one sample.
        outputs: channels of the result.
        layers: number of linear layers, at least 1.
        width: channels between them.
    """

    def __init__(self, features: int = 64, outputs: int = 10, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers is {layers}; valid: an integer >= 1")
        sizes = [features, *[width] * (layers - 1), outputs]
        stack: list[nn.Module] = []
        for inner, outer in pairwise(sizes):
            stack += [nn.Linear(inner, outer), nn.GELU()]
        self.layers = nn.Sequential(*stack[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))
