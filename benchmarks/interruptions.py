"""Kills a training run with SIGKILL at random moments and compares what it leaves.

    python benchmarks/interruptions.py RUN_DIR --kills 10

RUN_DIR holds job.json, plan.json and analysis.json (`adapt MODEL ... --until plan`); it is copied
twice. One copy is trained undisturbed, the other is killed and started again until it has been
killed so often. Prints one JSON object; exit status 1 where losses or the adapter differ by a bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LONGEST = 3.0
"""Seconds that a run goes on after its first step, at most."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        straight, killed = Path(folder) / "straight", Path(folder) / "killed"
        for copy in (straight, killed):
            shutil.copytree(
                arguments.run_dir, copy, ignore=shutil.ignore_patterns("train", "adapter")
            )
        assert start(straight).wait() == 0, "the undisturbed run failed"
        at = [kill(killed, draw) for _ in range(arguments.kills)]
        assert start(killed).wait() == 0, "the interrupted run failed"
        losses = [[m["loss"] for m in metrics(run)] for run in (straight, killed)]
        adapters = [digest(run) for run in (straight, killed)]
    same = losses[0] == losses[1] and adapters[0] == adapters[1]
    found = {
        "steps": len(losses[0]),
        "killed_after_steps": at,
        "losses_equal": losses[0] == losses[1],
        "adapter_sha256": adapters,
        "equal": same,
    }
    print(json.dumps(found, indent=2))
    return 0 if same else 1


def start(run: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", f"import runtime; runtime.train({str(run)!r})"])


def kill(run: Path, draw: random.Random) -> int:
    """Kills the run some time after its first step since it was started; returns the steps that
    were done. Half of the kills come the moment a step is written."""
    file = run / "train" / "metrics.jsonl"
    before = file.stat().st_mtime_ns if file.is_file() else 0
    child = start(run)
    while child.poll() is None:
        if file.is_file() and file.stat().st_mtime_ns != before and metrics(run):
            break
        time.sleep(0.005)
    time.sleep(draw.choice([0.0, draw.uniform(0.0, LONGEST)]))
    assert child.poll() is None, "the run ended before it could be killed: give it more steps"
    child.send_signal(signal.SIGKILL)
    child.wait()
    while ranks_of(run):
        time.sleep(0.05)
    return len(metrics(run))


def ranks_of(run: Path) -> list[str]:
    """Processes that still name the run directory: torchrun and its ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(run).encode() in command and b"\0-m\0" in command:
                found.append(entry.name)
    return found


def metrics(run: Path) -> list[dict]:
    """The whole lines: a kill leaves the last one broken."""
    file = run / "train" / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def digest(run: Path) -> str:
    return hashlib.sha256((run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
