"""How far kernels are from float64, beside plain torch in the same dtype.

    python -m codegen.verify.table KERNELS/manifest.json...                 of proofs made before
    python -m codegen.verify.table --prove kda gla --widths 128x128 --backend h200 [--jobs 8]
        [--dtypes bfloat16] [--strategy fused] [--interpret] [--output DIR]

A row is one output of one kernel in one dtype, over all cases, in the case that comes closest to
its limit. New proofs run on the backend's device where it is here, with --interpret in Triton's
interpreter, else on the plain torch form. --output writes `kernel_errors.json` with the rows and
`kernel_errors.md`, a line a kernel and dtype. Exits with status 4 when a gate of the new proofs
failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from codegen.family import Spec, Strategy
from codegen.schema import Gate, KernelSet


@dataclass(frozen=True, kw_only=True)
class Row:
    kernel: str
    ran_on: str
    dtype: str
    output: str
    case: str
    error: float
    """Relative, over the whole tensor, as the next two."""
    torch: float
    """Of the plain torch reference in the same dtype."""
    limit: float


def rows(kernel: str, gates: Iterable[Gate]) -> list[Row]:
    """The worst case of each output, by device and dtype, in the order of the gates."""
    worst: dict[tuple, Row] = {}
    for gate in gates:
        for found in gate.errors:
            what, case = gate.name.split(": ", 1)
            row = Row(
                kernel=kernel,
                ran_on=gate.ran_on,
                dtype=what.removeprefix("accuracy, "),
                output=found.output,
                case=case,
                error=found.kernel,
                torch=found.torch,
                limit=found.limit,
            )
            key = row.ran_on, row.dtype, row.output
            if key not in worst or row.error / row.limit > worst[key].error / worst[key].limit:
                worst[key] = row
    return list(worst.values())


def markdown(table: list[Row]) -> str:
    lines = [
        "| kernel | ran on | dtype | output | error | torch | limit | case |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in table:
        numbers = f"{r.error:.1e} | {r.torch:.1e} | {r.limit:.1e}"
        lines.append(f"| {r.kernel} | {r.ran_on} | {r.dtype} | {r.output} | {numbers} | {r.case} |")
    return "\n".join(lines) + "\n"


def summary(table: list[Row]) -> str:
    """Markdown: a line a kernel and dtype, an output a column: its error, and torch's."""
    outputs = list(dict.fromkeys(r.output for r in table))
    cells = {
        (r.kernel, r.ran_on, r.dtype, r.output): f"{r.error:.1e} ({r.torch:.1e})" for r in table
    }
    lines = [
        "| kernel | ran on | dtype | " + " | ".join(outputs) + " |",
        "|---|---|---|" + "---|" * len(outputs),
    ]
    for line in dict.fromkeys((r.kernel, r.ran_on, r.dtype) for r in table):
        found = (cells.get((*line, output), "") for output in outputs)
        lines.append("| " + " | ".join([*line, *found]) + " |")
    return "\n".join(lines) + "\n"


def prove(
    operator: str,
    attributes: dict[str, int],
    backend_name: str,
    dtypes: list[str] | None = None,
    interpret: bool = False,
    strategy: Strategy | None = None,
) -> list[Gate]:
    """Renders a kernel and proves it on the backend's device where it is here, else on the CPU;
    or in the interpreter. `strategy`, of linear attention, is the family's own unless one is named.
    """
    from analyzers.backends import load_backend
    from codegen.build import subject_of
    from codegen.members import load_members
    from codegen.render import render
    from codegen.verify.harness import device_of, run_on

    spec, backend = load_members()[operator], load_backend(backend_name)
    tile = None
    if strategy and isinstance(spec, Spec):
        tile = spec.tile(backend, attributes["key_dim"], strategy=strategy)
    rendered = render(spec, backend, attributes, tile=tile)
    device = None if interpret else device_of(backend)
    stage = "interpreter" if interpret else "device" if device else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for name, text in rendered.files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        subject = subject_of(rendered, spec, Path(folder))
        return run_on(subject, stage, device, dtypes=dtypes)


def complain(kernel: str, gates: list[Gate]) -> None:
    """Names the gates that failed, at once: other kernels may take minutes more."""
    for gate in gates:
        if not gate.passed:
            found = "" if gate.measured is None else f" ({gate.measured:.2g})"
            line = f"{kernel}: {gate.name}{found} on {gate.ran_on}: {gate.detail}"
            print(line, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    from analyzers.documents import read_document, write_text
    from codegen.members import load_members

    parser = argparse.ArgumentParser(prog="python -m codegen.verify.table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("manifests", nargs="*", type=Path)
    parser.add_argument("--prove", nargs="+", default=[], metavar="OPERATOR")
    parser.add_argument(
        "--widths",
        nargs="+",
        default=["128x128"],
        metavar="KxV",
        help="what the kernel is rendered for; taps of a convolution",
    )
    parser.add_argument("--backend", default="h200")
    parser.add_argument("--jobs", type=int, default=1, help="kernels proved at a time")
    parser.add_argument("--dtypes", nargs="+", help="all of the kernel's")
    parser.add_argument("--strategy", choices=get_args(Strategy), help="the family's own")
    parser.add_argument("--interpret", action="store_true", help="prove in Triton's interpreter")
    parser.add_argument("--output", type=Path, help="folder of kernel_errors.json and .md")
    parser.add_argument("--json", action="store_true", help="JSON instead of markdown")
    given = parser.parse_args(arguments)
    proofs: dict[str, list[Gate]] = {}
    for path in given.manifests:
        for kernel in read_document(KernelSet, path).kernels:
            name = f"{path.parent.name}/{kernel.module}"
            proofs[name] = kernel.gates
            complain(name, kernel.gates)
    names = {operator: load_members()[operator].rendered_for for operator in given.prove}
    # One kernel serves all where it is rendered for nothing.
    wanted = [(o, size) for o in given.prove for size in (given.widths if names[o] else [""])]

    def one(pair: tuple[str, str]) -> tuple[str, list[Gate]]:
        operator, size = pair
        sizes = map(int, size.split("x") if size else [])
        shape = dict(zip(names[operator], sizes, strict=True))
        gates = prove(operator, shape, given.backend, given.dtypes, given.interpret, given.strategy)
        name = " ".join(filter(None, pair))
        complain(name, gates)
        return name, gates

    with ThreadPoolExecutor(given.jobs) as pool:
        proofs |= dict(pool.map(one, wanted))
    table = [row for kernel, gates in proofs.items() for row in rows(kernel, gates)]
    data = json.dumps([asdict(r) for r in table], indent=1) + "\n"
    if given.output:
        write_text(given.output / "kernel_errors.json", data)
        write_text(given.output / "kernel_errors.md", summary(table))
    sys.stdout.write(data if given.json else markdown(table))
    return 0 if all(gate.passed for gates in proofs.values() for gate in gates) else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
