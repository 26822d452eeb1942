"""`nvidia-smi topo -m`: how the GPUs and NICs of one node are joined.

Legend as the tool prints it: NV# a bond of # NVLinks; PIX at most one PCIe bridge, PXB several,
PHB a host bridge, NODE within a NUMA node, SYS between NUMA nodes.
"""

from __future__ import annotations

import re
from pathlib import Path

from analyzers.errors import InputError
from strategies.cluster.importers.found import Found, NodeInside

_COLUMN = re.compile(r"(?:GPU|NIC)\d+|mlx5_\w+")
_CELL = re.compile(r"X|NV(\d{1,3})|PIX|PXB|PHB|NODE|SYS")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NEAR = ("PIX", "PXB")


def is_matrix(text: str) -> bool:
    return any(_header(line) for line in _COLOUR.sub("", text).splitlines())


def _header(line: str) -> list[str]:
    words = line.split()
    columns = [w for w in words if _COLUMN.fullmatch(w)]
    return columns if words[:1] == ["GPU0"] and (len(words) < 2 or words[1] != "X") else []


def read_matrix(path: Path, text: str) -> Found:
    """Raises InputError that names the line of a row or cell that does not fit."""
    lines = _COLOUR.sub("", text).splitlines()
    start, columns = next((i, c) for i, line in enumerate(lines) if (c := _header(line)))
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(lines[start + 1 :], start + 2):
        words = line.split()
        if not words:
            if rows:
                break
            continue
        if words[0] not in columns:
            break
        cells = words[1 : len(columns) + 1]
        wrong = next((c for c in cells if not _CELL.fullmatch(c)), None)
        if wrong is not None or len(cells) < len(columns):
            fault = f"'{wrong}' is no kind of link" if wrong else "has too few cells"
            fix = "give the matrix as nvidia-smi prints it"
            raise InputError(f"{path}:{number}", field=words[0], fault=fault, fix=fix)
        rows[words[0]] = cells
    gpus = [c for c in columns if c.startswith("GPU")]
    if missing := [g for g in gpus if g not in rows]:
        fault = f"has no row for {missing[0]}"
        raise InputError(path, fault=fault, fix="give the whole matrix")
    return _found(path, columns, rows, gpus)


def _found(path: Path, columns: list[str], rows: dict[str, list[str]], gpus: list[str]) -> Found:
    at = {c: i for i, c in enumerate(columns)}
    links = {(a, b): rows[a][at[b]] for a in gpus for b in gpus if a != b}
    if odd := next(((a, b) for (a, b), c in links.items() if c != links[b, a]), None):
        fault = f"{odd[0]} to {odd[1]} is {links[odd]}, the way back {links[odd[1], odd[0]]}"
        raise InputError(path, fault=fault, fix="give the matrix as nvidia-smi prints it")
    kinds = set(links.values())
    counts = {int(m[1]) for c in kinds if (m := re.fullmatch(r"NV(\d+)", c))}
    nics = [c for c in columns if c not in gpus]
    near = [n for n in nics if any(rows[g][at[n]] in NEAR for g in gpus)]
    notes: list[str] = []
    if len(near) < len(nics):
        notes.append(f"{len(near)} of {len(nics)} NICs are close to a GPU; the others are left out")
    every_pair = len(counts) == 1 and len(kinds) == 1
    if counts and not every_pair:
        shown = ", ".join(sorted(kinds))
        notes.append(
            f"pairs of GPUs are joined unevenly ({shown}): all are planned at the rate of PCIe"
        )
    return Found(
        path=path,
        format="nvidia_smi",
        node=NodeInside(
            devices=len(gpus),
            kind="switch",
            links=counts.pop() if every_pair else None,
            nics=len(near),
        ),
        notes=tuple(notes),
    )
