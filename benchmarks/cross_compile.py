"""Compiles every generated kernel at full width for devices that are not here.

    python benchmarks/cross_compile.py --output FILE.json [--backends a100,h200,b200,mi300x]
        [--members NAME,...] [--widths 128x128,256x512] [--dtypes bfloat16,float32] [--jobs 1]

What `adapt kernels` would render for each backend is compiled for its processor; the kernels keep
its limits of shared and tensor memory, or the exit status is 1. The file holds registers, stack
(what is spilled), shared memory and seconds of every kernel, by version of Triton; it is rewritten
after every module, and a module that it holds already, unchanged, is not compiled again. Takes
about an hour of one processor for everything.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton

from analyzers.backends import Backend, load_backend
from analyzers.documents import write_text
from codegen.build import subject_of
from codegen.family import Member, Spec, digest
from codegen.members import load_members
from codegen.render import render
from codegen.verify.harness import compiled, fault_of, target_of

BACKENDS = ["a100", "h200", "b200", "mi300x"]
WIDTHS = ["128x128", "256x512"]
ROWS = {"short_convolution": {"kernel_size": 4}}
SECONDS = 300.0
"""Longest wait for one kernel."""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    done: dict[str, dict] = {}
    if options.output.exists():
        done = json.loads(options.output.read_text(encoding="utf-8"))
    wanted = [
        (load_members()[member], load_backend(backend), attributes)
        for member in options.members
        for attributes in attributes_of(load_members()[member], options.widths)
        for backend in options.backends
    ]
    writing = threading.Lock()

    def one(job: tuple[Member, Backend, dict]) -> bool:
        key, row = compile_module(*job, options.dtypes, done)
        with writing:
            done[key] = row
            write_text(options.output, json.dumps(done, indent=1, sort_keys=True) + "\n")
            print(key, *(row["faults"] or ["ok"]), sep="\n  ", flush=True)
        return not row["faults"]

    with ThreadPoolExecutor(options.jobs) as pool:
        right = list(pool.map(one, wanted))
    print(table(done))
    return 0 if all(right) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def listed(text: str) -> list[str]:
        return text.split(",")

    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--backends", type=listed, default=BACKENDS)
    add("--members", type=listed, default=list(load_members()))
    add("--widths", type=listed, default=WIDTHS, help="KxV of linear attention")
    add("--dtypes", type=listed, default=["bfloat16", "float32"])
    add("--jobs", type=int, default=1, help="modules compiled at a time")
    return parser.parse_args(arguments)


def attributes_of(spec: Member, widths: list[str]) -> list[dict]:
    """What the kernel is rendered for, at each width."""
    if not isinstance(spec, Spec):
        return [ROWS.get(spec.operator, {})]
    return [
        dict(zip(("key_dim", "value_dim"), map(int, w.split("x")), strict=True)) for w in widths
    ]


def compile_module(
    spec: Member, backend: Backend, attributes: dict, dtypes: list[str], done: dict
) -> tuple[str, dict]:
    """Its name in the file, and what was found."""
    rendered = render(spec, backend, attributes)
    sizes = "x".join(str(value) for value in attributes.values()) or "-"
    target = target_of(backend)
    key = f"{spec.operator} {sizes} {target['name']} triton {triton.__version__}"
    dtypes = [dtype for dtype in dtypes if dtype in spec.dtypes]
    row = {"module_sha256": digest(rendered.files[rendered.module]), "dtypes": dtypes}
    if (old := done.get(key)) and all(old[name] == row[name] for name in row):
        return key, old
    with tempfile.TemporaryDirectory() as folder:
        for name, text in rendered.files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        subject = subject_of(rendered, spec, Path(folder))
        launches, lines, ended = compiled(subject, [target | {"dtypes": dtypes}], SECONDS)
    missing = sum(launches.get(dtype, 0) for dtype in dtypes) - len(lines)
    found = [(line, fault_of(line, target)) for line in lines]
    faults = [f"{line['kernel']} {line['dtype']}: {fault}" for line, fault in found if fault]
    if missing or not lines:
        faults.append(f"{missing} kernels not compiled: {ended}")
    return key, row | {"shared_limit": target["shared"], "kernels": lines, "faults": faults}


def table(done: dict[str, dict]) -> str:
    """Markdown: of each module the most that one of its kernels takes."""
    lines = [
        "| kernel | target | Triton | shared memory | registers | stack | |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, row in sorted(done.items()):
        member, sizes, target, _, version = key.split()
        shared, registers, stack = (
            max((line.get(name, 0) for line in row["kernels"]), default=0)
            for name in ("shared", "registers", "stack")
        )
        limit, verdict = row["shared_limit"], "; ".join(row["faults"]) or "fits"
        lines.append(
            f"| {member} {sizes} | {target} | {version} | {shared} of {limit} | {registers} "
            f"| {stack} | {verdict} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
