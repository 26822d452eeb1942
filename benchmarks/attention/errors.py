"""Errors of one implementation against exact results."""

from __future__ import annotations

import torch

# An implementation is wrong beyond these relative errors, for a whole tensor and for its worst
# token (whose size counts as at least a tenth of the usual one). Meant to sort out broken kernels;
# the harness has the strict rule.
LIMITS = {torch.bfloat16: (0.03, 0.3), torch.float32: (1e-3, 1e-2)}


def errors(got: dict, want: dict) -> dict[str, list[float]]:
    """Relative error of each tensor as a whole, and of the worst token (and head) of those that
    have tokens."""
    return {name: _error(x.double(), want[name].double()) for name, x in got.items()}


def _error(x: torch.Tensor, exact: torch.Tensor) -> list[float]:
    whole = ((x - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    if x.ndim < 3:
        return [whole]
    size = exact.norm(dim=-1)
    usual = size.square().mean().sqrt()
    worst = (x - exact).norm(dim=-1) / size.clamp_min(0.1 * usual).clamp_min(1e-30)
    return [whole, worst.max().item()]


def is_wrong(found: dict[str, list[float]], dtype: torch.dtype) -> list[str]:
    return [n for n, e in found.items() if not all(map(float.__le__, e, LIMITS[dtype]))]
