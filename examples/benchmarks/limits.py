"""The physical limits of one data-parallel step, from measured compute and communication.

    python comm_bench.py --ranks 2 && python limits.py --compute 0.92

The traffic of each ZeRO stage is priced with the measured gloo collectives at three rates: `bucket`, in pieces of
16 MB as DDP and FSDP send; `single`, in pieces of 100 MB; `wire`, the bytes that each rank must send at the rate of
all_to_all, gloo's best path. max() assumes perfect overlap on spare cores, sum() none: gloo's own threads burn the
ranks' cores. P bytes of parameters: ZeRO-0 is an all-reduce; 1 and 2 a reduce-scatter and an all-gather; 1 as
ZeroRedundancyOptimizer does it an all-reduce and a broadcast; 3 two all-gathers and a reduce-scatter.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from harness import HERE
from model import ModelConfig

MIB = 2**20


@dataclass(frozen=True)
class Traffic:
    """What a stage sends per step: its collectives, and how often each rank sends (N-1)/N of the parameters."""

    name: str
    collectives: tuple[str, ...]
    sends: int


STAGES = (
    Traffic("zero0 (AR)", ("all_reduce",), 2),
    Traffic("zero1/2 (RS+AG)", ("reduce_scatter_tensor", "all_gather_into_tensor"), 2),
    Traffic("zero1 as ZeRO-RO (AR+broadcast)", ("all_reduce", "broadcast"), 3),
    Traffic("zero3 (2AG+RS)", ("reduce_scatter_tensor", "all_gather_into_tensor", "all_gather_into_tensor"), 3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", type=float, required=True, help="seconds of a local step, one thread")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--comm", type=Path, default=None, help="what comm_bench.py wrote")
    parser.add_argument("--model", type=json.loads, default={})
    given = parser.parse_args()

    measured = json.loads((given.comm or HERE / f"comm_n{given.ranks}.json").read_text())
    size = ModelConfig(**given.model).n_params() * (4 if given.dtype == "float32" else 2)
    share = (given.ranks - 1) / given.ranks
    wire = 16 * MIB * share / measured[f"all_to_all_single|16|{given.dtype}"]

    def seconds(collectives: tuple[str, ...], piece: int) -> float:
        return sum(measured[f"{name}|{piece}|{given.dtype}"] / (piece * MIB) * size for name in collectives)

    print(f"P = {size / 1e6:.1f} MB, compute {given.compute:.3f} s, wire {wire / 1e9:.2f} GB/s per direction")
    print("| plan | comm s bucket/single/wire | max (bucket) | sum (bucket) | sum (single) | sum/compute |")
    print("|" + "---|" * 6)
    for stage in STAGES:
        bucket, single = seconds(stage.collectives, 16), seconds(stage.collectives, 100)
        cells = (
            stage.name,
            f"{bucket:.3f}/{single:.3f}/{stage.sends * share * size / wire:.3f}",
            f"{max(bucket, given.compute):.3f}",
            f"{bucket + given.compute:.3f}",
            f"{single + given.compute:.3f}",
            f"{(bucket + given.compute) / given.compute:.3f}",
        )
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
