"""Kernels, right and wrong, that the tests hand to the harness."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import torch

from analyzers.backends import load_backend
from codegen.build import subject_of
from codegen.family import FLOORS, Strategy
from codegen.load import import_file
from codegen.members import load_members, load_specs
from codegen.render import render
from codegen.schema import Gate
from codegen.verify.cases import Case, Shape, all_cases, make_inputs, run
from codegen.verify.judge import Judge, errors_of
from codegen.verify.processes import environment
from tests.codegen.kernel_samples import load, write_kernel

LINEAR = [n for n, spec in load_specs().items() if spec.family == "linear_attention"]


def subject(
    folder: Path,
    member: str,
    *changes: tuple[str, str],
    widths: tuple[int, int] = (16, 16),
    backend: str = "cpu",
    strategy: Strategy | None = None,
):
    """A rendered member whose module is changed: each pair is what to find and to put there."""
    rendered = write_kernel(folder, member, *widths, backend, strategy)
    path = folder / rendered.module
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, f"the kernels have no {old!r} any more"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return subject_of(rendered, load_specs()[member], folder)


def written(folder: Path, operator: str, *changes: tuple[str, str], backend: str = "cpu"):
    """The kernel of an operator without widths of its own; its module is changed as above."""
    spec = load_members()[operator]
    made = render(spec, load_backend(backend), {})
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.files.items():
        for old, new in changes if name == made.module else ():
            assert old in text, f"the kernels have no {old!r} any more"
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    return subject_of(made, spec, folder)


def assert_refused(gates) -> None:
    """For what a kernel computes or overwrites, not because it does not run."""
    assert failed(gates)
    for gate in gates:
        if gate.name.startswith("accuracy"):
            assert gate.measured is not None or gate.detail == DIED


def failed(gates) -> list[str]:
    return [
        f"{gate.name}: {gate.detail}, {gate.measured} > {gate.tolerance}"
        for gate in gates
        if not gate.passed
    ]


DIED = "the process died"
SERVER = """
import os, signal, sys
from codegen.verify.candidate import main
first = True
for line in sys.stdin:
    request = line.rstrip("\\n").split("\\t")
    if first:
        main(*request)  # what is imported on first use is imported once
    elif child := os.fork():
        os.waitpid(child, 0)
    else:
        signal.alarm(120)
        main(*request)
        os._exit(0)
    first = False
    print(flush=True)
"""


class Forks:
    """Runs subjects' cases in float32, each subject in a fork of one process: to start one takes
    longer than to run a few cases. A wrong kernel may ruin its process; the first subject runs in
    that of all and must be right."""

    def __init__(self, folder: Path, interpret: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ran_on = folder, "interpreter" if interpret else "cpu"
        self.asked = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=environment(interpret),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.communicate(timeout=60)

    def gates(self, one, names: tuple[str, ...]) -> list[Gate]:
        """The gates of a subject's cases of these names."""
        answers = self.folder / f"answers{self.asked}"
        self.asked += 1
        answers.mkdir()
        work = list(enumerate(("float32", name) for name in names))
        request = {"module": str(one.module), "shape": one.shape, "device": "cpu", "work": work}
        path = answers / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{path}\t{answers}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline(), "the process of all forks ended"
        results = {}
        for i, name in enumerate(names):
            answer = answers / f"{i}.pt"
            results["float32", name] = torch.load(answer) if answer.exists() else {"error": DIED}
        shape = Shape(**one.shape)
        chosen = [case for case in all_cases(shape) if case.name in names]
        reference = import_file(one.reference, "kernel_reference")
        return Judge(reference, shape, chosen).gates(results, self.ran_on)


def gates_of(
    folder: Path, subjects: list, cases: list[tuple[str, ...]], interpret: bool
) -> list[list[Gate]]:
    """The gates of each subject's cases; the first subject must be right."""
    with Forks(folder / "forks", interpret) as forks:
        return [forks.gates(*each) for each in zip(subjects, cases, strict=True)]


def assert_as_exact(one, case: Case, dtype: str, device: str = "cpu") -> None:
    """The kernel against its reference in float64, in this process, with the gates' limits."""
    inputs = on(device, make_inputs(case, Shape(**one.shape), getattr(torch, dtype)))
    exact = {
        n: x.double() if x is not None and x.is_floating_point() else x for n, x in inputs.items()
    }
    kernel, reference = function_of(one), function_of(one, "reference")
    got = run(kernel, case, inputs)
    want = run(reference, case, exact, kernel=False)
    plain = reference
    if dtype != "float32":
        plain = getattr(_imported(one.reference), "in_dtype", reference)
    same = run(plain, case, inputs, kernel=False)
    floor = FLOORS[dtype]
    for name, value in want.items():
        kind = case.kind(name)
        whole, worst = errors_of(got[name], value, kind)
        torch_has = errors_of(same[name], value, kind)
        assert whole <= max(2 * torch_has[0], floor), name
        assert worst <= max(4 * torch_has[1], 2 * floor), f"worst row of {name}"


def on(device: str, inputs: dict) -> dict:
    return {n: None if x is None else x.to(device) for n, x in inputs.items()}


@functools.cache
def _imported(path: Path):
    return load(path)


def function_of(one, which: str = "module"):
    """The operator's function in the subject's `module` or `reference`."""
    return getattr(_imported(getattr(one, which)), Shape(**one.shape).function)
