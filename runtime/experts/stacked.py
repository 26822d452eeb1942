"""Routed experts: a grouped GEMM over the (row, choice) pairs that a dispatcher brings.

The function `run_experts` enters a model through transformers' `ExpertsInterface`; the expert
weights stay where the model put them, as DTensors `Shard(0)` on the `ep` axis.

Legend of shapes: T tokens of this rank, K experts a token, D expert width, I intermediate width,
E experts of the model, L experts of this rank, P (row, choice) pairs computed here, r adapter rank,
F features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from analyzers.experts import experts_of
from analyzers.schema import BANKS
from runtime.experts.activations import NOTHING, Activation, activation_of
from runtime.experts.capacity import Limiter
from runtime.experts.dispatch import Local
from runtime.experts.fan import Pairs, RowKernels, tally
from runtime.experts.replay import once

if TYPE_CHECKING:
    from runtime.experts.copies import Copies

IMPLEMENTATION = "adapter_agent"


def grouped_linear(x_PF: Tensor, w_LOF: Tensor, pairs: Pairs) -> Tensor:
    """`x @ w[expert].T` for pairs sorted by expert -> [P, O].

    Exactly `offsets[-1]` rows go in: rows beyond are uninitialised in torch's output and gradient.
    """
    if not pairs.size:  # torch's kernel refuses an empty operand; gradients are zero, but there
        return F.linear(x_PF, w_LOF[0])
    if x_PF.device.type == "cpu" or x_PF.dtype == torch.bfloat16:
        return F.grouped_mm(x_PF, w_LOF.transpose(-2, -1), offs=pairs.offsets_L)
    parts = zip(x_PF.split(pairs.counts), w_LOF.unbind(0), strict=True)  # CUDA: bfloat16 alone
    return torch.cat([F.linear(x, w) for x, w in parts])


def base_linear(experts: Any, name: str, x_PF: Tensor, pairs: Pairs) -> Tensor:
    """The frozen bank `name`; experts that keep it packed have a `base_linear` of their own."""
    weight = weight_of(experts, name, pairs)
    assert weight is not None
    w_LOF = weight.transpose(-2, -1) if experts.is_transposed else weight
    return grouped_linear(x_PF, w_LOF, pairs)


def base_weight(experts: Any, name: str, pairs: Pairs) -> dict[str, Tensor]:
    """The frozen bank `name` as the generated kernel is given it, by argument; experts that keep it
    packed have a `base_weight` of their own."""
    weight = weight_of(experts, name, pairs)
    assert weight is not None
    return {"base": weight.transpose(-2, -1) if experts.is_transposed else weight}


def adapted_linear(
    experts: Any, name: str, x_PF: Tensor, pairs: Pairs, activation: Activation = NOTHING
) -> Tensor:
    """The bank `name` with bias and low-rank adapter, and what the activation makes of it; base
    weight plus delta never exist as one."""
    kernel = getattr(experts, BANKS, None)
    if kernel is not None and _in_kernel(experts, name):
        return _by_kernel(kernel, experts, name, x_PF, pairs, activation)
    y_PO = getattr(experts, "base_linear", base_linear)(experts, name, x_PF, pairs)
    bias_LO = weight_of(experts, f"{name}_bias", pairs)
    if bias_LO is not None:
        y_PO = y_PO + bias_LO[pairs.expert_P]
    b_LOr = weight_of(experts, f"lora_{name}_B", pairs)
    if b_LOr is not None:
        y_PO = y_PO + _low_rank(experts, name, b_LOr, x_PF, pairs)
    return activation.function(y_PO)


def _in_kernel(experts: Any, name: str) -> bool:
    """Whether the generated kernel computes this bank: adapted, without dropout."""
    adapted = hasattr(experts, f"lora_{name}_B")
    return adapted and not (experts.training and experts.lora_dropout)


def _by_kernel(
    kernel: Callable[..., Tensor],
    experts: Any,
    name: str,
    x_PF: Tensor,
    pairs: Pairs,
    activation: Activation,
) -> Tensor:
    y_PO = kernel(
        x_PF,
        _first_factor(experts, name, pairs),
        weight_of(experts, f"lora_{name}_B", pairs),
        **getattr(experts, "base_weight", base_weight)(experts, name, pairs),
        base_bias=weight_of(experts, f"{name}_bias", pairs),
        offsets=pairs.offsets_L,
        scale=experts.lora_scale,
        activation=activation.name,
        gated=activation.gated,
        betas=activation.betas,
    )
    return activation.function(y_PO) if activation.name is None else y_PO


def _first_factor(experts: Any, name: str, pairs: Pairs) -> Tensor:
    """A `[L, r, F]`, or `[r, F]` that experts share: it is the block's, whole on every rank."""
    (owner,) = getattr(experts, "lora_shared", (experts,))
    a = weight_of(owner, f"lora_{name}_A", pairs)
    assert a is not None
    return a


def _low_rank(experts: Any, name: str, b_LOr: Tensor, x_PF: Tensor, pairs: Pairs) -> Tensor:
    """The adapter's part of a bank -> [P, O]"""
    a = _first_factor(experts, name, pairs)
    shared = a.ndim == 2
    a, b_LOr = _padded(a if shared else _used(a, pairs), _used(b_LOr, pairs), x_PF.dtype)
    x_PF = F.dropout(x_PF, experts.lora_dropout, experts.training)
    low_Pr = F.linear(x_PF, a) if shared else grouped_linear(x_PF, a, pairs)
    return grouped_linear(low_Pr, b_LOr, pairs) * experts.lora_scale


