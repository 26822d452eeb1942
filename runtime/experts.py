"""Routed experts: a grouped GEMM over the (row, choice) pairs that a dispatcher brings.

The function `run_experts` enters a model through transformers' `ExpertsInterface`; the expert
weights stay where the model put them, as DTensors `Shard(0)` on the `ep` axis.

Legend of shapes: T tokens of this rank, K experts a token, D expert width, I intermediate width,
E experts of the model, L experts of this rank, P (row, choice) pairs computed here, r adapter rank,
F features in, O features out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime.dispatch import Dispatcher, Local, Pairs

IMPLEMENTATION = "adapter_agent"


def grouped_linear(x_PF: Tensor, w_LOF: Tensor, pairs: Pairs) -> Tensor:
    """`x @ w[expert].T` for pairs sorted by expert -> [P, O].

    Exactly `offsets[-1]` rows go in: rows beyond are uninitialised in torch's output and gradient.
    """
    if _has_grouped_gemm(x_PF):
        return F.grouped_mm(x_PF, w_LOF.transpose(-2, -1), offs=pairs.offsets_L)
    parts = zip(x_PF.split(pairs.counts), w_LOF.unbind(0), strict=True)
    return torch.cat([F.linear(x, w) for x, w in parts])


def _has_grouped_gemm(x_PF: Tensor) -> bool:
    # torch's kernel refuses an empty operand; CUDA has it for bfloat16 alone.
    return x_PF.shape[0] > 0 and (x_PF.device.type == "cpu" or x_PF.dtype == torch.bfloat16)


def base_linear(experts: Any, name: str, x_PF: Tensor, pairs: Pairs) -> Tensor:
    """The frozen bank `name`; experts that keep it packed have a `base_linear` of their own."""
    weight = local(getattr(experts, name))
    w_LOF = weight.transpose(-2, -1) if experts.is_transposed else weight
    return grouped_linear(x_PF, w_LOF, pairs)


def adapted_linear(experts: Any, name: str, x_PF: Tensor, pairs: Pairs) -> Tensor:
    """The bank `name` with bias and low-rank adapter; base weight plus delta never exist as one."""
    y_PO = getattr(experts, "base_linear", base_linear)(experts, name, x_PF, pairs)
    bias_LO = getattr(experts, f"{name}_bias", None)
    if bias_LO is not None:
        y_PO = y_PO + local(bias_LO)[pairs.expert_P]
    b_LOr = getattr(experts, f"lora_{name}_B", None)
    if b_LOr is None:
        return y_PO
    (owner,) = getattr(experts, "lora_shared", (experts,))
    a = local(getattr(owner, f"lora_{name}_A"))
    shared = a.ndim == 2
    a, b_LOr = _padded(a if shared else _used(a, pairs), _used(local(b_LOr), pairs), x_PF.dtype)
    x_PF = F.dropout(x_PF, experts.lora_dropout, experts.training)
    low_Pr = F.linear(x_PF, a) if shared else grouped_linear(x_PF, a, pairs)
    return y_PO + grouped_linear(low_Pr, b_LOr, pairs) * experts.lora_scale


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
    recorder.add(self, index_TK)
    dispatcher: Dispatcher = getattr(self, "dispatcher", None) or Local()
    x_PD, sent = dispatcher.dispatch(x_TD, index_TK, weights_TK, self.num_experts)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    h_PI = adapted_linear(self, name, x_PD, sent.pairs)
    h_PI = self._apply_gate(h_PI) if self.has_gate else self.act_fn(h_PI)
    y_PD = adapted_linear(self, "down_proj", h_PI, sent.pairs)
    if self.has_post_expert_norm:
        y_PD = self.post_expert_norm(y_PD)
    return dispatcher.combine(y_PD, sent).to(x_TD.dtype)


def experts_of(model: nn.Module) -> dict[str, Any]:
    """All modules of stacked experts, by name: those that run through transformers' registry, and
    lists of experts that were stacked here.

    Typed loosely: what transformers' decorator adds to them is not declared anywhere.
    """
    return {n: module for n, module in model.named_modules() if hasattr(module, "is_transposed")}


def use_own_experts(model: nn.Module) -> None:
    """Makes every experts module of the model run `run_experts`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
    for module in experts_of(model).values():
        if hasattr(module, "has_gate"):  # transformers' decorator put it there
            module.config._experts_implementation = IMPLEMENTATION


class Recorder:
    """Tokens per expert of one step, real tokens only.

    Records inside `recording()` alone, so a forward repeated for the backward pass is not counted.
    """

    def __init__(self) -> None:
        self.counts: dict[nn.Module, Tensor] = {}
        self._valid_T: Tensor | None = None
        self._on = False

    @contextmanager
    def recording(self, valid_BT: Tensor) -> Iterator[None]:
        self._valid_T, self._on = valid_BT.reshape(-1), True
        try:
            yield
        finally:
            self._valid_T, self._on = None, False

    def add(self, module: Any, index_TK: Tensor) -> None:
        if not self._on or self._valid_T is None:
            return
        # Rows of a list of experts do not know their token: padding is counted with the rest.
        known = index_TK.shape[0] == self._valid_T.shape[0]
        ids = (index_TK[self._valid_T] if known else index_TK).reshape(-1)
        counts_E = torch.bincount(ids, minlength=module.num_experts)
        self.counts[module] = self.counts.get(module, 0) + counts_E

    def take(self) -> list[Tensor]:
        """Counts [E] by layer, in order of the forward pass, and starts again."""
        counts, self.counts = list(self.counts.values()), {}
        return counts


recorder = Recorder()
