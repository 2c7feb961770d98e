"""The whole zoo under every stage on real ranks, as one command that writes a dated table.

    python -m tests.matrix                          # every model x stage 0..3, interpreted, on 2 data ranks
    python -m tests.matrix --meshes 1x2 2x2 1x4 --stages 0 1 3      # the tensor axis
    python -m tests.matrix --models llama vit --stages 3 --backend inductor

Writes tests/results/YYYY-MM-DD-matrix.md and exits with 1 if anything is not as one device computes it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autoshard.program import Role
from tests.multirank import zoo_run
from tests.multirank.runner import End, RanksFailedError, close_worlds, run_ranks
from tests.multirank.zoo_bounds import EXCEPTIONS, FLOPS, TENSOR_FLOPS, cost_complaints
from tests.multirank.zoo_run import Combination, Errors, Measured
from tests.zoo import CASES

_COLUMNS = ("model", "mesh", "stage", "backend", "loss", "gradient", "buffer", "parameter", "FLOPs", "bytes", "whole",
            "sent", "data", "tensor", "tensor bytes", "init s", "step ms")  # fmt: skip
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One combination and what became of it; `complaints` is empty if it is exact and costs its share."""

    combination: Combination
    complaints: tuple[str, ...]
    errors: Errors | None = None
    measured: Measured | None = None
    seconds: float = 0.0


def run(combination: Combination) -> Row:
    """One row of the table. A rank's failure becomes a complaint."""
    started = time.monotonic()
    try:
        ranks = run_ranks(zoo_run.run_case, combination.ranks, combination, timeout=600.0)
        errors = zoo_run.compare(combination, ranks)
    except RanksFailedError as failure:
        first = next(outcome for outcome in failure.outcomes if outcome.end is not End.RETURNED)
        story = f"{first.end.value}: {first.kind[0] if first.kind else ''} {first.message.splitlines()[:1]}"
        return Row(combination, (story,), seconds=time.monotonic() - started)
    except AssertionError as failure:
        return Row(combination, (str(failure),), seconds=time.monotonic() - started)
    complaints = errors.complaints(combination.case) + cost_complaints(combination, ranks)
    return Row(combination, tuple(complaints), errors, ranks[0], time.monotonic() - started)


def table(rows: Sequence[Row], command: str, seconds: float) -> str:
    """The rows as a markdown document, with the command and machine they were made by."""
    failed = [row for row in rows if row.complaints]
    lines = [
        f"# The zoo on real ranks, {datetime.date.today().isoformat()}",
        "",
        f"`{command}`: {len(rows) - len(failed)} of {len(rows)} combinations pass, in {seconds / 60:.0f} minutes.",
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}, "
        "gloo, float64.",
        "",
        "Each row is compared with one device in eager PyTorch. Errors are relative (losses: of max(1, loss)): the",
        "worst loss or gradient norm of the steps, the worst gradient of a parameter, the worst buffer, and the worst",
        f"parameter after {zoo_run.STEPS} AdamW steps. Bounds: {zoo_run.LOSS:g} ({zoo_run.LOSS_IN_FLOAT32:g} where the",
        f"model computes its loss in float32), {zoo_run.GRADIENT:g}, {zoo_run.BUFFER:g}, {zoo_run.PARAMETER:g}.",
        "Mesh: data x tensor = N ranks; where that has a tensor axis, models that compute parts in float32 run without",
        f"these casts. FLOPs: over global / N (bound {FLOPS}, {TENSOR_FLOPS} with a tensor axis). Bytes: at rest, over",
        "what the stage allows, global / N with padding where it shards (bound 1); of these, whole: vectors (norm",
        "weights, biases) that stay whole on the tensor axis, beyond their N-th part. Sent: bytes for parameters and",
        "gradients on the data axis, over the ZeRO paper's (bound 1). Data, tensor: collectives of a step by axis, of",
        "activations (reduces + gathers) / all. Tensor bytes: sent on that axis by a rank in a step. Init: without the",
        "tracing, which a model has once for its stages. Without a data axis all stages are one program: one is run.",
        "",
        f"| {' | '.join(_COLUMNS)} | |",
        f"|{'---|' * (len(_COLUMNS) + 1)}",
    ]
    lines += [_line(row) for row in rows]
    if failed:
        lines += ["", "## Not passing", ""]
        lines += [f"- {row.combination}: {complaint}" for row in failed for complaint in row.complaints]
    exceptions = [f"- {name}: {reason}" for group in EXCEPTIONS for name, reason in group.items()]
    if exceptions:
        lines += ["", "## Beyond a bound, with the reason", "", *exceptions]
    return "\n".join([*lines, ""])


def _line(row: Row) -> str:
    combination, errors, measured = row.combination, row.errors, row.measured
    head = f"| {combination.name} | {combination.mesh} | {combination.stage} | {combination.backend} |"
    verdict = "**fails**" if row.complaints else ""
    if errors is None or measured is None:
        return f"{head}{' |' * (len(_COLUMNS) - 4)} {verdict} |"
    cost = measured.cost
    allowed = zoo_run.allowed_bytes(combination, measured.split)
    numbers = [f"{x:.0e}" if x else "0" for x in (errors.loss, errors.gradient, errors.buffer, errors.parameter)]
    numbers += [f"{cost.flops / zoo_run.flops_share(combination):.3f}", f"{measured.at_rest / allowed.total:.3f}"]
    numbers += [f"{allowed.whole / allowed.total:.3f}", _ratio(zoo_run.traffic(cost), combination, measured)]
    for axis in ("data", "tensor"):
        kinds = (zoo_run.collectives(cost, axis, role) for role in (Role.ACTIVATION_REDUCE, Role.ACTIVATION_GATHER))
        numbers.append(f"{' + '.join(map(str, kinds))} / {zoo_run.collectives(cost, axis)}")
    numbers.append(str(zoo_run.sent(cost, "tensor")))
    numbers += [f"{measured.seconds[0]:.1f}", f"{measured.seconds[1] * 1e3:.0f}"]
    return f"{head} {' | '.join(numbers)} | {verdict} |"


def _ratio(sent: int, combination: Combination, measured: Measured) -> str:
    allowed = zoo_run.allowed_traffic(combination, measured.split)
    return f"{sent / allowed:.3f}" if allowed else "-"


def _mesh(text: str) -> tuple[int, int]:
    data, tensor = map(int, text.split("x"))
    return data, tensor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write the table, say where. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--meshes", nargs="+", type=_mesh, default=[(2, 1)], metavar="DATAxTENSOR")
    parser.add_argument("--backend", choices=("debug", "inductor"), default="debug")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--out", type=Path, default=None, help="file to write; default tests/results/DATE-matrix.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = time.monotonic()
    combinations = [
        Combination(name, stage, given.backend, data, tensor, accumulate=given.accumulate)
        for data, tensor in given.meshes
        for name in given.models
        for stage in (given.stages if data > 1 else given.stages[-1:])  # without a data axis all are one program
    ]
    rows = []
    for index, combination in enumerate(combinations, start=1):
        rows.append(run(combination))
        verdict = "; ".join(rows[-1].complaints) or "exact"
        print(f"[{index}/{len(combinations)}] {combination}: {verdict} ({rows[-1].seconds:.1f} s)", flush=True)
    close_worlds()
    command = " ".join(["python -m tests.matrix", *(arguments if arguments is not None else sys.argv[1:])])
    out = given.out or RESULTS / f"{datetime.date.today().isoformat()}-matrix.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(table(rows, command, time.monotonic() - started))
    print(f"wrote {out}")
    return 1 if any(row.complaints for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
