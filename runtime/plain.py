"""A copy of a model folder in which no weight is packed, shard by shard.

Where a model is packed, its config tells transformers how; the copy's does not, so that it loads as
any plain model does. Weights that are not packed keep their bytes.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from analyzers.checkpoint import INDEX
from analyzers.documents import write_text
from analyzers.formats import Logical
from analyzers.models import read_config
from runtime.reader import DTYPES, Reader

PIECE = 16 * 2**20
"""Bytes of a tensor that are unpacked at once."""
QUANTIZATION = ("quantization_config", "checkpoint_quantization_config")
OF_PACKED = ("*.safetensors", "*.safetensors.index.json", "hf_quant_config.json")
"""Files of the folder that say what is packed, or are."""


def write_plain(reader: Reader, base: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copies the model folder `base` to `folder`, packed weights as `dtype`.

    Raises InputError for a format that is not unpacked.
    """
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns(*OF_PACKED))
    shards: Mapping[Path, list[Logical]] = defaultdict(list)
    for weight in reader.tensors.values():
        shards[reader.where(weight.name)].append(weight)
    for shard, weights in shards.items():
        _write_shard(reader, weights, folder / shard.name, dtype)
    if (base / INDEX).is_file():
        map_ = {w.name: shard.name for shard, weights in shards.items() for w in weights}
        size = sum((folder / shard.name).stat().st_size for shard in shards)
        index = {"metadata": {"total_size": size}, "weight_map": map_}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    config = read_config(base)
    for place in (config, config.get("text_config")):
        if isinstance(place, dict):
            for key in QUANTIZATION:
                place.pop(key, None)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _write_shard(reader: Reader, weights: list[Logical], path: Path, dtype: torch.dtype) -> None:
    """One file of safetensors: the header's length, the header, then the tensors one by one."""
    named = {made: name for name, made in DTYPES.items()}
    kinds = {w.name: _kind(w, dtype) for w in weights}
    weights = sorted(weights, key=lambda w: (-kinds[w.name].itemsize, w.name))  # all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        kind = kinds[weight.name]
        begin, end = end, end + math.prod(weight.shape) * kind.itemsize
        entry = {"dtype": named[kind], "shape": weight.shape, "data_offsets": [begin, end]}
        header[weight.name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight in weights:
            _write_tensor(reader, weight, kinds[weight.name], file)


def _kind(weight: Logical, dtype: torch.dtype) -> torch.dtype:
    stored = DTYPES[weight.dtype]
    small = stored.is_floating_point and stored.itemsize == 1  # also where it has no scale
    return dtype if small or len(weight.parts) > 1 else stored


def _write_tensor(reader: Reader, weight: Logical, kind: torch.dtype, file: Any) -> None:
    rows = weight.shape[0] if weight.shape else 1
    row = math.prod(weight.shape[1:]) * 4  # as float32, in which packed rows come
    step = max(1, PIECE // max(1, row))
    for low in range(0, rows, step):
        piece = reader.rows(weight.name, low, min(low + step, rows)).to(kind)
        file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
