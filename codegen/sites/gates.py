"""The forget gate of Kimi delta attention, left raw for the kernel to compute the log decay from.

In the module's own code the gate is a chain of float32 tensors as large as the keys, each of them
kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from analyzers.mixers.linear import decay_bound


class RawGate(NamedTuple):
    """What the log decay is computed from, handed on in its place."""

    g: Tensor
    """[B, T, H, K], in the dtype of the model."""
    A_log: Tensor
    """[H]"""
    dt_bias: Tensor
    """[H * K]"""
    lower_bound: float | None

    def log_decay(self) -> Tensor:
        """-exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias))."""
        raw = self.g.float() + self.dt_bias.float().view(self.g.shape[2:])
        rate = self.A_log.float().exp().unsqueeze(-1)
        if self.lower_bound is None:
            return -rate * F.softplus(raw)
        return self.lower_bound * (rate * raw).sigmoid()


FORGET_GATES = {
    "BailingHybridForgetGate",
    "Glm5NextTextForgetGate",
    "KimiK3ForgetGate",
    "KimiLinearForgetGate",
}
"""Classes that compute exactly that from their projections."""


def raw_forward(gate: Any, hidden_states: Tensor) -> RawGate:
    """A forward of the gate that stops before the decay."""
    if hasattr(gate, "f_proj"):
        g = gate.f_proj(hidden_states)
    else:
        g = gate.f_b_proj(gate.f_a_proj(hidden_states))
    g = g.unflatten(-1, (-1, gate.head_dim))
    return RawGate(g, gate.A_log.flatten(), gate.dt_bias, decay_bound(gate))


def with_decay(own: Callable) -> Callable:
    """The model's own function, given the log decay where it is handed a raw gate."""

    def call(*args: Any, g: Tensor | RawGate, **kwargs: Any) -> Any:
        return own(*args, g=g.log_decay() if isinstance(g, RawGate) else g, **kwargs)

    return call
