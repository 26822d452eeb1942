"""Reads what a folder of safetensors holds without trusting it and without reading the weights.

Only headers are read. Every length is bounded before it is used, every offset is checked against
the file, and every path must stay in the folder. The format is the one of
https://github.com/huggingface/safetensors#format, checked as strictly as its own reader does, so
that what passes here also opens there.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from analyzers.errors import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_BITS = 2**54  # of one tensor: 2 PB

# Width in bits of each stored dtype, by its safetensors name.
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
NOT_READ = ("*.gguf", "*.h5", "*.msgpack")
NOT_WEIGHTS = {
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "rng_state.pth",
}


class TensorInfo(NamedTuple):
    """Where one tensor lies. `begin` and `end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    """As safetensors names it: `BF16`, `F32`, `U8`, ..."""
    shape: tuple[int, ...]
    shard: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


SPAN = attrgetter("begin", "end")


@dataclass(frozen=True)
class CheckpointFolder:
    folder: Path
    tensors: dict[str, TensorInfo]
    shards: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def formats(self) -> dict[str, int]:
        """Bytes by stored dtype, largest first."""
        total: dict[str, int] = {}
        for t in self.tensors.values():
            total[t.dtype] = total.get(t.dtype, 0) + t.nbytes
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Stops the cyclic garbage collector, which otherwise walks half a million new objects again
    and again and takes most of the time; nothing in here makes cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def open_checkpoint(folder: str | Path) -> CheckpointFolder | None:
    """The tensors of a model folder, from its safetensors headers; None when it has no weights.

    Raises InputError for anything that is cut, inconsistent, unsafe or not safetensors.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(folder, fault="no such folder", fix="give the folder of a model")
    with collector_paused():
        # The order in which transformers looks: the single file wins over an index.
        if _exists(folder / SINGLE):
            shard = _inside(folder, SINGLE, where=folder / SINGLE)
            return CheckpointFolder(folder, read_header(shard), (shard,))
        if _exists(folder / INDEX):
            return _open_sharded(folder)
    _refuse_other_formats(folder)
    return None


def read_header(shard: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, in the order of their offsets.

    Raises InputError that names the file when it is cut, inconsistent or claims absurd lengths.
    """
    size = shard.stat().st_size
    if size < 8:
        raise _damaged(shard, "header", f"the file is cut: {size} bytes, the length alone needs 8")
    with shard.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if length > MAX_HEADER_BYTES:
            fault = f"claims a header of {length} bytes, more than {MAX_HEADER_BYTES}"
            raise _damaged(shard, "header", fault)
        if length > size - 8:
            fault = f"the file is cut: a header of {length} bytes in a file of {size}"
            raise _damaged(shard, "header", fault)
        header = parse_json(f.read(length), shard, "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(shard, "__metadata__", "is not an object of strings")

    data = 8 + length
    tensors = [_tensor(name, entry, shard, data, size) for name, entry in header.items()]
    tensors.sort(key=SPAN)
    reached = data
    for t in tensors:
        if t.begin != reached:
            what = (
                "overlaps the tensor before it" if t.begin < reached else "leaves a gap before it"
            )
            raise _damaged(shard, t.name, what)
        reached = t.end
    if reached != size:
        raise _damaged(shard, "header", f"{size - reached} bytes at the end belong to no tensor")
    return {t.name: t for t in tensors}


def parse_json(raw: bytes, where: Path, field: str | None = None) -> dict[str, Any]:
    """A JSON object in which no key occurs twice. Raises InputError for everything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        fault = "nested too deeply" if isinstance(e, RecursionError) else f"broken JSON: {e}"
        raise InputError(where, field=field, fault=fault, fix=_AGAIN) from e
    if not isinstance(found, dict):
        raise InputError(where, field=field, fault="is not a JSON object", fix=_AGAIN)
    return found


_AGAIN = "download or save the file again"


def _damaged(where: Path, field: str, fault: str) -> InputError:
    return InputError(where, field=shown(field), fault=fault, fix=_AGAIN)


def shown(name: str) -> str:
    """A name from a file as it may stand in a message: one line, printable, not too long."""
    return (name if name.isprintable() else ascii(name))[:120]


def _tensor(name: str, entry: Any, shard: Path, data: int, size: int) -> TensorInfo:
    """Checks one entry of a header; `data` is where the tensors begin in a file of `size` bytes."""
    if (fault := _fault(entry, size - data)) is not None:
        raise _damaged(shard, name, fault)
    begin, end = entry["data_offsets"]
    return TensorInfo(name, entry["dtype"], tuple(entry["shape"]), shard, data + begin, data + end)


def _fault(entry: Any, room: int) -> str | None:
    """What is wrong with an entry of a header before `room` bytes of data. Runs half a million
    times on a large checkpoint, so nothing is formatted before something is wrong."""
    if type(entry) is not dict:
        return "is not a JSON object"
    if len(entry) != 3 or not ("dtype" in entry and "shape" in entry and "data_offsets" in entry):
        return "needs dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPE_BITS:
        return f"has the unknown dtype {dtype!a:.40}"
    if type(shape) is not list:
        return "has a broken shape"
    bits = DTYPE_BITS[dtype]
    for n in shape:
        if type(n) is not int or n < 0:
            return "has a broken shape"
        bits *= n
        if bits >= MAX_BITS or n >= MAX_BITS:
            return "has an absurd shape"
    if type(offsets) is not list or len(offsets) != 2:
        return "has broken data_offsets"
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or begin < 0:
        return "has broken data_offsets"
    if begin > end:
        return f"ends at {_short(end)}, before its begin {_short(begin)}"
    if end > room:
        return f"ends {_short(end - room)} bytes after the end of the file"
    if bits != 8 * (end - begin):
        return f"{dtype} {shape!s:.80} does not fill {end - begin} bytes"
    return None


def _short(number: int) -> str:
    """A number from a file as it may stand in a message, however many digits it has."""
    return str(number) if abs(number) < 2**64 else "more than 2**64"


def _open_sharded(folder: Path) -> CheckpointFolder:
    index = _inside(folder, INDEX, where=folder / INDEX)
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise InputError(index, fault=f"is larger than {MAX_HEADER_BYTES} bytes", fix=_AGAIN)
    weight_map = parse_json(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        fault = "is missing, empty or not a JSON object"
        raise InputError(index, field="weight_map", fault=fault, fix=_AGAIN)

    if set(map(type, weight_map.values())) != {str}:
        name = next(n for n, file in weight_map.items() if not isinstance(file, str))
        raise _damaged(index, f"weight_map.{name}", "is not a file name")
    # The first name of each file stands for it in messages.
    first = {file: name for name, file in reversed(weight_map.items())}
    shards = {
        file: read_header(_inside(folder, file, where=index, field=f"weight_map.{first[file]}"))
        for file in sorted(first)
    }
    try:
        tensors = {name: shards[file][name] for name, file in weight_map.items()}
    except KeyError as e:
        name = e.args[0]
        fault = f"{shown(weight_map[name])} has no tensor of that name"
        raise _damaged(index, f"weight_map.{name}", fault) from e
    return CheckpointFolder(folder, tensors, tuple(folder / file for file in shards))


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _inside(folder: Path, name: str, *, where: Path, field: str | None = None) -> Path:
    """`folder / name` when that is a plain file in the folder itself, also after symbolic links."""

    def refuse(fault: str, fix: str) -> InputError:
        return InputError(where, field=shown(field) if field else None, fault=fault, fix=fix)

    plain = name and name not in (".", "..") and not any(c in name for c in "/\\\0")
    if not plain:
        raise refuse(f"'{shown(name)}' leaves the folder", "name a file of the folder itself")
    if not name.endswith((".safetensors", ".json")):
        raise refuse(f"'{shown(name)}' is not a safetensors file", "convert the weights")
    path = folder / name
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as e:  # missing, a loop of links, not encodable
        raise refuse(f"{shown(name)} is missing", "download it again") from e
    if resolved.parent != folder.resolve():
        fault = f"{shown(name)} is a link out of the folder"
        raise refuse(fault, "replace the link by the file itself")
    if not resolved.is_file():
        raise refuse(f"{shown(name)} is not a file", "download it again")
    return path


def _refuse_other_formats(folder: Path) -> None:
    """Raises InputError when the folder has weights, but none that can be read safely."""

    def named(*patterns: str) -> list[str]:
        found = {p.name for pattern in patterns for p in folder.glob(pattern)}
        return sorted(found - NOT_WEIGHTS)

    if shards := named("*.safetensors"):
        fault = f"has {shown(shards[0])} but neither {SINGLE} nor {INDEX}"
        raise InputError(folder, fault=fault, fix=f"download {INDEX} too")
    if pickles := named(*PICKLES):
        raise InputError(
            folder / pickles[0],
            fault="pickle weights can run code when they are read and are not accepted",
            fix="convert them to safetensors with save_pretrained",
        )
    if others := named(*NOT_READ):
        fix = "convert them to safetensors, or plan from config.json in a folder of its own"
        raise InputError(folder / others[0], fault="weights in this format are not read", fix=fix)
