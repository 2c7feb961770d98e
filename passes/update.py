"""The epilogue of a step: reduce, clip, optimizer and schedule, on local shards, in place.

Before: the micro graph leaves gradients partial, sharded or whole.
After: the graph ``epilogue`` takes parameters at rest, gradients, optimizer slots and the step counter, and
writes their new values into them; it returns grad_norm and lr. With an optimizer whose own code must run, it
returns the reduced and clipped gradients instead.

    g = reduce_scatter(grad);  norm = sqrt(all_reduce(sum(g * g)));  g = g * min(1, clip / norm)
    p', slots' = rule(shard(p), g, slots, lr * schedule(step));  copy_(p, all_gather(p'));  copy_(slots, slots')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard import collectives, compat
from autoshard.manager import PassContext
from autoshard.optim import Mode, SlotTemplate
from autoshard.passes.lower import coordinate_ports, fake_inputs
from autoshard.passes.zero import parameter_at_rest, slot_at_rest
from autoshard.placement import Shard
from autoshard.program import TAG, Graph, Kind, Phase, Placements, Port, Program, Role, Signature, Tag
from autoshard.retrace import clean, stamp


def parameter_placements(shape: tuple[int, ...], context: PassContext) -> Placements:
    """How a parameter lies between steps."""
    if context.data is None:
        return context.replicate()
    return context.on_data(parameter_at_rest(shape, context.axes[context.data].ranks, context.plan))


def slot_placements(shape: tuple[int, ...], context: PassContext) -> Placements:
    """How a parameter's optimizer state lies, and its gradient while it is updated."""
    if context.data is None:
        return context.replicate()
    return context.on_data(slot_at_rest(shape, context.axes[context.data].ranks, context.plan))


def slot_port(name: str, template: SlotTemplate, shape: tuple[int, ...], context: PassContext) -> Port:
    placements = slot_placements(shape, context) if template.like_parameter else context.replicate()
    return Port(Kind.SLOT, f"{name}:{template.name}", template.shape, template.dtype, placements)


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
    return program.with_graph("epilogue", _Epilogue(gradients, context).build())


@dataclass(frozen=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]
    at_rest: Placements
    updated: Placements
    gradient: Placements
    slots: tuple[SlotTemplate, ...]


