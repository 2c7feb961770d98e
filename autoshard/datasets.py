"""Data that every machine has, for the presets in conf/: Python's own sources as bytes, and made-up samples."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autoshard.data import Samples

# Third-party code, tests, and files that are tables of data rather than text.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
_GENERATED = ("config-", "_sysconfigdata", "lib-dynload")


@dataclass(frozen=True)
class Splits:
    """Samples to train on and samples held out.

    Args:
        train, heldout: map-style datasets whose samples are mappings with "x" and "y".
        baseline: its name, and a function that returns the loss on `heldout` of a simpler model fitted to `train`,
            in nats per token.
    """

    train: Samples
    heldout: Samples
    baseline: tuple[str, Callable[[], float]] | None = None


class ByteText:
    """Windows of a text as next-byte samples: {"x": int64 (sequence,), "y": int64 (sequence,)}, y one byte later.

    Args:
        text: uint8 (bytes,).
        sequence: bytes per sample.
        most: no more than this many samples, spread evenly over the text; None takes all of it, window by window.
    """

    def __init__(self, text: Tensor, sequence: int, most: int | None = None) -> None:
        if text.dtype != torch.uint8 or text.dim() != 1 or len(text) <= sequence:
            raise ValueError(
                f"text is {text.dtype} {tuple(text.shape)}; valid: torch.uint8, one dim, more than {sequence} bytes"
            )
        self.text = text
        self.sequence = sequence
        windows = (len(text) - 1) // sequence
        self._length = windows if most is None else min(most, windows)
        self._stride = sequence if most is None else max(sequence, len(text) // self._length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = self.text[index * self._stride :][: self.sequence + 1].long()
        return {"x": window[:-1], "y": window[1:]}


def stdlib_text(sequence: int = 128, megabytes: float = 10.0, heldout_samples: int = 1024) -> Splits:
    """The sources of the running Python's standard library: byte-level text, about 10 MB in all.

    Deterministic for a Python release: files in an order hashed from their names, every tenth held out whole.

    Args:
        sequence: bytes per sample.
        megabytes: take no more than this many million bytes.
        heldout_samples: take at most so many windows of the held-out text, spread evenly.
    """
    train, heldout = (_join(files) for files in _split(_stdlib_sources(), int(megabytes * 1e6)))
    for name, text in (("training", train), ("held-out", heldout)):
        if len(text) <= sequence:
            raise ValueError(
                f"megabytes={megabytes} leaves {len(text)} bytes of {name} text, not more than sequence={sequence}; "
                "valid: more megabytes or a shorter sequence"
            )
    splits = ByteText(train, sequence), ByteText(heldout, sequence, heldout_samples)
    return Splits(*splits, baseline=("byte bigram", lambda: bigram_loss(*splits)))


def bigram_loss(train: ByteText, heldout: ByteText) -> float:
    """Mean negative log-likelihood, in nats per byte, of `heldout` under a byte bigram fitted to `train`'s text.

    p(b | a) = (count(a, b) + 256 k p(b)) / (count(a) + 256 k) with k = 0.1, where p(b) is the unigram with one
    added to each count: of the usual smoothings that which does best on the standard library, by a hair.
    """
    text = train.text.long()
    pairs = torch.bincount(text[:-1] * 256 + text[1:], minlength=256 * 256).view(256, 256).double()
    unigram = (pairs.sum(0) + 1) / (pairs.sum() + 256)
    strength = 0.1 * 256
    table = ((pairs + strength * unigram) / (pairs.sum(1, keepdim=True) + strength)).log()
    windows = [heldout[i] for i in range(len(heldout))]
    x, y = (torch.cat([window[key] for window in windows]) for key in ("x", "y"))
    return -table[x, y].mean().item()


class RandomTokens:
    """Uniformly random tokens, {"x", "y"} as in `ByteText`: for timing, there is nothing to learn."""

    def __init__(self, vocabulary: int, sequence: int, samples: int, seed: int) -> None:
        self.vocabulary, self.sequence, self.samples, self.seed = vocabulary, sequence, samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        generator = _generator(self.seed, index)
        window = torch.randint(self.vocabulary, (self.sequence + 1,), generator=generator)
        return {"x": window[:-1], "y": window[1:]}


def random_tokens(
    vocabulary: int = 256, sequence: int = 128, samples: int = 4096, heldout_samples: int = 64, seed: int = 0
) -> Splits:
    """Random tokens below `vocabulary`."""
    return Splits(
        RandomTokens(vocabulary, sequence, samples, seed),
        RandomTokens(vocabulary, sequence, heldout_samples, seed + 1),
    )


class SyntheticImages:
    """Images that a classifier can learn: {"x": float32 (channels, size, size), "y": int64 ()}.

    The class is the index modulo the classes; the image is the class's own smooth pattern plus normal noise.
    """

    def __init__(self, classes: int, channels: int, size: int, samples: int, noise: float, seed: int) -> None:
        coarse = torch.randn(classes, channels, 4, 4, generator=_generator(seed, 0))
        self.patterns = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear", align_corners=False)
        self.samples, self.noise, self.seed = samples, noise, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        label = index % len(self.patterns)
        pattern = self.patterns[label]
        image = pattern + self.noise * torch.randn(pattern.shape, generator=_generator(self.seed, index + 1))
        return {"x": image, "y": torch.tensor(label)}


def synthetic_images(
    classes: int = 10,
    channels: int = 3,
    size: int = 32,
    samples: int = 4096,
    heldout_samples: int = 256,
    noise: float = 1.0,
    seed: int = 0,
) -> Splits:
    """`SyntheticImages`: one set of patterns, noise of their own for each split."""
    made = SyntheticImages(classes, channels, size, samples + heldout_samples, noise, seed)
    order = range(samples + heldout_samples)
    return Splits(
        torch.utils.data.Subset(made, order[:samples]),  # type: ignore[arg-type]
        torch.utils.data.Subset(made, order[samples:]),  # type: ignore[arg-type]
    )


def _generator(seed: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{index}".encode()))


def _stdlib_sources() -> list[tuple[str, Path]]:
    """(path below the standard library, where it is) of its sources, in path order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _LEFT_OUT.intersection(parts) and not parts[0].startswith(_GENERATED):
            found.append(("/".join(parts), path))
    if len(found) < 10:
        raise FileNotFoundError(
            f"{root} has {len(found)} Python sources; this Python was installed without its standard library's text. "
            "Use another, or data=random_tokens"
        )
    return found


def _split(files: list[tuple[str, Path]], limit: int) -> tuple[list[bytes], list[bytes]]:
    ordered = sorted(files, key=lambda file: (zlib.crc32(file[0].encode()), file[0]))
    taken: list[bytes] = []
    total = 0
    for _, path in ordered:
        content = path.read_bytes()
        if total + len(content) > limit:
            break
        taken.append(content)
        total += len(content)
    return [c for i, c in enumerate(taken) if i % 10 != 9], taken[9::10]


def _join(files: list[bytes]) -> Tensor:
    text = bytearray(b"\0".join(files))
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
