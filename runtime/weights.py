"""Each rank reads what it owns of the checkpoint, and proofs of what it read.

Conversion comes before sharding, always: see `analyzers.conversion`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from analyzers.conversion import Recipe, plan_conversion
from analyzers.errors import InputError
from runtime.adapters import is_adapter
from runtime.experts.lists import converters, under_own_names
from runtime.shards import full, local_rows, tensor_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READABLE = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL", "U8"}


class Reader:
    """Reads tensors, whole or by rows, from the safetensors shards of a model folder."""

    def __init__(self, folder: str | Path) -> None:
        from analyzers.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(folder)
        if checkpoint is None:
            raise InputError(folder, fault="has no weights", fix="a folder with *.safetensors")
        self.tensors = checkpoint.tensors
        self._open: dict[str, Any] = {}

    def _slice(self, name: str) -> Any:
        from safetensors import safe_open

        info = self.tensors[name]
        if info.dtype not in READABLE:
            fault = f"stored as {info.dtype}, which is not trained from yet"
            raise InputError(info.shard, field=name, fault=fault, fix="use bfloat16 weights")
        shard = str(info.shard)
        if shard not in self._open:
            self._open[shard] = safe_open(shard, framework="pt")
        return self._open[shard].get_slice(name)

    def whole(self, name: str) -> Tensor:
        return self._slice(name)[...]

    def rows(self, name: str, low: int, high: int) -> Tensor:
        return self._slice(name)[low:high]


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: str | Path) -> list[str]:
    """Fills this rank's shard of every weight and buffer; returns checkpoint names left unused.

    The model lies on its device, sharded or not, uninitialised. Raises InputError that names the
    tensors which the checkpoint lacks or holds in another shape.
    """
    reader = Reader(folder)
    state = _base_state(model)
    conversion = plan_conversion(model, reader.tensors, state, converters(model))
    if conversion.missing:
        missing = ", ".join(conversion.missing[:8])
        more = f" and {len(conversion.missing) - 8} more" if len(conversion.missing) > 8 else ""
        raise InputError(folder, fault=f"the checkpoint lacks {missing}{more}")
    for name, tensor in state.items():
        recipe = conversion.recipes.get(name)
        if recipe is None:
            continue  # tied to a weight that is filled
        shard, low, high = local_rows(tensor)
        rows = _rows(recipe, reader, model, tensor.shape, low, high)
        shard.copy_(rows)
    _fill_computed_buffers(model, set(conversion.recipes))
    return conversion.unexpected


def _base_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights and persistent buffers of the model itself."""
    return {n: t for n, t in model.state_dict(keep_vars=True).items() if not is_adapter(n)}


def _rows(
    recipe: Recipe, reader: Reader, model: PreTrainedModel, shape: torch.Size, low: int, high: int
) -> Tensor:
    """Rows `[low, high)` of a model tensor; of a bank of experts only those experts are read."""
    if recipe.converter is None and shape:
        source = recipe.names[0]
        found = tuple(reader.tensors[source].shape)
        _check_shape(recipe, found, shape, reader)
        return reader.rows(source, low, high)
    if recipe.by_expert:
        counts = {len(names) for names in recipe.sources.values()}
        if counts != {shape[0]}:
            _check_shape(recipe, (*counts, *shape[1:]), shape, reader)
        if low == high:
            return torch.empty(0, *shape[1:])
        rows = recipe.convert(reader.whole, model, experts=(low, high))
        _check_shape(recipe, (shape[0], *rows.shape[1:]), shape, reader)
        return rows
    tensor = recipe.convert(reader.whole, model)
    _check_shape(recipe, tuple(tensor.shape), shape, reader)
    return tensor[low:high] if shape else tensor


def _check_shape(recipe: Recipe, found: tuple, shape: torch.Size, reader: Reader) -> None:
    if tuple(found) != tuple(shape):
        source = recipe.names[0]
        fault = f"gives {recipe.name} the shape {list(found)}, the model has {list(shape)}"
        raise InputError(reader.tensors[source].shard, field=source, fault=fault)


def _fill_computed_buffers(model: PreTrainedModel, loaded: set[str]) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) are computed by the model itself."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        computed = [b for b in module._buffers if f"{prefix}{b}" not in loaded]
        if not any(module._buffers[b] is not None for b in computed):
            continue
        if next(module.parameters(recurse=False), None) is not None:
            raise InputError(type(module).__name__, fault=f"{prefix}{computed[0]} is never filled")
        for buffer in computed:
            value = module._buffers[buffer]
            if value is not None and value.is_floating_point():
                value.fill_(float("nan"))
        model._init_weights(module)
        for buffer in computed:
            value = module._buffers[buffer]
            if value is not None and value.is_floating_point() and value.isnan().any():
                raise InputError(type(module).__name__, fault=f"{prefix}{buffer} is never filled")


def full_tensors(model: nn.Module, *, adapters: bool) -> Iterator[tuple[str, Tensor]]:
    """Every full weight and persistent buffer, or every full adapter factor, one at a time on the
    CPU, under the names of the model's own code. All ranks must walk it together."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_adapter(name) == adapters:
            yield from under_own_names(model, name, full(tensor).cpu())


def digest(model: nn.Module, *, adapters: bool = False) -> dict[str, str]:
    """sha256 of dtype, shape and bytes of every full tensor, by name; the same on every rank."""
    return {name: tensor_digest(t) for name, t in full_tensors(model, adapters=adapters)}


def stored_digest(model: PreTrainedModel, reader: Reader) -> dict[str, str]:
    """What `digest` must give: each tensor converted whole, in this process, one at a time."""
    state = _base_state(model)
    recipes = plan_conversion(model, reader.tensors, state, converters(model)).recipes
    return {
        own: tensor_digest(tensor.to(state[name].dtype))
        for name, recipe in recipes.items()
        for own, tensor in under_own_names(model, name, recipe.convert(reader.whole, model))
    }
