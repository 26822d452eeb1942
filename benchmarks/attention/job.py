"""What a task of a worker names: its device, its member, shape and implementation."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from attention.implementations import build
from attention.workload import Shape, inputs, members, output_gradient

FLUSH_BYTES = 256 << 20  # several times the level-2 cache
WARM_UP = 5


class Device:
    """Clock, cache and memory of the device that the tensors are on."""

    def __init__(self, name: str):
        self.name = name
        self.cuda = name == "cuda"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=name) if self.cuda else None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def times(self, call: Callable[[], object], repeats: int) -> list[float]:
        """Milliseconds of each call, from a cold level-2 cache. The calls are queued one behind the
        other, so that the device waits for the host only where the host is the slower one."""
        if self._flush is None:
            marks = [time.perf_counter()]
            for _ in range(repeats):
                call()
                marks.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
        events = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def median(self, call: Callable[[], object], seconds: float) -> float:
        """Median milliseconds over about so many seconds, at least 5 and at most 100 calls."""
        usual = statistics.median(self.times(call, WARM_UP if self.cuda else 1))
        repeats = int(max(5, min(100, 1e3 * seconds / max(usual, 1e-3))))
        return statistics.median(self.times(call, repeats))

    def extra_bytes(self, call: Callable[[], list[torch.Tensor]]) -> int | None:
        """Peak memory of a call beyond what was there and what it returns."""
        if not self.cuda:
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = call()
        self.synchronize()
        returned = sum(t.numel() * t.element_size() for t in made)
        return torch.cuda.max_memory_allocated() - before - returned


device = functools.cache(Device)  # its cache is written over by every measurement


class Job:
    """A task's fields, with the names resolved."""

    def __init__(self, task: dict):
        self.device = device(task["device"])
        self.folder = Path(task["folder"])
        self.seconds: float = task["seconds"]
        self.tokens: int = task["tokens"]
        self.backend: str = task["backend"]
        self.implementation: str = task.get("implementation", "")
        self.share: list[int] = task.get("share", [0, 1])
        if "shape" in task:
            self.shape = Shape.parse(task["shape"])
        if "member" in task:
            (self.spec,) = members([task["member"]])
            self.gate: str = task["gate"]

    @property
    def small(self) -> Shape:
        return self.shape.small(self.tokens)

    @property
    def reference_file(self) -> Path:
        name = f"reference-{self.spec.operator}-{self.gate}-{self.small}"
        return self.folder / f"{name.replace(':', '_')}.pt"

    def inputs(self, shape: Shape) -> tuple[dict, torch.Tensor]:
        """The inputs and the gradient of o."""
        x = inputs(self.spec, shape, self.gate, self.device.name, self.device.dtype)
        return x, output_gradient(x)

    def build(self, shape: Shape):
        return build(self.implementation, self.spec, shape, self.gate, self.folder)