class _Epilogue:
    def __init__(self, gradients: Sequence[Port], context: PassContext) -> None:
        assert context.binding is not None
        self.context = context
        self.binding = context.binding
        unassigned = set(self.binding.unassigned)
        self.graph_mode = self.binding.mode is Mode.GRAPH
        self.gradients = [port for port in gradients if port.name not in unassigned]
        self.parameters = [
            _Parameter(
                port.name,
                port.shape,
                parameter_placements(port.shape, context),
                slot_placements(port.shape, context),
                port.placements,
                self.binding.slot_templates(port.name, port.shape, port.dtype) if self.graph_mode else (),
            )
            for port in self.gradients
        ]

    def build(self) -> Graph:
        context = self.context
        inputs: list[Port] = [
            Port(Kind.PARAMETER, p.name, g.shape, g.dtype, p.at_rest)
            for p, g in zip(self.parameters, self.gradients, strict=True)
        ]
        inputs += self.gradients
        inputs += [slot_port(p.name, slot, p.shape, context) for p in self.parameters for slot in p.slots]
        inputs.append(Port(Kind.STEP, "step", (), torch.int64, context.replicate()))
        inputs += coordinate_ports(context)
        outputs = [Port(Kind.RESULT, name, (), torch.float64, context.replicate()) for name in ("grad_norm", "lr")]
        if not self.graph_mode:
            outputs += [g.at(p.updated) for p, g in zip(self.parameters, self.gradients, strict=True)]
        with compat.fake_mode():
            module = compat.make_fx(lambda *flat: self._run(list(flat)), fake_inputs(tuple(inputs), context))
        for node, port in zip([n for n in module.graph.nodes if n.op == "placeholder"], inputs, strict=True):
            node.meta[TAG] = Tag(Phase.UPDATE, placements=(port.placements,))
        clean(module)
        return Graph(module, Signature(tuple(inputs), tuple(outputs)), local=True)

    def _run(self, flat: list[Tensor]) -> list[Tensor]:
        n = len(self.parameters)
        params, grads, rest = flat[:n], flat[n : 2 * n], flat[2 * n :]
        self.coordinates = rest[len(rest) - len(self.context.axes) :]
        step = rest[len(rest) - len(self.context.axes) - 1]
        self._stamp("")
        for i, p in enumerate(self.parameters):
            grads[i] = self._change(grads[i], p.gradient, p.updated, p.shape)
            self._stamp(p.name, Role.GRAD_REDUCE)
        norm = self._norm(grads)
        clip = self.context.plan.clip_norm
        # torch.nn.utils.clip_grad_norm_'s formula
        scale = None if clip is None else (clip / (norm + 1e-6)).clamp(max=1.0)
        factor = self._factor(step)
        lr = factor * self.binding.groups[0].lr
        self._stamp("")
        results = [norm.to(torch.float64), lr]
        if not self.graph_mode:
            results += grads if scale is None else [g * scale.to(g.dtype) for g in grads]
            torch.ops.aten.copy_.default(step, step + 1)
            self._stamp("")
            return results
        slots = iter(rest)
        number = (step + 1).to(torch.float64)
        for p, param, grad in zip(self.parameters, params, grads, strict=True):
            held = {slot.name: next(slots) for slot in p.slots}
            self._update(p, param, grad, held, factor, number, scale)
        torch.ops.aten.copy_.default(step, step + 1)
        self._stamp("")
        return results

    def _update(
        self,
        p: _Parameter,
        param: Tensor,
        grad: Tensor,
        held: dict[str, Tensor],
        factor: Tensor,
        number: Tensor,
        scale: Tensor | None,
    ) -> None:
        rule, group = self.binding.rule, self.binding.group_of(p.name)
        assert rule is not None
        shard = self._change(param, p.at_rest, p.updated, p.shape)
        self._stamp(p.name)
        if scale is not None:
            grad = grad * scale.to(grad.dtype)
        new, new_slots = rule.update(shard, grad, held, factor * group.lr, number, group)
        for slot, value in new_slots.items():
            torch.ops.aten.copy_.default(held[slot], value)
        if p.at_rest == p.updated:
            torch.ops.aten.copy_.default(param, new)
        self._stamp(p.name, region=f"update {p.name}")
        if p.at_rest != p.updated:
            whole = self._change(new, p.updated, p.at_rest, p.shape)
            self._stamp(p.name, Role.PARAM_GATHER)
            torch.ops.aten.copy_.default(param, whole)
            self._stamp(p.name)

    def _factor(self, step: Tensor) -> Tensor:
        schedule = self.context.schedule
        factor = 1.0 if schedule is None else schedule(step)
        if not isinstance(factor, Tensor):
            return torch.full((), float(factor), dtype=torch.float64, device=step.device)
        return factor.to(torch.float64)

    def _norm(self, grads: list[Tensor]) -> Tensor:
        """The L2 norm of the whole gradient; one all-reduce per set of axes over which gradients are sharded."""
        sums: dict[tuple[int, ...], list[Tensor]] = {}
        for p, grad in zip(self.parameters, grads, strict=True):
            where = tuple(i for i, placement in enumerate(p.updated) if isinstance(placement, Shard))
            wide = grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
            sums.setdefault(where, []).append((wide * wide).sum(dtype=torch.float64))
            self._stamp(p.name, region=f"norm {p.name}")
        total: Tensor | None = None
        for where, parts in sums.items():
            part = torch.stack(parts).sum()
            for i in where:
                part = collectives.all_reduce(part, self.context.axes[i])
            self._stamp("", Role.NORM_REDUCE)
            total = part if total is None else total + part
        assert total is not None
        norm = total.sqrt()
        self._stamp("")
        return norm

    def _change(self, x: Tensor, source: Placements, target: Placements, shape: tuple[int, ...]) -> Tensor:
        for i, axis in enumerate(self.context.axes):
            x = collectives.redistribute(x, axis, source[i], target[i], shape, self.coordinates[i])
        return x

    def _stamp(self, name: str, role: Role | None = None, region: str = "") -> None:
        stamp(compat.traced_graph(), Tag(Phase.UPDATE, name.rpartition(".")[0], role, region=region))
