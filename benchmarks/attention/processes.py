"""Workers: a process an implementation, asked for one row at a time, with a time limit a row."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "ROW "  # begins a line that carries a row


def serve(handle: Callable[[dict], dict]) -> None:
    """The worker's side: a row on standard output for every task on standard input."""
    for line in sys.stdin:
        print(MARK + json.dumps(handle(json.loads(line))), flush=True)


class Worker:
    """A process that answers tasks; what it prints besides rows goes to `log`."""

    def __init__(self, script: Path, log: Path, environment: dict[str, str]):
        self._log = log
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last = ""
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--worker"],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._lines.put(text)
        self._lines.put(None)

    def send(self, task: dict, last: bool = False) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        if last:
            self._process.stdin.close()

    def row(self, seconds: float) -> dict | None:
        """The next row, or None when none came in that time. Raises EOFError, with the last words
        of the process, when it ended."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                text = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if text is None:
                status = self._process.wait()
                raise EOFError(f"its process ended with status {status}: {self._last}"[:400])
            if text.startswith(MARK):
                return json.loads(text.removeprefix(MARK))
            self._last = text.strip() or self._last
            with self._log.open("a", encoding="utf-8") as file:
                file.write(text)

    def drain(self) -> None:
        """Writes what an ended process printed to the log."""
        with suppress(EOFError):
            while self.row(1.0) is not None:
                pass

    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process and those that it started, compilers among them."""
        if self.running():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Workers:
    """The workers that are alive, by name. A context manager: it ends them."""

    def __init__(self, start: Callable[..., Worker], left: Callable[[], float]):
        self._start = start
        self._left = left
        self._alive: dict[str, Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        for name in list(self._alive):
            self.end(name)

    def end(self, name: str) -> None:
        if worker := self._alive.pop(name, None):
            worker.kill()

    def ask(self, name: str, task: dict, limit: float, **environment: str) -> dict:
        """A row with its `status`.

        A worker that takes longer than `limit` seconds, dies or fails is ended, and the next task
        gets a new one; what the budget leaves out is `skipped`.
        """
        skipped = {"status": "skipped", "note": "the budget ran out"}
        seconds = min(limit, self._left())
        if seconds < 1:
            return skipped
        if name not in self._alive:
            self._alive[name] = self._start(**environment)
        worker = self._alive[name]
        try:
            worker.send(task)
            row = worker.row(seconds)
        except (EOFError, BrokenPipeError) as fault:
            row = {"status": "failed", "note": str(fault)}
        if row is None:
            late = {"status": "not ready", "note": f"not ready after {limit:g} s"}
            row = late if seconds == limit else skipped
        if row["status"] in ("failed", "not ready", "skipped"):
            self.end(name)  # its device may be unusable
        return row
