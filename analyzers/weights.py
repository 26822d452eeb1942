"""Whether the tensors of a checkpoint are those of a model, from names and shapes alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from analyzers.checkpoint import CheckpointFolder
from analyzers.conversion import Recipe, plan_conversion
from analyzers.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MAX_CHECKED = 100_000
FIRST_LAYERS = 8
FIX = "give the weights that belong to config.json"


def check_weights(model: PreTrainedModel, checkpoint: CheckpointFolder) -> list[str]:
    """Notes on what was not checked or is not used.

    Raises InputError when some tensor of the model is made by no tensor of the checkpoint, or by
    one of another shape. What only a quantiser of transformers can unpack is not checked.
    """
    text = model.config.get_text_config()
    if any(getattr(c, "quantization_config", None) for c in (model.config, text)):
        return []
    names, expected = list(checkpoint.tensors), model.state_dict()
    notes = []
    if len(names) > MAX_CHECKED:
        # Many seconds of pattern matching otherwise; the layers beside these are of their kinds.
        names = [n for n in names if _in_first_layers(n)]
        expected = {n: t for n, t in expected.items() if _in_first_layers(n)}
        notes.append(f"the checkpoint's names were compared for the first {FIRST_LAYERS} layers")
    conversion = plan_conversion(model, names, expected)
    if conversion.missing:
        more = f" and {len(conversion.missing) - 1} more" if conversion.missing[1:] else ""
        raise InputError(
            checkpoint.folder,
            field=f"{conversion.missing[0]}{more}",
            fault="made by no tensor of the checkpoint",
            fix=FIX,
        )
    for name, recipe in conversion.recipes.items():
        _check_shape(expected[name], recipe, checkpoint)
    if conversion.unexpected:
        first, count = conversion.unexpected[0], len(conversion.unexpected)
        notes.append(f"{count} tensors of the checkpoint are not used, {first} first")
    return notes


def _in_first_layers(name: str) -> bool:
    layer = re.search(r"\.(\d+)\.", name)
    return layer is None or int(layer[1]) < FIRST_LAYERS


def _check_shape(tensor: torch.Tensor, recipe: Recipe, checkpoint: CheckpointFolder) -> None:
    shape = tuple(tensor.shape)
    if recipe.converter is None:
        stored = checkpoint.tensors[recipe.names[0]]
        if stored.shape != shape:
            fault = f"has the shape {list(stored.shape)}, the model needs {list(shape)}"
            raise InputError(stored.shard, field=stored.name, fault=fault, fix=FIX)
    elif len(shape) == 3:
        # A bank of experts comes from one stacked tensor or from one tensor an expert.
        for pattern, names in recipe.sources.items():
            if len(names) not in (1, shape[0]):
                fault = f"stored for {len(names)} experts, the model has {shape[0]}"
                raise InputError(checkpoint.folder, field=pattern, fault=fault, fix=FIX)
