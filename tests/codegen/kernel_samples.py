"""Operators, rendered kernels and modules that the tests share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from analyzers.backends import load_backend
from analyzers.schema import Operator, Site, Work
from codegen.family import load_specs
from codegen.render import render

SITES = {
    "kda": Site(module_class="KimiLinearDeltaAttention", function="chunk_kimi_delta_attention"),
    "gated_delta_rule": Site(
        module_class="Qwen3NextGatedDeltaNet", function="torch_chunk_gated_delta_rule"
    ),
}


def operator(name: str, **attributes) -> Operator:
    gate = {"kda": "per_channel", "gated_delta_rule": "per_head"}.get(name)
    shape = {"heads": 2, "value_heads": 2, "key_dim": 16, "value_dim": 24, "qk_l2norm": True}
    if gate:
        shape["gate"] = gate
    return Operator(
        name=name,
        count=1,
        flops=Work(),
        bytes=Work(),
        attributes=shape | attributes,
        site=SITES.get(name),
    )


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_kernel(folder: Path, name: str, key_dim: int, value_dim: int, backend: str = "cpu"):
    """Renders one kernel into a folder, unproved; returns what was rendered."""
    shape = {"key_dim": key_dim, "value_dim": value_dim}
    rendered = render(load_specs()[name], load_backend(backend), shape)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in rendered.files.items():
        (folder / file).write_text(text, encoding="utf-8")
    return rendered
