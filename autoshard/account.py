"""What a step is made of, as data: parameters, layers, what each makes the ranks send, how a repeated block is split.

`explain` renders it as text and `page` as HTML; neither computes anything of its own.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from autoshard.assign import Layers, flops
from autoshard.collectives import Axis
from autoshard.cost import Call, Cost, calls
from autoshard.optim import Mode
from autoshard.passes.place import redistribute
from autoshard.passes.zero import at_rest
from autoshard.placement import Replicate, Shard
from autoshard.program import TAG, Graph, Kind, Phase, Placements, Role, tag
from autoshard.rules.options import tensor_inputs
from autoshard.rules.table import CHEAP_VIEWS

if TYPE_CHECKING:
    from autoshard.api import Step
    from autoshard.engine import Training

OPS = {
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}
GATHER_FORWARD, GATHER_BACKWARD, REDUCE, GATHER_UPDATE = USES = ("gather fwd", "gather bwd", "reduce", "gather upd")


@dataclass(frozen=True)
class Traffic:
    """Equal collectives of one layer in one step.

    Args:
        axis: the mesh axis.
        phase: "forward", "backward" or "update".
        op: "all-reduce", "all-gather", "reduce-scatter" or "all-to-all".
        change: the placements before and after on that axis.
        shape: of the whole tensor.
        count: how many a step runs.
        sent: bytes that this rank sends for all of them.
    """

    axis: str
    phase: str
    op: str
    change: str
    shape: str
    count: int
    sent: int


@dataclass(frozen=True)
class Layer:
    """Modules that cause the same collectives of activations, as one name; `copies` is how many they are.

    `traffic` is what all of them cause together.
    """

    name: str
    copies: int
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True)
class Parameter:
    """Parameters that differ in nothing but the numbers in their names.

    Args:
        at_rest, gradient, slots: placements, one per mesh axis; gradient is None where there is none.
        sent: bytes that one rank sends for all of them in a step, by axis and use (one of `USES`).
    """

    name: str
    copies: int
    shape: tuple[int, ...]
    at_rest: Placements
    gradient: Placements | None
    slots: Placements
    note: str
    sent: dict[tuple[str, str], int]


@dataclass(frozen=True)
class Whole:
    """An op repeated on every rank for want of a rule: by axis, FLOPs that others compute too, and bytes to gather."""

    op: str
    module: str
    phase: str
    output: str
    wasted: dict[str, int]
    gathered: dict[str, int]


@dataclass(frozen=True)
class Product:
    """A matrix product (or attention) of a block: its module within the block, its parameter, where both lie."""

    module: str
    op: str
    weight: str
    shape: tuple[int, ...]
    placements: Placements
    output: str
    made: Placements


@dataclass(frozen=True)
class Block:
    """How one of the repeated layers is computed.

    Args:
        name: the layers, as one name.
        columns: products in forward order; those of one column read the same value.
        forward, backward: collectives of activations in the gap before a column; len(columns) is behind the last.
    """

    name: str
    copies: int
    columns: tuple[tuple[Product, ...], ...]
    forward: tuple[tuple[int, Traffic], ...]
    backward: tuple[tuple[int, Traffic], ...]


@dataclass(frozen=True)
class Account:
    """Everything that `explain()` says. Bytes are those that this rank sends in one step (ring algorithms)."""

    axes: tuple[Axis, ...]
    stage: int
    accumulate: int
    backend: str
    cost: Cost
    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]
    whole: tuple[Whole, ...]
    block: Block | None
    constants: tuple[tuple[str, str, str, int], ...]
    optimizer: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def mesh(self) -> str:
        return ", ".join(f"{axis.name}={axis.ranks}" for axis in self.axes) or "of one rank"

    @property
    def share(self) -> float:
        """FLOPs of a rank over its fair part of one device's."""
        ranks = math.prod(axis.ranks for axis in self.axes)
        return self.cost.flops * ranks / max(self.cost.global_flops, 1)

    def by_purpose(self) -> dict[tuple[str, str], int]:
        """Bytes sent, by axis and role."""
        found: dict[tuple[str, str], int] = {}
        for c in self.cost.collectives:
            key = (c.axis, c.role.value)
            found[key] = found.get(key, 0) + c.sent
        return found


