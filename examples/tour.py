"""A tour of the idea, in one process: a model for one device, the program of each of 4 ranks, and training.

    python -m examples.tour

No GPU and no launcher are needed. It prints, for a small classifier,

1. the graph that capture makes of model, loss and backward, at global shapes;
2. what each pass changes in it, up to the program that every one of 4 ranks would run;
3. a few training steps with the same code on the one rank that is here, checked against plain PyTorch;
4. what `explain()` says.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import Modules, capture_training
from autoshard.collectives import Axis
from autoshard.manager import PassContext, run_passes
from autoshard.optim import bind
from autoshard.program import Graph, Program, Role, render, tag

RANKS = 4
ADAMW = functools.partial(torch.optim.AdamW, lr=3e-2)


class Classifier(nn.Module):
    """Inputs (B, 8) to logits (B, 4). Nothing in it knows of more than one device."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean cross-entropy, in nats."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_batch(rows: int) -> dict[str, Tensor]:
    """Points, labelled by which of 4 fixed directions is nearest."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "y": (x @ torch.randn(8, 4, generator=generator, dtype=torch.float64)).argmax(1)}


def title(text: str) -> None:
    print(f"\n{'=' * 100}\n{text}\n{'=' * 100}")


def program_of_each_rank(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Program]:
    """The program after each pass, for `RANKS` ranks that each pass a batch like `batch`. No rank need exist."""
    plan = autoshard.Plan(mesh=autoshard.Mesh(data=RANKS), zero=3, backend="debug", device="cpu")
    graph = capture_training(
        Modules(model, {}), loss, batch, ranks=RANKS, accumulate=1, device=torch.device("cpu")
    ).graph
    optimizer = bind(ADAMW, {name: p.detach().to("meta") for name, p in model.named_parameters()})
    axis = Axis("data", RANKS, f"autoshard:cpu:data{RANKS}:data")
    found: dict[str, Program] = {}

    def keep(name: str, program: Program) -> None:
        graphs = {key: Graph(copy.deepcopy(g.module), g.signature, g.local) for key, g in program.graphs.items()}
        found[name] = Program(graphs, program.history)

    run_passes(Program({"micro": graph}), PassContext(plan, (axis,), optimizer), watch=keep)
    return found


def show_passes(programs: Mapping[str, Program]) -> None:
    names = list(programs)
    title("1. capture: forward, loss and backward as one graph of global shapes")
    print(render(programs["capture"].graphs["micro"]))
    for before, after in itertools.pairwise(names):
        title(f"2. pass {after}: {programs[after].history[-1].summary}")
        print(programs[before].diff(programs[after]) or "nothing to do here")


def show_collectives(program: Program) -> None:
    title(f"What the {RANKS} ranks say to each other in one step")
    for name, graph in program.graphs.items():
        for node in graph.module.graph.nodes:
            role: Role | None = tag(node).role if node.op == "call_function" else None
            if role is not None and "_c10d_functional" in str(node.target) and "wait" not in str(node.target):
                print(f"{name:9} {role.value:22} {str(node.target).split('.')[1]:24} {list(node.meta['val'].shape)}")


def train(model: nn.Module, batch: Mapping[str, Tensor], steps: int) -> None:
    title("3. training, and the same steps in plain PyTorch")
    plan = autoshard.Plan(zero=3, backend="debug", device="cpu")
    eager = copy.deepcopy(model)
    optimizer = ADAMW(eager.parameters())
    step = autoshard.parallelize(model, plan, loss=loss, optimizer=ADAMW)
    state = step.init(batch)
    for number in range(1, steps + 1):
        state, metrics = step(state, batch)
        expected = loss(eager, batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        ours, theirs = metrics["loss"], expected.detach()
        print(f"step {number:2}   loss {float(ours):.12f}   in plain PyTorch {float(theirs):.12f}")
        torch.testing.assert_close(ours, theirs)
    title("4. step.explain()")
    print(step.explain())


def main() -> None:
    torch.manual_seed(0)
    model, batch = Classifier().double(), make_batch(16)
    programs = program_of_each_rank(model, batch)
    show_passes(programs)
    show_collectives(programs["update"])
    train(model, batch, steps=5)


if __name__ == "__main__":
    main()
