"""What was placed where and why, as plain text of at most 120 columns."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from autoshard import collectives
from autoshard.optim import Mode
from autoshard.passes.place import redistribute
from autoshard.passes.zero import at_rest
from autoshard.placement import REPLICATE, Replicate, Shard, local_shape
from autoshard.program import TAG, Graph, Kind, Placements, Role, Tag, tag
from autoshard.rules.table import CHEAP_VIEWS

if TYPE_CHECKING:
    from autoshard.api import Step
    from autoshard.engine import Training

_WIDTH = 120


def explain(step: Step, training: Training) -> str:
    """The account of a step under `training`'s program: parameters, collectives, replicated ops, constants, optimizer.

    Bytes are those that this rank sends in one optimizer step (ring algorithms).
    """
    text = _Explanation(step, training)
    parts = [text.heading(), text.parameters(), text.traffic(), text.replicated(), text.constants(), text.optimizer()]
    return "\n\n".join("\n".join(_wrapped(line) for line in part) for part in parts if part)


def _wrapped(line: str) -> str:
    return line if len(line) <= _WIDTH else "\n".join(textwrap.wrap(line, _WIDTH, subsequent_indent="    "))


@dataclass
class _Parameter:
    """One parameter and what it makes the ranks send, in bytes a step."""

    name: str
    shape: tuple[int, ...]
    at_rest: Placements
    gradient: Placements | None
    slots: Placements
    note: str
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What parameters must share to be listed as one."""
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "#", self.name)
        return pattern, self.shape, self.at_rest, self.gradient, self.slots, self.note, tuple(self.sent.items())


