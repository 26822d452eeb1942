"""The run directory: its record, its lock, its log, and the rules by which a run goes on.

`run.json` says what the run was made from and how far each stage came; `events.jsonl` is the log.
A stage is finished when its record says so, its inputs hash to what they did then, and every file
that it wrote is still what it wrote: then it is never done again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from analyzers.documents import document, from_data, read_document, write_document
from analyzers.errors import InputError
from runtime.schema import Evaluated, StepMetrics

T = TypeVar("T")

STAGES = ("analyze", "map", "generate", "plan", "review", "validate", "train", "report")
"""In order."""

StageState = Literal["pending", "running", "done", "skipped", "waiting", "failed"]

_VERSIONED = ("torch", "triton", "transformers", "peft", "safetensors", "langgraph")


@document
class StageRecord:
    """How far one stage came."""

    state: StageState = "pending"
    note: str = ""
    """One line for people: what came out, or why the stage was skipped."""
    seconds: float | None = None
    inputs_sha256: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    """Path inside the run directory -> sha256."""


@document
class RunRecord:
    """`run.json`."""

    version: Literal[1] = 1
    started: str
    inputs: dict[str, str | int | float | bool | None]
    """What the run is made from: paths, content hashes and options."""
    versions: dict[str, str]
    stages: dict[str, StageRecord]


def sha256_file(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def model_sha256(folder: Path) -> str:
    """Hash of a model folder: contents of its small files, name and size of its weights.

    Hidden files (`.DS_Store`, `.gitattributes`) are no part of a model.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] != "."):
        size = path.stat().st_size
        content = sha256_file(path) if size < 1 << 20 else ""
        digest.update(f"{path.name}\0{size}\0{content}\n".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers; a package that is missing is left out."""
    found = {"python": platform.python_version()}
    for name in ("adapter-agent", *_VERSIONED):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def now() -> str:
    """UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def files_of(path: Path) -> list[Path]:
    """The file itself, or the files below a folder in a fixed order, without caches."""
    if path.is_file():
        return [path]

    def kept(p: Path) -> bool:
        names = p.relative_to(path).parts
        return p.is_file() and not any(n.startswith(".") or n == "__pycache__" for n in names)

    return sorted(p for p in path.rglob("*") if kept(p))


class RunDirectory:
    """One run on disk. Made by `open_run` or `existing_run`, which hold its lock meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def record(self) -> RunRecord:
        return read_document(RunRecord, self / "run.json")

    def event(self, stage: str, event: str, **more: Any) -> None:
        """Appends one line to `events.jsonl`."""
        line = json.dumps({"time": now(), "stage": stage, "event": event, **more})
        with (self / "events.jsonl").open("a", encoding="utf-8") as f:
            f.write(line + "\n")

    def set_stage(self, stage: str, state: StageState, **more: Any) -> None:
        """Replaces the record of one stage and logs the change."""
        record = self.record
        new = replace(record.stages[stage], state=state, **more)
        write_document(replace(record, stages={**record.stages, stage: new}), self / "run.json")
        self.event(stage, state, **({"note": new.note} if new.note else {}))

    def is_finished(self, stage: str, inputs_sha256: str) -> bool:
        """Whether the stage was done from these inputs and all that it wrote still stands."""
        past = self.record.stages[stage]
        return (
            past.state in ("done", "skipped")
            and past.inputs_sha256 == inputs_sha256
            and past.outputs == self.hashes(list(past.outputs))
        )

    def hashes(self, names: list[str]) -> dict[str, str]:
        """sha256 of each named file or folder that exists in the run directory."""
        found = {}
        for name in names:
            path = self / name
            if path.is_file():
                found[name] = sha256_file(path)
            elif path.is_dir():
                parts = [f"{p.relative_to(path)}:{sha256_file(p)}" for p in files_of(path)]
                found[name] = sha256_text("\n".join(parts))
        return found

    def metrics(self) -> list[StepMetrics]:
        """The lines of `train/metrics.jsonl`; empty when nothing was trained.

        Raises InputError for a line that is none of ours.
        """
        return _lines(StepMetrics, self / "train/metrics.jsonl")

    def evaluations(self) -> list[Evaluated]:
        """The lines of `train/evaluation.jsonl`; empty when no examples were set apart.

        Raises InputError for a line that is none of ours.
        """
        return _lines(Evaluated, self / "train/evaluation.jsonl")


def _lines(cls: type[T], path: Path) -> list[T]:
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as e:
        fix = "train again, or take another run"
        raise InputError(path, fault=f"cannot be read: {e}", fix=fix) from e
    return [from_data(cls, line, path) for line in found]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the directory's lock; the kernel drops it when the process ends, however it ends."""
    try:
        handle = (path / ".lock").open("a")
    except OSError as e:
        fault = f"cannot be written: {e.strerror}"
        raise InputError(path, fault=fault, fix="choose another --run-dir") from e
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            fault = "another run is working in this directory"
            raise InputError(
                path, fault=fault, fix="wait for it, or choose another --run-dir"
            ) from e
        yield


@contextlib.contextmanager
def open_run(path: Path, inputs: dict[str, Any], *, resume: bool = False) -> Iterator[RunDirectory]:
    """Starts a run in an empty directory, or goes on with one that was made from the same inputs.

    Raises InputError when the directory cannot be written, holds something else, holds a run of
    other inputs (naming the first that differs), or holds one of the same and `resume` is false.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        fault = f"cannot be made a run directory: {e.strerror}"
        raise InputError(path, fault=fault, fix="choose another --run-dir") from e
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        fault = "cannot be written: Permission denied"
        raise InputError(path, fault=fault, fix="choose another --run-dir")
    _refuse_foreign(path)  # before the lock, which would leave a file in somebody else's folder
    with _locked(path):
        run = RunDirectory(path)
        _refuse_foreign(path)
        if (run / "run.json").exists():
            _check_same(run, inputs, resume)
        else:
            stages = {name: StageRecord() for name in STAGES}
            record = RunRecord(started=now(), inputs=inputs, versions=versions(), stages=stages)
            write_document(record, run / "run.json")
        yield run


def _refuse_foreign(path: Path) -> None:
    names = {p.name for p in path.iterdir()}
    # Names with a dot are the lock and temporary files of a run that was killed at once.
    if "run.json" not in names and any(not name.startswith(".") for name in names):
        fault = "is not empty and holds no run"
        raise InputError(path, fault=fault, fix="choose an empty or new --run-dir")


def _check_same(run: RunDirectory, inputs: dict[str, Any], resume: bool) -> None:
    past = run.record
    for name in [*inputs, *past.inputs]:
        old, new = past.inputs.get(name), inputs.get(name)
        if old != new:
            fault = f"holds a run made with {old}, not {new}"
            if name.endswith("_sha256"):
                name = name.removesuffix("_sha256")
                fault = f"{inputs[name]} has changed since the run was made"
            raise InputError(
                run.path, field=name, fault=fault, fix="choose another --run-dir, or an empty one"
            )
    if not resume:
        left = [s for s in STAGES if past.stages[s].state not in ("done", "skipped")]
        how_far = f"an unfinished run (next: {left[0]})" if left else "a finished run"
        fault = f"holds {how_far} of the same inputs"
        raise InputError(run.path, fault=fault, fix="add --resume, or choose another --run-dir")


@contextlib.contextmanager
def existing_run(path: Path) -> Iterator[RunDirectory]:
    """Opens a run directory for a stage command. Raises InputError when there is no run in it."""
    if not (path / "run.json").is_file():
        fault = "is not a run directory: it has no run.json"
        raise InputError(path, fault=fault, fix="make one with: adapt MODEL --cluster FILE")
    with _locked(path):
        yield RunDirectory(path)