def account(step: Step, training: Training) -> Account:
    """The account of a step under `training`'s program."""
    return _Accountant(step, training).run()


@dataclass
class _Entry:
    """A parameter and what it sends, before equal ones are joined."""

    name: str
    shape: tuple[int, ...]
    at_rest: Placements
    gradient: Placements | None
    slots: Placements
    note: str
    sent: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What parameters must share to be listed as one."""
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "#", self.name)
        return (
            pattern, self.shape, self.at_rest, self.gradient, self.slots, self.note, tuple(sorted(self.sent.items()))
        )  # fmt: skip


class _Accountant:
    def __init__(self, step: Step, training: Training) -> None:
        self.step = step
        self.training = training
        self.context = step.context
        self.axes = step.context.axes
        self.accumulate = step.plan.accumulate
        self.placed = training.snapshots.get("zero", training.snapshots["place"]).graphs
        self.micro = self.placed["micro"]
        self.order = {node: i for i, node in enumerate(self.micro.module.graph.nodes)}
        self.by_parameter: dict[str, dict[tuple[str, str], int]] = {}
        self.by_module: dict[str, list[Traffic]] = {}
        self.of_node: dict[fx.Node, tuple[str, Traffic]] = {}  # changes of activations: their module and collective
        self.bytes_of: dict[fx.Node, tuple[str, int]] = {}
        self._attribute()
        modules = {name.rpartition(".")[0] for name in step.modules.parameters()}
        tags = (tag(n).module for g in self.placed.values() for n in g.module.graph.nodes if TAG in n.meta)
        self.layers = Layers([*modules, *tags])

    def run(self) -> Account:
        notes = []
        if self.step.plan.zero.stage in (1, 2) and self.accumulate == 1:
            notes.append("stages 1 and 2 are the same program at accumulate=1: a gradient is reduced when it is made")
        if not self.axes:
            notes.append("the world has one rank: nothing is sharded and nothing is sent")
        return Account(
            axes=self.axes,
            stage=self.step.plan.zero.stage,
            accumulate=self.accumulate,
            backend=self.step.plan.backend,
            cost=self.step.cost(),
            layers=self._layers(),
            parameters=self._parameters(),
            whole=self._whole(),
            block=self._block(),
            constants=tuple(
                (name, dims(v.shape), str(v.dtype).removeprefix("torch."), v.numel() * v.element_size())
                for name, v in self.training.captured.constants.items()
            ),
            optimizer=self._optimizer(),
            notes=tuple(notes),
        )

    # ---------------------------------------------------------------- who causes what

    def _attribute(self) -> None:
        """Give every collective of the lowered graphs to a parameter or to a module."""
        lowered = self.training.snapshots["lower"].graphs
        for name, graph in self.placed.items():
            # what `lower` writes for a change of placement carries the change's own tag
            changes = {id(tag(n)): n for n in graph.module.graph.nodes if n.target is redistribute}
            owners = _owners(graph)
            for call in calls(lowered[name]):
                change = changes[id(tag(call.node))]
                self.bytes_of[change] = (call.axis, call.sent * self.accumulate)
                self._give(call, change, owners.get(change))
        epilogue = self.training.program.graphs.get("epilogue")
        for call in calls(epilogue) if epilogue is not None else ():
            parameter = _parameter_updated(epilogue, call.node) if epilogue is not None else None
            if parameter is not None:
                use = REDUCE if tag(call.node).role is Role.GRAD_REDUCE else GATHER_UPDATE
                self._add(parameter, call.axis, use, call.sent)

    def _give(self, call: Call, change: fx.Node, parameter: tuple[str, bool] | None) -> None:
        sent = call.sent * self.accumulate
        backward = tag(change).phase.backward
        if parameter is not None:
            name, is_gradient = parameter
            self._add(name, call.axis, REDUCE if is_gradient else GATHER_BACKWARD if backward else GATHER_FORWARD, sent)
            return
        args: tuple[Any, ...] = change.args
        traffic = Traffic(
            call.axis,
            "backward" if backward else "forward",
            _op(call.op, args[3]),
            f"{args[2]} -> {args[3]}",
            dims(change.meta["val"].shape),
            self.accumulate,
            sent,
        )
        module = _owner(change)
        self.by_module.setdefault(module, []).append(traffic)
        self.of_node[change] = (module, traffic)

    def _add(self, parameter: str, axis: str, use: str, sent: int) -> None:
        entry = self.by_parameter.setdefault(parameter, {})
        entry[axis, use] = entry.get((axis, use), 0) + sent

    # ---------------------------------------------------------------- layers and parameters

    def _layers(self) -> tuple[Layer, ...]:
        """Modules with a parameter or a collective, in the order of the forward pass."""
        nodes = [n for n in self.micro.module.graph.nodes if n.op == "call_function" and TAG in n.meta]
        first: dict[str, int] = {}  # where each module, or one within it, begins
        for i, path in enumerate(dict.fromkeys(tag(n).module for n in nodes)):
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                first.setdefault(".".join(parts[:end]), i)
        modules = {name.rpartition(".")[0]: None for name in self.step.modules.parameters()}
        listed = dict.fromkeys([*modules, *self.by_module])
        groups: dict[tuple[Any, ...], list[str]] = {}
        for module in sorted(listed, key=lambda m: (m == "", first.get(m, len(first)), m.count("."))):
            found = tuple(_joined(self.by_module.get(module, ())))
            groups.setdefault((self.layers.pattern(module), found), []).append(module)
        return tuple(
            Layer(joint_name(names) or "the loss", len(names), tuple(_times(t, len(names)) for t in found))
            for (_, found), names in groups.items()
        )

    def _parameters(self) -> tuple[Parameter, ...]:
        groups: dict[tuple[Any, ...], list[_Entry]] = {}
        for p in self._entries():
            groups.setdefault(p.kind, []).append(p)
        return tuple(
            Parameter(
                joint_name([q.name for q in group]),
                len(group),
                group[0].shape,
                group[0].at_rest,
                group[0].gradient,
                group[0].slots,
                group[0].note,
                {key: sent * len(group) for key, sent in group[0].sent.items()},
            )
            for group in groups.values()
        )

    def _entries(self) -> Iterator[_Entry]:
        assigned = self.context.binding
        gradients = {port.name: port for port in self.training.gradients}
        trainable = set(self.step.modules.trainable())
        for name, p in self.step.modules.parameters().items():
            resting = at_rest(tuple(p.shape), self.context.placed(name), self.context)
            note = ""
            if name not in trainable:
                note = "is not trained"
            elif name not in gradients:
                note = "has no path to the loss: it is neither updated nor decayed"
            elif assigned is not None and name in assigned.unassigned:
                note = "is in no group of the optimizer: it is not updated"
            gradient = gradients[name].placements if name in gradients else None
            sent = self.by_parameter.get(name, {})
            yield _Entry(name, tuple(p.shape), resting.parameter, gradient, resting.slot, note, sent)

    # ---------------------------------------------------------------- the rest

    def _whole(self) -> tuple[Whole, ...]:
        found = []
        for graph in self.placed.values():
            for node in graph.module.graph.nodes:
                made = node.op == "call_function" and TAG in node.meta and node.target not in CHEAP_VIEWS
                if made and node.target is not redistribute and tag(node).rule == "replicated":
                    found.append(self._repeated(node))
        return tuple(sorted(found, key=lambda w: (sum(w.wasted.values()), sum(w.gathered.values())), reverse=True))

    def _repeated(self, node: fx.Node) -> Whole:
        split = {i for i in range(len(self.axes)) if _is_split(node, i)}
        work = flops(node) * self.accumulate // math.prod(self.axes[i].ranks for i in split)
        gathered = {axis.name: 0 for axis in self.axes}
        for change in node.all_input_nodes:
            while change.target is redistribute:
                axis, sent = self.bytes_of.get(change, (self.axes[0].name, 0))
                gathered[axis] += sent
                change = change.all_input_nodes[0]
        return Whole(
            str(node.target).removeprefix("aten."),
            _owner(node) or "the loss",
            tag(node).phase.value,
            _shape(node.meta.get("val")),
            {a.name: 0 if i in split else work * (a.ranks - 1) // a.ranks for i, a in enumerate(self.axes)},
            gathered,
        )

    def _optimizer(self) -> tuple[str, ...]:
        binding = self.step.binding
        if binding is None:
            return ("no optimizer: step(...) is refused, gradients and evaluate work",)
        cost = {
            Mode.GRAPH: "no traffic of its own, fused with the update",
            Mode.SHARD: "no traffic of its own, but uncompiled, and the host waits for the device once a step",
            Mode.OWNER: "two all-to-alls a step carry parameters, gradients and state to one owner each and back",
        }[binding.mode]
        lines = [f"optimizer {binding.class_name}: {binding.mode.value} ({binding.mode.name}); {cost}"]
        if self.step.plan.clip_norm is not None:
            lines.append(f"gradients are clipped to norm {self.step.plan.clip_norm:g} of the whole model")
        return tuple(lines)

    # ---------------------------------------------------------------- the block

    def _block(self) -> Block | None:
        """The repeated layers that compute most, by the second of them: the first has a neighbour of another kind."""
        work: Counter[str] = Counter()
        members: dict[str, dict[str, None]] = {}
        products = [n for n in self.order if n.op == "call_function" and TAG in n.meta and _is_product(n)]
        for node in products:
            path = _owner(node)
            parts, pattern = path.split("."), self.layers.pattern(path).split(".")
            if "#" in pattern:
                end = pattern.index("#") + 1
                key = ".".join(pattern[:end])
                work[key] += flops(node)
                members.setdefault(key, {})[".".join(parts[:end])] = None
        found = [key for key, _ in work.most_common() if len(members[key]) > 1]
        if not found:
            return None
        names = list(members[found[0]])
        return self._drawn(names, names[1], [n for n in products if _within(_owner(n), names[1])])

    def _drawn(self, names: list[str], prefix: str, products: list[fx.Node]) -> Block:
        columns: dict[Any, list[fx.Node]] = {}
        for node in products:
            if tag(node).phase is Phase.FORWARD:
                columns.setdefault(self._read(node), []).append(node)
        column_of = {_owner(n): i for i, column in enumerate(columns.values()) for n in column}
        starts = [min(self.order[n] for n in column) for column in columns.values()]
        back = [(self.order[n], column_of[_owner(n)]) for n in products
                if tag(n).phase is Phase.INPUT_GRADIENT and _owner(n) in column_of]  # fmt: skip
        forward: list[tuple[int, Traffic]] = []
        backward: list[tuple[int, Traffic]] = []
        for node, (module, traffic) in self.of_node.items():
            if not _within(module, prefix) or node not in self.order:
                continue
            at = self.order[node]
            if traffic.phase == "forward":
                forward.append((sum(start < at for start in starts), traffic))
            else:
                backward.append((min((i for when, i in back if when < at), default=len(starts)), traffic))
        made = tuple(tuple(self._product(n, prefix) for n in column) for column in columns.values())
        return Block(joint_name(names), len(names), made, tuple(forward), tuple(backward))

    def _read(self, node: fx.Node) -> Any:
        """The value that a product multiplies with a parameter; itself where there is no parameter."""
        feeds = tensor_inputs(node)
        weights = [n for n in feeds if self._parameter_of(n) is not None]
        others = [_through_views(n) for n in feeds if n not in weights]
        return others[0] if weights and others else node

    def _parameter_of(self, node: fx.Node) -> str | None:
        origin = _origin(node)
        ports = zip(self.micro.placeholders(), self.micro.signature.inputs, strict=True)
        return next((p.name for n, p in ports if n is origin and p.kind is Kind.PARAMETER), None)

    def _product(self, node: fx.Node, prefix: str) -> Product:
        names = [name for n in tensor_inputs(node) if (name := self._parameter_of(n)) is not None]
        weights = {name: p for name, p in self.step.modules.parameters().items() if name in names}
        name, p = max(weights.items(), key=lambda item: item[1].dim(), default=("", None))
        shape = tuple(p.shape) if p is not None else ()
        value = node.meta["val"]
        return Product(
            _owner(node).removeprefix(prefix).removeprefix(".") or "itself",
            str(node.target).removeprefix("aten.").partition(".")[0],
            name.removeprefix(prefix).removeprefix("."),
            shape,
            at_rest(shape, self.context.placed(name), self.context).parameter if name else (),
            _shape(value[0] if isinstance(value, (tuple, list)) else value),
            tag(node).placements[0],
        )


def _is_product(node: fx.Node) -> bool:
    """A matrix product, a convolution, or attention, of which torch counts some kernels only."""
    return bool(flops(node)) or "scaled_dot_product" in str(node.target)


def _within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def _op(op: str, target: Any) -> str:
    """gloo has no reduce-scatter: an exchange and a sum stand for it."""
    return OPS[op] if op != "all_to_all_single" or not isinstance(target, Shard) else "reduce-scatter"


def _through_views(node: fx.Node) -> fx.Node:
    while node.target in CHEAP_VIEWS:
        node = node.all_input_nodes[0]
    return node


def _origin(node: fx.Node) -> fx.Node:
    """What a value is computed of alone, through ops of one tensor."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _owners(graph: Graph) -> dict[fx.Node, tuple[str, bool]]:
    """Changes of placement of parameters and of their gradients: the parameter's name, and whether it is a gradient."""
    found: dict[fx.Node, tuple[str, bool]] = {}
    parameters = {
        node: port.name
        for node, port in zip(graph.placeholders(), graph.signature.inputs, strict=True)
        if port.kind is Kind.PARAMETER
    }
    for node in graph.module.graph.nodes:
        if node.target is redistribute and (name := parameters.get(_origin(node))) is not None:
            found[node] = (name, False)
    for node, port in zip(graph.output_nodes(), graph.signature.outputs, strict=True):
        if port.kind is Kind.GRADIENT:
            while node.target is redistribute or node.target in CHEAP_VIEWS:
                if node.target is redistribute:
                    found.setdefault(node, (port.name, True))
                node = node.all_input_nodes[0]
    return found


