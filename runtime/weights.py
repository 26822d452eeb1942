"""Each rank reads what it owns of the checkpoint, and proofs of what it read.

Conversion comes before sharding, always: see `analyzers.conversion`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from analyzers.conversion import Conversion, Recipe, plan_conversion
from analyzers.errors import InputError
from runtime.adapters import is_adapter
from runtime.experts.lists import converters, under_own_names
from runtime.packed import CODES, SCALES, bank_of, unpacked
from runtime.reader import Reader
from runtime.shards import full, local_rows, own_classes, tensor_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE = 16 * 2**20
"""Bytes of a model tensor that are read and converted at once."""
READERS = 4
"""Threads of a rank that do so; a rank holds as many pieces beside its own shards."""


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: str | Path) -> list[str]:
    """Fills this rank's shard of every weight and buffer; returns checkpoint names left unused.

    The model lies on its device, sharded or not, uninitialised. Raises InputError that names the
    tensors which the checkpoint lacks or holds in another shape.
    """
    reader = Reader(folder)
    state = base_state(model)
    conversion = conversion_of(model, reader)
    if conversion.missing:
        missing = ", ".join(conversion.missing[:8])
        more = f" and {len(conversion.missing) - 8} more" if len(conversion.missing) > 8 else ""
        raise InputError(folder, fault=f"the checkpoint lacks {missing}{more}")
    pieces = list[Piece]()
    for name, tensor in state.items():
        bank, part = bank_of(model, name) or (name, None)
        if bank in conversion.recipes:  # others are tied to a weight that is filled
            recipe = as_stored(conversion.recipes[bank], reader, tensor.shape)
            pieces += _pieces(recipe, tensor, part)
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(lambda piece: piece.fill(reader, model), pieces):
            pass
    _fill_computed_buffers(model, set(conversion.recipes))
    return conversion.unexpected


def base_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights and persistent buffers of the model itself."""
    return {n: t for n, t in model.state_dict(keep_vars=True).items() if not is_adapter(n)}


def conversion_of(model: PreTrainedModel, reader: Reader) -> Conversion:
    """How the checkpoint makes the model's own weights; the model may be sharded and hold banks of
    experts packed."""
    wanted = {(bank_of(model, n) or (n,))[0]: t for n, t in base_state(model).items()}
    with own_classes(model):
        return plan_conversion(model, reader.tensors, wanted, converters(model))


@dataclass(frozen=True)
class Piece:
    """Rows `[low, high)` of a model tensor and where this rank keeps them."""

    recipe: Recipe
    shape: torch.Size
    """Of the whole tensor."""
    low: int
    high: int
    place: Tensor
    part: str | None
    """Codes or scales of a bank that stays packed."""

    def fill(self, reader: Reader, model: PreTrainedModel) -> None:
        self.place.copy_(self._rows(reader, model))

    def _rows(self, reader: Reader, model: PreTrainedModel) -> Tensor:
        recipe, low, high = self.recipe, self.low, self.high
        if not recipe.by_expert and not (recipe.by_row and self.shape):
            if self.part is not None:
                fault, fix = "can only be converted unpacked", "plan with bf16 experts"
                where = reader.where(recipe.names[0])
                raise InputError(where, field=recipe.name, fault=fault, fix=fix)
            tensor = recipe.convert(reader.whole, model)
            _check_shape(recipe, tuple(tensor.shape), self.shape, reader)
            return tensor[low:high] if self.shape else tensor
        counts = {reader.tensors[name].shape[:1] for name in recipe.names}
        if recipe.by_expert:
            counts = {(len(names),) for names in recipe.sources.values()}
        if counts != {self.shape[:1]}:
            _check_shape(recipe, (*max(counts), *self.shape[1:]), self.shape, reader)

        def read(name: str) -> Tensor:
            rows = (0, reader.tensors[name].shape[0]) if recipe.by_expert else (low, high)
            if self.part is None:
                return reader.rows(name, *rows)
            return reader.part_rows(name, (CODES, SCALES).index(self.part), *rows)

        rows = recipe.convert(read, model, experts=(low, high) if recipe.by_expert else None)
        _check_shape(recipe, (self.shape[0], *rows.shape[1:]), self.shape, reader)
        return rows


