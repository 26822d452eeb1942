"""Starts the local ranks of a stage with torchrun and waits for them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from analyzers.documents import read_document, write_document
from analyzers.errors import AdaptError, InfeasibleError, InputError, ProofError
from runtime.schema import ValidationReport

Progress = Callable[[str], None] | None

ERROR_LINE = "adapt-error"
"""Starts the line by which a rank tells the launcher of an error that a user can mend."""
TAIL_LINES = 12
CPU_RANKS = 2
"""Ranks of a proof on a machine without accelerators: enough for every exchange to be real."""

ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Unless the user says otherwise: rows of experts differ from step to step, and blocks of fixed
size would be left half empty."""


def train(run_dir: str | Path, *, plan: Path | None = None, progress: Progress = None) -> None:
    """Trains the job of `run_dir` on local ranks, from its last complete checkpoint.

    `plan` is another plan than the run directory's, such as its twin. Raises InputError,
    ProofError, or RuntimeError with the last lines of the rank that failed.
    """
    from strategies.schema import Plan

    run_dir = Path(run_dir)
    ranks = read_document(Plan, plan or run_dir / "plan.json").world_size
    kind, count = local_devices()
    if ranks > count and kind != "cpu":
        fault = f"{ranks}, but here are {count} {kind} devices"
        fix = "start it on the cluster with the scripts in launch/"
        raise InputError(plan or run_dir / "plan.json", field="world_size", fault=fault, fix=fix)
    launch(run_dir, "train", ranks, plan=plan, progress=progress)


def validate(run_dir: str | Path, *, progress: Progress = None) -> ValidationReport:
    """Proves the plan's twin on the devices that are here; writes `validation.json`.

    Raises ProofError that names the checks that failed; the report is written all the same.
    """
    run_dir = Path(run_dir)
    plan = write_twin(run_dir)
    report_file = run_dir / "validation.json"
    report_file.unlink(missing_ok=True)
    ranks = _world_size(plan)
    launch(run_dir, "validate", ranks, plan=plan, progress=progress)
    report = read_document(ValidationReport, report_file)
    if not report.passed:
        failed = [f"{c.name}: {c.detail}" for c in report.checks if not c.passed]
        raise ProofError(f"{report_file}: {'; '.join(failed)}")
    return report


def write_twin(run_dir: Path) -> Path:
    """`validate/plan.json`: the plan scaled down to the local devices."""
    from analyzers.backends import load_backend
    from analyzers.schema import ModelAnalysis
    from strategies import twin
    from strategies.schema import Job, Plan

    plan = read_document(Plan, run_dir / "plan.json")
    job = read_document(Job, run_dir / "job.json")
    analysis = read_document(ModelAnalysis, run_dir / "analysis.json")
    kind, count = local_devices()
    backend = load_backend(job.backend if kind != "cpu" else "cpu")
    if backend.device_type != kind:
        fault = f"'{job.backend}' is a {backend.device_type} device, here are {kind} devices"
        raise InputError(run_dir / "job.json", field="backend", fault=fault)
    ranks = min(plan.world_size, count)
    made = twin(plan, analysis, ranks, backend)
    return write_document(made, run_dir / "validate" / "plan.json")


