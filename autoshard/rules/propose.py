"""Find placement rows for an op by running it on small shards: a developer's tool, its rows are for review.

    python -m autoshard.rules.propose aten.mm.default "f6,12 f12,6"

Arguments are literals or tensors: ``f6,12`` double, ``i6,12<9`` integers below 9, ``b6,12`` truth values.
Every placement of the inputs is tried (whole, sharded along one dim, a partial sum); what each rank returns is
compared with the parts of the whole result. A row that holds on 2 and 3 ranks is printed. It may hold by chance
of the sample call: read it, give it a rule in `table.TABLE`, and sample calls in tests/test_rules.py.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.compat import pytree
from autoshard.placement import PARTIAL, REPLICATE, Partial, Placement, Shard, local_shape, neutral, shard_length
from autoshard.rules import Op, Row, Rule, divides, indexed_dim, make_op


@dataclass(frozen=True)
class Call:
    """An op with real arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def op(self) -> Op:
        return make_op(self.target, self.args, self.kwargs, self.target(*self.args, **self.kwargs))

    def __str__(self) -> str:
        args, kwargs = pytree.tree_map(
            lambda x: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else x,
            (self.args, self.kwargs),
        )
        return f"{self.target}{args}{kwargs or ''}"


def shards(x: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """What each rank holds of a whole tensor; random terms where it is a partial sum, other values as padding."""
    if isinstance(placement, Shard):
        size = x.shape[placement.dim]
        if missing := shard_length(size, ranks) * ranks - size if placement.outer == 1 else 0:
            junk = x.narrow(placement.dim, 0, 1).expand(
                *x.shape[: placement.dim], missing, *x.shape[placement.dim + 1 :]
            )
            x = torch.cat([x, junk + 1 if x.dtype.is_floating_point else junk], placement.dim)
        split = x.unflatten(placement.dim, (placement.outer, ranks, -1))
        parts = (split.select(placement.dim + 1, r) for r in range(ranks))
        return [part.flatten(placement.dim, placement.dim + 1).contiguous() for part in parts]
    if isinstance(placement, Partial):
        generator = torch.Generator().manual_seed(ranks)
        if x.dtype.is_floating_point or x.dtype.is_complex:
            terms = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(ranks - 1)]
        else:
            terms = [torch.randint(9, x.shape, generator=generator, dtype=x.dtype) for _ in range(ranks - 1)]
        return [*terms, x - sum(terms)]
    return [x] * ranks


def join(parts: Sequence[Tensor], placement: Placement) -> Tensor | None:
    """The whole tensor of which the ranks hold `parts`; None where replicas differ or shapes do not fit."""
    if any(part.shape != parts[0].shape for part in parts):
        return None
    if isinstance(placement, Shard):
        if placement.dim >= parts[0].dim() or parts[0].shape[placement.dim] % placement.outer:
            return None
        split = [part.unflatten(placement.dim, (placement.outer, -1)) for part in parts]
        return torch.stack(split, placement.dim + 1).flatten(placement.dim, placement.dim + 2)
    if isinstance(placement, Partial):
        terms = torch.stack(list(parts))
        return terms.sum(0, dtype=parts[0].dtype) if placement.op == "sum" else _EXTREMES[placement.op](terms, 0)
    same = all(torch.allclose(part, parts[0], rtol=1e-9, atol=1e-9, equal_nan=True) for part in parts)
    return parts[0] if same else None


_EXTREMES = {"max": torch.amax, "min": torch.amin}


def _local_shape(x: Tensor | None, placement: Placement, ranks: int) -> tuple[int, ...] | None:
    if x is None or not isinstance(placement, Shard):
        return tuple(x.shape) if x is not None else None
    return local_shape(x.shape, [placement], [ranks])


def _neutral(parts: list[Tensor], x: Tensor, placement: Placement, row: Row) -> list[Tensor]:
    """Shards whose padding is neutral where an output joins what the ranks make of them."""
    joined = [p for p in row.outputs if not isinstance(p, Shard)]
    if not joined or not isinstance(placement, Shard) or placement.outer > 1:
        return parts
    op = next((p.op for p in joined if isinstance(p, Partial)), "sum")
    length, size = parts[0].shape[placement.dim], x.shape[placement.dim]
    for rank, part in enumerate(parts):
        held = min(max(size - rank * length, 0), length)
        part.narrow(placement.dim, held, length - held).fill_(neutral(op, part.dtype))
    return parts


def run_on_shards(op: Op, rule: Rule | None, row: Row, ranks: int) -> list[tuple[Any, ...]]:
    """What each rank's call returns, its arguments made local as the `lower` pass makes them."""
    held = [_neutral(shards(x, p, ranks), x, p, row) for x, p in zip(op.inputs, row.inputs, strict=True)]
    shapes = tuple(_local_shape(x, p, ranks) for x, p in zip(op.outputs, row.outputs, strict=True))
    split = _split_places(op, rule, row, ranks)
    results = []
    for rank in range(ranks):
        mine = iter([parts[rank] for parts in held])
        found: Any = pytree.tree_map(
            lambda x, mine=mine: next(mine) if isinstance(x, Tensor) else x, (op.args, dict(op.kwargs))
        )
        args, kwargs = list(found[0]), found[1]
        if rule is not None:
            for argument, output in rule.sizes.items():
                args[argument] = list(shapes[output] or ())
            inputs = tuple(tuple(parts[rank].shape) for parts in held)
            args = list(rule.localize(op, args, inputs, shapes)) if rule.localize is not None else args
        if split is not None:
            assert rule is not None
            assert rule.shifted is not None
            offset = torch.tensor([rank * split[0]], device=op.inputs[0].device)
            result = rule.shifted(op.target, tuple(args), kwargs, offset, *split)
        else:
            result = op.target(*args, **kwargs)
        results.append(tuple(result) if isinstance(result, (tuple, list)) else (result,))
    return results


