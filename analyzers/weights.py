"""Whether the tensors of a checkpoint are those of a model, from names, shapes and dtypes alone.

Every tensor is compared: packed weights by the shape that they unpack to, converted ones through
transformers' own operations on meta tensors, once for each distinct pattern of shapes.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzers.checkpoint import CheckpointFolder, collector_paused, shown
from analyzers.conversion import Conversion, Recipe, plan_conversion
from analyzers.errors import InputError
from analyzers.fields import contradicted
from analyzers.formats import PLAIN, READ_METHODS, Logical, Shape, Stored, quantization_of
from analyzers.names import NUMBER
from analyzers.quantization import is_kept_plain
from analyzers.schema import Difference
from analyzers.unused import unused

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SHOWN = 5
FIX = "give the weights that belong to config.json"
FLOATS = frozenset(PLAIN.values())
INTEGERS = frozenset(("bool", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"))


@dataclass(frozen=True)
class Comparison:
    """How a checkpoint differs from the model of its config."""

    wrong: list[Difference]
    harmless: list[Difference]
    """What the loader casts, and what the model does not use."""
    contradiction: str | None
    """The field of config.json that explains most of the wrong shapes, and what would fit."""


def check_weights(
    model: PreTrainedModel,
    checkpoint: CheckpointFolder,
    stored: Stored,
    config: Mapping[str, Any],
) -> list[Difference]:
    """The harmless differences. Raises InputError that names the wrong tensors and their faults.

    `stored` are the weights of `checkpoint`, `config` is its config.json.
    """
    found = compare(model, stored, config)
    if found.wrong:
        casts = [d for d in found.harmless if d.kind == "dtype"]
        raise refusal(checkpoint.folder, [*found.wrong, *casts], found.contradiction)
    return found.harmless


def refusal(
    folder: Path, differences: list[Difference], contradiction: str | None = None
) -> InputError:
    """One line that names some of the tensors with their faults, and counts the others."""
    # One of each kind and family before the second of any: no fault hides behind a thousand others.
    seen: Counter[tuple[str, ...]] = Counter()
    ranked: list[tuple[int, Difference]] = []
    for difference in differences:
        family = (difference.kind, *_family(difference.tensor))
        ranked.append((seen[family], difference))
        seen[family] += 1
    ranked.sort(key=lambda pair: pair[0])
    told = "; ".join(f"{shown(d.tensor)}: {d.detail}" for _, d in ranked[:SHOWN])
    more = f"; and {len(ranked) - SHOWN} more" if len(ranked) > SHOWN else ""
    why = f" ({contradiction})" if contradiction else ""
    return InputError(
        folder, fault=f"the tensors are not those of config.json{why}: {told}{more}", fix=FIX
    )


def compare(model: PreTrainedModel, stored: Stored, config: Mapping[str, Any]) -> Comparison:
    """Every tensor of `model` (on meta) against what the checkpoint makes it from.

    Wrong are tensors that are missing, of another shape, integers for floats or the reverse, and
    parts of packed weights that do not fit one another. Harmless are float dtypes that differ from
    layer to layer and tensors that the model neither uses nor declares as ignored. Nothing is
    compared in a format of `quant_method` that is not read here.
    """
    quantization = quantization_of(config)
    method = (quantization or {}).get("quant_method")
    if method is not None and method not in READ_METHODS:
        detail = f"packed by {method!s:.40}, which is not read here: no tensor was compared"
        unread = Difference(tensor="*", kind="dtype", detail=detail)
        return Comparison(wrong=[], harmless=[unread], contradiction=None)
    with collector_paused():
        expected = model.state_dict()
        conversion = plan_conversion(model, stored.tensors, expected)
        check = _Check(model, stored, expected, conversion)
        found = [*check.missing(), *check.shapes()]
        odd, cast = check.dtypes(quantization)
        harmless = [*cast, *unused(conversion, stored)]
    return Comparison(
        wrong=[*_apart(stored, found), *odd],
        harmless=harmless,
        contradiction=contradicted(config, check.resized, check.fitting),
    )


def _apart(stored: Stored, found: list[Difference]) -> list[Difference]:
    """Faults of packed weights and what was found, each tensor once: where the codes are of a wrong
    shape, scales that do not fit them say nothing more."""
    if not stored.faults:
        return found
    wrong = {d.tensor for d in found if d.kind == "shape"}
    excused = {part for t in stored.tensors.values() if t.parts[0] in wrong for part in t.parts[1:]}
    faults = [d for d in stored.faults if d.kind != "shape" or d.tensor not in excused]
    named = {d.tensor for d in faults}
    return [*faults, *(d for d in found if d.tensor not in named)]


@dataclass
class _Check:
    model: PreTrainedModel
    stored: Stored
    expected: Mapping[str, torch.Tensor]
    conversion: Conversion
    resized: list[tuple[int, int]] = field(default_factory=list)
    """Dimensions as needed and as stored, where they differ."""
    fitting: set[int] = field(default_factory=set)
    """Dimensions that are as needed."""
    incomplete: set[str] = field(default_factory=set)
    """Model tensors some of whose sources are missing or too many."""

    def missing(self) -> Iterator[Difference]:
        """Tensors that nothing makes, sources that a sister layer has, experts of a bank."""
        sisters: dict[tuple[str, ...], Recipe] = {}
        for recipe in self.conversion.recipes.values():
            fullest = sisters.setdefault(_family(recipe.name), recipe)
            if len(recipe.names) > len(fullest.names):
                sisters[_family(recipe.name)] = recipe
        optional = getattr(self.model, "_keys_to_ignore_on_load_missing", None) or []
        for name in self.conversion.missing:
            if any(re.search(pattern, name) for pattern in optional):
                continue
            detail = "made by no tensor of the checkpoint"
            if (sister := sisters.get(_family(name))) is None:
                yield Difference(tensor=name, kind="missing", detail=detail)
                continue
            detail = f"is not in the checkpoint, {name} needs it"
            if len(sister.names) > 1:
                detail += f" and {len(sister.names) - 1} more that are not there either"
            first = self._renumbered(sister.names[0], sister.name, name)
            yield Difference(tensor=first, kind="missing", detail=detail)
        for recipe in self.conversion.recipes.values():
            sister = sisters[_family(recipe.name)]
            for pattern in sister.sources.keys() - recipe.sources.keys():
                if recipe.converter is None or recipe.converter is not sister.converter:
                    continue
                self.incomplete.add(recipe.name)
                for name in sister.sources[pattern]:
                    gone = self._renumbered(name, sister.name, recipe.name)
                    detail = f"is not in the checkpoint, {recipe.name} needs it"
                    yield Difference(tensor=gone, kind="missing", detail=detail)
            yield from self._experts(recipe)

    def _experts(self, recipe: Recipe) -> Iterator[Difference]:
        """Experts of a bank that are missing, or another number of them than the model has."""
        if not _single(recipe).by_expert:
            return
        count = self.expected[recipe.name].shape[0]
        for names in recipe.sources.values():
            if len(names) == count:
                continue
            self.incomplete.add(recipe.name)
            gone = _gaps(names, count)
            if gone is None:
                detail = f"stored for {len(names)} experts, the model has {count}"
                yield Difference(tensor=self._codes(names[0]), kind="shape", detail=detail)
                self.resized.append((count, len(names)))
            for name in gone or ():
                sister = self._codes(names[0])
                codes = name + sister.removeprefix(names[0])
                detail = f"is not in the checkpoint, {recipe.name} needs it"
                yield Difference(tensor=codes, kind="missing", detail=detail)

    def shapes(self) -> Iterator[Difference]:
        """Tensors of another shape than their sisters, or than the model needs."""
        made: dict[tuple, Shape | str | None] = {}
        right: dict[tuple, dict[str, Shape]] = {}
        misfits: list[tuple[Recipe, dict[str, Shape], Shape | str]] = []
        told: set[str] = set()
        for recipe in self.conversion.recipes.values():
            shapes: dict[str, Shape] = {}
            every: list[tuple[str, tuple[tuple[Shape, int], ...]]] = []
            for pattern, names in recipe.sources.items():
                counted = Counter([self.stored.tensors[name].shape for name in names])
                every.append((pattern, tuple(counted.items())))
                shapes[pattern] = usual = max(counted, key=counted.__getitem__)
                # Experts of one stacked bank are alike; others may differ (Ernie's vision experts).
                alike = len(counted) == 1 or not _single(recipe).by_expert
                for name in () if alike else names:
                    tensor = self.stored.tensors[name]
                    if tensor.shape != usual and name not in told:
                        told.add(name)
                        detail = f"{_shown(tensor)}, its sisters as {list(usual)}"
                        yield Difference(tensor=tensor.parts[0], kind="shape", detail=detail)
            needed = self._needed(recipe)
            key = (_family(recipe.name), id(recipe.converter), *every, needed)
            if key not in made:
                made[key] = self._made(recipe, shapes)
            shape = made[key]
            if shape is not None and shape != needed:
                misfits.append((recipe, shapes, shape))
            elif shape == needed and recipe.name not in self.incomplete:
                right[_family(recipe.name), needed] = shapes
                self.fitting.update(needed)
        for recipe, shapes, shape in misfits:
            sisters = right.get((_family(recipe.name), self._needed(recipe)))
            if recipe.converter is None or not sisters or sisters.keys() != shapes.keys():
                if recipe.name not in self.incomplete:
                    yield self._misfit(recipe, shape)
                continue
            for pattern, names in recipe.sources.items():
                if shapes[pattern] != sisters[pattern]:
                    tensor = self.stored.tensors[names[0]]
                    detail = f"{_shown(tensor)}, its sisters as {list(sisters[pattern])}"
                    yield Difference(tensor=tensor.parts[0], kind="shape", detail=detail)

    def _needed(self, recipe: Recipe) -> Shape:
        return tuple(self.expected[recipe.name].shape)

    def _made(self, recipe: Recipe, shapes: dict[str, Shape]) -> Shape | str | None:
        """The shape that a recipe makes of tensors of these shapes, or what the conversion says;
        None when it cannot run without data."""
        import torch

        if recipe.converter is None:
            return next(iter(shapes.values()))
        one = _single(recipe)
        by_expert = one.by_expert
        run = one if by_expert else recipe
        source = {name: self.stored.tensors[name].shape for name in recipe.names}
        if by_expert:
            source |= {names[0]: shapes[pattern] for pattern, names in run.sources.items()}
        dtype = self.expected[recipe.name].dtype

        def read(name: str) -> torch.Tensor:
            return torch.empty(source[name], dtype=dtype, device="meta")

        try:
            shape = tuple(run.convert(read, self.model).shape)
        except InputError as e:
            return None if isinstance(e.__cause__, NotImplementedError) else e.fault
        return (self._needed(recipe)[0], *shape[1:]) if by_expert else shape

    def _misfit(self, recipe: Recipe, shape: Shape | str) -> Difference:
        needed = self._needed(recipe)
        first = self.stored.tensors[recipe.names[0]]
        if isinstance(shape, str):
            detail = f"{_shown(first)} {shape}, the model needs {list(needed)}"
        elif recipe.converter is None:
            detail = f"{_shown(first)}, the model needs {list(needed)}"
        else:
            detail = (
                f"{_shown(first)}, which makes {recipe.name} {list(shape)}, the model needs"
                f" {list(needed)}"
            )
        if not isinstance(shape, str) and len(shape) == len(needed):
            self.resized += [(n, s) for n, s in zip(needed, shape, strict=True) if n != s]
        return Difference(tensor=first.parts[0], kind="shape", detail=detail)

    def dtypes(
        self, quantization: Mapping[str, Any] | None
    ) -> tuple[list[Difference], list[Difference]]:
        """Tensors in another format than the model can take or than their sisters have: wrong and
        harmless ones."""
        wrong: list[Difference] = []
        harmless: list[Difference] = []
        lists: dict[tuple, list[list[Logical]]] = defaultdict(list)
        counts: dict[tuple, Counter[str]] = defaultdict(Counter)
        for recipe in self.conversion.recipes.values():
            if recipe.name != recipe.first_target and recipe.first_target:
                continue  # a second tensor made of the same sources
            is_float = self.expected[recipe.name].dtype.is_floating_point
            for pattern, names in recipe.sources.items():
                tensors = [self.stored.tensors[name] for name in names]
                formats = Counter([t.format for t in tensors])
                key = (_family(recipe.name), pattern if recipe.converter else "")
                counts[key] += formats
                lists[key].append(tensors)
                for form in formats:
                    if is_float == (form in INTEGERS):
                        need = "a float" if is_float else "an integer"
                        detail = f"stored as {form}, the model needs {need}"
                        wrong += [_dtype(t, detail) for t in tensors if t.format == form]
        for key, formats in counts.items():
            if len(formats) == 1:
                continue
            usual, number = formats.most_common(1)[0]
            for tensors in lists[key]:
                mixed = len({t.format in FLOATS for t in tensors}) > 1
                for t in tensors:
                    if t.format == usual or t.format in INTEGERS:
                        continue
                    difference = _dtype(t, f"stored as {t.format}, its {number} sisters as {usual}")
                    unpacked = t.format in FLOATS and usual not in FLOATS
                    module = t.name.removesuffix(".weight")
                    if mixed or (
                        unpacked and quantization and not is_kept_plain(quantization, module)
                    ):
                        wrong.append(difference)
                    else:
                        harmless.append(difference)
        return wrong, harmless

    def _codes(self, name: str) -> str:
        """As the checkpoint names the weight, or its codes where it is packed."""
        return self.stored.tensors[name].parts[0]

    def _renumbered(self, name: str, target: str, other: str) -> str:
        """The stored name that stands to the model tensor `other` as `name` to `target`."""
        words = NUMBER.split(self._codes(name))
        changes = list(zip(NUMBER.split(target)[1::2], NUMBER.split(other)[1::2], strict=True))
        for i in range(1, len(words), 2):
            if changes and words[i] == changes[0][0]:
                words[i] = changes.pop(0)[1]
        return "".join(words)


def _family(name: str) -> tuple[str, ...]:
    return tuple(NUMBER.split(name)[::2])


def _single(recipe: Recipe) -> Recipe:
    """The recipe for the first expert alone."""
    first = {pattern: names[:1] for pattern, names in recipe.sources.items()}
    return dataclasses.replace(recipe, sources=first)


def _gaps(names: list[str], count: int) -> list[str] | None:
    """Names of the experts that are missing from `count`; None when it is another count."""
    first, last = NUMBER.split(names[0]), NUMBER.split(names[-1])
    varying = [i for i in range(1, len(first), 2) if first[i] != last[i]]
    if len(varying) != 1:
        return None
    (place,) = varying
    held = {int(NUMBER.split(name)[place]) for name in names}
    gone = sorted(set(range(count)) - held)
    if len(gone) != count - len(held) or len(gone) > len(held):
        return None
    return ["".join((*first[:place], str(i), *first[place + 1 :])) for i in gone]


def _shown(tensor: Logical) -> str:
    if tensor.format in FLOATS or len(tensor.parts) == 1:
        return f"stored as {list(tensor.shape)}"
    return f"stored as {list(tensor.shape)} in {tensor.format}"


def _dtype(tensor: Logical, detail: str) -> Difference:
    return Difference(tensor=tensor.parts[0], kind="dtype", detail=detail)
