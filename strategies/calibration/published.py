"""Published training runs: one typed row of a table each, as its source printed it.

A cell that is empty is unknown (`n/a` in a degree is an axis that is not used); nothing is filled
in. What a layout means, and which rows are complete enough to be predicted, `cases` decides.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import math
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import UnionType

from analyzers.errors import InputError
from strategies.cluster.reading import read_text

FOLDER = resources.files("strategies.calibration")
MAX_BYTES = 64 * 2**20
NOT_USED = ("n/a", "-")
"""How tables write the degree of an axis that a run does not use."""


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """The columns that a prediction is made from or held against; None where unknown."""

    id: str
    kind: str
    model: str
    task: str
    gpu: str
    num_gpus: int | None
    gpus_per_node: str
    precision: str
    framework: str
    params_total_b: float | None
    tp: int | None
    pp: int | None
    vpp: int | None
    cp: int | None
    ep: int | None
    etp: int | None
    fsdp_shard: str
    dp: int | None
    mbs: int | None
    local_bs: int | None
    ga: int | None
    gbs: int | None
    seq_len: int | None
    dispatcher: str
    routing: str
    capacity_factor: float | None
    balancer: str
    recompute: str
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    peak_mem_gib: float | None
    unit: str
    outcome: str
    notes: str
    source: str
    confidence: str


FIELDS = {f.name: f.type for f in dataclasses.fields(PublishedRun)}
REQUIRED = ("id", "kind", "model", "gpu", "source")


def published_runs() -> list[PublishedRun]:
    """The rows that come with the project."""
    with resources.as_file(FOLDER / "published_runs.csv") as path:
        return read_runs(path)


def supplemented(run: PublishedRun) -> PublishedRun:
    """The row with what its source says elsewhere than in its table (`supplements.yaml`)."""
    for entry in _supplements():
        if _concerns(entry, run):
            empty = {n: v for n, v in entry.get("set", {}).items() if not getattr(run, n)}
            run = dataclasses.replace(run, **empty, **entry.get("correct", {}))
    return run


def faulty(run: PublishedRun) -> str | None:
    """Why the row's own source says that it should not be counted."""
    found = (e["leave_out"] for e in _supplements() if "leave_out" in e and _concerns(e, run))
    return next(found, None)


def _concerns(entry: dict, run: PublishedRun) -> bool:
    return all(
        re.search(entry.get(name, ""), getattr(run, name))
        for name in ("source", "model", "precision")
    )


@functools.cache
def _supplements() -> list[dict]:
    import yaml

    return yaml.safe_load((FOLDER / "supplements.yaml").read_text(encoding="utf-8"))


def read_runs(path: str | Path) -> list[PublishedRun]:
    """Reads a table of these columns; a column that is not there is unknown in every row.

    Raises InputError that names the row and the column of a cell that is not what its column holds.
    """
    path = Path(path)
    text = read_text(path, MAX_BYTES, missing="--rows FILE.csv", larger="split it")
    lines = io.StringIO(text.removeprefix("\ufeff"), newline="")
    return _rows(path, csv.reader(lines, strict=True))


def _rows(path: Path, reader) -> list[PublishedRun]:
    try:
        header = [name.strip() for name in next(reader, [])]
        if missing := [name for name in REQUIRED if name not in header]:
            fix = f"the first line names the columns: {', '.join(REQUIRED)}, ..."
            raise InputError(path, field="line 1", fault=f"no column {missing[0]!r}", fix=fix)
        if twice := [name for name in header if name and header.count(name) > 1]:
            fault = f"column {twice[0]!r} is there twice"
            raise InputError(path, field="line 1", fault=fault, fix="name each column once")
        found: list[PublishedRun] = []
        seen: set[str] = set()
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            where = f"line {reader.line_num}"
            if len(cells) != len(header):
                fault = f"has {len(cells)} cells for {len(header)} columns"
                fix = "put a cell with a comma in quotes"
                raise InputError(path, field=where, fault=fault, fix=fix)
            run = _run(path, where, dict(zip(header, cells, strict=True)))
            if run.id in seen:
                fault = f"id {run.id!r} is there twice"
                raise InputError(path, field=where, fault=fault, fix="give each row its own id")
            seen.add(run.id)
            found.append(run)
        return found
    except csv.Error as e:
        where = f"line {reader.line_num}"
        raise InputError(path, field=where, fault=f"is not CSV: {e}", fix="check quotes") from e


def _run(path: Path, where: str, row: dict[str, str]) -> PublishedRun:
    label = f"{where} ({row['id'].strip() or 'no id'})"
    values = {}
    for name, kind in FIELDS.items():
        text = row.get(name, "").strip()
        if name in REQUIRED and not text:
            raise InputError(path, field=f"{label}, {name}", fault="is empty", fix="fill it in")
        try:
            values[name] = _cell(text, kind)
        except ValueError as e:
            fix = "leave it empty where it is unknown"
            raise InputError(path, field=f"{label}, {name}", fault=str(e), fix=fix) from e
    return PublishedRun(**values)


def _cell(text: str, kind: str | type | UnionType) -> str | int | float | None:
    if kind == "str":
        return text
    if not text:
        return None
    if text in NOT_USED:
        return 1 if kind == "int | None" else None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text!r} is not a finite number >= 0")
    if kind == "float | None":
        return value or None
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value) or None


def organisation(run: PublishedRun) -> str:
    """Who published the row: what is left out together when its rows are predicted.

    A repository's owner, those of one company under one name. A row without a repository keeps the
    name of what it is from (an arXiv number, a site).
    """
    text = re.sub(r"^https?://(?:www\.)?", "", run.source)
    if (
        (match := re.match(r"github\.com/([^/]+)/", text))
        or (match := re.match(r"([A-Za-z0-9_-]+)/[A-Za-z0-9._-]+[@ ]", text))
        or (match := re.match(r"([a-z0-9.-]+\.[a-z]{2,})/", text))
    ):
        owner = match[1]
    else:
        owner = re.split(r"[\s/]", text)[0] if not text.startswith("PyPI") else text.split()[1]
    return ORGANISATIONS.get(owner.lower(), owner)


ORGANISATIONS = {
    "nvidia-nemo": "NVIDIA",
    "nvidia": "NVIDIA",
    "yanring": "NVIDIA",  # Megatron-MoE-ModelZoo: Megatron-Core's own team
    "aiconfigurator-core": "NVIDIA",
    "pytorch": "PyTorch",
    "pytorch.org": "PyTorch",
    "modelscope": "ModelScope",
    "marin-community": "Marin",
    "amd-agi": "AMD",
    "huggingface": "Hugging Face",
    "ascend": "Huawei",
    "mindspore-ai": "Huawei",
    "radixark": "RadixArk",
    "deepseek-ai": "DeepSeek",
    "sgl-project": "SGLang",
    "stas00": "ml-engineering",
    "semianalysisai": "SemiAnalysis",
}
