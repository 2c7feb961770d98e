"""Bandwidth of gloo's collectives between local ranks.

    python comm_bench.py --ranks 2 --iters 7

Collectives take turns within each round, so that noise hits all alike; medians of the slowest rank are printed as time
and as bytes of the full (unsharded) tensor per second. The result goes to comm_n<ranks>.json for limits.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import HERE, free_port, rank_environment

PIECES = 64  # of a coalesced collective
MIB = 2**20


def cases(size: int, dtype: Any) -> dict[str, Callable[[], Any]]:
    """Name -> one collective on a full tensor of about `size` bytes."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    elements = size // dtype.itemsize // (ranks * PIECES) * (ranks * PIECES)
    x, other, full = (torch.ones(elements, dtype=dtype) for _ in range(3))
    shard = torch.ones(elements // ranks, dtype=dtype)
    x_list, full_list = list(x.chunk(ranks)), list(full.chunk(ranks))
    x_pieces, shard_pieces = list(x.chunk(PIECES)), list(shard.chunk(PIECES))
    functional = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def wait_all(tensors: list[Any]) -> None:
        for t in tensors:
            functional.wait_tensor(t)

    def send_or_receive() -> None:
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(full, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather(list)": lambda: dist.all_gather(full_list, shard),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(full, shard),
        "reduce_scatter(list)": lambda: dist.reduce_scatter(shard, x_list),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(shard, x),
        "all_to_all_single": lambda: dist.all_to_all_single(other, x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "send/recv": send_or_receive,
        "functional.all_reduce": lambda: wait_all([functional.all_reduce(x, "sum", group)]),
        "functional.all_gather": lambda: wait_all([functional.all_gather_into_tensor(shard, ranks, group)]),
        "functional.reduce_scatter": lambda: wait_all([functional.reduce_scatter_tensor(x, "sum", ranks, group)]),
        f"functional.all_gather({PIECES})": lambda: wait_all(
            functional.all_gather_into_tensor_coalesced(shard_pieces, ranks, group)
        ),
        f"functional.reduce_scatter({PIECES})": lambda: wait_all(
            functional.reduce_scatter_tensor_coalesced(x_pieces, "sum", ranks, group)
        ),
        f"functional.all_reduce({PIECES})": lambda: wait_all(functional.all_reduce_coalesced(x_pieces, "sum", group)),
        "memcpy": lambda: other.copy_(x),
        "add": lambda: torch.add(x, other, out=full),
    }


def measure(sizes: list[int], iterations: int) -> dict[str, float | str]:
    """ "name|MiB|dtype" -> median seconds of the slowest rank, or why it failed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, float | str] = {}
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            times: dict[str, list[float]] = {}
            failed: dict[str, str] = {}
            todo = cases(size * MIB, dtype)
            for iteration in range(iterations + 1):  # the first one warms up
                for name, action in todo.items():
                    if name in failed:
                        continue
                    dist.barrier()
                    started = time.perf_counter()
                    try:
                        action()
                    except Exception as error:
                        failed[name] = str(error).splitlines()[0][:150]
                        continue
                    seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
                    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                    if iteration:
                        times.setdefault(name, []).append(seconds.item())
            for name in todo:
                key = f"{name}|{size}|{str(dtype).removeprefix('torch.')}"
                found[key] = failed[name] if name in failed else statistics.median(times[name])
    return found


def table(found: dict[str, float | str], sizes: list[int]) -> str:
    columns = [(size, dtype) for size in sizes for dtype in ("float32", "bfloat16")]
    lines = [
        "| collective | " + " | ".join(f"{size} MB {dtype}" for size, dtype in columns) + " |",
        "|" + "---|" * (len(columns) + 1),
    ]
    for name in dict.fromkeys(key.split("|")[0] for key in found):
        cells = []
        for size, dtype in columns:
            value = found[f"{name}|{size}|{dtype}"]
            fast = isinstance(value, float)
            cells.append(f"{value * 1e3:.1f} ms ({size / 1024 / value:.2f} GB/s)" if fast else str(value))  # type: ignore[operator]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iters", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 100], help="MiB of the full tensor")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(measure(given.sizes, given.iters)))
        return
    port = free_port()
    command = [sys.executable, __file__, "--worker", "--iters", str(given.iters), "--sizes", *map(str, given.sizes)]
    processes = [
        subprocess.Popen(
            command,
            env=rank_environment(rank, given.ranks, port),
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(given.ranks)
    ]
    output, _ = processes[0].communicate()
    for process in processes:
        process.wait()
    if processes[0].returncode:
        raise SystemExit(f"rank 0 ended with {processes[0].returncode}")
    found = json.loads(output.strip().splitlines()[-1])
    print(table(found, given.sizes))
    (given.out or HERE / f"comm_n{given.ranks}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
