"""One option for every node of a graph at the least total cost, as a mixed-integer linear program.

Each node has options with costs of their own. A value that a node makes lies somewhere by the option taken; each
consumer, by its option, wants it somewhere; moving it costs, once per place it is wanted in. The program is solved by
HiGHS (through `scipy.optimize.milp`), which is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize, sparse

from autoshard.errors import VerifyError


@dataclass(frozen=True)
class Use:
    """A consumer of a value: per option of the node `node`, the place that it wants the value in."""

    node: int
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """What a node makes.

    Args:
        node: its maker.
        made: per option of the maker, the place where the value is made.
        uses: its consumers.
        moves: cost from a place to another; a pair that is missing cannot be done, staying is free.
    """

    node: int
    made: tuple[int, ...]
    uses: tuple[Use, ...]
    moves: Mapping[tuple[int, int], float]


@dataclass
class Problem:
    """Nodes by their options' costs, and the values that flow between them."""

    costs: list[list[float]] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def node(self, costs: Sequence[float]) -> int:
        """A node with an option per cost; returns its number."""
        self.costs.append(list(costs))
        return len(self.costs) - 1

    def solve(self, gap: float = 1e-4) -> list[int]:
        """The option of each node.

        Args:
            gap: by how much, of the total, the answer may miss the least cost.

        Raises:
            VerifyError: no choice satisfies every use.
        """
        model = _Model()
        options = [[model.variable(cost, whole=len(costs) > 1) for cost in costs] for costs in self.costs]
        for row in options:
            model.constrain(dict.fromkeys(row, 1.0), 1.0)
        for value in self.values:
            _add(model, options, value)
        found = model.solve(gap)
        return [max(range(len(row)), key=lambda i: found[row[i]]) for row in options]


class _Model:
    def __init__(self) -> None:
        self.cost: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.entries: list[float] = []
        self.right: list[float] = []
        self.at_least: list[bool] = []  # whether a row may exceed its right side

    def variable(self, cost: float, *, whole: bool = False) -> int:
        self.cost.append(cost)
        self.whole.append(whole)
        return len(self.cost) - 1

    def constrain(self, terms: Mapping[int, float], right: float, *, at_least: bool = False) -> None:
        for variable, factor in terms.items():
            self.rows.append(len(self.right))
            self.columns.append(variable)
            self.entries.append(factor)
        self.right.append(right)
        self.at_least.append(at_least)

    def solve(self, gap: float) -> np.ndarray:
        shape = (len(self.right), len(self.cost))
        matrix = sparse.csr_array((self.entries, (self.rows, self.columns)), shape=shape)
        costs = np.array(self.cost)
        costs *= 1e6 / max(float(costs.max(initial=0.0)), 1e-6)
        right, more = np.array(self.right), np.array(self.at_least)
        # Without whole numbers first: most answers are whole by themselves, and the dual simplex finds them fastest.
        result = optimize.linprog(
            costs,
            A_eq=matrix[~more],
            b_eq=right[~more],
            A_ub=-matrix[more] if more.any() else None,
            b_ub=-right[more] if more.any() else None,
            bounds=(0, 1),
            method="highs-ds",
        )
        if result.x is None or np.abs(result.x - result.x.round())[self.whole].max(initial=0.0) > 1e-6:
            result = optimize.milp(
                costs,
                integrality=np.array(self.whole, dtype=int),
                bounds=optimize.Bounds(0, 1),
                constraints=optimize.LinearConstraint(matrix, right, np.where(more, np.inf, right)),
                options={"mip_rel_gap": gap},
            )
        if result.x is None:
            raise VerifyError(f"place: no choice of placements is valid ({result.message})")
        return np.asarray(result.x)


def _add(model: _Model, options: list[list[int]], value: Value) -> None:
    """Each use is a transport from where the value is made to where it is wanted; uses share the moves that they make.

    This form (the local polytope) has whole answers for most graphs without any branching.
    """
    made = _by_place(options[value.node], value.made)
    shared: dict[tuple[int, int], int] = {}
    for use in value.uses:
        wanted = _by_place(options[use.node], use.wanted)
        if made.keys() == wanted.keys() and len(made) == 1:
            continue
        taken: dict[tuple[int, int], int] = {}
        for source in made:
            for place in wanted:
                cost = 0.0 if source == place else value.moves.get((source, place), math.inf)
                if math.isinf(cost):
                    continue
                pair = source, place
                if cost and len(value.uses) > 1:
                    taken[pair] = model.variable(0.0)
                    if pair not in shared:
                        shared[pair] = model.variable(cost)
                    model.constrain({shared[pair]: 1.0, taken[pair]: -1.0}, 0.0, at_least=True)
                else:
                    taken[pair] = model.variable(cost)
        for place, makers in made.items():
            leaving = {moved: 1.0 for pair, moved in taken.items() if pair[0] == place}
            model.constrain({**leaving, **dict.fromkeys(makers, -1.0)}, 0.0)
        for place, wanting in wanted.items():
            arriving = {moved: 1.0 for pair, moved in taken.items() if pair[1] == place}
            model.constrain({**arriving, **dict.fromkeys(wanting, -1.0)}, 0.0)


def _by_place(options: Sequence[int], places: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for option, place in zip(options, places, strict=True):
        found.setdefault(place, []).append(option)
    return found