def as_stored(recipe: Recipe, reader: Reader, shape: torch.Size) -> Recipe:
    """The recipe without a transposition that transformers makes only where shapes differ: of rows
    alone they always do."""
    if recipe.converter is None or not recipe.by_row:
        return recipe
    checked = all(getattr(o, "check_dims", False) for o in recipe.converter.operations)
    same = checked and reader.tensors[recipe.names[0]].shape == tuple(shape)
    return replace(recipe, converter=None) if same else recipe


def _pieces(recipe: Recipe, tensor: Tensor, part: str | None) -> Iterator[Piece]:
    """This rank's rows in pieces of about PIECE bytes; in one where no part can be read alone."""
    shard, low, high = local_rows(tensor)
    if low == high:
        return
    step = high - low
    if tensor.ndim and (recipe.by_expert or recipe.by_row):
        step = max(1, PIECE // max(1, shard.nbytes // step))
    for start in range(low, high, step):
        stop = min(start + step, high)
        place = shard[start - low : stop - low] if tensor.ndim else shard
        yield Piece(recipe, tensor.shape, start, stop, place, part)


def _check_shape(recipe: Recipe, found: tuple, shape: torch.Size, reader: Reader) -> None:
    if tuple(found) != tuple(shape):
        source = recipe.names[0]
        fault = f"gives {recipe.name} the shape {list(found)}, the model has {list(shape)}"
        raise InputError(reader.where(source), field=source, fault=fault)


def _fill_computed_buffers(model: PreTrainedModel, loaded: set[str]) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) are computed by the model itself: by
    the code of the part that a module belongs to, of the module or of one around it."""
    computed = {n: b for n, b in model.named_buffers() if n not in loaded}
    if not computed:
        return
    for own in (*model.parameters(), *model.buffers()):
        own._is_hf_initialized = True  # type: ignore[attr-defined]  # read: leave it alone
    for buffer in computed.values():
        buffer._is_hf_initialized = False  # type: ignore[attr-defined]
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
    around = {""} | {n[:i] for n in computed for i, c in enumerate(n) if c == "."}
    for name, module in model.named_modules():
        module._is_hf_initialized = name not in around  # type: ignore[assignment]
    with own_classes(model):  # transformers looks at less in code that is not its own
        model.initialize_weights()
    for name, buffer in computed.items():
        if buffer.is_floating_point() and buffer.isnan().any():
            raise InputError(model.config.model_type, fault=f"{name} is never filled")


def full_tensors(model: nn.Module, *, adapters: bool) -> Iterator[tuple[str, Tensor]]:
    """Every full weight and persistent buffer, or every full adapter factor, one at a time on the
    CPU, under the names of the model's own code. All ranks must walk it together."""
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        bank, part = bank_of(model, name) or (name, None)
        if is_adapter(name) != adapters or part == SCALES:
            continue
        value = full(tensor).cpu()
        if part == CODES:
            value = unpacked(model, bank, value, full(state[f"{bank}{SCALES}"]).cpu())
        yield from under_own_names(model, bank, value)


def digest(model: nn.Module, *, adapters: bool = False) -> dict[str, str]:
    """sha256 of dtype, shape and bytes of every full tensor, by name; the same on every rank."""
    return {name: tensor_digest(t) for name, t in full_tensors(model, adapters=adapters)}


def stored_digest(model: PreTrainedModel, reader: Reader) -> dict[str, str]:
    """What `digest` must give: each tensor converted whole, in this process, one at a time."""
    state, recipes = base_state(model), conversion_of(model, reader).recipes
    return {
        own: tensor_digest(tensor.to(state[name].dtype if name in state else model.dtype))
        for name, recipe in recipes.items()
        for own, tensor in under_own_names(model, name, recipe.convert(reader.whole, model))
    }
