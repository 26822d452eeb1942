"""Tensors of a checkpoint that the model has no place for, by what they share."""

from __future__ import annotations

import re

from analyzers.conversion import Conversion
from analyzers.formats import Stored
from analyzers.names import NUMBER
from analyzers.schema import Difference

DEPTH = 5  # words of a name in which models, layers and towers are told apart
PARTS = {
    "multi-token prediction": re.compile(r"(^|[._])(mtp|nextn)|\.layers\.\d+\.\*$", re.IGNORECASE),
    "vision": re.compile(r"vis(ion|ual)|image|mm_|multi_modal"),
    "audio": re.compile(r"audio|speech|whisper"),
}


def unused(conversion: Conversion, stored: Stored) -> list[Difference]:
    """One difference for each part of the model that is not used, `model.layers.61.*`."""
    if not conversion.unexpected:
        return []
    used: set[str] = set()
    for recipe in conversion.recipes.values():
        for name in recipe.names:
            used.add(name.rpartition(".")[0])
    used = {prefix for name in used for prefix in _prefixes(name)}
    groups: dict[str, list[str]] = {}
    for name in conversion.unexpected:
        outside = next((p for p in _prefixes(name) if p not in used), None)
        pattern = f"{outside}.*" if outside else "*".join(NUMBER.split(name)[::2])
        groups.setdefault(pattern, []).append(name)
    return [_difference(pattern, names, stored) for pattern, names in groups.items()]


def _prefixes(name: str) -> list[str]:
    """Of at most DEPTH words, the shortest first, without the name itself."""
    words = name.split(".")
    return [".".join(words[:i]) for i in range(1, min(DEPTH + 1, len(words)))]


def _difference(pattern: str, names: list[str], stored: Stored) -> Difference:
    tensors = [stored.tensors[name] for name in names]
    size = sum(t.nbytes for t in tensors)
    part = next((f" ({part})" for part, regex in PARTS.items() if regex.search(pattern)), "")
    if len(tensors) == 1:
        shape = list(tensors[0].shape)
        detail = f"{shape}, not used by the model{part}"
        return Difference(tensor=tensors[0].parts[0], kind="unexpected", detail=detail)
    detail = f"{len(tensors)} tensors, {size / 1e6:.1f} MB, not used by the model{part}"
    return Difference(tensor=pattern, kind="unexpected", detail=detail)
