"""What was placed where and why, as plain text of at most 120 columns. `page` has the same as HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoshard.account import USES, Account, account, dims, placed, size
from autoshard.placement import Shard

if TYPE_CHECKING:
    from autoshard.api import Step
    from autoshard.engine import Training

_WIDTH = 120
_LISTED = 20  # ops without a rule


def explain(step: Step, training: Training) -> str:
    """The account of a step under `training`'s program: parameters, layers, replicated ops, constants, optimizer.

    Bytes are those that this rank sends in one optimizer step (ring algorithms).
    """
    return render(account(step, training))


def page(step: Step, training: Training) -> str:
    """The same as one HTML file that needs no other."""
    from autoshard.page import render

    return render(account(step, training))


def render(a: Account) -> str:
    """An account as text."""
    parts = [heading(a), _parameters(a), _layers(a), _traffic(a), _whole(a), _constants(a), list(a.optimizer)]
    return "\n\n".join("\n".join(_wrapped(line) for line in part) for part in parts if part)


def _wrapped(line: str) -> str:
    return line if len(line) <= _WIDTH else "\n".join(textwrap.wrap(line, _WIDTH, subsequent_indent="    "))


def heading(a: Account) -> list[str]:
    cost = a.cost
    return [
        f"mesh {a.mesh}; ZeRO stage {a.stage}; {a.accumulate} micro-batch{'es' * (a.accumulate > 1)} a step; "
        f"backend {a.backend}",
        f"per rank and step: {cost.flops:,} FLOPs ({cost.flops / max(cost.global_flops, 1):.3f} of one device's, "
        f"{a.share:.3f} of a fair part); {size(cost.bytes_at_rest)} at rest; at most {size(cost.gathered_peak)} of "
        "gathered parameters alive",
        *a.notes,
    ]


def legend(a: Account) -> list[str]:
    where = ", ".join(axis.name for axis in a.axes) or "none"
    lines = [f"placements on the axes ({where}): R whole on every rank, S(d) split along dim d, P a term of a sum"]
    if any(isinstance(p, Shard) and p.outer > 1 for row in a.parameters for p in (*row.at_rest, *row.slots)):
        lines.append("S(d/k): each of k equal parts of dim d is split")
    return lines


def uses(a: Account) -> list[tuple[str, str]]:
    """The columns of what parameters send: axis and use; on several axes those that any parameter has."""
    if len(a.axes) <= 1:
        return [(a.axes[0].name if a.axes else "", use) for use in USES]
    found = {key for p in a.parameters for key in p.sent}
    return [(axis.name, use) for axis in a.axes for use in USES if (axis.name, use) in found]


def _parameters(a: Account) -> list[str]:
    columns = uses(a)
    several = len(a.axes) > 1
    above = ("", "", "", "", "", *((axis for axis, _ in columns) if several else [""] * len(columns)))
    rows: list[Sequence[str]] = [("parameter", "shape", "param", "grad", "opt", *(use for _, use in columns))]
    for p in a.parameters:
        sent = [p.sent.get(column, 0) for column in columns]
        slots = placed(p.slots) if p.gradient is not None else "none"
        cells = [dims(p.shape), placed(p.at_rest), placed(p.gradient), slots]
        rows.append((p.name, *cells, *(size(n) if n else "-" for n in sent)))
    notes = [f"{p.name}: {p.note}" for p in a.parameters if p.note]
    return [*legend(a), *_table(rows, above if several else None), *notes]


def _layers(a: Account) -> list[str]:
    rows: list[Sequence[str]] = [("layer", "axis", "phase", "collective", "change", "tensor", "calls", "sent")]
    for layer in a.layers:
        for i, t in enumerate(layer.traffic):
            name = "" if i else layer.name
            rows.append((name, t.axis, t.phase, t.op, t.change, t.shape, str(t.count), size(t.sent)))
    if len(rows) == 1:
        return ["no layer sends activations"] if a.axes else []
    rest = sum(layer.copies for layer in a.layers if not layer.traffic)
    more = [f"{rest} more modules with parameters send no activations"] if rest else []
    return ["activations that layers send:", *_table(rows), *more]


def _traffic(a: Account) -> list[str]:
    if not a.cost.collectives:
        return []
    rows: list[Sequence[str]] = [("axis", "for", "collective", "graph", "calls", "sent")]
    rows += [(c.axis, c.role.value, c.op, c.graph, str(c.count), size(c.sent)) for c in a.cost.collectives]
    totals = ", ".join(f"{axis} {size(sent)}" for axis, sent in a.cost.sent.items())
    return [*_table(rows), f"sent in all, by axis: {totals}"]


def _whole(a: Account) -> list[str]:
    """Ops that every rank repeats because no rule says how to split them, the dearest first."""
    if not a.whole:
        return ["every op that a shard or a partial sum reaches is split by a rule"] if a.axes else []
    several = len(a.axes) > 1
    above = ("", "", "", "", *(axis.name for axis in a.axes for _ in range(2)))
    rows: list[Sequence[str]] = [("op", "module", "phase", "output", *["FLOPs wasted", "sent to gather"] * len(a.axes))]
    for w in a.whole[:_LISTED]:
        costs = [cell for x in a.axes for cell in (f"{w.wasted[x.name]:,}", size(w.gathered[x.name]))]
        rows.append((w.op, w.module, w.phase, w.output[:30], *costs))
    more = [f"... and {len(a.whole) - _LISTED} more"] if len(a.whole) > _LISTED else []
    text = f"{len(a.whole)} ops run whole on every rank of an axis for want of a rule (autoshard/rules/table.py):"
    return [text, *_table(rows, above if several else None, shrink=1), *more]


def _constants(a: Account) -> list[str]:
    """Tensors that the loss took from its closure."""
    if not a.constants:
        return []
    rows: list[Sequence[str]] = [("constant", "shape", "dtype", "bytes")]
    rows += [(name, shape, dtype, size(nbytes)) for name, shape, dtype, nbytes in a.constants]
    return ["tensors that the model or loss closed over, whole on every rank and never updated:", *_table(rows)]


def _table(rows: list[Sequence[str]], above: Sequence[str] | None = None, shrink: int = 0) -> list[str]:
    """Lines with aligned columns; of column `shrink` only the ends of names, where the table would be too wide.

    Args:
        above: a first heading line.
    """
    heads = [above, rows[0]] if above else [rows[0]]
    cells = [list(row) for row in (*heads, *rows[1:])]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    room = max(widths[shrink] - max(0, sum(widths) + 2 * (len(widths) - 1) - _WIDTH), 12)
    if room < widths[shrink]:
        widths[shrink] = room
        for row in cells:
            row[shrink] = row[shrink] if len(row[shrink]) <= room else "..." + row[shrink][3 - room :]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    rule = "-" * min(len(max(lines, key=len)), _WIDTH)
    return [*lines[: len(heads)], rule, *lines[len(heads) :]]