def local_devices() -> tuple[str, int]:
    """Kind and number of the devices that a local run can use."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu", CPU_RANKS
    return accelerator.type, torch.accelerator.device_count()


def _world_size(plan: Path) -> int:
    from strategies.schema import Plan

    return read_document(Plan, plan).world_size


def launch(
    run_dir: Path, stage: str, ranks: int, *, plan: Path | None = None, progress: Progress = None
) -> None:
    """Runs `python -m runtime RUN_DIR --stage STAGE` on `ranks` local ranks."""
    arguments = ["runtime", str(run_dir), "--stage", stage]
    if plan is not None:
        arguments += ["--plan", str(plan)]
    run_ranks(stage, arguments, ranks, run_dir / stage / "logs", progress=progress)


def run_ranks(
    what: str, arguments: list[str], ranks: int, logs: Path, *, progress: Progress = None
) -> None:
    """Runs `python -m ARGUMENTS` on `ranks` local ranks under torchrun, and waits.

    Progress lines of rank 0 go to `progress`; what the ranks say on stderr is kept in `logs`. The
    ranks die with this process. Raises the error of the first rank that failed, or RuntimeError
    with its last lines.
    """
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--redirects", "2", "--log-dir", str(logs)]
    command += ["-m", *arguments]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = ALLOCATOR | os.environ | {"OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks))}
    agent_log = logs / "torchrun.log"
    with (
        agent_log.open("w", encoding="utf-8") as agent,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=agent,
            text=True,
            env=environment,
            preexec_fn=die_with_parent,
        ) as child,
        _forwarded_signals(child),
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if progress is not None:
                progress(line.rstrip())
    if child.returncode != 0:
        raise _failure(what, logs, agent_log, child.returncode)


@contextlib.contextmanager
def _forwarded_signals(child: subprocess.Popen) -> Iterator[None]:
    """Passes SIGTERM and SIGINT on; on any other way out the child is ended first."""
    caught: list[int] = []

    def forward(number: int, frame: object) -> None:
        caught.append(number)
        child.send_signal(number)

    previous = {}
    with contextlib.suppress(ValueError):  # not in the main thread: nothing to take over
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, forward)
    try:
        yield
    except BaseException:
        child.terminate()
        raise
    finally:
        child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if caught:
        if caught[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + caught[0])


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, so that no rank outlives a killed run
    and writes into the directory of the next one."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _failure(stage: str, logs: Path, agent_log: Path, status: int) -> Exception:
    """The error of the rank that failed first, as the error that it was."""
    failed = _first_failed(agent_log.read_text(encoding="utf-8", errors="replace"))
    found = sorted(logs.glob(f"**/{failed.rank}/stderr.log"))
    lines = found[-1].read_text(encoding="utf-8", errors="replace").splitlines() if found else []
    for line in reversed(lines):
        match = re.match(rf"{ERROR_LINE} (\d+): (.*)", line)
        if match:
            return _known(int(match[1]), match[2])
    if not lines:
        lines = agent_log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = "\n".join(lines[-TAIL_LINES:])
    who = f"rank {failed.rank}{failed.host and f' on {failed.host}'}"
    return RuntimeError(f"{stage}: {who} {failed.cause(status)} (logs in {logs}):\n{tail}")


@dataclass(frozen=True)
class _Failed:
    rank: int = 0
    host: str = ""
    exit_code: int | None = None

    @property
    def killed(self) -> bool:
        """By a signal that torchrun itself does not send to the ranks that are left over."""
        code = self.exit_code
        return code is not None and code < 0 and -code != signal.SIGTERM

    def cause(self, status: int) -> str:
        if self.exit_code is None or self.exit_code >= 0:
            return f"failed (status {status if self.exit_code is None else self.exit_code})"
        name = signal.Signals(-self.exit_code).name
        hint = ", as for want of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"


def _first_failed(log: str) -> _Failed:
    """By the report of torchrun: a rank that was killed, else the one that failed first. Ranks
    that lose a peer fail within the same moment, and may be reported before it."""
    blocks = re.findall(
        r"host\s*:\s*(\S+)\s+.*?rank\s*:\s*(\d+).*?\n.*?exitcode\s*:\s*(-?\d+)", log
    )
    if not blocks:
        return _Failed()
    all_failed = [_Failed(int(rank), host, int(code)) for host, rank, code in blocks]
    root = re.search(r"Root Cause.*?rank\s*:\s*(\d+)", log, re.DOTALL)
    first = next((f for f in all_failed if root and f.rank == int(root[1])), all_failed[0])
    return next((f for f in all_failed if f.killed), first)


def _known(status: int, message: str) -> AdaptError:
    """The error that a rank raised; its text is already complete."""
    for kind in (InputError, InfeasibleError, ProofError):
        if kind.exit_status == status:
            error = kind.__new__(kind)
            Exception.__init__(error, message)
            return error
    return AdaptError(message)
