"""`python -m runtime.merge RUN_DIR FOLDER`: the base model with the adapter added to its weights.

The folder is a copy of the model folder in which the bytes of adapted tensors are replaced, under
the names and in the dtype that the checkpoint has. Experts are merged one by one, other tensors
whole, so memory holds a few matrices whatever the size of the model. Where any of them is packed,
all of the copy is unpacked first: a merged value is none that the format has.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from analyzers.conversion import Recipe
from analyzers.errors import InputError
from analyzers.formats import PLAIN
from runtime.adapters import Adapted, adapted_weights
from runtime.build import Documents, build_adapted
from runtime.finished import command
from runtime.peft_format import StoredAdapter
from runtime.plain import write_plain
from runtime.reader import Reader
from runtime.weights import as_stored, conversion_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def merge(documents: Documents, folder: Path, adapter: Path | None = None) -> int:
    """Writes the merged model to `folder`, which must not exist; returns how many tensors changed.

    `adapter` is that of the run by default. Raises InputError for a packed format that is not
    unpacked here.
    """
    model = build_adapted(documents)
    base = Path(documents.job.model)
    stored = StoredAdapter(adapter or documents.run_dir / "adapter", model, documents.job.lora)
    reader = Reader(base)
    recipes = adapted_recipes(model, reader)
    if folder.exists():
        raise InputError(folder, fault="exists", fix="give a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    sources = {reader.tensors[source] for r in recipes.values() for source in r.names}
    if any(source.format not in PLAIN.values() for source in sources):
        write_plain(reader, base, partial, model.dtype)  # type: ignore[arg-type]
    else:
        shutil.copytree(base, partial)
    copied = Reader(partial)
    changed = set[str]()
    for name, weight in adapted_weights(model).items():
        recipe = recipes[name]
        for part, delta in _deltas(model, recipe, weight, stored):
            for source, values in origins(model, recipe, part, reader).back(delta).items():
                row = part[0] if part and not recipe.by_expert else 0
                _add(copied, source, row, values)
                changed.add(source)
    partial.rename(folder)
    return len(changed)


def adapted_recipes(model: PreTrainedModel, reader: Reader) -> dict[str, Recipe]:
    """How the checkpoint makes each weight that is adapted."""
    recipes = conversion_of(model, reader).recipes
    return {
        name: as_stored(recipes[name], reader, model.get_parameter(name).shape)
        for name in adapted_weights(model)
    }


def _deltas(
    model: nn.Module, recipe: Recipe, weight: Adapted, stored: StoredAdapter
) -> Iterator[tuple[tuple[int, int] | None, Tensor]]:
    """The float32 delta of experts `(low, high)`, one at a time, or of a whole tensor, None."""
    a, b = model.get_parameter(weight.a), model.get_parameter(weight.b)

    def of(low: int, high: int) -> Tensor:
        b_rows = stored.rows(weight.b, b.shape, low, high)
        a_rows = (low, high) if a.ndim == 3 else (0, a.shape[0])
        delta = b_rows @ stored.rows(weight.a, a.shape, *a_rows) * weight.scale
        return delta.transpose(-2, -1) if weight.transposed else delta

    if weight.bank and (recipe.by_expert or recipe.by_row):
        for expert in range(b.shape[0]):
            yield (expert, expert + 1), of(expert, expert + 1)
    else:
        yield None, of(0, b.shape[0])


@dataclass(frozen=True)
class Origins:
    """Where the values of a model tensor, or of experts of it, lie in the checkpoint."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    """Of the sources, or of the experts' rows in them."""
    positions: Tensor
    """In the form of the model tensor: numbers of values, counted through all sources."""

    def back(self, values: Tensor) -> dict[str, Tensor]:
        """Values of the model tensor as parts of each source; zero where others lie."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        flat = torch.zeros(sum(sizes))
        flat[self.positions.flatten()] = values.flatten()
        parts = zip(self.names, flat.split(sizes), self.shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in parts}


def origins(
    model: PreTrainedModel, recipe: Recipe, part: tuple[int, int] | None, reader: Reader
) -> Origins:
    """Follows a conversion with numbers in the place of values, whatever it does with them.

    `part` are experts. Raises InputError when the conversion computes, and does not only move.
    """
    low, high = part or (0, None)
    experts = part if recipe.by_expert else None
    names = [n for g in recipe.sources.values() for n in (g[low:high] if experts else g)]
    shapes = [reader.tensors[name].shape for name in names]
    if part and not experts:
        shapes = [(part[1] - part[0], *shape[1:]) for shape in shapes]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    numbers = torch.arange(sum(sizes)).split(sizes)
    read = {n: p.view(s) for n, p, s in zip(names, numbers, shapes, strict=True)}
    positions = recipe.convert(read.__getitem__, model, experts=experts)
    if positions.dtype != torch.int64 or positions.unique().numel() != positions.numel():
        raise InputError(names[0], fault=f"is computed with to make {recipe.name}, not only moved")
    return Origins(names, shapes, positions)


def _add(copied: Reader, name: str, row: int, delta: Tensor) -> None:
    """Adds to the rows of a tensor of the copy from `row` on, in float32, and rounds once."""
    info = copied.stored[name]
    base = copied.rows(name, row, row + delta.shape[0])
    merged = (base.float() + delta).to(base.dtype)
    begin = info.begin + row * info.nbytes // info.shape[0]
    with info.shard.open("r+b") as file:
        os.pwrite(file.fileno(), merged.view(torch.uint8).numpy().tobytes(), begin)


if __name__ == "__main__":
    folder = "a new folder for the merged model"
    sys.exit(command("merge", __doc__, merge, folder=folder, made="tensors merged"))
