"""Tensors of a model folder, whole or by rows, by plain reads at the offsets of the headers.

Files are not mapped: pages of a mapped file count as memory of the rank that touched them, and many
reads at once are what a network file system is good at.
"""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from analyzers.errors import InputError
from runtime.unpack import rows_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Reader:
    """Weights of a model folder, or tensors of one file. Any number of threads may read at once;
    files are closed with the reader.

    A packed weight goes by the name and shape that it has unpacked and is read unpacked. Raises
    InputError for a folder without weights, a format that is not read, a file that became shorter.
    """

    def __init__(self, path: str | Path) -> None:
        from analyzers.checkpoint import CheckpointFolder, open_checkpoint, read_header
        from analyzers.formats import Scheme, logical_tensors, quantization_of
        from analyzers.models import read_config

        path, quantization = Path(path), None
        if path.is_file():
            checkpoint = CheckpointFolder(path.parent, read_header(path), (path,))
        else:
            checkpoint = open_checkpoint(path)
            if checkpoint is None:
                raise InputError(path, fault="has no weights", fix="a folder with *.safetensors")
            if (path / "config.json").is_file():
                quantization = quantization_of(read_config(path))
        self.stored = checkpoint.tensors
        """Where each stored tensor lies."""
        self.tensors = logical_tensors(checkpoint, quantization)
        self._scheme = Scheme.of(quantization)
        self._shapes = {name: info.shape for name, info in self.stored.items()}
        self._files = {shard: os.open(shard, os.O_RDONLY) for shard in checkpoint.shards}
        for file in self._files.values():
            weakref.finalize(self, os.close, file)

    def where(self, name: str) -> Path:
        """The shard that holds a weight, or its codes."""
        return self.stored[self.tensors[name].parts[0]].shard

    def whole(self, name: str) -> Tensor:
        weight = self.tensors[name]
        if len(weight.parts) > 1:
            return self.rows(name, 0, weight.shape[0])
        info = self.stored[name]
        return self._read(name, info.begin, info.shape)

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows `[low, high)` of dimension 0, which lie together in the file."""
        weight = self.tensors[name]
        if len(weight.parts) > 1:
            return rows_of(weight, low, high, self._stored_rows, self._shapes, self._scheme)
        return self._stored_rows(name, low, high)

    def part_rows(self, name: str, part: int, low: int, high: int) -> Tensor:
        """Rows of the codes (part 0) or scales (1) of an MXFP4 weight, uint8 `[.., out, bytes]`."""
        weight = self.tensors[name]
        if weight.format != "mxfp4":
            fault, fix = f"stored as {weight.format}, the plan keeps mxfp4", "bf16"
            raise InputError(self.where(name), field=name, fault=fault, fix=fix)
        rows = self._stored_rows(weight.parts[part], low, high).view(torch.uint8)
        return rows.flatten(-2) if rows.ndim == 4 else rows  # [E, out, groups, 16]

    def _stored_rows(self, name: str, low: int, high: int) -> Tensor:
        info = self.stored[name]
        if not info.shape:
            return self._read(name, info.begin, ())
        row = info.nbytes // max(1, info.shape[0])
        return self._read(name, info.begin + low * row, (high - low, *info.shape[1:]))

    def _read(self, name: str, begin: int, shape: tuple[int, ...]) -> Tensor:
        info = self.stored[name]
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            fault = f"stored as {info.dtype}, which is not trained from yet"
            raise InputError(info.shard, field=name, fault=fault, fix="use bfloat16 weights")
        buffer = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        view, done = memoryview(buffer.numpy()), 0  # type: ignore[arg-type]
        while done < len(view):
            read = os.preadv(self._files[info.shard], [view[done:]], begin + done)
            if not read:
                raise InputError(info.shard, field=name, fault="the file ends inside of it")
            done += read
        return buffer.view(dtype).view(shape)
