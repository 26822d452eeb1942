"""OperatorMap (`operators.json`) and KernelSet (`kernels/manifest.json`)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from analyzers.documents import document
from analyzers.schema import Site
from codegen.family import Strategy

Decision = Literal["native", "existing", "generated", "unsupported"]


@document
class OperatorChoice:
    """What serves one operator on one backend, and why."""

    operator: str
    backend: str
    decision: Decision
    provider: str
    """`torch`, `transformers`, `fla`, `codegen:<family>`, or `none`."""
    reason: str
    evidence: str
    """What the reason rests on: a backend file's entry, a dispatcher query, an import."""
    attributes: dict[str, int | float | str | bool] = field(default_factory=dict)
    site: Site | None = None


@document
class OperatorMap:
    version: Literal[1] = 1
    backend: str
    operators: list[OperatorChoice]


@document
class OutputError:
    """Relative errors of one output against float64, over the whole tensor or in its worst row."""

    output: str
    kernel: float
    torch: float
    """Of plain torch in the same dtype."""
    limit: float


@document
class Gate:
    """One proof that a kernel passed or failed; `measured` and `tolerance` are relative errors
    where the gate is numeric."""

    name: str
    passed: bool
    ran_on: str
    """`interpreter`, `cpu`, `h200`, `compiler:sm_90`, ..."""
    detail: str
    measured: float | None = None
    tolerance: float | None = None
    errors: list[OutputError] = field(default_factory=list)
    """Of every output, where the gate is one of accuracy."""


@document
class Kernel:
    """One generated kernel of the set."""

    operator: str
    family: str
    module: str
    """File name inside the kernel set, e.g. `kda.py`; the reference and test stand beside it."""
    function: str
    """Callable inside the module, with the signature of the model's own function."""
    reference: str
    test: str
    sha256: str
    spec_sha256: str
    template_sha256: str
    backend_sha256: str
    tuning_sha256: str | None
    triton: str
    """Supported version range."""
    command: str
    """Regenerates the file."""
    attributes: dict[str, int | float | str | bool]
    site: Site | None
    gates: list[Gate]
    passed: bool
    strategy: Strategy | None = None
    """Of the forward (`codegen.family.Tile`), in families that know more than one."""


@document
class KernelSet:
    version: Literal[1] = 1
    generator: str
    backend: str
    kernels: list[Kernel]
