"""Kernels that the runtime's own code calls around the experts of any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from analyzers.errors import InputError
from analyzers.experts import experts_of
from codegen.load import LoadedKernel
from codegen.members import find_spec

if TYPE_CHECKING:
    from torch import nn


def around_experts(
    model: nn.Module, kernels: list[LoadedKernel]
) -> Iterator[tuple[nn.Module, str, Callable]]:
    """Experts modules, and the name under which the runtime looks for which function in them: that
    of the operator. Raises InputError for a model without experts."""
    for loaded in kernels:
        operator = loaded.kernel.operator
        member = find_spec(operator)
        if loaded.kernel.site is not None or member is None or member.around != "experts":
            continue
        found = experts_of(model)
        if not found:
            raise InputError(
                type(model).__name__,
                fault=f"has no experts that could call {operator}",
                fix="generate the kernels for this model",
            )
        for module in found.values():
            yield module, operator, loaded.function
