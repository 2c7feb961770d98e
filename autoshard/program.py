"""The thing that passes rewrite: named FX graphs, what their inputs and outputs are, and where they came from.

Meaning lives on nodes as one `Tag` and on graph inputs and outputs as `Port`s; passes read those and never
guess from names or operators.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.placement import Placement

TAG = "autoshard"  # the key of node.meta under which the Tag lies


class Phase(enum.Enum):
    FORWARD = "forward"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_GRADIENT = "weight-gradient"
    UPDATE = "update"

    @property
    def backward(self) -> bool:
        return self in (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)


class Role(enum.Enum):
    """What a collective is for."""

    PARAM_GATHER = "parameter gather"
    GRAD_REDUCE = "gradient reduce"
    ACTIVATION_REDUCE = "activation reduce"
    ACTIVATION_GATHER = "activation gather"
    STATISTICS_GATHER = "statistics gather"
    NORM_REDUCE = "gradient-norm reduce"


# One placement per mesh axis that is larger than one rank, in mesh order.
Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Tag:
    """What a node means.

    Args:
        phase: forward, input-gradient, weight-gradient or update.
        module: path of the module that owns the node, "" for the root or the loss.
        role: what a collective or redistribution is for, else None.
        placements: per output of the node (one for a plain tensor), its placements; () before `place`.
        rule: the placement rule that applied, for `explain()`; "replicated" where there was none.
        region: nodes of one region stand together and are compiled by themselves, once for all regions that compute
            the same; "" for what is compiled with the rest of its graph.
    """

    phase: Phase
    module: str = ""
    role: Role | None = None
    placements: tuple[Placements, ...] = ()
    rule: str = ""
    region: str = ""

    def but(self, **changes: Any) -> Tag:
        return dataclasses.replace(self, **changes)


def tag(node: fx.Node) -> Tag:
    """The node's tag.

    Raises:
        KeyError: the node was made without one, a defect in the pass that made it.
    """
    return node.meta[TAG]


def set_tag(node: fx.Node, value: Tag) -> fx.Node:
    node.meta[TAG] = value
    return node


class Kind(enum.Enum):
    """What an input or output of a graph is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    CONSTANT = "constant"
    RNG = "rng key"
    COORDINATE = "coordinate"
    WEIGHT = "loss weight"
    ACCUMULATOR = "accumulator"
    GRADIENT = "gradient"
    SLOT = "optimizer slot"
    STEP = "step"
    LOSS = "loss"
    EXTRA = "extra"
    RESULT = "result"


@dataclass(frozen=True)
class Port:
    """One input or output of a graph.

    Args:
        kind: what it is.
        name: its name in the model (a parameter's, a buffer's), or a path in the batch or result.
        shape: global shape, in elements.
        dtype: element type.
        placements: one per mesh axis in use, () before `place`. How the tensor arrives or leaves.
        sharded: of a batch tensor, whether its first dim is the batch.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements = ()
    sharded: bool = False

    def at(self, placements: Placements) -> Port:
        return dataclasses.replace(self, placements=placements)


@dataclass(frozen=True)
class Signature:
    """The ports of a graph, in the order of its placeholders and of its output tuple."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def find_inputs(self, kind: Kind) -> Iterator[tuple[int, Port]]:
        return ((i, port) for i, port in enumerate(self.inputs) if port.kind is kind)

    def find_outputs(self, kind: Kind) -> Iterator[tuple[int, Port]]:
        return ((i, port) for i, port in enumerate(self.outputs) if port.kind is kind)


@dataclass(frozen=True)
class Graph:
    """A graph module and its signature. `local` once `lower` made its shapes those of one rank."""

    module: fx.GraphModule
    signature: Signature
    local: bool = False

    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def output_nodes(self) -> list[Any]:
        output = next(iter(reversed(self.module.graph.nodes)))
        return list(output.args[0])


@dataclass(frozen=True)
class PassRecord:
    """Provenance: which pass ran, for how long (seconds), and what it changed."""

    name: str
    seconds: float
    summary: str


@dataclass(frozen=True)
class Program:
    """Named graphs with their history. Passes are functions from Program to Program."""

    graphs: Mapping[str, Graph]
    history: tuple[PassRecord, ...] = ()

    def with_graph(self, name: str, graph: Graph) -> Program:
        return dataclasses.replace(self, graphs={**self.graphs, name: graph})

    def with_record(self, record: PassRecord) -> Program:
        return dataclasses.replace(self, history=(*self.history, record))

    def diff(self, later: Program) -> str:
        """What changed between this program and a later one, as a unified diff of their texts."""
        before, after = (str(Program(program.graphs)).splitlines() for program in (self, later))
        return "\n".join(difflib.unified_diff(before, after, "before", "after", lineterm="", n=1))

    def __str__(self) -> str:
        lines = [f"# pass {r.name}: {r.seconds * 1e3:.0f} ms, {r.summary}" for r in self.history]
        for name, graph in self.graphs.items():
            lines += ["", f"graph {name}{' (local shapes)' if graph.local else ''}:", render(graph)]
        return "\n".join(lines)


def render(graph: Graph) -> str:
    """The graph as text: one line per node with shape, dtype, placements, phase and module."""
    lines = []
    ports = dict(zip(graph.placeholders(), graph.signature.inputs, strict=True))
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            port = ports[node]
            where = " ".join(map(str, port.placements))
            lines.append(f"  {node.name}: {_type_of(node)} {where}  # {port.kind.value} {port.name}")
        elif node.op == "output":
            lines.append(f"  return {', '.join(map(str, graph.output_nodes()))}")
        else:
            t: Tag | None = node.meta.get(TAG)
            where = " | ".join(" ".join(map(str, p)) for p in t.placements) if t else ""
            note = f"{t.phase.value} {t.module}{' [' + t.role.value + ']' if t.role else ''}" if t else "untagged"
            args = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
            target = getattr(node.target, "__name__", str(node.target)) if callable(node.target) else str(node.target)
            lines.append(f"  {node.name}: {_type_of(node)} {where} = {target}({', '.join(args)})  # {note}")
    return "\n".join(lines)


def _type_of(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(f"{list(v.shape)}" if isinstance(v, torch.Tensor) else str(v) for v in value) + ")"
    return type(value).__name__ if value is not None else "?"
