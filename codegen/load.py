"""Reads a kernel set that was generated and proved: checks every file, imports every module."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from analyzers.documents import read_document
from analyzers.errors import ProofError
from codegen.schema import Kernel, KernelSet


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    kernel: Kernel
    function: Callable


def load_kernels(folder: str | Path) -> list[LoadedKernel]:
    """The kernels of the set in `folder`, in the manifest's order.

    Raises ProofError, naming the file and the command that mends it, when a kernel is missing, has
    changed since it was proved, or did not pass; InputError when there is no manifest.
    """
    folder = Path(folder)
    manifest = read_document(KernelSet, folder / "manifest.json")
    return [LoadedKernel(kernel=k, function=_import(folder, k)) for k in manifest.kernels]


def _import(folder: Path, kernel: Kernel) -> Callable:
    path = folder / kernel.module
    mend = f"regenerate it with `{kernel.command}`, in a run directory with --resume"
    if not path.exists():
        raise ProofError(f"{path}: is missing; {mend}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != kernel.sha256:
        raise ProofError(f"{path}: has changed since it was proved; {mend}")
    if not kernel.passed:
        failed = ", ".join(gate.name for gate in kernel.gates if not gate.passed)
        raise ProofError(f"{path}: was not proved ({failed}); {mend}")
    # One module a content, wherever the file lies: its operators may be registered only once.
    name = f"codegen_kernel_{path.stem}_{kernel.sha256[:12]}"
    module = sys.modules.get(name)
    if module is None:
        module = sys.modules[name] = import_file(path, name)
    return getattr(module, kernel.function)


def import_file(path: Path, name: str) -> ModuleType:
    """The file as a module of that name, imported afresh and not entered in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
