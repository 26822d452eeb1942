"""Tensor names by families: the same tensor of every layer and expert, told by its numbers.

Half a million names of a checkpoint are some sixty families, and what holds for one name of a
family (how it is renamed, what its shape is) holds for the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# A word of a dotted name that is an index. Longer numbers are no index.
NUMBER = re.compile(r"(?<![^.])([0-9]{1,9})(?![^.])")
MARK = 900_000_000
"""No layer or expert has a number from here on."""


@dataclass(frozen=True)
class Family:
    """Names that differ only in their numbers."""

    words: tuple[str, ...]
    """What stands before, between and after the numbers."""
    names: dict[tuple[str, ...], str]
    """By their numbers, in the order of the numbers."""

    def name(self, numbers: tuple[str, ...]) -> str:
        """The name that has these numbers, whether it is there or not."""
        return "".join(w + n for w, n in zip(self.words, (*numbers, ""), strict=True))


def families(names: Iterable[str], fixed: Iterable[str] = ()) -> list[Family]:
    """All names by what they are without their numbers; numbers in `fixed` count as words."""
    kept = frozenset(fixed)
    found: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
    for name in names:
        parts = NUMBER.split(name)
        if kept and not kept.isdisjoint(parts[1::2]):
            parts = _joined(parts, kept)
        found.setdefault(tuple(parts[::2]), {})[tuple(parts[1::2])] = name
    return [
        Family(words, dict(sorted(members.items(), key=lambda item: [int(n) for n in item[0]])))
        for words, members in found.items()
    ]


def _joined(parts: list[str], kept: frozenset[str]) -> list[str]:
    joined = parts[:1]
    for number, word in zip(parts[1::2], parts[2::2], strict=True):
        if number in kept:
            joined[-1] += number + word
        else:
            joined += [number, word]
    return joined


def numbers_in(patterns: Iterable[str]) -> set[str]:
    """Numbers that regular expressions name as whole words, in `layers\\.0\\.` but not in `w1`."""
    return {n for p in patterns for n in re.findall(r"(?<![\w\\])[0-9]+(?!\w)", p)}


def natural_key(name: str) -> list[tuple[int, int, str, int]]:
    """Sorts as transformers' loader does: by words, numbers and numeric endings by their value."""
    key = []
    for word in name.split("."):
        text = word.rstrip("0123456789")
        digits = word[len(text) :][-18:]  # no index is longer
        number = int(digits) if digits else -1
        key.append((0, number, "", 0) if not text and digits else (1, 0, text, number))
    return key
