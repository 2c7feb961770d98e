"""An account as one HTML file: inline styles and pictures, nothing loaded, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from autoshard import explain as text
from autoshard.account import Account, Product, Traffic, dims, placed, size
from autoshard.placement import Shard
from autoshard.program import Placements

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; --card: #f5f7f9;
  --axis0: #1f6fd0; --axis1: #c2570c; --axis2: #6f42c1 }
@media (prefers-color-scheme: dark) { :root { --page: #12161b; --ink: #e3e8ee; --soft: #9aa5b1; --line: #333b45;
  --card: #1a2027; --axis0: #6aa9f4; --axis1: #f0964f; --axis2: #b392f0 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px }
h1 { font-size: 1.5rem; margin: 0 0 4px } h2 { font-size: 1.12rem; margin: 34px 0 6px }
p { margin: 4px 0 10px; color: var(--soft); max-width: 80ch }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 10px; margin: 16px 0 }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px }
.tile b { display: block; font-size: 1.2rem; font-weight: 600 } .tile span { color: var(--soft); font-size: .84rem }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px }
.box > svg { display: block; margin: 8px } .narrow { max-width: 462px }
table { border-collapse: collapse; width: 100%; font-size: .86rem; white-space: nowrap }
th, td { padding: 5px 12px; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top }
thead th { white-space: pre-line; vertical-align: bottom }
thead th { background: var(--card); color: var(--soft); font-weight: 600 }
tbody tr:last-child td { border-bottom: 0 }
.n { text-align: right; font-variant-numeric: tabular-nums } .soft { color: var(--soft) }
thead .n { min-width: 76px } code, .c { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .92em }
svg text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink) } svg .soft { fill: var(--soft) }
svg .small { font-size: 11px } svg .bold { font-weight: 600 }
"""


def render(a: Account) -> str:
    """The page. Names come from the user's model: all are escaped."""
    parts = [
        _summary(a),
        _sent(a),
        _block(a),
        _layers(a),
        _parameters(a),
        _whole(a),
        _collectives(a),
        _rest(a),
    ]
    title = f"autoshard: mesh {escape(a.mesh)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def _summary(a: Account) -> str:
    cost = a.cost
    tiles = [
        (f"{a.share:.3f}", f"FLOPs per rank over global / N: {_big(cost.flops)} of {_big(cost.global_flops)}"),
        (size(cost.bytes_at_rest), "at rest per rank: " + ", ".join(f"{k} {size(n)}" for k, n in cost.at_rest.items())),
        (size(cost.gathered_peak), "of gathered parameters alive at most"),
        *((size(cost.sent.get(axis.name, 0)), f"sent on {axis.name} ({axis.ranks} ranks)") for axis in a.axes),
    ]
    made = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in tiles
    )
    batches = f"{a.accumulate} micro-batch{'es' * (a.accumulate > 1)} a step"
    head = f"<h1>How one step is split</h1><p>Mesh <b>{escape(a.mesh)}</b>, ZeRO stage {a.stage}, {batches}, backend "
    notes = "".join(f"<p>{escape(note)}</p>" for note in a.notes)
    return f"{head}{escape(a.backend)}. All numbers are of one rank and one optimizer step.</p>{notes}" + (
        f'<div class="tiles">{made}</div>'
    )


