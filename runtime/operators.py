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
        with _own_experts(model), bind(model, [_recording(loaded, calls)]) as binding:
            if not binding:
                continue
            logits_of(model, batch, device)
        module = import_file(folder / loaded.kernel.reference, "kernel_reference")
        reference = getattr(module, loaded.kernel.function)
        checks.append(_compared(loaded, reference, calls, dtype))
    return checks


@contextmanager
def _own_experts(model: nn.Module) -> Iterator[None]:
    configs = [m.config for m in experts_of(model).values() if hasattr(m, "config")]
    before = [config._experts_implementation for config in configs]
    use_own_experts(model)
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
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
    worst = max(distance(k, e) for k, e in zip(kernel, exact, strict=True))
    floor = max(distance(s, e) for s, e in zip(same, exact, strict=True))
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


def _run(function: Callable, args: tuple, kwargs: dict, dtype: torch.dtype) -> list[Tensor]:
    """Output and the gradients of every floating input, in float64 on the CPU."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().to(dtype).requires_grad_()
        return value

    inputs = [leaf(a) for a in args]
    options = {k: v if k in CONSTANTS else leaf(v) for k, v in kwargs.items()}
    with torch.enable_grad():
        out = function(*inputs, **options)
        out = out[0] if isinstance(out, tuple) else out
        # A fixed, uneven weighting, so that no gradient is a plain sum; the same in every dtype.
        weights = torch.arange(out.numel(), dtype=torch.float64).cos().bfloat16()
        out.backward(weights.view(out.shape).to(out))
    leaves = [t for t in [*inputs, *options.values()] if isinstance(t, Tensor) and t.requires_grad]
    gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
    return [t.detach().double().cpu() for t in [out, *gradients]]
