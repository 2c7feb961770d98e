"""The list of passes, and what runs them: times, records, dumps, switches off and verifies each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from autoshard.collectives import Axis
from autoshard.optim import Binding
from autoshard.placement import REPLICATE, Placement
from autoshard.plan import Plan
from autoshard.program import PassRecord, Placements, Program


@dataclass(frozen=True)
class PassContext:
    """What a pass may read besides the program.

    Args:
        plan: as the user made it, its mesh resolved.
        axes: mesh axes of more than one rank, outermost first; placements are in this order.
        binding: the optimizer, None without one.
        schedule: factor on the learning rate by update, None for 1.
        device: where the program runs.
        parameters: how `place` laid each parameter in the training program, whole on the data axis; empty before there
            is one. Later programs keep to it.
        wishes: what plan.rules ask of parameters on the tensor axis.
    """

    plan: Plan
    axes: tuple[Axis, ...]
    binding: Binding | None = None
    schedule: Callable[[torch.Tensor], torch.Tensor] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parameters: Mapping[str, Placements] = field(default_factory=dict)
    wishes: Mapping[str, Placement] = field(default_factory=dict)

    @property
    def data(self) -> int | None:
        """Position of the data axis among `axes`, None where it has one rank."""
        return next((i for i, axis in enumerate(self.axes) if axis.name == "data"), None)

    def replicate(self) -> Placements:
        return (REPLICATE,) * len(self.axes)

    def on_data(self, placement: Placement, others: Placements | None = None) -> Placements:
        """`placement` on the data axis; on the other axes `others`, or replicated."""
        return tuple(placement if i == self.data else p for i, p in enumerate(others or self.replicate()))

    def placed(self, name: str) -> Placements:
        """How `place` laid a parameter, whole on the data axis; before it did, and where it has no use, replicated."""
        return self.parameters.get(name, self.replicate())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The sizes of `axes`."""
        return tuple(axis.ranks for axis in self.axes)


Pass = Callable[[Program, PassContext], Program]


def pass_list() -> list[tuple[str, Pass]]:
    """Every pass in order. A program is what the list makes of a captured graph."""
    from autoshard.passes.accumulate import accumulate
    from autoshard.passes.canonicalize import canonicalize
    from autoshard.passes.lower import lower
    from autoshard.passes.place import place
    from autoshard.passes.update import update
    from autoshard.passes.zero import zero

    return [
        ("canonicalize", canonicalize),
        ("place", place),
        ("zero", zero),
        ("lower", lower),
        ("accumulate", accumulate),
        ("update", update),
    ]


def run_passes(
    program: Program,
    context: PassContext,
    *,
    watch: Callable[[str, Program], None] | None = None,
) -> Program:
    """Run the list, less what plan.without names.

    Args:
        watch: told every program as it stands after each pass, "capture" first.

    Raises:
        VerifyError: an invariant does not hold after a pass.
    """
    from autoshard.invariants import check_program

    dump = os.environ.get("AUTOSHARD_DUMP")
    _report(0, "capture", program, dump, watch)
    for number, (name, run) in enumerate(pass_list(), start=1):
        if name in context.plan.without:
            continue
        started = time.perf_counter()
        before = _sizes(program)
        program = run(program, context)
        check_program(program, context, name)
        summary = ", ".join(
            f"{graph} {before.get(graph, 0)} -> {size} nodes" for graph, size in _sizes(program).items()
        )
        program = program.with_record(PassRecord(name, time.perf_counter() - started, summary))
        _report(number, name, program, dump, watch)
    return program


def _sizes(program: Program) -> dict[str, int]:
    return {name: len(graph.module.graph.nodes) for name, graph in program.graphs.items()}


def _report(
    number: int, name: str, program: Program, dump: str | None, watch: Callable[[str, Program], None] | None
) -> None:
    if watch is not None:
        watch(name, program)
    if dump and int(os.environ.get("RANK", "0")) == 0:
        folder = Path(dump)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}-{name}.txt").write_text(str(program) + "\n")
