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
from codegen.family import Spec, Tile
from codegen.tuning.records import Record, launch_table, record_sha256, tile_of

GENERATOR = "1"

# Unit roundoff of the dtype, with room for the sums that any order of evaluation needs.
FLOORS = {"float32": 1e-5, "bfloat16": 2.0**-8}


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The three files of a kernel by name, and what they were made from."""

    module: str
    reference: str
    test: str
    files: dict[str, str]
    key_dim: int
    value_dim: int
    tile: Tile
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
    spec: Spec,
    backend: Backend,
    attributes: dict,
    *,
    name: str | None = None,
    tile: Tile | None = None,
    record: Record | None = None,
) -> Rendered:
    """The files of the kernel for this operator's head widths on this backend.

    `attributes` holds `key_dim` and `value_dim`; `name` (of the files) defaults to the operator's.
    The tile is `tile`, or the one of a tuning `record`, or the family's own choice.
    """
    name = name or spec.operator
    key_dim, value_dim = int(attributes["key_dim"]), int(attributes["value_dim"])
    if record is not None:
        heads = int(attributes.get("value_heads", attributes.get("heads", 1)))
        tile = tile_of(record, heads)
    tile = tile or spec.tile(backend, key_dim)
    launches = launch_table(spec, backend, key_dim, value_dim, tile, record)
    hashes = {
        "template_sha256": families.template_sha256(spec),
        "spec_sha256": families.spec_sha256(spec),
        "backend_sha256": families.backend_sha256(backend),
    }
    shape = f"{key_dim}x{value_dim} {tile} {launches}"
    content = families.digest(*hashes.values(), GENERATOR, shape)
    names = {
        "module": f"{name}.py",
        "reference": f"reference_{name}.py",
        "test": f"test_{name}.py",
    }
    block_k = families.power_of_two(key_dim)
    values = {
        **hashes,
        **names,
        "spec": spec,
        "per_channel": spec.decay == "per_channel",
        "generator": GENERATOR,
        "backend_name": backend.name,
        "tuning_sha256": record and record_sha256(record),
        "command": f"adapt kernels MODEL --backend {backend.name}",
        "namespace": f"codegen_{spec.operator}_{content[:8]}",
        "key_dim": key_dim,
        "value_dim": value_dim,
        "tile": tile,
        "launches": launches,
        "block_k": block_k,
        "block_v": families.power_of_two(value_dim),
        "levels": int(math.log2(tile.chunk)),
        "precision": _by_dtype({d: f'"{p}"' for d, p in spec.dot_precision(backend).items()}),
        "floors": _by_dtype({d: FLOORS[d] for d in spec.dtypes}),
    }
    files = {}
    for kind, file in names.items():
        template = _environment().get_template(f"{spec.template}/{kind}.py.j2")
        files[file] = template.render(values).rstrip("\n") + "\n"
    return Rendered(
        **names,
        files=files,
        key_dim=key_dim,
        value_dim=value_dim,
        tile=tile,
        **hashes,
        tuning_sha256=values["tuning_sha256"],
        command=values["command"],
    )


def _by_dtype(values: dict) -> str:
    return "{" + ", ".join(f"torch.{name}: {value}" for name, value in values.items()) + "}"
