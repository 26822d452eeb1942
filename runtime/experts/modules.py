"""Which modules of a model are experts."""

from __future__ import annotations

from typing import Any

from torch import nn


def experts_of(model: nn.Module) -> dict[str, Any]:
    """All modules of stacked experts, by name: those that run through transformers' registry, and
    lists of experts that were stacked here.

    Typed loosely: what transformers' decorator adds to them is not declared anywhere.
    """
    return {n: module for n, module in model.named_modules() if hasattr(module, "is_transposed")}
