"""A profile of some steps: a trace for chrome://tracing or Perfetto, and what it says.

How much communication hides behind computation is read from the trace: the time in which a
collective runs while a kernel of another kind runs on the same device.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from analyzers.documents import write_text

Interval = tuple[float, float]

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on a device, as the profiler names them."""
COLLECTIVE = re.compile(r"nccl|hccl|rccl|gloo:", re.IGNORECASE)
NAMES = {
    "all_gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce_scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all_reduce": re.compile(r"all_?reduce", re.IGNORECASE),
    "all_to_all": re.compile(r"all_?to_?all|send_?recv", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast", re.IGNORECASE),
}


@dataclass(frozen=True)
class Collective:
    seconds: float
    """In which at least one collective of this kind runs."""
    hidden: float
    """Share of it in which something else computes."""


@dataclass(frozen=True)
class Overlap:
    """Of one rank."""

    collectives: dict[str, Collective] = field(default_factory=dict)
    total: Collective = Collective(0.0, 0.0)
    computing: float = 0.0
    """Seconds in which a kernel that is no collective runs."""

    def lines(self) -> list[str]:
        if not self.collectives:
            return ["profile: no collective was seen"]
        named = [
            *sorted(self.collectives.items(), key=lambda c: -c[1].seconds),
            ("all", self.total),
        ]
        said = (f"{n} {1e3 * c.seconds:.1f} ms, {c.hidden:.0%} hidden" for n, c in named)
        return [
            f"profile: computing {1e3 * self.computing:.1f} ms",
            *(f"profile: {s}" for s in said),
        ]


def overlap(events: Iterable[dict[str, Any]]) -> Overlap:
    """Of the `traceEvents` of a chrome trace (times in microseconds).

    Where the trace has kernels of a device, they are what counts; a trace of a CPU alone has the
    operators that ATen ran and the collectives of gloo.
    """
    complete = [e for e in events if e.get("ph") == "X" and e.get("dur")]
    on_device = [e for e in complete if e.get("cat") in KERNELS]
    used = on_device or [e for e in complete if _computes_on_host(e)]
    computing = _union(_interval(e) for e in used if not COLLECTIVE.search(e["name"]))
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    for event in used if on_device else complete:
        if COLLECTIVE.search(event["name"]):
            by_kind[_kind(event["name"])].append(_interval(event))
    found = {kind: _collective(_union(i), computing) for kind, i in by_kind.items()}
    everything = _union(i for intervals in by_kind.values() for i in intervals)
    return Overlap(found, _collective(everything, computing), 1e-6 * _length(computing))


def _computes_on_host(event: dict[str, Any]) -> bool:
    return event.get("cat") == "cpu_op" and event["name"].startswith("aten::")


def _kind(name: str) -> str:
    return next((kind for kind, pattern in NAMES.items() if pattern.search(name)), "other")


def _interval(event: dict[str, Any]) -> Interval:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order."""
    made: list[Interval] = []
    for start, end in sorted(intervals):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((start, end))
    return made


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _collective(one: list[Interval], computing: list[Interval]) -> Collective:
    """Both disjoint and in order."""
    shared, at = 0.0, 0
    for start, end in one:
        while at < len(computing) and computing[at][1] <= start:
            at += 1
        for low, high in computing[at:]:
            if low >= end:
                break
            shared += min(end, high) - max(start, low)
    length = _length(one)
    return Collective(1e-6 * length, shared / length if length else 0.0)


def read_trace(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as f:
        return json.load(f)["traceEvents"]


class StepProfile:
    """Traces the steps `steps` on this rank and writes `trace.json.gz` and, from it,
    `overlap.json`."""

    def __init__(self, folder: Path, steps: range, device: torch.device) -> None:
        self.folder, self.steps, self.device = folder, steps, device
        self._running: Any = None

    def begin(self, step: int) -> None:
        if step in self.steps[:1]:
            self._running = torch.profiler.profile()
            self._running.start()

    def end(self, step: int) -> list[str]:
        """What the trace says, after the last of its steps."""
        if self._running is None or step not in self.steps[-1:]:
            return []
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._running.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / "trace.json.gz"
        self._running.export_chrome_trace(str(trace))
        found = overlap(read_trace(trace))
        text = json.dumps(dataclasses.asdict(found), indent=2) + "\n"
        write_text(self.folder / "overlap.json", text)
        return [*found.lines(), f"profile: written to {trace}"]
