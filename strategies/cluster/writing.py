"""Writing topo.yaml: one line a tier and a curve, read back as the same cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from analyzers.documents import write_text
from strategies.cluster.reading import NUMBER

HEADER = (
    "Units are in the keys: GB/s (1e9, one direction, per device), us, GiB, TFLOPS. Tiers are",
    "ordered, closest first; each groups `size` children of the tier before. docs/cluster.md",
)


class _Dumper(yaml.SafeDumper):
    """Quotes also what only YAML 1.2 takes for a number, such as 1e3."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"^(?:{NUMBER})$"), list("-+.0123456789")
)


def to_yaml(data: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """The text of a topology file; `comments` go to its head."""
    lines = [f"# {' '.join(line.split())}" for line in (*comments, *HEADER)]
    for key, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines += [f"{key}:", *(f"  - {_flow(item)}" for item in value)]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def write_topology(data: Mapping[str, Any], path: Path, comments: Sequence[str] = ()) -> Path:
    """Raises InputError when the folder cannot be written."""
    return write_text(path, to_yaml(data, comments))


def _flow(value: Any) -> str:
    text = yaml.dump(
        _plain(value),
        Dumper=_Dumper,
        default_flow_style=True,
        width=10**6,
        sort_keys=False,
        allow_unicode=True,
    )
    return text.removesuffix("\n...\n").strip()


def _plain(value: Any) -> Any:
    """Numbers as short as they are: 450.0 -> 450, and six significant digits."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        rounded = float(f"{value:.6g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    return value
