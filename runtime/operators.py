"""Each installed kernel against its float64 reference, on values that the model itself makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runtime.adapters import banks
from runtime.checks import check, distance, logits_of
from runtime.experts import experts_of, use_own_experts
from runtime.packing import Batch
from runtime.schema import Check

if TYPE_CHECKING:
    from codegen import LoadedKernel

FLOORS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative L2 error that is always allowed, by dtype."""

CONSTANTS = ("g_gamma",)
"""Arguments of kernels that take no gradient and keep their dtype."""

FROZEN = ("base", "base_bias")
"""Weights that take no gradient."""

UNDER_A_LIMIT = ("moe_reroute",)
"""Kernels that only experts with a capacity call."""

RANK = 4
"""Of the adapters that the experts have while their kernel is checked."""


def operators_vs_reference(
    model: nn.Module, folder: Path, batch: Batch, device: torch.device, dtype: torch.dtype
) -> list[Check]:
    """One check a kernel: its output and gradients, in `dtype`, on the inputs of its first call in
    `model` (plain, without kernels); at most twice the error of the reference in that dtype.

    None for a kernel without a place in it: experts in a list, as transformers has some, call no
    kernels. Others run as the runtime runs them, and are left as they were.
    """
    from codegen import bind, load_kernels
    from codegen.load import import_file

    checks = []
    for loaded in load_kernels(folder):
        if loaded.kernel.site is None and not experts_of(model):
            continue
        calls: list[tuple[tuple, dict]] = []
        with (
            adapted_experts(model),
            bind(model, [_recording(loaded, calls)]) as binding,
        ):
            if not binding:
                continue
            logits_of(model, batch, device)
        if not calls and loaded.kernel.operator in UNDER_A_LIMIT:
            continue
        module = import_file(folder / loaded.kernel.reference, "kernel_reference")
        reference = getattr(module, loaded.kernel.function)
        checks.append(_compared(loaded, reference, calls, dtype))
    return checks


@contextmanager
def adapted_experts(model: nn.Module) -> Iterator[None]:
    """Random adapters on the stacked experts of a plain model, which run as in training: adapted
    banks are what their kernel computes."""
    modules = [m for m in experts_of(model).values() if hasattr(m, "has_gate")]
    kept = [(m.config, m.config._experts_implementation) for m in modules]
    generator = torch.Generator().manual_seed(0)
    given: list[tuple[Any, str]] = []

    def give(module: Any, name: str, value: Any) -> None:
        module.__dict__[name] = value
        given.append((module, name))

    use_own_experts(model)
    try:
        for module in modules:
            give(module, "lora_scale", 1.0)
            give(module, "lora_dropout", 0.0)
            for bank in banks(module):
                weight = getattr(module, bank)
                outs, ins = weight.shape[:0:-1] if module.is_transposed else weight.shape[1:]
                for key, shape in (("A", (RANK, ins)), ("B", (outs, RANK))):
                    drawn = torch.randn(weight.shape[0], *shape, generator=generator)
                    give(module, f"lora_{bank}_{key}", drawn.to(weight) / shape[1] ** 0.5)
        yield
    finally:
        for module, name in given:
            del module.__dict__[name]
        for config, implementation in kept:
            config._experts_implementation = implementation


def _recording(loaded: LoadedKernel, calls: list[tuple[tuple, dict]]) -> LoadedKernel:
    def function(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            calls.append((args, kwargs))
        return loaded.function(*args, **kwargs)

    return replace(loaded, function=function)


def _compared(
    loaded: LoadedKernel,
    reference: Callable,
    calls: list[tuple[tuple, dict]],
    dtype: torch.dtype,
) -> Check:
    name = f"operators_vs_reference_{loaded.kernel.operator}"
    if not calls:
        return check(name, False, None, 0.0, detail="the model never called the kernel")
    args, kwargs = calls[0]
    known = inspect.signature(reference).parameters
    plain = {k: v for k, v in kwargs.items() if k in known}
    exact = _run(reference, args, plain, torch.float64)
    same = _run(reference, args, plain, dtype)
    kernel = _run(loaded.function, args, kwargs, dtype)
    worst = max(_apart(k, e) for k, e in zip(kernel, exact, strict=True))
    floor = max(_apart(s, e) for s, e in zip(same, exact, strict=True))
    tolerance = max(2 * floor, FLOORS[dtype])
    shape = list(args[0].shape) if args else []
    return check(
        name,
        worst <= tolerance,
        worst,
        0.0,
        tolerance=tolerance,
        detail=f"output and gradients of {loaded.kernel.module} in {dtype} on {shape} values of "
        f"the model's first call; the torch reference in that dtype is off by {floor:.3g}",
    )


def _apart(x: Tensor, exact: Tensor) -> float:
    """Ids and counts are the same or wrong."""
    if exact.is_floating_point():
        return distance(x, exact)
    return 0.0 if torch.equal(x, exact) else float("inf")


def _run(function: Callable, args: tuple, kwargs: dict, dtype: torch.dtype) -> list[Tensor]:
    """Output and the gradients of every floating input, in float64 on the CPU; of a function of
    ids, all outputs."""

    def leaf(value: Any, name: str = "") -> Any:
        if name not in CONSTANTS and isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().to(dtype).requires_grad_(name not in FROZEN)
        return value

    inputs = [leaf(a) for a in args]
    options = {k: leaf(v, k) for k, v in kwargs.items()}
    with torch.enable_grad():
        out = function(*inputs, **options)
        if isinstance(out, tuple) and not out[0].is_floating_point():
            return [t.cpu() for t in out]
        out = out[0] if isinstance(out, tuple) else out
        # A fixed, uneven weighting, so that no gradient is a plain sum; the same in every dtype.
        weights = torch.arange(out.numel(), dtype=torch.float64).cos().bfloat16()
        out.backward(weights.view(out.shape).to(out))
    leaves = [t for t in [*inputs, *options.values()] if isinstance(t, Tensor) and t.requires_grad]
    gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
    return [t.detach().double().cpu() for t in [out, *gradients]]
