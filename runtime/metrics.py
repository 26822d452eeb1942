"""What a training writes as it goes: JSON lines, and events for TensorBoard where asked for."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path
from typing import Any

import torch

from analyzers.documents import write_text
from analyzers.errors import InputError
from runtime.schema import Evaluated, StepMetrics


class MetricsLog:
    """`metrics.jsonl` and `evaluation.jsonl` of a folder, written by rank 0 alone.

    A run that is resumed first drops the lines of steps after its checkpoint.
    """

    def __init__(self, folder: Path, first: int, *, tensorboard: bool) -> None:
        self.steps, self.evaluations = folder / "metrics.jsonl", folder / "evaluation.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        _truncate(self.steps, first)
        _truncate(self.evaluations, first - 1)  # what is due at `first` is evaluated again
        self.events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1)

    def step(self, metrics: StepMetrics) -> None:
        _append(self.steps, metrics)
        if self.events is None:
            return
        for name, value in dataclasses.asdict(metrics).items():
            if isinstance(value, int | float) and name != "step":
                self.events.add_scalar(f"train/{name}", value, metrics.step)
        self.events.add_scalar("experts/overflow", sum(metrics.overflow), metrics.step)
        for layer, counts in enumerate(metrics.tokens_per_expert):
            fullest = max(counts) * len(counts) / max(1, sum(counts))
            self.events.add_scalar(f"experts/layer_{layer}_max_over_mean", fullest, metrics.step)

    def evaluated(self, result: Evaluated) -> None:
        _append(self.evaluations, result)
        if self.events is not None:
            self.events.add_scalar("evaluation/loss", result.loss, result.step)
            self.events.add_scalar("evaluation/perplexity", result.perplexity, result.step)

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


def check_tensorboard(job_file: Path) -> None:
    """Raises InputError where TensorBoard is asked for and is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as e:
        fault = "is set, but tensorboard is not installed"
        fix = "pip install tensorboard, or set it to false"
        raise InputError(job_file, field="tensorboard", fault=fault, fix=fix) from e


def _append(file: Path, record: Any) -> None:
    with file.open("a", encoding="utf-8") as f:
        f.write(json.dumps(dataclasses.asdict(record)) + "\n")


def _truncate(file: Path, steps: int) -> None:
    """Keeps the lines of the first `steps` steps; nothing where a run begins."""
    lines: list[str] = []
    if steps > 0 and file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                kept = json.loads(line)["step"] <= steps
            except json.JSONDecodeError:
                break  # the line that was being written when the run was killed
            if kept:
                lines.append(line + "\n")
    write_text(file, "".join(lines))


def peak_memory_gib(device: torch.device) -> float:
    """Peak of the allocator on an accelerator, of the whole process on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes on Linux
    return torch.accelerator.max_memory_allocated(device) / 2**30


def peak_reserved_gib(device: torch.device) -> float | None:
    """Peak of what the allocator took from the device; None on a CPU."""
    if device.type == "cpu":
        return None
    return torch.accelerator.max_memory_reserved(device) / 2**30
