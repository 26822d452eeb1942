"""How far kernels are from float64, beside plain torch in the same dtype.

    python -m codegen.verify.table KERNELS/manifest.json...                 of proofs made before
    python -m codegen.verify.table --prove kda gla --widths 128x128 --backend h200 [--jobs 8]

A row is one output of one kernel in one dtype, over all cases, in the case that comes closest to
its limit. Exits with status 4 when a gate of the new proofs failed.
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


def prove(operator: str, widths: tuple[int, int], backend_name: str) -> list[Gate]:
    """Renders a kernel and proves it on the backend's device where it is here, else on the CPU."""
    from analyzers.backends import load_backend
    from codegen.build import subject_of
    from codegen.family import load_specs
    from codegen.render import render
    from codegen.verify.harness import device_of, run_on

    spec, backend = load_specs()[operator], load_backend(backend_name)
    rendered = render(spec, backend, {"key_dim": widths[0], "value_dim": widths[1]})
    device = device_of(backend)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in rendered.files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        subject = subject_of(rendered, spec, Path(folder))
        return run_on(subject, "device" if device else "cpu", device)


def main(arguments: list[str]) -> int:
    from analyzers.documents import read_document

    parser = argparse.ArgumentParser(prog="python -m codegen.verify.table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("manifests", nargs="*", type=Path)
    parser.add_argument("--prove", nargs="+", default=[], metavar="OPERATOR")
    parser.add_argument("--widths", nargs="+", default=["128x128"], metavar="KxV")
    parser.add_argument("--backend", default="h200")
    parser.add_argument("--jobs", type=int, default=1, help="kernels proved at a time")
    parser.add_argument("--json", action="store_true", help="JSON instead of markdown")
    given = parser.parse_args(arguments)
    proofs: dict[str, list[Gate]] = {}
    for path in given.manifests:
        for kernel in read_document(KernelSet, path).kernels:
            proofs[f"{path.parent.name}/{kernel.module}"] = kernel.gates
    wanted = [(operator, size) for operator in given.prove for size in given.widths]

    def one(pair: tuple[str, str]) -> tuple[str, list[Gate]]:
        operator, size = pair
        key_dim, value_dim = map(int, size.split("x"))
        return " ".join(pair), prove(operator, (key_dim, value_dim), given.backend)

    with ThreadPoolExecutor(given.jobs) as pool:
        proofs |= dict(pool.map(one, wanted))
    table = [row for kernel, gates in proofs.items() for row in rows(kernel, gates)]
    text = (
        json.dumps([asdict(r) for r in table], indent=1) + "\n" if given.json else markdown(table)
    )
    sys.stdout.write(text)
    failed = [(k, gate) for k, gates in proofs.items() for gate in gates if not gate.passed]
    for kernel, gate in failed:
        print(f"{kernel}: {gate.name} on {gate.ran_on}: {gate.detail}", file=sys.stderr)
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