def _parameter_updated(graph: Graph, node: fx.Node) -> str | None:
    """The parameter whose gradient a collective of the epilogue reduces, or whose new value it gathers."""
    names = {n: port.name for n, port in zip(graph.placeholders(), graph.signature.inputs, strict=True)}
    match tag(node).role:
        case Role.GRAD_REDUCE:
            while node.op != "placeholder":
                node = node.all_input_nodes[0]
            return names[node]
        case Role.PARAM_GATHER:
            while "copy_" not in str(node.target):
                node = next(iter(node.users))
            return names[node.all_input_nodes[0]]
    return None


def _owner(node: fx.Node) -> str:
    """The module of a node; of what has none, such as a sum of gradients, the innermost that holds its inputs' ones."""
    if tag(node).module:
        return tag(node).module
    return _common(_near(node, up=True)) or _common(_near(node, up=False))


def _near(node: fx.Node, up: bool) -> list[str]:
    """The nearest modules up or down the graph, through what belongs to none."""
    found: dict[str, None] = {}
    todo, seen = [node], {node}
    for n in todo:
        for other in n.all_input_nodes if up else n.users:
            if other in seen or TAG not in other.meta or other.op == "placeholder":
                continue
            seen.add(other)
            if tag(other).phase is not tag(node).phase and tag(node).phase is Phase.FORWARD:
                continue
            if tag(other).module:
                found[tag(other).module] = None
            elif len(seen) < 16:
                todo.append(other)
    return list(found)


