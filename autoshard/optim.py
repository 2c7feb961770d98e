"""Optimizers: what a user imports, and the way from a factory to an update.

    factory --bind--> Binding --GRAPH--> Rule.update, written into the update graph
                              --SHARD, OWNER--> EagerUpdate.step, the class's own step

A factory is any callable that takes parameters and returns a torch optimizer: a class, a
``functools.partial`` of one, or a function that makes its own groups by name. `grouped` makes the common kind
of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from autoshard.errors import OptimizerError
from autoshard.optim_binding import Binding, Factory, Mode, SlotTemplate, bind
from autoshard.optim_eager import EagerUpdate, LocalShard
from autoshard.optim_rules import RULES, Group, Lion, Rule, Slot

__all__ = [
    "RULES",
    "Binding",
    "EagerUpdate",
    "Factory",
    "Group",
    "Grouped",
    "Lion",
    "LocalShard",
    "Mode",
    "Rule",
    "Slot",
    "SlotTemplate",
    "bind",
    "grouped",
]

Choice = str | Callable[[str], bool]


@dataclass(frozen=True)
class Grouped:
    """A factory that sorts parameters into groups by name; made by `grouped`."""

    factory: Factory
    choices: tuple[tuple[Choice, tuple[tuple[str, Any], ...]], ...]

    def __call__(self, named_parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer, with one group per choice and one of the rest.

        Raises:
            OptimizerError: parameters come without names, or a choice takes none of them.
        """
        given = list(named_parameters)
        if not all(isinstance(item, tuple) for item in given):
            raise OptimizerError("grouped: needs (name, parameter) pairs, such as model.named_parameters()")
        members: list[list[tuple[str, torch.nn.Parameter]]] = [[] for _ in range(len(self.choices) + 1)]
        for name, param in given:
            index = next((i for i, (choice, _) in enumerate(self.choices) if _takes(choice, name)), -1)
            members[index].append((name, param))
        for (choice, _), taken in zip(self.choices, members, strict=False):
            if not taken:
                every = any(_takes(choice, name) for name, _ in given)
                why = "all that it matches were taken by an earlier one" if every else "no name matches"
                shown = ", ".join(name for name, _ in given[:8]) + (", ..." if len(given) > 8 else "")
                raise OptimizerError(f"grouped: {choice!r} takes no parameter ({why}); the names are {shown}")
        options = [dict(values) for _, values in self.choices] + [{}]
        groups = [{"params": taken, **values} for taken, values in zip(members, options, strict=True) if taken]
        return self.factory(groups)


def _takes(choice: Choice, name: str) -> bool:
    return fnmatchcase(name, choice) if isinstance(choice, str) else bool(choice(name))


def grouped(factory: Factory, groups: Mapping[Choice, Mapping[str, Any]]) -> Grouped:
    """A factory with other options for some parameters, chosen by name.

        optim.grouped(functools.partial(torch.optim.AdamW, lr=3e-4), {"*bias": {"weight_decay": 0.0}})

    Args:
        factory: a torch optimizer class, or a partial of one; its options hold for what no pattern takes.
        groups: for each pattern its options. A pattern is a shell glob over the whole name ("*" also
            matches dots), or a predicate on the name; the first that matches takes the parameter.

    Raises:
        OptimizerError: when it is bound: a pattern takes no parameter.
    """
    return Grouped(factory, tuple((choice, tuple(values.items())) for choice, values in groups.items()))
