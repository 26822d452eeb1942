"""Tuning records: what was fastest on a device, and which record serves a shape.

A record is one JSON file. Shipped ones lie in `codegen/tuned/`; what `--tune` finds is kept in the
user's cache folder under the hash of everything that it depends on.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from dataclasses import field
from importlib import resources
from pathlib import Path
from typing import Literal

from analyzers.backends import Backend
from analyzers.documents import document, read_document, to_json, write_document
from analyzers.errors import InputError
from codegen.family import (
    Launch,
    Spec,
    Strategy,
    Tile,
    backend_sha256,
    digest,
    spec_sha256,
    template_sha256,
)
from codegen.tuning.space import ITEM_BYTES, Space, clipped, triton_version


@document
class Class:
    """What was fastest for one class of shapes: about so many programs, about so long."""

    programs: int
    """Sequences times value heads: what a kernel that walks along the sequence runs at once."""
    tokens: int
    """Of each sequence."""
    launches: dict[str, Launch]
    milliseconds: dict[str, float]
    """By kernel, in one training step and a forward alone; `step` is both."""
    default_milliseconds: dict[str, float]
    """The same with the family's own tile."""


@document
class Refused:
    """A candidate that was not timed, or whose time cannot be true."""

    tile: str
    reason: str


@document
class Record:
    version: Literal[1] = 1
    operator: str
    backend: str
    device: str
    """As the driver names it."""
    triton: str
    """Version."""
    key_dim: int
    value_dim: int
    dtype: str
    content: str
    """Hash of template, spec, backend, Triton version and device name."""
    chunk: int
    strategy: Strategy
    classes: list[Class]
    tried: int
    keep: bool = False
    """As `Tile.keep`."""
    refused: list[Refused] = field(default_factory=list)


def content_of(spec: Spec, backend: Backend, triton: str, device: str) -> str:
    """Hash of everything besides the shape that the result of tuning depends on."""
    return digest(template_sha256(spec), spec_sha256(spec), backend_sha256(backend), triton, device)


def record_sha256(record: Record) -> str:
    return digest(to_json(record))


def cache_folder() -> Path:
    """The user's folder of records: XDG's on Linux, the platform's own elsewhere."""
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.environ.get("LOCALAPPDATA"):
        base = Path(os.environ["LOCALAPPDATA"])
    else:
        base = Path.home() / ".cache"
    return base / "adapter-agent" / "tuned"


def shipped_folder() -> Path:
    return Path(str(resources.files("codegen"))) / "tuned"


def file_name(record: Record, *, shipped: bool = False) -> str:
    """A shipped record replaces the one for the same shape; a cached one is kept by content."""
    widths = f"{record.key_dim}x{record.value_dim}"
    name = f"{record.backend}-{record.operator}-{widths}-{record.dtype}"
    return f"{name}.json" if shipped else f"{name}-{record.content[:12]}.json"


def record_name(module: str) -> str:
    """Of the record beside a rendered module."""
    return f"tuning_{Path(module).stem}.json"


def records_beside(folder: Path) -> list[Record]:
    """Those that the kernels of a set were made with."""
    return [read_document(Record, path) for path in sorted(folder.glob(record_name("*")))]


def save(record: Record, folder: Path | None = None) -> Path:
    """Writes the record to the user's cache folder, or to `folder` under its shipped name."""
    if folder is not None:
        return write_document(record, folder / file_name(record, shipped=True))
    return write_document(record, cache_folder() / file_name(record))


def known_records() -> list[Record]:
    """The user's records, then the shipped ones.

    A damaged file of the user's cache is passed over: it can be made again. Raises InputError for
    a damaged shipped one.
    """
    mine = []
    for path in sorted(cache_folder().glob("*.json")):
        try:
            mine.append(read_document(Record, path))
        except InputError:
            continue
    return mine + [read_document(Record, p) for p in sorted(shipped_folder().glob("*.json"))]


