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

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Reader:
    """Of a model folder or of one file. Any number of threads may read at once; files are closed
    with the reader.

    Raises InputError for a folder without weights, a dtype that is not trained from, a file that
    became shorter.
    """

    def __init__(self, path: str | Path) -> None:
        from analyzers.checkpoint import open_checkpoint, read_header

        if Path(path).is_file():
            self.tensors = read_header(Path(path))
        elif (checkpoint := open_checkpoint(path)) is not None:
            self.tensors = checkpoint.tensors
        else:
            raise InputError(path, fault="has no weights", fix="a folder with *.safetensors")
        shards = {info.shard for info in self.tensors.values()}
        self._files = {shard: os.open(shard, os.O_RDONLY) for shard in shards}
        for file in self._files.values():
            weakref.finalize(self, os.close, file)

    def whole(self, name: str) -> Tensor:
        info = self.tensors[name]
        return self._read(name, info.begin, info.shape)

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows `[low, high)` of dimension 0, which lie together in the file."""
        info = self.tensors[name]
        row = info.nbytes // info.shape[0]
        return self._read(name, info.begin + low * row, (high - low, *info.shape[1:]))

    def _read(self, name: str, begin: int, shape: tuple[int, ...]) -> Tensor:
        info = self.tensors[name]
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            fault = f"stored as {info.dtype}, which is not trained from yet"
            raise InputError(info.shard, field=name, fault=fault, fix="use bfloat16 weights")
        buffer = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        view, done = memoryview(buffer.numpy()), 0
        while done < len(view):
            read = os.preadv(self._files[info.shard], [view[done:]], begin + done)
            if not read:
                raise InputError(info.shard, field=name, fault="the file ends inside of it")
            done += read
        return buffer.view(dtype).view(shape)