class _Explanation:
    def __init__(self, step: Step, training: Training) -> None:
        self.step = step
        self.training = training
        self.context = step.context
        self.axes = step.context.axes
        self.accumulate = step.plan.accumulate
        self.stage = step.plan.zero.stage
        stage_graphs = training.snapshots.get("zero", training.snapshots["place"])
        self.micro = stage_graphs.graphs["micro"]

    def heading(self) -> list[str]:
        plan, cost = self.step.plan, self.step.cost()
        mesh = ", ".join(f"{axis.name}={axis.ranks}" for axis in self.axes) or "of one rank"
        lines = [
            f"mesh {mesh}; ZeRO stage {self.stage}; {self.accumulate} micro-batch{'es' * (self.accumulate > 1)} "
            f"a step; backend {plan.backend}",
            f"per rank and step: {cost.flops:,} FLOPs ({cost.flops / max(cost.global_flops, 1):.3f} of one device's); "
            f"{_size(cost.bytes_at_rest)} at rest; at most {_size(cost.gathered_peak)} of gathered parameters alive",
        ]
        if self.stage in (1, 2) and self.accumulate == 1:
            lines.append("stages 1 and 2 are the same program at accumulate=1: a gradient is reduced when it is made")
        if not self.axes:
            lines.append("the world has one rank: nothing is sharded and nothing is sent")
        return lines

    # ---------------------------------------------------------------- parameters

    def parameters(self) -> list[str]:
        columns = ("parameter", "shape", "param", "grad", "opt", "gather fwd", "gather bwd", "reduce", "gather upd")
        rows: list[Sequence[str]] = [columns]
        notes: list[str] = []
        groups = _folded(self._parameters())
        for group in groups:
            p = group[0]
            name = _joint_name([q.name for q in group])
            if p.note:
                notes.append(f"{name}: {p.note}")
            sent = [p.sent.get(column, 0) * len(group) for column in columns[5:]]
            rows.append(
                (
                    name if len(name) <= 44 else "..." + name[-41:],
                    "x".join(map(str, p.shape)) or "scalar",
                    _placed(p.at_rest),
                    _placed(p.gradient) if p.gradient is not None else "none",
                    _placed(p.slots) if p.gradient is not None else "none",
                    *(_size(n) if n else "-" for n in sent),
                )
            )
        where = ", ".join(axis.name for axis in self.axes) or "none"
        legend = [f"placements on the axes ({where}): R whole on every rank, S(d) split along dim d, P a term of a sum"]
        if any(isinstance(p, Shard) and p.outer > 1 for group in groups for p in (*group[0].at_rest, *group[0].slots)):
            legend.append("S(d/k): each of k equal parts of dim d is split")
        return [*legend, *_table(rows), *notes]

    def _parameters(self) -> list[_Parameter]:
        assigned = self.context.binding
        gradients = {port.name: port for port in self.training.gradients}
        sent = self._sent_for_parameters()
        trainable = set(self.step.modules.trainable())
        found = []
        for name, p in self.step.modules.parameters().items():
            shape = tuple(p.shape)
            resting = at_rest(shape, self.context.placed(name), self.context)
            note = ""
            if name not in trainable:
                note = "is not trained"
            elif name not in gradients:
                note = "has no path to the loss: it is neither updated nor decayed"
            elif assigned is not None and name in assigned.unassigned:
                note = "is in no group of the optimizer: it is not updated"
            placements = gradients[name].placements if name in gradients else None
            entry = _Parameter(name, shape, resting.parameter, placements, resting.slot, note, dict(sent.get(name, {})))
            if placements is not None and assigned is not None and not note:
                self._add_epilogue(entry, p.element_size())
            found.append(entry)
        return found

    def _add_epilogue(self, p: _Parameter, element: int) -> None:
        """What the update itself sends: gradients that were left partial, and new values of whole parameters."""
        assert p.gradient is not None
        for i, axis in enumerate(self.axes):
            nbytes = element * self._left_to(i, p.slots, p.shape)
            reduce = collectives.cost(p.gradient[i], p.slots[i], nbytes, axis.ranks)
            gather = collectives.cost(p.slots[i], p.at_rest[i], nbytes, axis.ranks)
            for column, amount in (("reduce", reduce), ("gather upd", gather)):
                if amount:
                    p.sent[column] = p.sent.get(column, 0) + int(amount)

    def _sent_for_parameters(self) -> dict[str, dict[str, int]]:
        """Bytes that the micro graph's gathers and reductions send, by parameter."""
        found: dict[str, dict[str, int]] = {}

        def add(name: str, column: str, node: fx.Node) -> None:
            entry = found.setdefault(name, {})
            entry[column] = entry.get(column, 0) + self._sent(node) * self.accumulate

        for node, port in zip(self.micro.placeholders(), self.micro.signature.inputs, strict=True):
            if port.kind is Kind.PARAMETER:
                for use in node.users:
                    if use.target is redistribute and tag(use).role is Role.PARAM_GATHER:
                        add(port.name, "gather bwd" if tag(use).phase.backward else "gather fwd", use)
        for node, port in zip(self.micro.output_nodes(), self.micro.signature.outputs, strict=True):
            if port.kind is Kind.GRADIENT:
                for made in _redistributed(node):
                    add(port.name, "reduce", made)
        return found

    def _sent(self, node: fx.Node) -> int:
        arguments: tuple[Any, ...] = node.args
        _, axis, source, target = arguments
        value = node.meta["val"]
        elements = self._left_to(axis, tag(node).placements[0], tuple(value.shape))
        return int(collectives.cost(source, target, elements * value.element_size(), self.axes[axis].ranks))

    def _left_to(self, axis: int, placements: Placements, shape: tuple[int, ...]) -> int:
        """Elements of a tensor that the ranks of one axis hold together."""
        others = [REPLICATE if i == axis else p for i, p in enumerate(placements)]
        return math.prod(local_shape(shape, others, self.context.ranks))

    # ---------------------------------------------------------------- the rest

    def traffic(self) -> list[str]:
        cost = self.step.cost()
        if not cost.collectives:
            return []
        rows: list[Sequence[str]] = [("axis", "for", "collective", "graph", "calls", "sent")]
        rows += [(c.axis, c.role.value, c.op, c.graph, str(c.count), _size(c.sent)) for c in cost.collectives]
        totals = ", ".join(f"{axis} {_size(sent)}" for axis, sent in cost.sent.items())
        return [*_table(rows), f"sent in all, by axis: {totals}"]

    def replicated(self) -> list[str]:
        """Ops that every rank repeats because no rule says how to split them, the dearest first."""
        rows = []
        ranks = math.prod(axis.ranks for axis in self.axes)
        for name in ("prologue", "micro"):
            graph = self.training.snapshots["place"].graphs.get(name)
            for node in _replicated(graph) if graph is not None else ():
                gathered = sum(
                    self._sent(n) for n in node.all_input_nodes if n.target is redistribute and self._is_gather(n)
                )
                split = math.prod(a.ranks for i, a in enumerate(self.axes) if _is_split(node, i))
                wasted = _flops(node) * (ranks - split) // (ranks * split)
                rows.append((wasted * self.accumulate, gathered * self.accumulate, node))
        if not rows:
            return ["every op that a shard or a partial sum reaches is split by a rule"] if self.axes else []
        rows.sort(key=lambda row: row[:2], reverse=True)
        table: list[Sequence[str]] = [("op", "module", "phase", "output", "FLOPs wasted", "sent to gather")]
        for wasted, gathered, node in rows[:20]:
            owner: Tag = tag(node)
            table.append(
                (
                    str(node.target).removeprefix("aten."),
                    owner.module[-40:] or "the loss",
                    owner.phase.value,
                    _shape(node.meta.get("val")),
                    f"{wasted:,}",
                    _size(gathered),
                )
            )
        more = [f"... and {len(rows) - 20} more"] if len(rows) > 20 else []
        heading = f"{len(rows)} ops run whole on every rank for want of a rule (autoshard/rules/table.py):"
        return [heading, *_table(table), *more]

    @staticmethod
    def _is_gather(node: fx.Node) -> bool:
        return not isinstance(node.args[2], Replicate)

    def constants(self) -> list[str]:
        """Tensors that the loss took from its closure."""
        found = self.training.captured.constants
        if not found:
            return []
        rows: list[Sequence[str]] = [("constant", "shape", "dtype", "bytes")]
        for name, value in found.items():
            shape = "x".join(map(str, value.shape)) or "scalar"
            rows.append((name, shape, str(value.dtype).removeprefix("torch."), _size(_nbytes(value))))
        return ["tensors that the model or loss closed over, whole on every rank and never updated:", *_table(rows)]

    def optimizer(self) -> list[str]:
        binding = self.step.binding
        if binding is None:
            return ["no optimizer: step(...) is refused, gradients and evaluate work"]
        cost = {
            Mode.GRAPH: "no traffic of its own, fused with the update",
            Mode.SHARD: "no traffic of its own, but uncompiled, and the host waits for the device once a step",
            Mode.OWNER: "two all-to-alls a step carry parameters, gradients and state to one owner each and back",
        }[binding.mode]
        lines = [f"optimizer {binding.class_name}: {binding.mode.value} ({binding.mode.name}); {cost}"]
        if self.step.plan.clip_norm is not None:
            lines.append(f"gradients are clipped to norm {self.step.plan.clip_norm:g} of the whole model")
        return lines


