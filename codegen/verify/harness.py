"""Starts the processes in which a kernel is proved and turns what they say into gates.

Gates of a stage are kept under the hash of everything they depend on, so that a run that was killed
goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from analyzers.backends import Backend
from analyzers.documents import from_data, to_data, write_text
from codegen.load import import_file
from codegen.schema import Gate
from codegen.verify.processes import run_alone

if TYPE_CHECKING:
    from codegen.verify.cases import Shape
    from codegen.verify.judge import Judge

STAGES = ("compile", "interpreter", "cpu", "device")  # the longest first
CASE_SECONDS = 200
"""Longest wait for one case of a candidate, the compilation for it included."""
COMPILE_SECONDS = 120
"""Longest wait for the compilation of one kernel."""
DEVICE_HEADS = 8
"""Times the heads of a case on a device."""
DEATHS = 3
"""So often a candidate is started again after it hung or crashed."""

# What a kernel is compiled for when its backend has no Triton target of its own: all dtypes on the
# first, bfloat16 on the others, to keep within a minute on two cores.
OTHER_TARGETS = (
    {"name": "sm_90", "backend": "cuda", "arch": 90, "warp_size": 32, "shared": 232448},
    {"name": "sm_80", "backend": "cuda", "arch": 80, "warp_size": 32, "shared": 166912},
    {"name": "sm_100", "backend": "cuda", "arch": 100, "warp_size": 32, "shared": 232448},
    {"name": "gfx942", "backend": "hip", "arch": "gfx942", "warp_size": 64, "shared": 65536},
)
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The files of one kernel that is to be proved."""

    module: Path
    reference: Path
    shape: dict
    """Fields of `verify.cases.Shape`."""
    dtypes: list[str]


def verify(subject: Subject, backend: Backend, cache: Path, progress=None) -> list[Gate]:
    """All gates of one kernel: interpreter, plain torch form, device if one is here, compilers.

    At most two processes run at a time. A kernel that fails raises nothing: its gates say so.
    """
    device = device_of(backend)
    stages = [stage for stage in STAGES if stage != "device" or device]
    if device and _interpreter_is_broken():
        stages.remove("interpreter")  # the kernels are proved on the device itself

    speaking = threading.Lock()

    def one(stage: str) -> list[Gate]:
        kept = cache / f"{stage}-{_content(subject, backend, stage, device)}.json"
        if kept.exists():
            data = json.loads(kept.read_text(encoding="utf-8"))
            return [from_data(Gate, gate, str(kept)) for gate in data]
        if progress:
            with speaking:
                progress(f"proving {subject.module.name}: {stage}")
        if stage == "compile":
            gates = compile_for(subject, backend)
        else:
            gates = run_on(subject, stage, device)
        write_text(kept, json.dumps([to_data(gate) for gate in gates], indent=1) + "\n")
        return gates

    with ThreadPoolExecutor(max_workers=2) as pool:
        return [gate for gates in pool.map(one, stages) for gate in gates]


def device_of(backend: Backend) -> str | None:
    """The accelerator that is here, if it is of the backend's kind."""
    import torch

    if not torch.accelerator.is_available():
        return None
    here = torch.accelerator.current_accelerator()
    return here.type if here is not None and here.type == backend.device_type else None


def _interpreter_is_broken() -> bool:
    """Before 3.7 it fails on loops with a runtime bound under numpy 2.4 (triton#9171)."""
    import numpy
    import triton
    from packaging.version import Version

    old = Version(triton.__version__) < Version("3.7")
    return old and Version(numpy.__version__) >= Version("2.4")