def _big(n: int) -> str:
    power = min(int(math.log10(max(n, 1)) // 3), 6)
    return f"{n / 1000**power:.4g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}".strip()


def _colour(a: Account, axis: str) -> str:
    return f"var(--axis{[x.name for x in a.axes].index(axis) % 3})"


def _sent(a: Account) -> str:
    """Bars of bytes sent, by axis and purpose."""
    found = a.by_purpose()
    if not found:
        return ""
    names = [axis.name for axis in a.axes]
    bars = sorted(found.items(), key=lambda item: (names.index(item[0][0]), -item[1]))
    left, width, row = 196, 176, 26
    most = max(n for _, n in bars) or 1
    drawn = []
    for i, ((axis, purpose), n) in enumerate(bars):
        y, length = 6 + i * row, max(width * n / most, 2)
        drawn.append(
            _text(left - 10, y + 14, f"{axis}: {purpose}", anchor="end")
            + f'<rect x="{left}" y="{y}" width="{length:.1f}" height="18" rx="3" fill="{_colour(a, axis)}"/>'
            + _text(left + length + 8, y + 14, size(n), "soft")
        )
    picture = _svg(left + width + 72, 10 + row * len(bars), drawn, "bytes sent by axis and purpose")
    return f'<h2>Bytes sent, by axis and purpose</h2><div class="box narrow">{picture}</div>'


# ---------------------------------------------------------------- the block

_BOX, _ROW, _TOP = 144, 132, 30  # the width of a column, the height of a product, where the first one is
_NARROW, _WIDE = 24, 106  # a gap between columns without and with a collective


def _block(a: Account) -> str:
    b = a.block
    if b is None:
        return ""
    rows = max(len(column) for column in b.columns)
    gaps = [
        _WIDE if any(at == i for at, _ in (*b.forward, *b.backward)) else _NARROW for i in range(len(b.columns) + 1)
    ]
    starts = [sum(gaps[:i]) + i * _BOX for i in range(len(gaps))]
    deepest = max((sum(at == i for at, _ in b.backward) for i in range(len(gaps))), default=0)
    middle, below = _TOP + rows * _ROW / 2, _TOP + rows * _ROW + 22
    width, height = starts[-1] + gaps[-1], below + 22 + 34 * max(deepest, 1)
    drawn = [_marker(), _text(8, 16, "forward →", "soft"), _line(width - 8, 8, below, dashed=True)]
    drawn.append(
        _text(width - 8, below + 18, "← backward", "soft", "end")
        if all(at != len(b.columns) for at, _ in b.backward)
        else ""
    )
    for i, column in enumerate(b.columns):
        top = middle - len(column) * _ROW / 2
        drawn += [_product(a, p, starts[i] + gaps[i], top + j * _ROW) for j, p in enumerate(column)]
    for i, (x, gap) in enumerate(zip(starts, gaps, strict=True)):
        drawn.append(_line(x + 6, x + gap - 6, middle))
        drawn.append(_sends(a, x + gap / 2, middle, [t for at, t in b.forward if at == i]))
        drawn.append(_sends(a, x + gap / 2, below, [t for at, t in b.backward if at == i]))
    each = "" if b.copies == 1 else f", one of {b.copies} alike"
    made = _svg(width, height, drawn, f"how {b.name} is split")
    return (
        f"<h2>How <code>{escape(b.name)}</code> is split</h2><p>The matrix products of one block{each}, in order. "
        "Pale: the part of a weight that a rank computes with; dark: what it keeps between steps, where ZeRO splits "
        "that further on data (dashed) and gathers it for use. Between the products: what the block sends in forward; "
        "under them, along the dashed arrow: in backward. Bytes are those of one block and step.</p>"
        f'<div class="box" tabindex="0">{made}</div>'
    )


def _marker() -> str:
    return (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="var(--soft)"/></marker></defs>'
    )


def _line(start: float, end: float, y: float, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{start}" y1="{y}" x2="{end}" y2="{y}" stroke="var(--soft)" stroke-width="1.5"{dash} '
        'marker-end="url(#tip)"/>'
    )


def _sends(a: Account, x: float, y: float, traffic: Sequence[Traffic]) -> str:
    """Collectives, written under an arrow."""
    found = ""
    for i, t in enumerate(traffic):
        found += _text(x, y + 18 + 34 * i, t.op, "bold", "middle", _colour(a, t.axis))
        found += _text(x, y + 32 + 34 * i, f"{t.axis}, {size(t.sent)}", "small soft", "middle")
    return found


def _product(a: Account, p: Product, x: float, y: float) -> str:
    """A weight as a rectangle, its rank's part filled, with its name, shape and placements."""
    found = (
        f'<rect x="{x}" y="{y + 4}" width="{_BOX}" height="{_ROW - 10}" rx="8" fill="var(--card)" '
        'stroke="var(--line)"/>'
    ) + _text(x + 10, y + 22, _fit(p.module, 19), "bold")
    if not p.weight:
        found += _text(
            x + 10, y + 42, _fit(p.op.removeprefix("_scaled_dot_product_").replace("_", " "), 23), "small soft"
        )
        return found + _made(a, p, x + 10, y + 62)
    found += _weight(a, p, x + 10, y + 32)
    lines = [dims(p.shape), *(f"{axis.name} {placement}" for axis, placement in zip(a.axes, p.placements, strict=True))]
    for i, line in enumerate(lines[:4]):
        kind = "small" if i else "small soft"
        fill = _colour(a, a.axes[i - 1].name) if i else ""
        found += _text(x + 69, y + 43 + 15 * i, line, kind, colour=fill)
    return found + _made(a, p, x + 10, y + 104)


def _made(a: Account, p: Product, x: float, y: float) -> str:
    return _text(x, y, "output " + _fit(p.output, 15), "small soft") + _text(
        x, y + 14, _fit(_where(a, p.made), 24), "small soft"
    )


def _where(a: Account, placements: Placements) -> str:
    return ", ".join(f"{axis.name} {p}" for axis, p in zip(a.axes, placements, strict=True))


def _weight(a: Account, p: Product, x: float, y: float) -> str:
    """The first rank's part of a matrix, in use and at rest: what is split on an axis is cut along that dim."""
    side = 52.0
    in_use = at_rest = [(0.0, 1.0, 0.0, 1.0)]  # top, bottom, left, right
    cuts = ""
    for axis, placement in zip(a.axes, p.placements, strict=True):
        if not isinstance(placement, Shard) or placement.dim > 1:
            continue
        at_rest = [_cut(part, placement, axis.ranks, k) for part in at_rest for k in range(placement.outer)]
        if axis.name != "data":
            in_use = [_cut(part, placement, axis.ranks, k) for part in in_use for k in range(placement.outer)]
        steps = axis.ranks * placement.outer
        dash = ' stroke-dasharray="3 2"' if axis.name == "data" else ""
        for k in range(1, steps if steps <= 16 else 0):
            at = side * k / steps
            ends = (0.0, at, side, at) if placement.dim == 0 else (at, 0.0, at, side)
            cuts += (
                f'<line x1="{x + ends[0]:.1f}" y1="{y + ends[1]:.1f}" x2="{x + ends[2]:.1f}" y2="{y + ends[3]:.1f}" '
                f'stroke="{_colour(a, axis.name)}" stroke-width="1.5"{dash}/>'
            )
    frame = f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="var(--page)" stroke="var(--soft)"/>'
    return frame + _filled(in_use, x, y, side, 0.25) + _filled(at_rest, x, y, side, 0.5) + cuts


def _filled(parts: Iterable[tuple[float, float, float, float]], x: float, y: float, side: float, ink: float) -> str:
    return "".join(
        f'<rect x="{x + left * side:.1f}" y="{y + top * side:.1f}" width="{(right - left) * side:.1f}" '
        f'height="{(bottom - top) * side:.1f}" fill="var(--soft)" opacity="{ink}"/>'
        for top, bottom, left, right in parts
        if right > left and bottom > top
    )


def _cut(
    part: tuple[float, float, float, float], shard: Shard, ranks: int, k: int
) -> tuple[float, float, float, float]:
    """The first rank's part of the k-th of `shard.outer` parts, within `part`."""
    start, end = k / shard.outer, (k + 1 / ranks) / shard.outer
    top, bottom, left, right = part
    if shard.dim == 0:
        return max(top, start), min(bottom, end), left, right
    return top, bottom, max(left, start), min(right, end)


# ---------------------------------------------------------------- tables


def _layers(a: Account) -> str:
    if not a.axes:
        return ""
    rows = []
    for layer in a.layers:
        found = layer.traffic or (None,)
        for i, t in enumerate(found):
            name = _code(layer.name) if i == 0 else ""
            copies = str(layer.copies) if i == 0 else ""
            cells = ["-"] * 7
            if t is not None:
                cells = [t.axis, t.phase, t.op, _code(t.change), _code(t.shape), str(t.count), size(t.sent)]
            rows.append([name, copies, *cells])
    heads = ("layer", "modules", "axis", "phase", "collective", "change", "tensor", "calls", "sent")
    note = "Identical layers are one row: calls and bytes are of all of them. A tensor's shape is that of the whole."
    return f"<h2>Layers, and the activations they send</h2><p>{note}</p>" + _table(heads, rows, (1, 7, 8))


def _parameters(a: Account) -> str:
    columns = text.uses(a)
    heads = ["parameter", "copies", "shape", "at rest", "gradient", "optimizer"]
    heads += [f"{axis}\n{use}" if len(a.axes) > 1 else use for axis, use in columns]
    rows = []
    for p in a.parameters:
        note = f'<br><span class="soft">{escape(p.note)}</span>' if p.note else ""
        slots = placed(p.slots) if p.gradient is not None else "none"
        sent = [p.sent.get(column, 0) for column in columns]
        cells = map(_code, (dims(p.shape), placed(p.at_rest), placed(p.gradient), slots))
        rows.append([_code(p.name) + note, str(p.copies), *cells, *(size(n) if n else "-" for n in sent)])
    note = "".join(f"<p>{escape(line[0].upper() + line[1:])}.</p>" for line in text.legend(a))
    return f"<h2>Parameters</h2>{note}" + _table(heads, rows, (1, *range(6, len(heads))))


def _whole(a: Account) -> str:
    if not a.axes:
        return ""
    if not a.whole:
        return "<h2>Ops without a rule</h2><p>Every op that a shard or a partial sum reaches is split by a rule.</p>"
    heads = ["op", "module", "phase", "output"]
    heads += [f"{axis.name}\n{what}" for axis in a.axes for what in ("FLOPs wasted", "sent to gather")]
    rows = []
    for w in a.whole:
        costs = [cell for x in a.axes for cell in (f"{w.wasted[x.name]:,}", size(w.gathered[x.name]))]
        rows.append([_code(w.op), _code(w.module), escape(w.phase), _code(w.output), *costs])
    note = "Every rank of an axis repeats these, for want of a rule in autoshard/rules/table.py."
    return f"<h2>Ops without a rule</h2><p>{note}</p>" + _table(heads, rows, range(4, len(heads)))


def _collectives(a: Account) -> str:
    if not a.cost.collectives:
        return ""
    rows = [
        [c.axis, c.role.value, _code(c.op), c.graph, str(c.count), size(c.sent)]
        for c in sorted(a.cost.collectives, key=lambda c: -c.sent)
    ]
    return "<h2>All collectives</h2>" + _table(("axis", "for", "collective", "graph", "calls", "sent"), rows, (4, 5))


def _rest(a: Account) -> str:
    found = ""
    if a.constants:
        rows = [[_code(name), _code(shape), dtype, size(n)] for name, shape, dtype, n in a.constants]
        found += "<h2>Constants</h2><p>The model or loss closed over these; whole on every rank, never updated.</p>"
        found += _table(("constant", "shape", "dtype", "bytes"), rows, (3,))
    return found + "<h2>Optimizer</h2>" + "".join(f"<p>{escape(line)}</p>" for line in a.optimizer)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int]) -> str:
    """Cells are HTML already."""
    right = set(numbers)

    def row(cells: Sequence[str], kind: str) -> str:
        made = (f"<{kind}{' class=n' * (i in right)}>{cell}</{kind}>" for i, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    head = row([escape(h) for h in heads], "th")
    return f'<div class="box" tabindex="0"><table><thead>{head}</thead><tbody>\n{body}\n</tbody></table></div>'


# ---------------------------------------------------------------- pieces


def _code(value: str) -> str:
    return f'<span class="c">{escape(value)}</span>'


def _fit(value: str, length: int) -> str:
    return value if len(value) <= length else "…" + value[1 - length :]


def _text(x: float, y: float, value: str, kind: str = "", anchor: str = "", colour: str = "") -> str:
    extra = f' class="{kind}"' if kind else ""
    extra += f' text-anchor="{anchor}"' if anchor else ""
    extra += f' style="fill: {colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(value)}</text>'


def _svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )
