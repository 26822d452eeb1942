"""Puts kernels into a model: a reversible rebinding of the forwards of one model's own modules.

Other models in the process, and the library's files, stay as they are.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from analyzers.errors import InputError
from codegen.load import LoadedKernel

if TYPE_CHECKING:
    from torch import nn


class Binding:
    """What `bind` did. Call `undo`, or use it as a context manager, to take the kernels out."""

    def __init__(self, modules: list[nn.Module]):
        self.modules = modules

    def undo(self) -> None:
        """Gives every module its class's own forward back; a second call does nothing."""
        for module in self.modules:
            module.__dict__.pop("forward", None)
        self.modules = []

    def __enter__(self) -> Binding:
        return self

    def __exit__(self, *_) -> None:
        self.undo()


def bind(model: nn.Module, kernels: Iterable[LoadedKernel]) -> Binding:
    """Makes the modules of `model` call the kernels instead of the functions of their own file.

    A module's forward is copied with other globals: the name that the kernel's site gives is looked
    up to the kernel. Kernels without a site are passed over. Raises InputError when no module of
    that class is in the model, or when its forward no longer calls the function: the model would
    silently run without the kernel.
    """
    sites: dict[str, dict[str, Callable]] = {}
    for loaded in kernels:
        site = loaded.kernel.site
        if site is not None:
            sites.setdefault(site.module_class, {})[site.function] = loaded.function
    binding = Binding([])
    try:
        for class_name, functions in sites.items():
            found = [m for m in model.modules() if _is(m, class_name)]
            if not found:
                raise InputError(
                    type(model).__name__,
                    fault=f"has no module of class {class_name} to bind {', '.join(functions)} in",
                    fix="generate the kernels for this model again",
                )
            for module in found:
                _rebind(module, functions)
                binding.modules.append(module)
    except BaseException:
        binding.undo()
        raise
    return binding


def _is(module: nn.Module, class_name: str) -> bool:
    """By name anywhere in the class's ancestry: sharding and adapters subclass on the fly."""
    return any(base.__name__ == class_name for base in type(module).__mro__)


def _rebind(module: nn.Module, functions: Mapping[str, Callable]) -> None:
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        raise InputError(type(module).__name__, fault="its forward is not a Python function")
    gone = [name for name in functions if name not in forward.__code__.co_names]
    if gone:
        raise InputError(
            f"{type(module).__name__}.forward",
            fault=f"no longer calls {', '.join(gone)}",
            fix="generate the kernels for this version of transformers",
        )
    if "forward" in module.__dict__:
        raise InputError(type(module).__name__, fault="its forward is already replaced")
    bound = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, **functions},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(bound, module)