def _content(subject: Subject, backend: Backend, stage: str, device: str | None) -> str:
    import torch
    import triton

    own = sorted(Path(__file__).parent.rglob("*.py"))
    name = torch.cuda.get_device_name() if device == "cuda" else device
    parts = [
        *(p.read_bytes() for p in (subject.module, subject.reference, *own)),
        json.dumps([subject.shape, subject.dtypes, to_data(backend)]).encode(),
        f"{stage} {name} {torch.__version__} {triton.__version__}".encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def shape_on(subject: Subject, stage: str) -> Shape:
    """What a kernel is proved with there; a device has room for more heads."""
    from codegen.verify.cases import Shape

    return Shape(**subject.shape, heads=DEVICE_HEADS if stage == "device" else 1)


def run_on(
    subject: Subject,
    stage: str,
    device: str | None = None,
    cases: list[str] | None = None,
    dtypes: list[str] | None = None,
    seconds: float = CASE_SECONDS,
    judge: Judge | None = None,
) -> list[Gate]:
    """Runs the candidate in another process and judges here what it hands back.

    `stage` is `interpreter`, `cpu` or `device` (then `device` names its type); `cases` and `dtypes`
    pick some by name. A case that says nothing for so many `seconds` is killed, and fails. `judge`
    may be one that knows the answers to these cases already.
    """
    import torch

    from codegen.verify.cases import all_cases
    from codegen.verify.judge import Judge

    dtypes = subject.dtypes if dtypes is None else dtypes
    if stage == "interpreter":
        # It computes bfloat16 wrongly (triton-lang/triton#11584).
        dtypes = [dtype for dtype in dtypes if dtype != "bfloat16"]
    shape = shape_on(subject, stage)
    chosen = [c for c in all_cases(shape) if cases is None or c.name in cases]
    work = [(dtype, c.name) for dtype in dtypes for c in chosen if dtype in c.dtypes]
    if cases is None:
        work.append((dtypes[0], "opcheck"))
    ran_on = {"interpreter": "interpreter", "cpu": "cpu"}.get(stage, str(device))
    if stage == "device" and device == "cuda":
        ran_on = torch.cuda.get_device_name()
    request = {
        "module": str(subject.module),
        "shape": asdict(shape),
        "device": device if stage == "device" else "cpu",
    }
    results = _ask(request, work, stage == "interpreter", seconds)
    if judge is None:
        judge = Judge(import_file(subject.reference, "kernel_reference"), shape, chosen)
    return judge.gates(results, ran_on)


def _ask(request: dict, work: list[tuple], interpret: bool, seconds: float) -> dict[tuple, dict]:
    """What the candidate answers to each (dtype, case). The process is started again behind a case
    that it did not survive."""
    import torch

    results: dict[tuple, dict] = {}
    deaths = 0
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder) / "request.json", Path(folder) / "answers"
        answers.mkdir()
        while left := [pair for pair in work if pair not in results]:
            if deaths == DEATHS:
                fault = f"not run: the candidate died {DEATHS} times before"
                return results | {pair: {"error": fault} for pair in left}
            asked.write_text(json.dumps(request | {"work": list(enumerate(left))}), "utf-8")
            command = [sys.executable, "-m", "codegen.verify.candidate", str(asked), str(answers)]
            fault = run_alone(command, interpret, answers, seconds)
            lost = False
            for number, pair in enumerate(left):
                answer = answers / f"{number}.pt"
                if not answer.exists():
                    break
                result = torch.load(answer, weights_only=True)
                answer.unlink()
                lost = result["lost"]
                if result["interpreted"] != interpret:
                    result = {"error": "ran in the wrong mode"}
                results[pair] = result
            else:
                break
            deaths += 1
            if not lost:
                results[pair] = {"error": fault or "ended without an answer"}
    return results


def compile_for(subject: Subject, backend: Backend) -> list[Gate]:
    """One gate per target: every kernel of the module compiles and keeps the device's limits."""
    targets: list[dict] = [{**target, "dtypes": ["bfloat16"]} for target in OTHER_TARGETS]
    targets[0]["dtypes"] = subject.dtypes
    gates = []
    if backend.triton and backend.triton.backend == "npu":
        # Its compiler is not part of Triton: the text keeps its rules, and another accepts it.
        gates = [_rules_gate(subject, backend)]
        targets = [targets[0] | {"dtypes": ["bfloat16"]}]
    elif backend.triton:
        targets = [target_of(backend) | {"dtypes": subject.dtypes}]
    launches, lines, fault = compiled(subject, targets)
    return gates + [_compile_gate(target, lines, launches, fault) for target in targets]


def _rules_gate(subject: Subject, backend: Backend) -> Gate:
    from codegen.verify.rules import broken_rules

    assert backend.triton is not None
    broken = broken_rules(subject.module.read_text(encoding="utf-8"), backend.triton)
    return Gate(
        name="keeps the backend's rules",
        passed=not broken,
        ran_on=f"rules:{backend.name}",
        detail="; ".join(broken[:5])
        or "launch options, programs of a launch, blocks in place of masks, functions",
    )


def target_of(backend: Backend) -> dict:
    """The backend's compiler target and its limit, in the words of `OTHER_TARGETS`."""
    t = backend.triton
    assert t is not None
    own = {"name": t.arch_name, "backend": t.backend, "arch": t.arch, "warp_size": t.warp_size}
    return own | {"shared": t.shared_memory_bytes}


def compiled(
    subject: Subject, targets: list[dict], seconds: float = COMPILE_SECONDS
) -> tuple[dict[str, int], list[dict], str]:
    """Compiles every launch of the module for each target, in the target's `dtypes`.

    Returns how many launches each dtype has, what the compiler said of each (a line of
    `cross_compile.compile_one`, which `fault_of` judges), and how the process ended if it ended
    early: a kernel that takes longer than so many `seconds` ends it.
    """
    request = {"module": str(subject.module), "shape": subject.shape, "targets": targets}
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder) / "request.json", Path(folder) / "answers"
        answers.mkdir()
        asked.write_text(json.dumps(request | {"dtypes": subject.dtypes}), encoding="utf-8")
        command = [sys.executable, "-m", "codegen.verify.cross_compile", str(asked), str(answers)]
        fault = run_alone(command, False, answers, seconds)
        said = answers / "lines.jsonl"
        text = said.read_text(encoding="utf-8") if said.exists() else ""
    # A process that was killed leaves its last line unfinished.
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return (lines[0]["launches"] if lines else {}), lines[1:], fault


def fault_of(line: dict, target: dict) -> str | None:
    """Why a kernel cannot run on the target, or None."""
    if "error" in line:
        return line["error"]
    if line["shared"] > target["shared"]:
        return f"{line['shared']} bytes of shared memory"
    if line["tensor_memory"] > TENSOR_MEMORY_COLUMNS or line["traps"]:
        return f"{line['tensor_memory']} columns of tensor memory"
    return None


def _compile_gate(target: dict, lines: list[dict], launches: dict, fault: str) -> Gate:
    """`launches` counts the distinct launches by dtype."""
    expected = sum(launches.get(dtype, 0) for dtype in target["dtypes"])
    mine = [line for line in lines if line["target"] == target["name"]]
    found = [(line, fault_of(line, target)) for line in mine]
    faults = [f"{line['kernel']} {line['dtype']}: {why}" for line, why in found if why]
    if not expected or len(mine) < expected:
        faults.append(f"{len(mine)} of {expected} kernels compiled; {fault or 'compiler ended'}")
    shared = max((line.get("shared", 0) for line in mine), default=0)
    spilling = {
        f"{line['kernel']} {line['dtype']}": line["stack"] for line in mine if line.get("stack")
    }
    spills = ", ".join(f"{name} {stack} B" for name, stack in spilling.items()) or "none"
    dtypes = " and ".join(target["dtypes"])
    detail = (
        f"{len(mine)} kernels in {dtypes}; at most {shared} B of shared memory; stack: {spills}"
    )
    return Gate(
        name="compiles within the device's limits",
        passed=not faults,
        ran_on=f"compiler:{target['name']}",
        detail="; ".join(faults) or detail,
    )
