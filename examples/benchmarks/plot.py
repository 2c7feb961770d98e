"""A picture of what compare.py wrote: step time over the baseline's with its spread, and bytes at rest.

python plot.py results/2026-11-30.json results/2026-11-30.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

_OURS, _THEIRS = "#1f6f8b", "#a7a7a7"
_KINDS = (("params", 1.0), ("grads", 0.6), ("optim", 0.3))


def draw(found: dict[str, Any], path: Path) -> None:
    """Write a PNG with one row of bars per engine.

    Args:
        found: compare.py's JSON.
    """
    records = list(reversed(found["results"]))
    labels = [record["label"] for record in records]
    colors = [_OURS if label.startswith("autoshard") else _THEIRS for label in labels]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 0.42 * len(records) + 1.2), sharey=True)
    for i, (record, color) in enumerate(zip(records, colors, strict=True)):
        left.barh(i, record["ratio"], color=color)
        spread = record.get("ratios") or [1.0]
        left.plot([min(spread), max(spread)], [i, i], color="black", linewidth=1)
        left.text(0.02, i, f"{record['ratio']:.2f}", va="center", color="white", fontsize=9)
        state = record["state_mb"][0] or {}
        start = 0.0
        for kind, alpha in _KINDS:
            size = state.get(kind, 0.0)
            right.barh(i, size, left=start, color=color, alpha=alpha)
            start += size
    left.set_yticks(range(len(labels)), labels)
    left.axvline(1.0, color="black", linewidth=0.5)
    args = found["args"]
    left.set_xlabel(f"step time, x {labels[-1]} (median, spread of {args['rounds']} rounds)")
    right.set_xlabel("at rest, MB per rank: parameters, gradients, optimizer")
    figure.suptitle(f"{args['ranks']} ranks, {args['dtype']}, {args['micro_batch']} sequences per rank, CPU and gloo")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    given = parser.parse_args()
    draw(json.loads(given.json.read_text()), given.png)


if __name__ == "__main__":
    main()
