"""Puts kernels into a model: a reversible rebinding of the forwards of one model's own modules.

Other models in the process, and the library's files, stay as they are.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from analyzers.errors import InputError
from analyzers.schema import BANKS, FORWARD
from codegen.load import LoadedKernel
from codegen.sites import (
    BESIDE,
    CALLS,
    FORGET_GATES,
    FORWARDS,
    Kernels,
    delta_attention,
    is_delta_attention,
    raw_forward,
)
from codegen.sites.calls import attention
from codegen.sites.experts import around_experts

if TYPE_CHECKING:
    from torch import Tensor, nn

FIX = "generate the kernels for this model and this version of transformers"


class Binding:
    """What `bind` did. Call `undo`, or use it as a context manager, to take the kernels out."""

    def __init__(self) -> None:
        self.given: list[tuple[nn.Module, str]] = []
        """Modules that got a function, and under which name."""

    def give(self, module: nn.Module, name: str, function: Callable) -> None:
        """Raises InputError where the module has one already."""
        if name in module.__dict__:
            raise InputError(type(module).__name__, fault=f"its {name} is already replaced")
        setattr(module, name, function)
        self.given.append((module, name))

    @property
    def modules(self) -> list[nn.Module]:
        return [module for module, _ in self.given]

    def undo(self) -> None:
        """Gives every module its class's own forward back; a second call does nothing."""
        for module, name in self.given:
            module.__dict__.pop(name, None)
        self.given = []

    def __bool__(self) -> bool:
        """Whether any kernel found its place."""
        return bool(self.given)

    def __enter__(self) -> Binding:
        return self

    def __exit__(self, *_) -> None:
        self.undo()


def bind(model: nn.Module, kernels: Iterable[LoadedKernel]) -> Binding:
    """Makes the modules of `model` use the kernels instead of the code of their own file.

    Where a kernel's site is a function, the module's forward is copied with other globals, in which
    the function's name stands for the kernel; where it is the module itself, its forward is
    replaced; stacked experts, whose forward is the runtime's, are given the kernel under the name
    of the function. A kernel that the runtime calls around experts becomes an attribute of every
    experts module, named after the operator. Other kernels without a site are passed over. Raises
    InputError when no module of that class is in the model, or when its forward no longer calls the
    function: the model would silently run without the kernel.
    """
    kernels = list(kernels)
    sites: dict[str, dict[str, list[LoadedKernel]]] = {}
    for loaded in kernels:
        site = loaded.kernel.site
        if site is not None:
            at = sites.setdefault(site.module_class, {})
            at.setdefault(site.function, []).append(loaded)
    binding = Binding()
    try:
        for module, name, function in around_experts(model, kernels):
            binding.give(module, name, function)
        for class_name, functions in sites.items():
            found = [m for m in model.modules() if _is(m, class_name)]
            if not found:
                raise InputError(
                    type(model).__name__,
                    fault=f"has no module of class {class_name} to bind {', '.join(functions)} in",
                    fix=FIX,
                )
            for module in found:
                name = BANKS if BANKS in functions else FORWARD
                binding.give(module, name, _replacement(module, functions))
                if (gate := _raw_gate(module, functions)) is not None:
                    binding.give(gate, FORWARD, types.MethodType(raw_forward, gate))
    except BaseException:
        binding.undo()
        raise
    return binding


def _is(module: nn.Module, class_name: str) -> bool:
    """By name anywhere in the class's ancestry: sharding and adapters subclass on the fly."""
    return any(base.__name__ == class_name for base in type(module).__mro__)


