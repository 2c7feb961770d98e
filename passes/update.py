"""The epilogue of a step: reduce, clip, optimizer and schedule, on local shards, in place.

Before: the micro graph leaves gradients partial, sharded or whole.
After: the graph ``epilogue`` takes parameters at rest, gradients, optimizer slots and the step counter, and
writes their new values into them; it returns grad_norm and lr. With an optimizer whose own code must run, it
returns the reduced and clipped gradients instead.

    g = reduce_scatter(grad);  norm = sqrt(all_reduce(sum(g * g)));  g = g * min(1, clip / norm)
    p', slots' = rule(shard(p), g, slots, lr * schedule(step));  copy_(p, all_gather(p'));  copy_(slots, slots')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autoshard import collectives, moves, ops
from autoshard.fragments import Writer
from autoshard.manager import PassContext
from autoshard.optim import Mode, SlotTemplate
from autoshard.passes.lower import coordinate_ports, local_shape
from autoshard.passes.zero import Resting, at_rest
from autoshard.placement import REPLICATE, Shard
from autoshard.program import Graph, Kind, Phase, Placements, Port, Program, Role, Signature, Tag
from autoshard.retrace import clean


def slot_placements(template: SlotTemplate, resting: Resting, context: PassContext) -> Placements:
    """How one slot of a parameter's optimizer state lies."""
    return resting.slot if template.like_parameter else context.replicate()


def update(program: Program, context: PassContext) -> Program:
    """Add the epilogue where there is an optimizer and the program has gradients."""
    micro = program.graphs.get("micro")
    if micro is None or context.binding is None:
        return program
    gradients = [port for _, port in micro.signature.find_outputs(Kind.GRADIENT)]
    if not gradients:  # with micro-batches they are in the accumulators
        prefix = f"{Kind.GRADIENT.value}:"
        gradients = [
            Port(Kind.GRADIENT, port.name.removeprefix(prefix), port.shape, port.dtype, port.placements)
            for _, port in micro.signature.find_inputs(Kind.ACCUMULATOR)
            if port.name.startswith(prefix)
        ]
    parameters = micro.signature.find_inputs(Kind.PARAMETER)
    placed = {port.name: context.on_data(REPLICATE, port.placements) for _, port in parameters}
    return program.with_graph("epilogue", _Epilogue(gradients, placed, context).build())


@dataclass(frozen=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]
    at_rest: Placements
    updated: Placements
    gradient: Placements
    slots: tuple[tuple[SlotTemplate, Placements], ...]