def _redistributed(node: fx.Node) -> Iterator[fx.Node]:
    """The chain of placement changes that ends in `node`."""
    while node.target is redistribute:
        yield node
        node = node.args[0]  # type: ignore[assignment]


def _replicated(graph: Graph) -> Iterator[fx.Node]:
    for node in graph.module.graph.nodes:
        made = node.op == "call_function" and TAG in node.meta and node.target not in CHEAP_VIEWS
        if made and tag(node).rule == "replicated":
            yield node


def _is_split(node: fx.Node, axis: int) -> bool:
    """Whether the ranks of an axis share a node's work."""
    values = [p for n in (node, *node.all_input_nodes) if TAG in n.meta for p in tag(n).placements]
    return any(not isinstance(p[axis], Replicate) for p in values)


def _flops(node: fx.Node) -> int:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def _folded(parameters: Iterable[_Parameter]) -> list[list[_Parameter]]:
    """Parameters that differ only in the numbers in their names, together."""
    groups: dict[tuple[Any, ...], list[_Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.kind, []).append(p)
    return list(groups.values())


def _joint_name(names: list[str]) -> str:
    """``blocks.0.w``, ``blocks.1.w`` as ``blocks.{0..1}.w``."""
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    return ".".join(_joint_part(list(dict.fromkeys(column))) for column in columns)


def _joint_part(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(map(int, parts))
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}")
    return "{" + ",".join(runs) + "}"


def _placed(placements: Placements) -> str:
    return " ".join(map(str, placements)) or "R"


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    return ", ".join(_shape(v) for v in value) if isinstance(value, (tuple, list)) else "-"


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _table(rows: list[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * min(len(max(lines, key=len)), _WIDTH), *lines[1:]]
