"""Renders the files of one kernel: the module, its reference and its test.

The text depends on the spec, the templates, the backend and the tuning record alone: the same four
give the same bytes, without times, paths or random names.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import codegen.family as families
from analyzers.backends import Backend
from analyzers.documents import to_json
from codegen.family import FLOORS, Member, Spec, Tile
from codegen.layer import LayerSpec, RowTile
from codegen.tuning.records import Record, launch_table, record_name, record_sha256, tile_of
from codegen.tuning.space import buffered_tile, in_one_buffer

GENERATOR = "1"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The files of a kernel by name (module, reference, test and, where one was used, the tuning
    record), and what they were made from."""

    module: str
    reference: str
    test: str
    files: dict[str, str]
    attributes: dict[str, int]
    """Of the operator, for which the kernel was rendered."""
    tile: Tile | dict[str, RowTile]
    chunk: int
    """Tokens that a program works on at once."""
    template_sha256: str
    spec_sha256: str
    backend_sha256: str
    tuning_sha256: str | None
    command: str


@functools.cache
def _environment():
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("codegen"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
        autoescape=False,
    )


def render(
    spec: Member,
    backend: Backend,
    attributes: dict,
    *,
    name: str | None = None,
    tile: Tile | dict[str, RowTile] | None = None,
    record: Record | None = None,
) -> Rendered:
    """The files of the kernel for an operator of these attributes on this backend.

    `attributes` holds what the family renders for, e.g. `key_dim` and `value_dim`; `name` (of the
    files) defaults to the operator's. The tile is `tile`, or the one of a tuning `record`, or the
    family's own choice.
    """
    name = name or spec.operator
    if isinstance(spec, LayerSpec):
        assert not isinstance(tile, Tile)
        shape, chosen, chunk, values = _layer(spec, backend, attributes, tile)
    else:
        assert isinstance(spec, Spec)
        assert tile is None or isinstance(tile, Tile)
        shape, chosen, chunk, values = _linear_attention(spec, backend, attributes, tile, record)
    hashes = {
        "template_sha256": families.template_sha256(spec),
        "spec_sha256": families.spec_sha256(spec),
        "backend_sha256": families.backend_sha256(backend),
    }
    content = families.digest(*hashes.values(), GENERATOR, f"{shape} {chosen} {values}")
    names = {
        "module": f"{name}.py",
        "reference": f"reference_{name}.py",
        "test": f"test_{name}.py",
    }
    tuning = record and record_sha256(record)
    command = f"adapt kernels MODEL --backend {backend.name}"
    values |= {
        **hashes,
        **names,
        **shape,
        "spec": spec,
        "target": backend.triton.backend if backend.triton else "none",
        "most_programs": backend.triton and backend.triton.max_grid_product,
        "generator": GENERATOR,
        "backend_name": backend.name,
        "tuning_sha256": tuning,
        "command": command,
        "namespace": f"codegen_{spec.operator}_{content[:8]}",
        "floors": _by_dtype({d: FLOORS[d] for d in spec.dtypes}),
    }
    files = {}
    for kind, file in names.items():
        template = _environment().get_template(f"{spec.template}/{kind}.py.j2")
        files[file] = template.render(values).rstrip("\n") + "\n"
    if record is not None:
        files[record_name(names["module"])] = to_json(record)
    return Rendered(
        **names,
        files=files,
        attributes=shape,
        tile=chosen,
        chunk=chunk,
        **hashes,
        tuning_sha256=tuning,
        command=command,
    )


def _linear_attention(
    spec: Spec, backend: Backend, attributes: dict, tile: Tile | None, record: Record | None
) -> tuple[dict[str, int], Tile, int, dict]:
    """Attributes, tile and chunk of a kernel, and what its templates read besides."""
    key_dim, value_dim = int(attributes["key_dim"]), int(attributes["value_dim"])
    if record is not None:
        heads = int(attributes.get("value_heads", attributes.get("heads", 1)))
        tile = tile_of(record, heads)
    if tile is None and in_one_buffer(backend):
        tile = buffered_tile(spec, backend, key_dim, value_dim)
    tile = tile or spec.tile(backend, key_dim)
    launches = launch_table(spec, backend, key_dim, value_dim, tile, record)
    values = {
        "per_channel": spec.decay == "per_channel",
        "tile": tile,
        "short_chunk": families.SHORT_CHUNK,
        "launches": launches,
        "block_k": families.power_of_two(key_dim),
        "block_v": families.power_of_two(value_dim),
        "levels": int(math.log2(tile.chunk)),
        "precision": _by_dtype({d: f'"{p}"' for d, p in spec.dot_precision(backend).items()}),
    }
    return {"key_dim": key_dim, "value_dim": value_dim}, tile, tile.chunk, values


def _layer(
    spec: LayerSpec, backend: Backend, attributes: dict, tiles: dict[str, RowTile] | None
) -> tuple[dict[str, int], dict[str, RowTile], int, dict]:
    """The same of an operator around the recurrence."""
    tiles = tiles or spec.tile(backend)
    return spec.attributes(attributes), tiles, spec.chunk(tiles), spec.values(tiles)


def _by_dtype(values: dict) -> str:
    return "{" + ", ".join(f"torch.{name}: {value}" for name, value in values.items()) + "}"
