"""OperatorMap + Backend -> KernelSet: renders kernels, proves them, writes the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from analyzers.backends import Backend
from analyzers.documents import read_document, write_document, write_text
from analyzers.errors import ProofError
from analyzers.schema import ModelAnalysis
from codegen.family import Member, Spec, Tile
from codegen.members import find_spec
from codegen.render import GENERATOR, Rendered, render
from codegen.schema import Gate, Kernel, KernelSet, OperatorChoice, OperatorMap
from codegen.tuning.records import Record, known_records, nearest, record_name

MANIFEST = "manifest.json"
CACHE = ".gates"


def generate(
    analysis: ModelAnalysis,
    operators: OperatorMap,
    backend: Backend,
    folder: Path,
    *,
    records: list[Record] | None = None,
    progress: Callable[[str], None] | None = None,
) -> KernelSet:
    """Writes the kernel package for every operator decided `generated` and proves each kernel.

    Each kernel takes the nearest of the tuning `records`, by default those of the user's cache and
    the shipped ones; the record lies beside it. A run that was killed can be repeated: proofs
    already made are kept in `folder/.gates`. Raises ProofError that names the kernel and the gates
    that failed; the manifest then says so too.
    """
    from codegen.verify.harness import verify

    folder = Path(folder)
    records = known_records() if records is None else records
    chosen = [c for c in operators.operators if c.decision == "generated"]
    made = [render_choice(choice, chosen, backend, records) for choice in chosen]
    _remove_stale(folder, {name for rendered in made for name in rendered.files})
    write_text(folder / "__init__.py", f'"""Kernels of {analysis.model_type}; generated."""\n')
    for rendered in made:
        _write(folder, rendered)
    kernels = []
    for choice, rendered in zip(chosen, made, strict=True):
        spec = _spec(choice)
        gates = verify(subject_of(rendered, spec, folder), backend, folder / CACHE, progress)
        if rendered.tuning_sha256 and not all(gate.passed for gate in gates):
            # What is fastest for the nearest shape may be too much for this one.
            if progress:
                progress(f"{rendered.module}: its tuned launches fail; the family's own are taken")
            (folder / record_name(rendered.module)).unlink()
            rendered = render_choice(choice, chosen, backend, [])
            _write(folder, rendered)
            gates = verify(subject_of(rendered, spec, folder), backend, folder / CACHE, progress)
        kernels.append(kernel_of(choice, rendered, gates))
        if progress:
            passed = sum(gate.passed for gate in gates)
            progress(f"{rendered.module}: {passed} of {len(gates)} gates passed")
    made_set = KernelSet(generator=f"codegen {GENERATOR}", backend=backend.name, kernels=kernels)
    write_document(made_set, folder / MANIFEST)
    for kernel in kernels:
        failed = [gate for gate in kernel.gates if not gate.passed]
        if failed:
            first = failed[0]
            raise ProofError(
                f"{folder / kernel.module}: {len(failed)} of {len(kernel.gates)} gates failed, "
                f"first '{first.name}' on {first.ran_on}: {first.detail}"
            )
    return made_set


def _spec(choice: OperatorChoice) -> Member:
    spec = find_spec(choice.operator)
    assert spec is not None, f"{choice.operator} was chosen to be generated"
    return spec


def _write(folder: Path, rendered: Rendered) -> None:
    for name, text in rendered.files.items():
        if not (folder / name).exists() or (folder / name).read_text("utf-8") != text:
            write_text(folder / name, text)


def render_choice(
    choice: OperatorChoice,
    chosen: list[OperatorChoice],
    backend: Backend,
    records: list[Record],
) -> Rendered:
    """The files of the kernel for one of the `chosen` operators, with the nearest tuning record."""
    spec = _spec(choice)

    def shape_of(choice: OperatorChoice) -> str:
        return "x".join(str(choice.attributes[n]) for n in spec.rendered_for)

    # Places that need the same file share it.
    shapes = {shape_of(c) for c in chosen if _spec(c) is spec}
    name = f"{spec.operator}_{shape_of(choice)}" if len(shapes) > 1 else spec.operator
    record = None
    if backend.triton is not None and isinstance(spec, Spec):
        sizes = int(choice.attributes["key_dim"]), int(choice.attributes["value_dim"])
        record = nearest(records, spec, backend, *sizes, backend.training_dtype)
    return render(spec, backend, choice.attributes, name=name, record=record)


def kernel_of(choice: OperatorChoice, rendered: Rendered, gates: list[Gate]) -> Kernel:
    """The manifest's entry of a rendered kernel with its proofs; without any it has not passed."""
    spec = _spec(choice)
    return Kernel(
        operator=choice.operator,
        family=spec.family,
        module=rendered.module,
        function=spec.function,
        reference=rendered.reference,
        test=rendered.test,
        sha256=hashlib.sha256(rendered.files[rendered.module].encode()).hexdigest(),
        spec_sha256=rendered.spec_sha256,
        template_sha256=rendered.template_sha256,
        backend_sha256=rendered.backend_sha256,
        tuning_sha256=rendered.tuning_sha256,
        triton=spec.triton,
        command=rendered.command,
        attributes=choice.attributes,
        site=choice.site,
        gates=gates,
        passed=bool(gates) and all(gate.passed for gate in gates),
        strategy=rendered.tile.strategy if isinstance(rendered.tile, Tile) else None,
    )


def _remove_stale(folder: Path, wanted: set[str]) -> None:
    """Deletes the files of kernels that an earlier manifest lists and that are no longer made."""
    manifest = folder / MANIFEST
    if manifest.exists():
        for kernel in read_document(KernelSet, manifest).kernels:
            record = record_name(kernel.module)
            for name in {kernel.module, kernel.reference, kernel.test, record} - wanted:
                (folder / name).unlink(missing_ok=True)
        manifest.unlink()


def subject_of(rendered: Rendered, spec: Member, folder: Path):
    """What `verify` needs to know of a kernel whose files lie in `folder`."""
    from codegen.verify.harness import Subject

    return Subject(
        module=folder / rendered.module,
        reference=folder / rendered.reference,
        shape={
            "operator": spec.operator,
            "attributes": rendered.attributes,
            "chunk": rendered.chunk,
        },
        dtypes=spec.dtypes,
    )