def nearest(
    records: list[Record],
    spec: Spec,
    backend: Backend,
    key_dim: int,
    value_dim: int,
    dtype: str,
    triton: str | None = None,
) -> Record | None:
    """The record that serves kernels of these widths, or None.

    Nearest in K, then V, then dtype; then a record of the present templates goes before one of
    older ones, and the user's own before a shipped one. A record with a launch that the backend
    cannot hold at these widths, or that this version of Triton is known to get wrong, serves none.
    """
    triton = triton or triton_version()
    space = Space(
        spec=spec,
        backend=backend,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        triton=triton,
    )

    def kernels(strategy: Strategy) -> set[str]:
        return set(spec.tile(backend, key_dim, strategy=strategy).launches)

    def distance(a: int, b: int) -> float:
        return abs(math.log2(a / b))

    def serves(r: Record) -> bool:
        return (
            (r.operator, r.backend) == (spec.operator, backend.name)
            and ITEM_BYTES[dtype] <= ITEM_BYTES[r.dtype]
            and all(set(c.launches) == kernels(r.strategy) for c in r.classes)
            and not any(
                space.refusal(kernel, clipped(spec, kernel, launch, key_dim, value_dim), r.chunk)
                for c in r.classes
                for kernel, launch in c.launches.items()
            )
        )

    present = functools.cache(functools.partial(content_of, spec, backend))

    def order(r: Record):
        old = r.content != present(r.triton, r.device)
        return distance(r.key_dim, key_dim), distance(r.value_dim, value_dim), r.dtype != dtype, old

    return min(filter(serves, records), key=order, default=None)


def nearest_class(record: Record, programs: int, tokens: int) -> Class:
    """The class nearest in parallelism, then in length."""

    def order(c: Class):
        return abs(math.log2(c.programs / programs)), abs(math.log2(c.tokens / tokens))

    return min(record.classes, key=order)


Rows = list[tuple[int | None, Launch]]
"""(most programs that it is for, launch), rising; None is any number."""


def launch_rows(record: Record) -> dict[str, Rows]:
    """What a kernel of the rendered module picks its launch from, by the number of programs.

    Between two classes the limit is their geometric mean; of two lengths the longer one counts.
    """
    longest = {c.programs: c for c in sorted(record.classes, key=lambda c: c.tokens)}
    classes = [longest[programs] for programs in sorted(longest)]
    rows: dict[str, Rows] = {}
    for kernel in classes[0].launches:
        mine: Rows = []
        for c, above in zip(classes, [*classes[1:], None], strict=True):
            if mine and mine[-1][1] == c.launches[kernel]:
                mine.pop()
            most = None if above is None else math.isqrt(c.programs * above.programs)
            mine.append((most, c.launches[kernel]))
        rows[kernel] = mine
    return rows


def tile_of(record: Record, programs: int, tokens: int = 8192) -> Tile:
    """The record's tile for so many programs."""
    launches = nearest_class(record, programs, tokens).launches
    return Tile(chunk=record.chunk, strategy=record.strategy, launches=launches, keep=record.keep)


def launch_table(
    spec: Spec, backend: Backend, key_dim: int, value_dim: int, tile: Tile, record: Record | None
) -> dict[str, dict[str, Rows]]:
    """By dtype and kernel, the rows of the rendered module.

    The record's for its own dtype and others of that size, the family's own launches for the rest;
    those of `tile` where there is no record. Each with no more stages than fit in that dtype.
    """

    def rows(dtype: str) -> dict[str, Rows]:
        if record is not None and ITEM_BYTES[dtype] == ITEM_BYTES[record.dtype]:
            return launch_rows(record)
        own = functools.partial(spec.tile, backend, key_dim, strategy=tile.strategy)
        others = record is not None or tile == own()
        launches = (own(dtype=dtype) if others else tile).launches
        return {kernel: [(None, launch)] for kernel, launch in launches.items()}

    def fitted(dtype: str, kernel: str, launch: Launch) -> Launch:
        space = Space(spec=spec, backend=backend, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
        return space.fitted(kernel, launch, tile.chunk)

    return {
        dtype: {
            kernel: [(most, fitted(dtype, kernel, x)) for most, x in found]
            for kernel, found in rows(dtype).items()
        }
        for dtype in spec.dtypes
    }


def recall(
    records: list[Record],
    content: str,
    key_dim: int,
    value_dim: int,
    dtype: str,
    programs: list[int],
) -> Record | None:
    """The record that tuning for these numbers of programs would make again, or None.

    Lengths do not matter: a kernel's launches are the same for a sequence twice as long.
    """

    def is_same(r: Record) -> bool:
        return (r.content, r.key_dim, r.value_dim, r.dtype) == (
            content,
            key_dim,
            value_dim,
            dtype,
        ) and all(_near(n, r) for n in programs)

    return next(filter(is_same, records), None)


def _near(programs: int, record: Record) -> bool:
    return any(abs(math.log2(c.programs / programs)) <= 0.5 for c in record.classes)
