"""model folder -> ModelAnalysis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analyzers.analysis import analyze

__all__ = ["analyze"]


def __getattr__(name: str) -> Any:
    # On first use: analysis imports torch and transformers, which take seconds.
    if name == "analyze":
        from analyzers.analysis import analyze

        return analyze
    raise AttributeError(f"module 'analyzers' has no attribute '{name}'")
