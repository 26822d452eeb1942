"""`python -m runtime.export RUN_DIR FOLDER`: the adapter as inference servers read it.

Servers name every expert's matrices: `experts.3.up_proj.lora_A.weight`, under the names that the
checkpoint has. A matrix that the checkpoint holds in parts (gate and up apart) becomes an adapter
for each part: they share A, and B is cut by rows. Ranks are padded to one and the scale is in B, so
`lora_alpha / r` is 1 for every matrix: servers know no rank by layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from analyzers.conversion import Recipe
from analyzers.errors import InputError
from runtime.adapters import Adapted, adapted_weights
from runtime.build import Documents, build_adapted
from runtime.experts import experts_of
from runtime.finished import command
from runtime.merge import Origins, adapted_recipes, origins
from runtime.peft_format import PREFIX, StoredAdapter, write_adapter
from runtime.reader import Reader

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def export(documents: Documents, folder: Path, adapter: Path | None = None) -> int:
    """Writes the adapter of the run, or another, to `folder`; returns how many matrices it adapts.

    Raises InputError when a checkpoint tensor does not hold whole rows of an adapted weight.
    """
    model = build_adapted(documents)
    stored = StoredAdapter(adapter or documents.run_dir / "adapter", model, documents.job.lora)
    reader = Reader(documents.job.model)
    recipes = adapted_recipes(model, reader)
    lora = documents.job.lora
    rank = max(lora.rank_of(target) for target in lora.targets)
    tensors: dict[str, Tensor] = {}
    for name, weight in adapted_weights(model).items():
        for matrix, a, b in _matrices(model, name, weight, recipes[name], stored, reader):
            pad = rank - a.shape[0]
            tensors[f"{PREFIX}{matrix}.lora_A.weight"] = F.pad(a, (0, 0, 0, pad)).contiguous()
            scaled = F.pad(b * weight.scale, (0, pad))
            tensors[f"{PREFIX}{matrix}.lora_B.weight"] = scaled.contiguous()
    matrices = {name.split(".lora_")[0] for name in tensors}
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": documents.job.model,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({matrix.rpartition(".")[2] for matrix in matrices}),
    }
    write_adapter(tensors, config, folder)
    return len(matrices)


def _matrices(
    model: PreTrainedModel,
    name: str,
    weight: Adapted,
    recipe: Recipe,
    stored: StoredAdapter,
    reader: Reader,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Server's name and factors of every matrix that an adapted weight is."""
    a_shape, b_shape = (model.get_parameter(n).shape for n in (weight.a, weight.b))
    if not weight.bank:
        a = stored.rows(weight.a, a_shape, 0, a_shape[0])
        b = stored.rows(weight.b, b_shape, 0, b_shape[0])
        for source, rows in _rows_of(origins(model, recipe, None, reader)).items():
            yield source.removesuffix(".weight"), a, b[rows]
        return
    per_expert = (
        list(_rows_of(origins(model, recipe, (0, 1), reader)).values()) if recipe.by_expert else []
    )
    for expert in range(b_shape[0]):
        b = stored.rows(weight.b, b_shape, expert, expert + 1)[0]
        if len(a_shape) == 2:
            a = stored.rows(weight.a, a_shape, 0, a_shape[0])
        else:
            a = stored.rows(weight.a, a_shape, expert, expert + 1)[0]
        if recipe.by_expert:
            names = [group[expert] for group in recipe.sources.values()]
            for source, rows in zip(names, per_expert, strict=True):
                yield source.removesuffix(".weight"), a, b[rows]
        else:
            for part, rows in _stacked_parts(model, name, b.shape[0]).items():
                owner = recipe.names[0].rpartition(".")[0]
                yield f"{owner}.{expert}.{part}", a, b[rows]


def _rows_of(found: Origins) -> dict[str, Tensor]:
    """For each source, which row of the model tensor each of its rows is."""
    positions = found.positions.flatten(0, -2)
    at = {int(first): row for row, first in enumerate(positions[:, 0])}
    rows: dict[str, Tensor] = {}
    start = 0
    for name, shape in zip(found.names, found.shapes, strict=True):
        numbers = (start + torch.arange(torch.Size(shape).numel())).view(-1, shape[-1])
        start += numbers.numel()
        firsts = [at.get(int(first)) for first in numbers[:, 0]]
        if all(row is None for row in firsts):
            continue  # of another model tensor
        if None in firsts or not torch.equal(positions[torch.tensor(firsts)], numbers):
            raise InputError(name, fault="does not hold whole rows of what is adapted")
        rows[name] = torch.tensor(firsts)
    return rows


def _stacked_parts(model: PreTrainedModel, name: str, rows: int) -> dict[str, Tensor]:
    """Matrices of an expert that the checkpoint stacks too, by the names that servers know."""
    owner, _, bank = name.rpartition(".")
    experts: Any = experts_of(model)[owner]
    every = torch.arange(rows)
    if bank != "gate_up_proj":
        return {bank: every}
    if experts.is_concatenated:
        gate, up = every.chunk(2)
    else:
        gate, up = every[::2], every[1::2]
    return {"gate_proj": gate, "up_proj": up}


if __name__ == "__main__":
    sys.exit(
        command("export", __doc__, export, folder="where the adapter is written", made="matrices")
    )