def weight_of(experts: Any, key: str, pairs: Pairs) -> Tensor | None:
    """A parameter's rows for the experts of `pairs`; None where the module has no such."""
    own = getattr(experts, key, None)
    if own is None:
        return None
    copies = pairs.copies
    if copies is None or copies.experts is not experts:
        return local(own)
    return copies.weight(key, local(own))


def _used(factor: Tensor, pairs: Pairs) -> Tensor:
    """The factor with zeros for experts without pairs, so that their gradients are zero too: not
    every device's grouped GEMM writes them (pytorch/pytorch#172439)."""
    counts_L = pairs.offsets_L.diff(prepend=pairs.offsets_L.new_zeros(1))
    return torch.where((counts_L > 0).view(-1, 1, 1), factor, 0)


def _padded(a: Tensor, b_LOr: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors, A `[L, r, F]` or shared `[r, F]`, in the compute dtype, the rank padded with
    zeros to a stride of 16 bytes, as grouped GEMM asks for."""
    a, b_LOr = a.to(dtype), b_LOr.to(dtype)
    pad = -b_LOr.shape[2] % (16 // dtype.itemsize)
    return F.pad(a, (0, 0, 0, pad)), F.pad(b_LOr, (0, pad))


def local(parameter: Tensor) -> Tensor:
    """This rank's experts; the gradient returns to the DTensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def run_experts(self: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The experts forward that transformers calls, on this rank's tokens -> [T, D]."""

    def compute(x_PD: Tensor, pairs: Pairs) -> Tensor:
        name = "gate_up_proj" if self.has_gate else "up_proj"
        h_PI = adapted_linear(self, name, x_PD, pairs, activation_of(self))
        y_PD = adapted_linear(self, "down_proj", h_PI, pairs)
        return self.post_expert_norm(y_PD) if self.has_post_expert_norm else y_PD

    return dispatched(self, x_TD, index_TK, weights_TK, compute)


def dispatched(
    experts: Any,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    compute: Callable[[Tensor, Pairs], Tensor],
) -> Tensor:
    """Tokens to where their experts are, `compute` there on [P, D], and weighted sums back [T, D].
    Limiter, dispatcher and copies are the module's own, set by `runtime.sharding`."""
    kernels = RowKernels.of(experts)
    limiter: Limiter | None = getattr(experts, "limiter", None)
    if limiter is not None:
        index_TK, weights_TK = limiter(index_TK, weights_TK, recorder.valid_T, kernels)
    recorder.add(experts, index_TK)
    dispatcher = getattr(experts, "dispatcher", None) or Local()
    copies: Copies | None = getattr(experts, "copies", None)
    if copies is None or copies.placement is None:
        route = once(lambda: dispatcher.route(index_TK, experts.num_experts, kernels))
        x_PD, weights_P = route.dispatch(x_TD, weights_TK, kernels)
        y_PD = compute(x_PD, route.pairs)
    else:
        places = copies.placement.places
        route = once(lambda: dispatcher.route(copies.places(index_TK), places, kernels))
        x_PD, weights_P = route.dispatch(x_TD, weights_TK, kernels)
        parts = route.pairs.split(copies.own, copies)
        rows = zip(x_PD.split([part.size for part in parts]), parts, strict=True)
        y_PD = torch.cat([compute(x, part) for x, part in rows])
    return route.combine(y_PD, weights_P, kernels).to(x_TD.dtype)


def use_own_experts(model: nn.Module) -> None:
    """Makes every experts module of the model run `run_experts`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
    for module in experts_of(model).values():
        if hasattr(module, "has_gate"):  # transformers' decorator put it there
            module.config._experts_implementation = IMPLEMENTATION


class Recorder:
    """Tokens per expert of one step, real tokens only: those that were computed, and choices that
    were not.

    Records inside `recording()` alone, so a forward repeated for the backward pass is not counted.
    """

    def __init__(self) -> None:
        self.counts: dict[nn.Module, Tensor] = {}
        self.valid_T: Tensor | None = None
        """Which tokens of the batch are real; None outside of `recording()`."""

    @contextmanager
    def recording(self, valid_BT: Tensor) -> Iterator[None]:
        self.valid_T = valid_BT.reshape(-1)
        try:
            yield
        finally:
            self.valid_T = None

    def add(self, module: Any, index_TK: Tensor) -> None:
        if self.valid_T is None:
            return
        kinds = module.num_experts + 1  # the last: no expert had room
        # Rows of a list of experts do not know their token: padding is counted with the rest.
        if index_TK.shape[0] == self.valid_T.shape[0]:
            index_TK = torch.where(self.valid_T.unsqueeze(1), index_TK, kinds)
        self.counts[module] = self.counts.get(module, 0) + tally(index_TK, kinds)

    def take(self) -> list[Tensor]:
        """Counts [E + 1] by layer, in order of the forward pass, and starts again: tokens of each
        expert, then choices that found no room."""
        counts, self.counts = list(self.counts.values()), {}
        return counts


recorder = Recorder()