def _common(paths: Sequence[str]) -> str:
    parts = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*(p.split(".") for p in paths), strict=False))
    return ".".join(column[0] for column in parts)


def _is_split(node: fx.Node, axis: int) -> bool:
    """Whether the ranks of an axis share a node's work."""
    values = [p for n in (node, *node.all_input_nodes) if TAG in n.meta for p in tag(n).placements]
    return any(not isinstance(p[axis], Replicate) for p in values)


def _joined(traffic: Sequence[Traffic]) -> Iterator[Traffic]:
    """Equal collectives as one."""
    for t, times in Counter(traffic).items():
        yield _times(t, times)


def _times(t: Traffic, n: int) -> Traffic:
    return replace(t, count=t.count * n, sent=t.sent * n)


def joint_name(names: Sequence[str]) -> str:
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


def dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return dims(value.shape)
    return ", ".join(_shape(v) for v in value) if isinstance(value, (tuple, list)) else "-"


def placed(placements: Placements | None) -> str:
    return "none" if placements is None else " ".join(map(str, placements)) or "R"


def size(nbytes: int) -> str:
    """Bytes with a unit."""
    found, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if found < 1024:
            break
        found, unit = found / 1024, larger
    return f"{found:.0f} {unit}" if unit == "B" else f"{found:.1f} {unit}"
