"""Expert banks that stay MXFP4 in memory: codes and scales as parameters, unpacked where used.

A bank `gate_up_proj` becomes `gate_up_proj_codes` uint8 `[E, O, F / 2]` and `gate_up_proj_scales`
uint8 `[E, O, F / 32]`, which are cut, gathered and moved like any weight: a quarter of the bytes.

Legend of shapes: E experts of the model, L experts of this rank, P pairs, F features in, O out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from analyzers.errors import InputError
from analyzers.models.kimi_k3.mxfp4 import GROUP, unpack_mxfp4
from runtime.adapters import banks
from runtime.experts import experts_of
from runtime.experts.fan import Pairs
from runtime.experts.lists import ExpertList
from runtime.experts.stacked import grouped_linear, weight_of

CODES, SCALES = "_codes", "_scales"


def keep_packed(model: nn.Module) -> None:
    """Replaces the banks of every experts module, in place, on their device and uninitialised.

    After adapters are inserted and before sharding. Raises InputError where a row is no whole
    number of groups.
    """
    for name, experts in experts_of(model).items():
        for bank in banks(experts):
            weight = getattr(experts, bank)
            first, second = weight.shape[1:]
            outs, ins = (second, first) if experts.is_transposed else (first, second)
            if ins % GROUP or isinstance(experts, ExpertList):
                fault = f"mxfp4, which {name}.{bank} cannot stay packed in"
                raise InputError("plan.json", field="expert_weight_format", fault=fault, fix="bf16")
            delattr(experts, bank)
            for suffix, columns in ((CODES, ins // 2), (SCALES, ins // GROUP)):
                part = weight.new_empty(weight.shape[0], outs, columns, dtype=torch.uint8)
                parameter = nn.Parameter(part, requires_grad=False)
                experts.register_parameter(f"{bank}{suffix}", parameter)
        experts.base_linear, experts.base_weight = packed_linear, packed_weight


def bank_of(model: nn.Module, name: str) -> tuple[str, str] | None:
    """Name of the bank that a parameter is a part of, and which part; None for any other."""
    owner, _, last = name.rpartition(".")
    for suffix in (CODES, SCALES):
        bank = last.removesuffix(suffix)
        if bank != last and hasattr(model.get_submodule(owner), f"{bank}{CODES}"):
            return f"{owner}.{bank}", suffix
    return None


def unpacked(model: nn.Module, bank: str, codes: Tensor, scales: Tensor) -> Tensor:
    """The bank as the model's own code has it."""
    experts: Any = model.get_submodule(bank.rpartition(".")[0])
    weight = unpack_mxfp4(codes, scales, model.dtype)  # type: ignore[arg-type]
    return weight.transpose(-2, -1).contiguous() if experts.is_transposed else weight


def packed_weight(experts: Any, name: str, pairs: Pairs) -> dict[str, Tensor | None]:
    """What `base_weight` is with plain weights."""
    parts = {"base": CODES, "base_scales": SCALES}
    return {part: weight_of(experts, f"{name}{suffix}", pairs) for part, suffix in parts.items()}


def packed_linear(experts: Any, name: str, x_PF: Tensor, pairs: Pairs) -> Tensor:
    """What `base_linear` is with plain weights -> [P, O]."""
    codes, scales = packed_weight(experts, name, pairs).values()
    return _PackedLinear.apply(x_PF, codes, scales, pairs)  # type: ignore


class _PackedLinear(torch.autograd.Function):
    """`grouped_linear` with packed weights. They are unpacked anew in backward: what lies between
    holds them packed."""

    @staticmethod
    def forward(ctx: Any, x_PF: Tensor, codes: Tensor, scales: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.pairs = pairs
        return grouped_linear(x_PF, unpack_mxfp4(codes, scales, x_PF.dtype), pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PO: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        w_LOF = unpack_mxfp4(codes, scales, grad_PO.dtype)
        return grouped_linear(grad_PO, w_LOF.transpose(-2, -1), ctx.pairs), None, None, None
