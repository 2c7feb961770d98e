"""A name that does not exist, and the ones that may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_ALIKE = 0.75  # of difflib's ratio: one name misspelt, rather than another name


def hint(name: str, known: Iterable[str]) -> str:
    """A question with the nearest known name, empty where none is near."""
    return question([repr(near) for near in difflib.get_close_matches(name, list(known), n=1)])


def question(names: Sequence[str]) -> str:
    """A question that asks whether one of `names` was meant, with a space after it."""
    if not names:
        return ""
    return f"did you mean {' or '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}? "


def meant(name: str, here: Iterable[str], elsewhere: Iterable[str]) -> list[str]:
    """The dotted names that `name` may stand for, judged by their last parts, the likeliest first.

    One that is spelt nearly alike; else up to three that share a word with it, or that it spells out; else the nearest
    of `here`.
    """
    near = {full: _ratio(name, full) for full in here}
    every = {**{full: _ratio(name, full) for full in elsewhere}, **near}
    ordered = sorted(every, key=lambda full: (-every[full], full not in near, full))
    alike = [full for full in ordered if every[full] >= _ALIKE]
    related = [full for full in ordered if _share_a_word(name, _leaf(full))]
    nearest = [full for full in ordered if full in near]
    return alike[:1] or related[:3] or nearest[:1]


def _leaf(full: str) -> str:
    return full.rpartition(".")[2]


def _ratio(name: str, full: str) -> float:
    return difflib.SequenceMatcher(None, name, _leaf(full)).ratio()


def _share_a_word(name: str, other: str) -> bool:
    words = name.split("_")
    return not {*words, "".join(word[:1] for word in words)}.isdisjoint(other.split("_"))