class _Epilogue:
    def __init__(self, gradients: Sequence[Port], placed: Mapping[str, Placements], context: PassContext) -> None:
        assert context.binding is not None
        self.context = context
        self.binding = context.binding
        unassigned = set(self.binding.unassigned)
        self.writer = Writer()
        self.coordinates: list[fx.Node] = []
        self.graph_mode = self.binding.mode is Mode.GRAPH
        self.gradients = [port for port in gradients if port.name not in unassigned]
        self.parameters = [self._parameter(port, placed[port.name]) for port in self.gradients]

    def _parameter(self, port: Port, placed: Placements) -> _Parameter:
        resting = at_rest(port.shape, placed, self.context)
        templates = self.binding.slot_templates(port.name, port.shape, port.dtype) if self.graph_mode else ()
        slots = tuple((template, slot_placements(template, resting, self.context)) for template in templates)
        return _Parameter(port.name, port.shape, resting.parameter, resting.slot, port.placements, slots)

    def build(self) -> Graph:
        context = self.context
        inputs: list[Port] = [
            Port(Kind.PARAMETER, p.name, g.shape, g.dtype, p.at_rest)
            for p, g in zip(self.parameters, self.gradients, strict=True)
        ]
        inputs += self.gradients
        inputs += [
            Port(Kind.SLOT, f"{p.name}:{slot.name}", slot.shape, slot.dtype, placements)
            for p in self.parameters
            for slot, placements in p.slots
        ]
        inputs.append(Port(Kind.STEP, "step", (), torch.int64, context.replicate()))
        inputs += coordinate_ports(context)
        outputs = [Port(Kind.RESULT, name, (), torch.float64, context.replicate()) for name in ("grad_norm", "lr")]
        if not self.graph_mode:
            outputs += [g.at(p.updated) for p, g in zip(self.parameters, self.gradients, strict=True)]
        nodes = [
            self.writer.placeholder(
                f"{port.kind.name.lower()}_{port.name}",
                local_shape(port.shape, port.placements, context),
                port.dtype,
                context.device,
                Tag(Phase.UPDATE, placements=(port.placements,)),
            )
            for port in inputs
        ]
        module = self.writer.finish(self._write(nodes))
        clean(module)
        return Graph(module, Signature(tuple(inputs), tuple(outputs)), local=True)

    def _write(self, nodes: list[fx.Node]) -> list[fx.Node]:
        n = len(self.parameters)
        params, grads, rest = nodes[:n], nodes[n : 2 * n], nodes[2 * n :]
        self.coordinates = rest[len(rest) - len(self.context.axes) :]
        step = rest[len(rest) - len(self.context.axes) - 1]
        grads = [
            self._change(g, p.gradient, p.updated, p, Role.GRAD_REDUCE)
            for p, g in zip(self.parameters, grads, strict=True)
        ]
        norm = self._norm(grads)
        scale, clip = None, self.context.plan.clip_norm
        if clip is not None:  # torch.nn.utils.clip_grad_norm_'s formula
            scale = self._once(lambda total: (clip / (total + 1e-6)).clamp(max=1.0), norm)
        factor = self._once(self._factor, step)
        results = [norm, self._once(lambda factor: factor * self.binding.groups[0].lr, factor)]
        if self.graph_mode:
            number = self._once(lambda step: (step + 1).to(torch.float64), step)
            slots = iter(rest)
            for p, param, grad in zip(self.parameters, params, grads, strict=True):
                held = {slot.name: next(slots) for slot, _ in p.slots}
                self._update(p, param, grad, held, [factor, number] if scale is None else [factor, number, scale])
        elif scale is None:
            results += grads
        else:
            for p, grad in zip(self.parameters, grads, strict=True):
                clipped = self.writer.write(lambda g, s: g * s.to(g.dtype), [grad, scale], _tag(p), "clip")
                results.append(clipped)
        self._once(lambda step: torch.ops.aten.copy_.default(step, step + 1), step)
        return results

    def _once(self, function: Callable[..., Tensor], *nodes: fx.Node) -> fx.Node:
        """What `function` does, written where nothing else does the same."""
        return self.writer.write(function, nodes, Tag(Phase.UPDATE))

    def _update(
        self, p: _Parameter, param: fx.Node, grad: fx.Node, held: dict[str, fx.Node], numbers: list[fx.Node]
    ) -> None:
        """The rule as a region of its own: what it writes lies as the optimizer's state does."""
        rule, group = self.binding.rule, self.binding.group_of(p.name)
        assert rule is not None
        in_place = p.at_rest == p.updated
        names = list(held)

        def run(shard: Tensor, grad: Tensor, *rest: Tensor) -> Tensor | None:
            slots = dict(zip(names, rest, strict=False))
            factor, number, *scale = rest[len(names) :]
            if scale:
                grad = grad * scale[0].to(grad.dtype)
            new, new_slots = rule.update(shard, grad, slots, factor * group.lr, number, group)
            for slot, value in new_slots.items():
                torch.ops.aten.copy_.default(slots[slot], value)
            if not in_place:
                return new
            torch.ops.aten.copy_.default(shard, new)
            return None

        shard = self._change(param, p.at_rest, p.updated, p)
        key = ("update", self.binding.groups.index(group), in_place, len(numbers))
        region = _tag(p).but(region=f"update {p.name}")
        new = self.writer.write(run, [shard, grad, *held.values(), *numbers], region, key)
        if not in_place:
            whole = self._change(new, p.updated, p.at_rest, p, Role.PARAM_GATHER)
            self.writer.call(torch.ops.aten.copy_.default, (param, whole), {}, _tag(p))

    def _factor(self, step: Tensor) -> Tensor:
        schedule = self.context.schedule
        factor = 1.0 if schedule is None else schedule(step)
        if not isinstance(factor, Tensor):
            return torch.full((), float(factor), dtype=torch.float64, device=step.device)
        return factor.to(torch.float64)

    def _norm(self, grads: list[fx.Node]) -> fx.Node:
        """The L2 norm of the whole gradient; one all-reduce per set of axes over which gradients are sharded."""

        def squares(grad: Tensor) -> Tensor:
            wide = ops.wide(grad.abs() if grad.is_complex() else grad)
            return (wide * wide).sum(dtype=torch.float64)

        sums: dict[tuple[int, ...], list[fx.Node]] = {}
        for p, grad in zip(self.parameters, grads, strict=True):
            where = tuple(i for i, placement in enumerate(p.updated) if isinstance(placement, Shard))
            made = self.writer.write(squares, [grad], _tag(p).but(region=f"norm {p.name}"), "norm")
            sums.setdefault(where, []).append(made)
        totals = [self._total(where, parts) for where, parts in sums.items()]
        return self._once(lambda *parts: torch.stack(parts).sum().sqrt(), *totals)

    def _total(self, where: tuple[int, ...], parts: list[fx.Node]) -> fx.Node:
        def total(*parts: Tensor) -> Tensor:
            part = torch.stack(parts).sum()
            for i in where:
                part = collectives.all_reduce(part, self.context.axes[i])
            return part

        return self.writer.write(total, parts, Tag(Phase.UPDATE, role=Role.NORM_REDUCE), ("total", where))

    def _change(
        self, x: fx.Node, source: Placements, target: Placements, p: _Parameter, role: Role | None = None
    ) -> fx.Node:
        if source == target:
            return x

        def change(x: Tensor, *coordinates: Tensor) -> Tensor:
            return moves.change(x, self.context.axes, source, target, p.shape, coordinates)

        key = ("change", source, target, p.shape)
        return self.writer.write(change, [x, *self.coordinates], _tag(p, role), key)


def _tag(p: _Parameter, role: Role | None = None) -> Tag:
    return Tag(Phase.UPDATE, p.name.rpartition(".")[0], role)
