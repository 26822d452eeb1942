"""The report: a JSON file that grows row by row, its table, and the time that is left."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

from attention.workload import Shape

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "fla": "fla-core",
    "nemo": "nemo-automodel",
    "transformers": "transformers",
    "peft": "peft",
}


class Report:
    """What is known so far, on disk after every row."""

    def __init__(self, options: argparse.Namespace):
        self.file = options.output / "linear_attention.json"
        self.log = options.output / "linear_attention.log"
        self._started = time.monotonic()
        self._budget = options.budget
        options.output.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", "utf-8")
        self.data: dict = {
            "commit": options.commit or _commit(),
            "machine": machine(options.device),
            "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "kernels": [],
            "rates": {},
            "notes": [],
            "references": [],
            "rows": [],
            "carried": [],
            "first_call": [],
            "layer": [],
        }
        self._save()

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget - (time.monotonic() - self._started)

    def note(self, text: str) -> None:
        self.data["notes"].append(text)
        print(f"note: {text}", flush=True)
        self._save()

    def set_rates(self, rates: dict) -> None:
        self.data["rates"] = rates
        print(f"rates: {rates}", flush=True)
        self._save()

    def add(self, section: str, row: dict) -> None:
        self.data[section].append(row)
        print(f"{self._budget - self.left():5.0f} s  {section:10} {line(row)}", flush=True)
        self._save()

    def _save(self) -> None:
        self.data["seconds"] = round(self._budget - self.left(), 1)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1) + "\n", "utf-8")
        os.replace(temporary, self.file)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def machine(device: str) -> dict:
    """Processor, device and versions, for the head of a result."""
    found: dict = {
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
    }
    for name, package in PACKAGES.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[name] = None
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        found["gpu"], _, found["driver"] = told.splitlines()[0].partition(", ")
    return found


def line(row: dict) -> str:
    """A row in one line: who, on what, and its numbers."""
    names = ("implementation", "member", "gate", "shape")
    words = [str(row[name]) for name in names if row.get(name)]
    words.append(row.get("status", ""))
    for key, unit in (("forward_ms", "ms forward"), ("both_ms", "ms both")):
        if key in row:
            words.append(f"{row[key]:.3f} {unit}")
    if row.get("both_extra_bytes") is not None:
        words.append(f"{row['both_extra_bytes'] / 1e9:.2f} GB extra")
    for key in ("first_call_s", "other_length_s", "ready_s"):
        if key in row:
            words.append(f"{key[:-2].replace('_', ' ')} {row[key]:.1f} s")
    if found := row.get("errors"):
        worst = {n: max(e) if isinstance(e, list) else e for n, e in found.items()}
        name = max(worst, key=lambda n: worst[n])
        words.append(f"worst error {worst[name]:.1e} ({name})")
    if "note" in row:
        words.append(row["note"].splitlines()[0][:160])
    return "  ".join(filter(None, words))


def table(data: dict) -> str:
    """Milliseconds side by side, forward / forward + backward, as Markdown: a row a workload."""
    measured = [row for row in data["rows"] if "forward_ms" in row]
    names = list(dict.fromkeys(row["implementation"] for row in measured))
    cells: dict[tuple, dict[str, str]] = {}
    floors: dict[tuple, str] = {}
    for row in measured:
        key = (row["member"], row["gate"], row["shape"])
        back = f"{row['both_ms']:.2f}" if "both_ms" in row else "-"
        extra = row.get("both_extra_bytes")
        memory = "" if extra is None else f" ({extra / 1e9:.2f} GB)"
        wrong = " wrong" if row["status"] == "wrong" else ""
        cell = f"{row['forward_ms']:.2f} / {back}{memory}{wrong}"
        cells.setdefault(key, {})[row["implementation"]] = cell
        memory_ms, matrix_ms = row["memory_floor_ms"], row["matrix_floor_ms"]
        floors[key] = (
            f"{memory_ms[0]:.2f} / {memory_ms[1]:.2f} | {matrix_ms[0]:.2f} / {matrix_ms[1]:.2f}"
        )
    head = ["member", "gate", "shape", *names, "memory floor", "matrix floor"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, found in cells.items():
        each = [*key, *(found.get(name, "-") for name in names), floors[key]]
        lines.append("| " + " | ".join(each) + " |")
    return "\n".join(lines)


def error_table(data: dict) -> str:
    """Relative errors against float64 as Markdown, whole tensor (worst token): of o, and of the
    gradient that is farthest off. `recurrence` is the same recurrence in torch, on the same inputs,
    with results rounded to the same dtype."""
    rows = [{"implementation": "recurrence", **row} for row in data["references"]] + data["rows"]
    cells: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if found := row.get("errors"):
            tokens = Shape.parse(row["shape"]).small(data["options"]["tokens"])
            key = (row["member"], row["gate"], str(tokens))
            cells.setdefault(key, {}).setdefault(row["implementation"], _errors(found))
    names = list(dict.fromkeys(name for found in cells.values() for name in found))
    lines = ["| " + " | ".join(["member", "gate", "shape", *names]) + " |"]
    lines.append("|" + "---|" * (3 + len(names)))
    for key, found in cells.items():
        lines.append("| " + " | ".join([*key, *(found.get(name, "-") for name in names)]) + " |")
    return "\n".join(lines)


def _errors(found: dict[str, list[float]]) -> str:
    gradients = {name: e for name, e in found.items() if name.startswith("d")}
    said = {name: e for name, e in found.items() if name not in gradients}
    if gradients:
        name = max(gradients, key=lambda name: gradients[name][0])
        said[name] = gradients[name]
    return ", ".join(f"{name} {e[0]:.1e} ({e[-1]:.1e})" for name, e in said.items())
