"""The change set that a person can look at, the decision about it, the proof that it stands."""

from __future__ import annotations

import difflib
import getpass
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from adapter_agent.run_directory import RunDirectory, files_of, now, sha256_file
from analyzers.documents import document, read_document, write_document, write_text
from analyzers.errors import AdaptError, ProofError

if TYPE_CHECKING:
    from codegen.schema import Kernel


class ReviewRejectedError(ProofError):
    """A reviewer said no."""


class ReviewAwaitedError(AdaptError):
    """Nobody has decided yet. Exit status 5."""

    exit_status = 5


@document
class Decision:
    """`review.json`: what was decided, by whom, and about which content."""

    version: Literal[1] = 1
    decision: Literal["approved", "rejected"]
    by: str
    why: str
    time: str
    reviewed: dict[str, str]
    """Path inside the run directory -> sha256 of what was looked at."""


def write_patch(run: RunDirectory) -> Path:
    """Writes `review.patch`: the generated kernel package as a diff that `git apply` takes."""
    parts: list[str] = []
    for path in files_of(run / "kernels"):
        name = path.relative_to(run.path).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        parts.append(f"diff --git a/{name} b/{name}\nnew file mode 100644\n")
        for line in difflib.unified_diff([], lines, "/dev/null", f"b/{name}"):
            parts.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return write_text(run / "review.patch", "".join(parts))


def reviewed_content(run: RunDirectory) -> dict[str, str]:
    return run.hashes(["kernels", "plan.json"])


def read_decision(run: RunDirectory) -> Decision | None:
    """The decision, unless it was about other content than what lies there now."""
    if not (run / "review.json").is_file():
        return None
    decision = read_document(Decision, run / "review.json")
    return decision if decision.reviewed == reviewed_content(run) else None


def write_decision(run: RunDirectory, *, approve: bool, by: str | None, why: str) -> Decision:
    """Records a decision about the content that lies in the run directory now.

    Raises ProofError for a yes to a kernel that was edited since it was proved.
    """
    if approve:
        _check_unchanged(run)
    decision = Decision(
        decision="approved" if approve else "rejected",
        by=by or getpass.getuser(),
        why=why,
        time=now(),
        reviewed=reviewed_content(run),
    )
    write_document(decision, run / "review.json")
    return decision


def decide(run: RunDirectory, mode: Literal["auto", "ask", "require"]) -> str:
    """The review stage. Returns a line for people.

    Pauses the pipeline (LangGraph's interrupt) when a person must decide and none is at the
    terminal. Raises ReviewRejectedError when one said no.
    """
    write_patch(run)
    decision = read_decision(run)
    if decision is None and mode == "auto":
        decision = write_decision(run, approve=True, by="--review auto", why="no person was asked")
    elif decision is None and mode == "ask" and sys.stdin.isatty():
        import typer

        typer.echo(summary(run), err=True)
        approve = typer.confirm("Approve?", err=True)
        why = typer.prompt("Why", default="", show_default=False, err=True)
        decision = write_decision(run, approve=approve, by=None, why=why)
    elif decision is None:
        from langgraph.types import interrupt

        interrupt({"review": str(run / "review.patch")})
        raise AssertionError("unreachable: the pipeline is resumed by running this stage again")
    if decision.decision == "rejected":
        raise _rejected(run, decision)
    return f"approved by {decision.by}"


def require_not_refused(run: RunDirectory) -> None:
    """Raises when the run waits for a reviewer, or one said no: its kernels then enter no model."""
    decision = read_decision(run)
    if decision is not None and decision.decision == "rejected":
        raise _rejected(run, decision)
    if decision is None and run.record.stages["review"].state == "waiting":
        raise ReviewAwaitedError(
            f"{run.path}: waiting for review (adapt review {run.path} --approve, or --reject)"
        )


def _rejected(run: RunDirectory, decision: Decision) -> ReviewRejectedError:
    because = f": {decision.why}" if decision.why else ""
    return ReviewRejectedError(f"{run.path}: review rejected by {decision.by}{because}")


def summary(run: RunDirectory) -> str:
    """What there is to decide about, in a few lines."""
    from adapter_agent.words import shape
    from analyzers.numbers import number
    from codegen.schema import KernelSet
    from strategies.schema import Plan

    kernels = read_document(KernelSet, run / "kernels/manifest.json").kernels
    plan = read_document(Plan, run / "plan.json")
    lines = [f"{len(kernels)} generated kernels for {plan.cluster}:"]
    for kernel in kernels:
        passed = sum(g.passed for g in kernel.gates)
        proved = f"{passed} of {len(kernel.gates)} gates passed"
        changed = "" if _is_unchanged(run / "kernels", kernel) else ", but CHANGED since then"
        lines.append(f"  {kernel.module}: {proved}{changed}")
    lines.append(f"plan: {shape(plan)}, {number(plan.predicted.step_seconds, 3)} s a step")
    lines.append(f"read: {run / 'review.patch'}")
    decision = read_decision(run)
    if decision is None:
        lines.append(f"decide: adapt review {run.path} --approve (or --reject --why TEXT)")
    else:
        lines.append(f"{decision.decision} by {decision.by} at {decision.time}")
        lines.append("go on with the command that started the run, and --resume")
    return "\n".join(lines)


def _check_unchanged(run: RunDirectory) -> None:
    from codegen.schema import KernelSet

    folder = run / "kernels"
    for kernel in read_document(KernelSet, folder / "manifest.json").kernels:
        if not _is_unchanged(folder, kernel):
            raise ProofError(
                f"{folder / kernel.module}: differs from the manifest's sha256: it was changed "
                "after it was proved"
            )


def _is_unchanged(folder: Path, kernel: Kernel) -> bool:
    module = folder / kernel.module
    return module.is_file() and sha256_file(module) == kernel.sha256


def check(run: RunDirectory) -> str:
    """Proves that the kernels are what the generator makes and what the manifest says.

    Raises ProofError that names the first file that differs.
    """
    from analyzers.backends import load_backend
    from analyzers.schema import ModelAnalysis
    from codegen import generate
    from codegen.schema import KernelSet, OperatorMap
    from codegen.tuning.records import records_beside

    _check_unchanged(run)
    folder = run / "kernels"
    manifest = read_document(KernelSet, folder / "manifest.json")
    analysis = read_document(ModelAnalysis, run / "analysis.json")
    operators = read_document(OperatorMap, run / "operators.json")
    with tempfile.TemporaryDirectory() as temporary:
        again = Path(temporary) / "kernels"
        if (folder / ".gates").is_dir():
            # Proofs by content of the kernel: what is generated unchanged is not proved twice.
            shutil.copytree(folder / ".gates", again / ".gates")
        backend, records = load_backend(manifest.backend), records_beside(folder)
        generate(analysis, operators, backend, again, records=records)
        made = {p.relative_to(again) for p in files_of(again)}
        kept = {p.relative_to(folder) for p in files_of(folder)}
        if made != kept:
            odd = sorted(map(str, made ^ kept))
            raise ProofError(f"{folder}: not as generated now: {', '.join(odd)}")
        for name in sorted(made):
            if (again / name).read_bytes() != (folder / name).read_bytes():
                raise ProofError(f"{folder / name}: differs from what is generated now")
    return f"{len(manifest.kernels)} kernels are what the generator makes"
