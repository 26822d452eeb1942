"""Proves and times tiles on a device: every candidate in processes of its own, with time limits.

Proofs compile and run side by side. For timing, a group of candidates starts side by side too
(compiling is the long part); once all of them stand ready, one measures at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from analyzers.documents import write_text
from codegen.build import subject_of
from codegen.family import Tile, digest
from codegen.load import import_file
from codegen.render import render
from codegen.tuning.space import Space
from codegen.verify.cases import all_cases
from codegen.verify.harness import Subject, run_on, shape_on
from codegen.verify.judge import Judge
from codegen.verify.processes import environment

# Enough to catch what a launch can get wrong: tails, several documents and heads, hostile gates.
# A family without a case of that name has fewer.
CASES = (
    "usual",
    "grouped value heads in a batch",
    "packed with empty and one-token sequences",
    "hard resets",
    "usual, forward alone",
    "packed with empty and one-token sequences, forward alone",
    "hard resets, forward alone",
)
PROOF_SECONDS = 90
START_SECONDS = 150
"""Longest wait for the compilation and the first steps of a candidate that is to be timed."""
MEASURE_SECONDS = 60
MEASURE_MILLISECONDS = 60
"""Spent on each kernel of each workload."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a training step and a forward alone, to be timed, are of."""

    batch: int
    tokens: int
    heads: int
    value_heads: int

    @property
    def programs(self) -> int:
        return self.batch * self.value_heads

    def __str__(self) -> str:
        heads = f"H{self.heads}"
        if self.value_heads != self.heads:
            heads += f" HV{self.value_heads}"
        return f"B{self.batch} T{self.tokens} {heads}"


@dataclass(kw_only=True)
class Bench:
    """Where tiles are proved and timed."""

    space: Space
    workloads: list[Workload]
    folder: Path
    """For the rendered candidates."""
    device: str = "cuda"
    """Its type. `interpreter` runs the kernels on the CPU, where times say nothing of a device."""
    jobs: int = field(default_factory=lambda: max(1, min(12, os.cpu_count() or 1)))
    seed: int = field(default_factory=lambda: int.from_bytes(os.urandom(4), "big"))
    _judges: dict[int, Judge] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def interpreted(self) -> bool:
        return self.device == "interpreter"

    @property
    def stage(self) -> str:
        """As `run_on` names it."""
        return "interpreter" if self.interpreted else "device"

    def write(self, tile: Tile) -> Subject:
        """Renders the candidate."""
        space = self.space
        widths = {"key_dim": space.key_dim, "value_dim": space.value_dim}
        rendered = render(space.spec, space.backend, widths, tile=tile)
        folder = self.folder / digest(repr(tile))[:12]
        for name, text in rendered.files.items():
            write_text(folder / name, text)
        return subject_of(rendered, space.spec, folder)

    def prove(self, tiles: list[Tile]) -> list[str]:
        """Why each tile is refused; empty where it is proved, forward and backward."""
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(self._prove, tiles))

    def judge(self, subject: Subject) -> Judge:
        """Of all candidates with that chunk length: what is right is computed once."""
        shape = shape_on(subject, self.stage)
        with self._lock:
            if shape.chunk not in self._judges:
                reference = import_file(subject.reference, "kernel_reference")
                chosen = [case for case in all_cases(shape) if case.name in CASES]
                judge = self._judges[shape.chunk] = Judge(reference, shape, chosen)
                for case in chosen:
                    judge.references(case, self.space.dtype)
            return self._judges[shape.chunk]

    def _prove(self, tile: Tile) -> str:
        subject = self.write(tile)
        gates = run_on(
            subject,
            self.stage,
            None if self.interpreted else self.device,
            cases=list(CASES),
            dtypes=[self.space.dtype],
            seconds=PROOF_SECONDS,
            judge=self.judge(subject),
        )
        failed = next((gate for gate in gates if not gate.passed), None)
        if failed is not None:
            error = "" if failed.measured is None else f" ({failed.measured:.2g})"
            return f"{failed.name}{error}: {failed.detail}"[:300]
        return "" if gates else "nothing proves it"

    def time(self, tiles: list[Tile]) -> list[dict[str, Any] | str]:
        """What `codegen.tuning.timing` measured for each tile, or why it did not."""
        results: list[dict[str, Any] | str] = []
        for first in range(0, len(tiles), self.jobs):
            with contextlib.ExitStack() as stack:
                group = [
                    stack.enter_context(Worker(self._request(tile), self.interpreted))
                    for tile in tiles[first : first + self.jobs]
                ]
                for worker in group:
                    worker.wait(START_SECONDS)
                results += [worker.measure() for worker in group]
        return results

    def _request(self, tile: Tile) -> dict[str, Any]:
        subject = self.write(tile)
        return {
            "module": str(subject.module),
            "shape": subject.shape,
            "kernels": list(tile.launches),
            "workloads": [asdict(workload) for workload in self.workloads],
            "dtype": self.space.dtype,
            "device": "cpu" if self.interpreted else self.device,
            "seed": self.seed,
            "milliseconds": MEASURE_MILLISECONDS,
        }


class Worker:
    """The process that times one candidate. It is killed, with its compilers, on leaving."""

    def __init__(self, request: dict[str, Any], interpret: bool):
        self.kept = tempfile.TemporaryDirectory()
        folder = Path(self.kept.name)
        self.said = folder / "said"
        self.result = folder / "result.pt"
        asked = folder / "request.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "codegen.tuning.timing", str(asked), str(self.result)]
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                command,
                env=environment(interpret),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                bufsize=0,
                start_new_session=True,
            )
        self.fault = ""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.kept.cleanup()

    def wait(self, seconds: float) -> None:
        """Until the process says the next word; notes the fault when it does not."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not readable:
            self.fault = f"no answer after {seconds:g} s"
        elif not self.process.stdout.readline():
            self.fault = self._last_words()

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        status = self.process.poll()
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        lines = self.said.read_text("utf-8", errors="replace").strip().splitlines()
        return (lines or [f"ended with status {status}"])[-1][:300]

    def measure(self) -> dict[str, Any] | str:
        """What it measured, or the fault."""
        import torch

        if not self.fault:
            assert self.process.stdin is not None
            try:
                self.process.stdin.write(b"go\n")
            except BrokenPipeError:
                self.fault = self._last_words()
            else:
                self.wait(MEASURE_SECONDS)
        return self.fault or torch.load(self.result, weights_only=True)