def _replacement(module: nn.Module, functions: Mapping[str, list[LoadedKernel]]) -> Callable:
    if BANKS in functions:
        return Kernels(functions[BANKS]).of()
    if FORWARD in functions:
        loaded = functions[FORWARD]
        operator = loaded[0].kernel.operator
        if operator not in FORWARDS:
            fault = f"nothing is known to replace the forward of a {operator} by"
            raise InputError(type(module).__name__, fault=fault, fix=FIX)
        return types.MethodType(FORWARDS[operator](Kernels(loaded)), module)
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        raise InputError(type(module).__name__, fault="its forward is not a Python function")
    called, own = forward.__code__.co_names, forward.__globals__
    gone = [name for name in functions if name not in called]
    if gone:
        raise InputError(
            f"{type(module).__name__}.forward", fault=f"no longer calls {', '.join(gone)}", fix=FIX
        )
    new = {n: CALLS.get(n, attention)(Kernels(k), own[n]) for n, k in functions.items()}
    beside = {n: make(own[n]) for n, make in BESIDE.items() if n in called and n not in new}
    bound = types.FunctionType(
        forward.__code__,
        {**own, **beside, **new},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    here = {k[0].kernel.operator: Kernels(k) for k in functions.values()}
    if here.keys() == {"kda", "short_convolution"} and is_delta_attention(module):
        bound = delta_attention(here["kda"], here["short_convolution"], bound)
    return types.MethodType(bound, module)


def _raw_gate(module: nn.Module, functions: Mapping[str, list[LoadedKernel]]) -> nn.Module | None:
    """The module's forget gate, where a kernel computes the decay from what it projects."""
    gate = getattr(module, "forget_gate", None)
    known = gate is not None and any(_is(gate, name) for name in FORGET_GATES)
    found = any(loaded.kernel.operator == "kda" for k in functions.values() for loaded in k)
    return gate if known and found else None


@dataclass(frozen=True)
class Difference:
    """How far a module with kernels is from the module without, where it is farthest."""

    module: str
    """Path in the model."""
    tensor: str
    """`output`, `gradient of the input`, or `gradient of` a parameter."""
    relative: float
    """Largest difference over the largest value without the kernels."""


def compare(
    model: nn.Module,
    kernels: Iterable[LoadedKernel],
    *,
    batch: int = 2,
    tokens: int = 67,
    seed: int = 0,
) -> list[Difference]:
    """Runs the model's mixers that kernels are bound in, on random hidden states, without and with
    the kernels: outputs, and gradients of the input and of the parameters that are trained.

    Returns the largest difference of each mixer, in the order of the model; the model is left as it
    was. Raises what `bind` raises.
    """
    import torch

    kernels = list(kernels)
    with bind(model, kernels) as binding:
        bound = set(binding.modules)
    differences = []
    for name, mixer in _mixers(model, bound):
        generator = torch.Generator().manual_seed(seed)
        weight = next(mixer.parameters())
        width = _text_config(model).hidden_size
        x = torch.randn(batch, tokens, width, generator=generator).to(weight)
        before = _outcome(mixer, x)
        with bind(model, kernels):
            after = _outcome(mixer, x)
        found = [Difference(name, t, _relative(after[t], before[t])) for t in before]
        differences.append(max(found, key=lambda d: d.relative))
    return differences


def _mixers(model: nn.Module, bound: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The mixers that are bound or that hold a module that is."""
    from analyzers.mixers import is_mixer

    for name, module in model.named_modules():
        if is_mixer(module) and not bound.isdisjoint(module.modules()):
            yield name, module


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _outcome(mixer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    import torch

    x = x.detach().requires_grad_()
    output = mixer(hidden_states=x, attention_mask=None, **_unused(mixer))
    output = output[0] if isinstance(output, tuple) else output
    # A fixed, uneven weighting, so that no gradient is a plain sum.
    weights = torch.arange(output.numel(), device=x.device).view(output.shape).cos()
    trained = {n: p for n, p in mixer.named_parameters() if p.requires_grad}
    wanted = [x, *trained.values()]
    grads = torch.autograd.grad((output * weights).sum(), wanted, materialize_grads=True)
    names = ["gradient of the input", *(f"gradient of {n}" for n in trained)]
    return {"output": output.detach(), **dict(zip(names, grads, strict=True))}


def _unused(mixer: nn.Module) -> dict[str, None]:
    """Arguments that the forward has no default for and that these mixers do not read."""
    parameters = inspect.signature(type(mixer).forward).parameters.values()
    known = ("self", "hidden_states", "attention_mask")
    return {
        p.name: None
        for p in parameters
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in known
    }


def _relative(a: Tensor, b: Tensor) -> float:
    scale = float(b.abs().max())
    gap = float((a.double() - b.double()).abs().max())
    return gap / scale if scale else gap
