"""How long placing and lowering a large model takes, on one core and without its memory: prints the numbers.

python examples/benchmarks/place_time.py                     # Llama of 8B shape, 32 layers, data 8 x tensor 8
python examples/benchmarks/place_time.py --layers 4 --mesh 1x8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoshard.capture import Modules, capture_training
from autoshard.collectives import Axis
from autoshard.manager import PassContext, pass_list
from autoshard.models.llama import Llama
from autoshard.plan import Mesh, Plan
from autoshard.program import Program

TOKENS = 4096
PLACE, LOWER = 10.0, 30.0  # seconds that place and lower may take on a quiet core


@dataclass(frozen=True)
class Measured:
    """Seconds of each pass, and the nodes of the graph after it."""

    seconds: dict[str, float]
    nodes: dict[str, int]


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def measure(layers: int = 32, data: int = 8, tensor: int = 8, zero: int = 3) -> Measured:
    """Capture, place and lower a Llama of 8B shape. No weights and no ranks are made."""
    with torch.device("meta"):
        model = Llama(128256, TOKENS, layers, 32, 8, 4096, 14336).to(torch.bfloat16)
    batch = {key: torch.zeros(1, TOKENS, dtype=torch.long) for key in ("x", "y")}
    sizes = {"data": data, "tensor": tensor}
    axes = tuple(Axis(n, k, f"autoshard:cpu:data{data}-tensor{tensor}:{n}") for n, k in sizes.items() if k > 1)
    plan = Plan(mesh=Mesh(data=data, tensor=tensor), zero=zero, backend="debug", device="cpu")
    context = PassContext(plan, axes)
    found = Measured({}, {})
    started = time.perf_counter()
    captured = capture_training(Modules(model, {}), _loss, batch, ranks=data, accumulate=1, device=torch.device("cpu"))
    found.seconds["capture"] = time.perf_counter() - started
    program = Program({"micro": captured.graph})
    for name, run in pass_list():
        started = time.perf_counter()
        program = run(program, context)
        found.seconds[name] = time.perf_counter() - started
        found.nodes[name] = len(program.graphs["micro"].module.graph.nodes)
        if name == "lower":
            break
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the seconds of each pass; 1 if place or lower took longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--mesh", default="8x8", metavar="DATAxTENSOR")
    parser.add_argument("--zero", type=int, default=3)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data, tensor = map(int, given.mesh.split("x"))
    found = measure(given.layers, data, tensor, given.zero)
    print(f"Llama of 8B shape, {given.layers} layers, data {data} x tensor {tensor}, ZeRO {given.zero}")
    for name, seconds in found.seconds.items():
        print(f"{name:14} {seconds:7.2f} s   {found.nodes.get(name, 0):7,} nodes")
    late = found.seconds["place"] > PLACE or found.seconds["lower"] > LOWER
    print(f"bounds on a quiet core: place {PLACE:.0f} s, lower {LOWER:.0f} s{': exceeded' if late else ''}")
    return int(late)


if __name__ == "__main__":
    raise SystemExit(main())
