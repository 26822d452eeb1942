"""ModelAnalysis + Backend -> OperatorMap, KernelSet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codegen.build import generate
    from codegen.install import bind
    from codegen.load import LoadedKernel, load_kernels
    from codegen.mapper import map_operators

__all__ = ["LoadedKernel", "bind", "generate", "load_kernels", "map_operators"]

_HOMES = {
    "LoadedKernel": "codegen.load",
    "bind": "codegen.install",
    "generate": "codegen.build",
    "load_kernels": "codegen.load",
    "map_operators": "codegen.mapper",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for on first use: a light command must not pay for a heavy one."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'codegen' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
