"""What a token mixer is, and how its modules are asked for their sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from analyzers.schema import FORWARD, Site

Attributes = dict[str, int | float | str | bool]


@dataclass(frozen=True)
class Mixer:
    """A module that mixes tokens, and the operator at its heart."""

    name: str
    """As in `schema.Layer.mixer`."""
    operator: str
    attributes: Attributes
    site: Site | None = None
    path: str = ""


def first_of(module: Any, *names: str) -> Any:
    """The first of these attributes that the module has and that is not None."""
    for name in names:
        value = getattr(module, name, None)
        if value is not None:
            return value
    return None


def has(module: Any, *names: str) -> bool:
    return all(getattr(module, name, None) is not None for name in names)


def parameter(module: nn.Module, last: str) -> nn.Parameter | None:
    """The parameter of that last name in the module or below it."""
    return next((p for n, p in module.named_parameters() if n.rpartition(".")[2] == last), None)


def owns(module: nn.Module, *names: str) -> bool:
    """Whether a parameter of each last name lies in the module or below it."""
    return all(parameter(module, name) is not None for name in names)


def width(module: Any, *names: str) -> int | None:
    """Output width of the first linear layer of these names."""
    for name in names:
        child = getattr(module, name, None)
        if isinstance(child, nn.Linear):
            return child.out_features
    return None


def convolution(module: nn.Module) -> int:
    """Taps of the first convolution over time in the module; 0 without any."""
    sizes = [m.kernel_size[0] for m in module.modules() if isinstance(m, nn.Conv1d)]
    return sizes[0] if sizes else 0


def site(module: nn.Module, *words: str) -> Site | None:
    """The module-global function with one of `words` in its name that the forward calls."""
    forward = inspect.unwrap(type(module).forward)
    names = [n for n in forward.__code__.co_names if callable(forward.__globals__.get(n))]
    for word in words:
        for name in names:
            if word in name:
                return Site(module_class=type(module).__name__, function=name)
    return None


def whole(module: nn.Module) -> Site:
    """The module itself, for an operator that its forward spells out."""
    return Site(module_class=type(module).__name__, function=FORWARD)


def names_in(function: Callable) -> set[str]:
    """Names that a function's code uses, and the strings among its constants."""
    code = inspect.unwrap(function).__code__
    found = set(code.co_names) | set(code.co_varnames)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple):
            found.update(c for c in constant if isinstance(c, str))
    return found


def layer_type(module: Any, config: Any) -> str | None:
    """What the config calls the layer that the module lies in."""
    index, types = first_of(module, "layer_idx", "layer_id"), first_of(config, "layer_types")
    if isinstance(index, int) and isinstance(types, (list, tuple)) and index < len(types):
        return types[index]
    return None
