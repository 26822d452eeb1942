"""Functions that a model's forward looks up by name, made of kernels.

Each adapter gets the kernels of its site and the model's own function, and returns a function that
takes the arguments of the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from codegen.sites.gates import RawGate, with_decay
from codegen.sites.kernels import Kernels
from codegen.sites.packing import convolve_apart, document_limits


def attention(kernels: Kernels, own: Callable) -> Callable:
    """Linear attention in the convention of flash-linear-attention: q, k, v [B, T, H, D] and the
    gates, first in order, the rest by name; returns the output and the last state or None."""

    def call(q: Tensor, k: Tensor, v: Tensor, *args: Tensor, **kwargs: Any):
        limits = document_limits(kwargs)
        if isinstance(kwargs.get("g"), RawGate):
            kwargs |= kwargs["g"]._asdict() | {"use_gate_in_kernel": True}
        for name in ("A_log", "dt_bias"):  # models hold them in the shape of the gate
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name].flatten()
        kernel = kernels.of(key_dim=q.shape[-1], value_dim=v.shape[-1])
        return kernel(q, k, v, *args, cu_seqlens=limits, **kwargs)

    return call


def state_space(kernels: Kernels, own: Callable) -> Callable:
    """State-space duality in the convention of mamba-ssm (Dao & Gu 2024, arXiv 2405.21060).

    The state decays by exp(A dt) and x dt is written: q = C, k = B, v = x dt, g = A dt, without a
    scale. States of models are [B, H, value width, key width], the transpose of a kernel's.
    """

    def call(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int | None = None,
        D: Tensor | None = None,
        z: None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        **kwargs: Any,
    ):
        assert z is None, "models gate the output themselves"
        limits = document_limits(kwargs)
        dt = dt.float()
        if dt_bias is not None:
            dt = dt + dt_bias.float()
        if dt_softplus:
            dt = F.softplus(dt)
        dt = dt.clamp(*dt_limit)
        kernel = kernels.of(key_dim=B.shape[-1], value_dim=x.shape[-1])
        o, state = kernel(
            C,
            B,
            (x * dt.unsqueeze(-1)).to(x.dtype),
            dt * A.float(),
            scale=1.0,
            initial_state=None if initial_states is None else initial_states.mT,
            output_final_state=return_final_states,
            cu_seqlens=limits,
        )
        if D is not None:
            o = (o + x * D.unsqueeze(-1)).to(x.dtype)
        return (o, state.mT) if return_final_states else o

    return call


def convolution(kernels: Kernels | None, own: Callable) -> Callable:
    """The short convolution in the convention of causal-conv1d: x [B, D, T], weight [D, taps].

    Without a kernel it is the model's own, which takes no documents apart: what packed documents
    need is then done around it.
    """

    def call(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        limits = document_limits(kwargs)
        if kernels is not None and activation in (None, "silu", "swish"):
            kernel = kernels.of(kernel_size=weight.shape[-1])
            inputs = x.transpose(1, 2), weight, bias
            y, _ = kernel(*inputs, activation=activation, cu_seqlens=limits)
            return y.transpose(1, 2)

        def convolve(x: Tensor) -> Tensor:
            return own(x, weight, bias, activation=activation, **kwargs)

        if limits is None:
            return convolve(x)
        return convolve_apart(convolve, weight.shape[-1], x, limits)

    return call


CALLS: dict[str, Callable[[Kernels, Callable], Callable]] = {
    "mamba2_chunk_scan": state_space,
    "mamba_chunk_scan_combined": state_space,
    "causal_conv1d_fn": convolution,
}
"""By the name of the function; `attention` is the adapter of all others."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A fused function that a model prefers when it returns something."""


BESIDE: dict[str, Callable[[Callable], Callable]] = {
    "causal_conv1d_fn": lambda own: convolution(None, own),
    "mamba2_split_conv1d_scan_combined": lambda own: _nothing,
    "recurrent_kimi_delta_attention": with_decay,
}
"""Functions of a forward that are bound besides its kernels where none of them is theirs: they
would mix documents that the kernels keep apart, pass the kernels by, or get a raw gate."""
