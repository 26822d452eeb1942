"""Runs one command in processes that can hang, crash or be killed without harm to this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path


START_SECONDS = 90
"""Longest wait for the first sign, while the process imports what it needs."""


def environment(interpret: bool) -> dict[str, str]:
    variables = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # Hard-reset gates overflow to -inf on purpose; numpy would warn about each.
    variables["PYTHONWARNINGS"] = "ignore"
    if interpret:
        variables["TRITON_INTERPRET"] = "1"
    return variables


def run_alone(command: list[str], interpret: bool, answers: Path, seconds: float) -> str:
    """Runs a command in a process group of its own; says what went wrong, or nothing.

    It has `seconds` for each change in the folder `answers` after the first one. The whole group is killed at the end:
    a compiler that hangs is a grandchild.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            env=environment(interpret),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            status = _wait(process, answers, seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if status is None:
        return f"no result after {seconds:g} s"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return (lines or [f"ended with status {status}"])[-1][:500] if status else ""


def _wait(process: subprocess.Popen, answers: Path, seconds: float) -> int | None:
    """The exit status, or None when nothing changed for so long."""
    seen, since = None, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.05)
        now = _sizes(answers)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > (seconds if seen else max(seconds, START_SECONDS)):
            return None


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # renamed just now
            sizes[entry.name] = entry.stat().st_size
    return sizes
