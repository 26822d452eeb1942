"""Which checkpoint tensors make which model tensor, by transformers' own conversion table.

A released checkpoint rarely holds a model's tensors under the model's names: experts lie one by
one, convolutions apart, prefixes differ. transformers describes the way from one to the other as
`WeightRenaming` and `WeightConverter` objects. This module turns that table into one recipe for
each model tensor, from names alone, and runs a recipe on whatever reads the sources: whole, or for
a bank of experts only for the experts `[low, high)`, in which case only their tensors are read.

A recipe always works on whole source tensors, before any sharding: converting shards that are
already cut along the converted dimension permutes rows silently.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from analyzers.errors import InputError
from analyzers.names import MARK, NUMBER, Family, families, natural_key, numbers_in

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Read = Callable[[str], "torch.Tensor"]


@dataclass(frozen=True)
class Recipe:
    """How one model tensor is made from checkpoint tensors."""

    name: str
    """Of the model tensor."""
    sources: dict[str, list[str]]
    """Checkpoint names by the converter's source pattern, in the order that the converter wants."""
    converter: Any = None
    """transformers' `WeightConverter`; None where the tensor is stored as it is used."""
    first_target: str = ""
    """Model name of the converter's first target, which differs from `name` for a split."""

    @property
    def names(self) -> list[str]:
        """All checkpoint tensors that are read."""
        return [name for names in self.sources.values() for name in names]

    @property
    def by_expert(self) -> bool:
        """Whether each source list holds one tensor an expert, stacked on dimension 0, with nothing
        after the stacking that mixes experts."""
        from transformers import core_model_loading as loading

        if self.converter is None or len(self.converter.target_patterns) != 1:
            return False
        first, *rest = self.converter.operations
        if not isinstance(first, loading.MergeModulelist) or first.dim != 0:
            return False
        if not all(map(_keeps_rows, rest)):
            return False
        return len({len(names) for names in self.sources.values()}) == 1

    @property
    def by_row(self) -> bool:
        """Whether row i of the tensor is made of row i of each source, so that some rows of the
        sources convert to the same rows of the tensor."""
        if self.converter is None:
            return True
        alone = all(len(names) == 1 for names in self.sources.values())
        one = len(self.converter.target_patterns) == 1
        return alone and one and all(map(_keeps_rows, self.converter.operations))

    def convert(
        self, read: Read, model: PreTrainedModel, experts: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """The tensor itself, or its rows `experts = (low, high)` when `by_expert`.

        Raises InputError when transformers' converter cannot make the tensor from these sources.
        """
        if self.converter is None:
            return read(self.names[0])
        low, high = experts if experts is not None else (0, None)
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names[low:high]:
                converter.add_tensor(self.first_target, name, pattern, lambda name=name: read(name))
        try:
            made = converter.convert(self.first_target, model=model, config=model.config)
        except Exception as e:
            raise InputError(self.names[0], fault=f"cannot be converted to {self.name}: {e}") from e
        tensor = made[self.name]
        return tensor[0] if isinstance(tensor, list) else tensor


def _keeps_rows(operation: Any) -> bool:
    """Whether an operation leaves dimension 0 alone."""
    from transformers import core_model_loading as loading

    if isinstance(operation, loading.Transpose):
        return min(operation.dim0, operation.dim1) > 0
    # Not in transformers 5.17.
    kinds = (loading.Concatenate, getattr(loading, "Interleave", loading.Concatenate))
    return isinstance(operation, kinds) and operation.dim > 0


@dataclass(frozen=True)
class Conversion:
    """Recipes by model tensor, and the names that do not fit."""

    recipes: dict[str, Recipe]
    missing: list[str] = field(default_factory=list)
    """Model tensors that no checkpoint tensor makes."""
    unexpected: list[str] = field(default_factory=list)
    """Checkpoint tensors that the model has no place for and does not declare as ignored."""


def plan_conversion(
    model: PreTrainedModel,
    checkpoint_names: Iterable[str],
    expected: Mapping[str, Any] | None = None,
    own: Iterable[Any] = (),
) -> Conversion:
    """Recipes for the tensors of `model` (on any device, meta too) from names of a checkpoint.

    `expected` are the model tensors to make, by default all of `model.state_dict()`; pass fewer
    when the model carries tensors that no checkpoint holds, such as adapters. `own` are transforms
    beside those of the library, for a model whose modules were changed after it was built.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    wanted = dict(model.state_dict() if expected is None else expected)
    transforms = [*get_model_conversion_mapping(model), *own]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}

    def rename(key: str) -> tuple[str, str | None]:
        return rename_source_key(key, renamings, converters)

    patterns = [p for t in transforms for p in t.source_patterns]
    prefix = model.base_model_prefix
    grouped: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    unexpected: list[str] = []
    for family in families(checkpoint_names, numbers_in(patterns)):
        for (target, pattern), keys in _renamed(family, rename).items():
            found = _prefixed(target, prefix, wanted)
            if found is None:
                for key in keys:
                    if (found := _prefixed(key, prefix, wanted)) is not None:
                        grouped.setdefault(found, (None, {}))[1][key] = [key]
                    else:
                        unexpected.append(key)
                continue
            converter = by_pattern[pattern] if pattern is not None else None
            _, sources = grouped.setdefault(found, (converter, {}))
            if pattern is None:
                sources |= {key: [key] for key in keys}
            elif pattern in sources:
                sources[pattern] = sorted(sources[pattern] + keys, key=natural_key)
            else:
                sources[pattern] = keys

    recipes: dict[str, Recipe] = {}
    for first, (converter, sources) in sorted(grouped.items(), key=lambda g: natural_key(g[0])):
        targets = [first]
        if converter is not None:
            # Operations that join tensors take them in the order of names, as in the loader.
            sources = dict(sorted(sources.items(), key=lambda item: natural_key(item[1][0])))
            head, *others = converter.target_patterns
            targets += [first.replace(head, other) for other in others]
        for target in targets:
            recipes[target] = Recipe(target, sources, converter, first)

    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = [name for name in wanted if name not in recipes and name not in tied]
    unexpected = sorted((k for k in unexpected if not _ignored(model, k)), key=natural_key)
    return Conversion(recipes, missing, unexpected)


def _renamed(
    family: Family, rename: Callable[[str], tuple[str, str | None]]
) -> dict[tuple[str, str | None], list[str]]:
    """Names by their target and converter pattern.

    One renaming serves a family: where its numbers went, those of the others go. A renaming that
    computes with numbers is found out by two members, and then each name is renamed.
    """
    marks = tuple(str(MARK + i) for i in range(len(family.words) - 1))
    target, pattern = rename(family.name(marks))
    words = NUMBER.split(target)
    kept = [marks.index(word) for word in words[1::2] if word in marks]
    made = words[1::2] == [marks[i] for i in kept]
    found: dict[tuple[str, ...], list[str]] = {}
    for numbers, name in family.names.items():
        found.setdefault(tuple([numbers[i] for i in kept]), []).append(name)
    targets = {
        ("".join(w + n for w, n in zip(words[::2], (*key, ""), strict=True)), pattern): names
        for key, names in (found.items() if made else ())
    }
    first, *_, last = [*family.names.values()] * 2
    if not all(name in targets.get(rename(name), ()) for name in (first, last)):
        targets = {}
        for name in family.names.values():
            targets.setdefault(rename(name), []).append(name)
    return targets


def _prefixed(name: str, prefix: str, wanted: Mapping[str, Any]) -> str | None:
    """The name in `wanted`, without the base model's prefix, with it or as it is."""
    names = (name.removeprefix(f"{prefix}."), f"{prefix}.{name}") if prefix else ()
    return next((n for n in (*names, name) if n in wanted), None)


def _ignored(model: PreTrainedModel, key: str) -> bool:
    import re

    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    return any(re.search(pattern, key) for pattern in patterns)