def _split_places(op: Op, rule: Rule | None, row: Row, ranks: int) -> tuple[int, int] | None:
    """How many places of the dim that is counted each rank holds, and how many there are, where it is split."""
    found = indexed_dim(rule, op) if rule is not None else None
    if found is None:
        return None
    output, index, dim = found
    operand = (op.outputs if output else op.inputs)[index]
    if operand is None or (row.outputs if output else row.inputs)[index] != Shard(dim):
        return None
    return shard_length(operand.shape[dim], ranks), operand.shape[dim]


def propose(target: Any, *args: Any, ranks: Sequence[int] = (2, 3), **kwargs: Any) -> list[Row]:
    """The rows that hold for one call of an op on every number of `ranks`, all-replicated ones left out.

    A partial sum, where it fits an output, is proposed only where no shard or replica does.
    """
    op = Call(target, args, kwargs).op()
    choices: list[list[Placement]] = []
    for x in op.inputs:
        split: list[Placement] = [
            Shard(d) for d in range(x.dim()) if all(divides(x.shape[d], Shard(d), n) for n in ranks)
        ]
        summed: list[Placement] = [PARTIAL] if x.dtype.is_floating_point else []
        choices.append([REPLICATE, *split, *summed])
    found: list[Row] = []
    for inputs in itertools.product(*choices):
        if all(p == REPLICATE for p in inputs):
            continue
        outputs = [_outputs(op, inputs, n) for n in ranks]
        found += [Row(inputs, each) for each in outputs[0] if all(each in other for other in outputs)]
    return found


def _outputs(op: Op, inputs: tuple[Placement, ...], ranks: int) -> list[tuple[Placement, ...]]:
    """How the outputs may lie when the inputs lie so; nothing where one is neither whole, a shard nor a sum."""
    every: list[tuple[Placement, ...]] = []
    for rule, guess in _size_guesses(op):
        try:
            results = run_on_shards(op, rule, Row(inputs, guess), ranks)
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        found = [_placement([r[i] for r in results], whole, ranks) for i, whole in enumerate(op.outputs)]
        placements = tuple(p for p in found if p is not None)
        if len(placements) == len(found) and placements not in every:
            every.append(placements)
    return every


def _size_guesses(op: Op) -> list[tuple[Rule, tuple[Placement, ...]]]:
    """The call as it is, and with an argument that repeats an output's shape made that of each shard."""
    whole = (REPLICATE,) * len(op.outputs)
    found: list[tuple[Rule, tuple[Placement, ...]]] = [(Rule(), whole)]
    for argument, output in itertools.product(range(len(op.args)), range(len(op.outputs))):
        value, x = op.args[argument], op.outputs[output]
        if x is not None and isinstance(value, (list, tuple)) and list(value) == list(x.shape):
            for dim in range(x.dim()):
                guess = tuple(Shard(dim) if i == output else p for i, p in enumerate(whole))
                found.append((Rule(sizes={argument: output}), guess))
    return found


def _placement(parts: list[Tensor], whole: Tensor | None, ranks: int) -> Placement | None:
    """The placement under which the ranks' results are the whole one."""
    if whole is None:
        return REPLICATE
    splits = [
        Shard(d, outer)
        for d, size in enumerate(whole.shape)
        for outer in range(1, size)
        if size % outer == 0 and divides(size, Shard(d, outer), ranks)
    ]
    options: list[Placement] = [REPLICATE, *splits, PARTIAL]
    for placement in options:
        found = join(parts, placement)
        if found is None or found.shape != whole.shape or found.dtype != whole.dtype:
            continue
        if torch.allclose(found, whole, rtol=1e-9, atol=1e-9, equal_nan=True):
            return placement
    return None


def _tensor(text: str, generator: torch.Generator) -> Tensor:
    kind, rest = text[0], text[1:]
    dims, _, high = rest.partition("<")
    shape = [int(size) for size in dims.split(",") if size]
    if kind == "i":
        return torch.randint(int(high or 2), shape, generator=generator)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values > 0 if kind == "b" else values


def _argument(text: str, generator: torch.Generator) -> Any:
    """A tensor as ``f6,12``, ``i6<9`` or ``b6``, a list of them in ``[f6;f6]``, else a Python literal."""
    if text[0] in "fib" and (len(text) == 1 or text[1].isdigit()):
        return _tensor(text, generator)
    if text.startswith("[") and len(text) > 2 and text[1] in "fib":
        return [_tensor(part, generator) for part in text[1:-1].split(";")]
    return ast.literal_eval(text)


def main(arguments: Sequence[str]) -> int:
    """Print the rows of the op that the arguments name."""
    if len(arguments) < 2:
        print(__doc__)
        return 2
    target: Any = torch.ops
    for part in arguments[0].split("."):
        target = getattr(target, part)
    generator = torch.Generator().manual_seed(0)
    args = [_argument(text, generator) for word in arguments[1:] for text in word.split()]
    from autoshard.rules import rule_of

    print(f"{Call(target, tuple(args), {})}: {'has a rule' if rule_of(target) is not None else 'has no rule yet'}")
    rows = propose(target, *args)
    for row in rows:
        print(f"  {', '.join(map(str, row.inputs))} -> {', '.join(map(str, row.outputs))}")
    print(f"{len(rows)} rows hold for this call on 2 and 3 ranks; they are for review, not for the table as they are")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
