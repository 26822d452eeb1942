"""The proofs of `adapt validate`, one function each. Every one measures something and can fail.

All ranks call them together; rank 0 judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from runtime.adapters import adapter_parameters
from runtime.experts import experts_of
from runtime.packing import Batch
from runtime.schema import Check
from runtime.shards import tensor_digest, whole

if TYPE_CHECKING:
    from strategies.schema import Plan

FLOAT32_TOLERANCE = 1e-5
LOGITS_TOLERANCE = 1e-4
STATE_TOLERANCE = 0.1
"""Relative distance allowed between predicted and counted bytes of weights, adapters, optimizer."""


def check(name: str, passed: bool, measured: Any, expected: Any, **rest: Any) -> Check:
    tolerance, detail = rest.get("tolerance"), rest["detail"]
    return Check(
        name=name,
        passed=bool(passed),
        measured=measured,
        expected=expected,
        tolerance=tolerance,
        detail=detail,
    )


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance; absolute where the reference is exactly zero."""
    scale = float(b.float().norm())
    apart = float((a.float() - b.float()).norm())
    return apart / scale if scale > 0 else apart


def weights_equal(sharded: dict[str, str], reference: dict[str, str], source: str) -> Check:
    """Every full weight, gathered from the shards, is bit-equal to `reference`."""
    wrong = sorted(n for n in reference if sharded.get(n) != reference[n])
    extra = sorted(set(sharded) - set(reference))
    names = wrong + extra
    return check(
        "weights_equal_single_process",
        bool(reference) and not names,
        len(reference) - len(wrong),
        len(reference),
        detail=f"sha256 of every full tensor against {source}"
        + (f"; different: {', '.join(names[:4])}" if names else ""),
    )


class Worst:
    """Keeps the largest distance met, and where."""

    def __init__(self) -> None:
        self.value, self.where = 0.0, "nothing compared"
        self.count = 0

    def add(self, where: str, value: float) -> None:
        self.count += 1
        if self.count == 1 or not value <= self.value:  # NaN counts as larger
            self.value, self.where = value, where

    def within(self, tolerance: float) -> bool:
        return self.count > 0 and self.value <= tolerance


def replicas_equal(model: nn.Module) -> Check:
    """After two updates, whatever several ranks hold alike is bit-equal: shards of `dp_replicate`
    copies, buffers, and full factors as each rank gathers them. (With B = 0 the first update looks
    right even when ranks train their own copies.)"""
    sharded = dist.get_world_size() > 1
    plain = [
        n for n, p in adapter_parameters(model).items() if sharded and not isinstance(p, DTensor)
    ]
    mine: dict[str, str] = {}
    for name, parameter in adapter_parameters(model).items():
        mine[f"full {name}"] = tensor_digest(whole(parameter))
        if isinstance(parameter, DTensor):
            place = [
                "*" if isinstance(p, Replicate) else parameter.device_mesh.get_local_rank(axis)
                for axis, p in enumerate(parameter.placements)
            ]
            mine[f"shard {name} {place}"] = tensor_digest(parameter.to_local())
    for name, buffer in model.named_buffers():
        mine[f"buffer {name}"] = tensor_digest(buffer)
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    seen: dict[str, str] = {}
    compared, different = 0, set()
    for rank in everyone:
        for key, value in rank.items():
            compared += key in seen
            if seen.setdefault(key, value) != value:
                different.add(key)
    faults = sorted(different) + [f"{n} is not a DTensor" for n in plain]
    return check(
        "replicas_equal",
        not faults and compared > 0,
        len(faults),
        0,
        detail=f"{compared} tensors held by several ranks compared after step 2"
        + (f"; {', '.join(faults[:4])}" if faults else ""),
    )


def adapters_moved(model: nn.Module, before: dict[str, Tensor], steps: int) -> Check:
    names = list(before)
    moved = torch.tensor(
        [
            float(not torch.equal(before[n], _local(p)))
            for n, p in adapter_parameters(model).items()
        ],
        device=_local(next(iter(adapter_parameters(model).values()))).device,
    )
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    still = [n for n, m in zip(names, moved.tolist(), strict=True) if not m]
    return check(
        "adapters_moved",
        not still and bool(names),
        len(names) - len(still),
        len(names),
        detail=f"factors changed after {steps} updates"
        + (f"; unchanged: {', '.join(still[:4])}" if still else ""),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {n: _local(p).clone() for n, p in adapter_parameters(model).items()}


@contextmanager
def first_experts_only(model: nn.Module) -> Iterator[None]:
    """Routes every token to experts 0 .. K-1, so the other experts, and ranks, get nothing."""

    def skew(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        x_TD, index_TK, weights_TK = args
        first_TK = torch.arange(index_TK.shape[1], device=index_TK.device).expand_as(index_TK)
        return (x_TD, first_TK.contiguous(), weights_TK), kwargs

    handles = [
        m.register_forward_pre_hook(skew, with_kwargs=True) for m in experts_of(model).values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def zero_token_expert(
    model: nn.Module, loss: float, reference_loss: float | None, top_k: int
) -> Check:
    """Experts without a token have gradients that are there and exactly zero; the loss is that of
    one process. To be called after a backward pass under `first_experts_only`."""
    faults: list[str] = []
    starved = 0
    for name, module in experts_of(model).items():
        for key, parameter in module.named_parameters(recurse=False):
            if not key.startswith("lora_"):
                continue
            if parameter.grad is None:
                faults.append(f"{name}.{key} has no gradient")
                parameter.grad = torch.zeros_like(parameter)
            gradient = whole(parameter.grad)
            starved += gradient.shape[0] - top_k
            if not torch.isfinite(gradient).all():
                faults.append(f"{name}.{key} is not finite")
            if gradient[top_k:].abs().max() != 0:
                faults.append(f"{name}.{key} is not zero without tokens")
    error = 0.0 if reference_loss is None else abs(loss - reference_loss) / abs(reference_loss)
    return check(
        "zero_token_expert",
        not faults and starved > 0 and error <= FLOAT32_TOLERANCE,
        error,
        0.0,
        tolerance=FLOAT32_TOLERANCE,
        detail=f"all tokens on the first {top_k} experts: {starved} starved experts' gradients, "
        "loss against one process"
        + ("" if reference_loss is not None else " not compared")
        + (f"; {', '.join(faults[:4])}" if faults else ""),
    )


def routing_balance(counts: list[list[int]], tokens: int, top_k: int, ep: int) -> Check:
    """Reports the load; fails when the counts do not add up to every token times `top_k`."""
    sums = [sum(row) for row in counts]
    expert = max((max(row) * len(row) / max(1, sum(row)) for row in counts), default=0.0)
    rank = 0.0
    for row in counts:
        share = len(row) // ep
        loads = [sum(row[i * share : (i + 1) * share]) for i in range(ep)]
        rank = max(rank, max(loads) * ep / max(1, sum(loads)))
    return check(
        "routing_balance",
        bool(counts) and all(s == tokens * top_k for s in sums),
        {"expert_max_over_mean": round(expert, 4), "rank_max_over_mean": round(rank, 4)},
        {"routed_tokens_per_layer": tokens * top_k},
        detail=f"{len(counts)} layers, {tokens} tokens to {top_k} experts each; the fullest expert "
        f"has {expert:.2f} and the fullest of {ep} ranks {rank:.2f} times the mean load",
    )


def state_memory(model: nn.Module, optimizer: Any, plan: Plan, weights: torch.dtype) -> Check:
    """Bytes of state on the fullest rank against the plan: weights, adapters, gradients, optimizer.

    Counted from the tensors that are there, not asked of the allocator. The proof runs in float32;
    frozen weights are counted as the plan stores them, and a gradient as large as its adapter.
    """
    from runtime.build import dtype_of

    stored = dtype_of(plan).itemsize
    counted = 0
    for parameter in model.parameters():
        local = _local(parameter)
        if parameter.requires_grad:
            counted += local.nbytes * 2  # and its gradient
        else:
            counted += local.numel() * (stored if local.dtype == weights else local.element_size())
    for held in optimizer.state.values():
        counted += sum(_local(t).nbytes for t in held.values() if isinstance(t, Tensor) and t.ndim)
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, counted / 2**30)
    memory = plan.predicted.memory_gib
    predicted = memory.frozen_weights + memory.adapters + memory.gradients + memory.optimizer
    measured = max(everyone)
    error = abs(measured - predicted) / predicted if predicted else float("inf")
    return check(
        "memory",
        error <= STATE_TOLERANCE,
        measured,
        predicted,
        tolerance=STATE_TOLERANCE,
        detail=f"GiB of state on the fullest rank, {100 * error:.1f}% from the plan: tensors added "
        f"up, frozen weights (at the plan's {stored} bytes each), adapters, their gradients and "
        "optimizer moments. Not measured: activations, logits, unsharded blocks, dispatch buffers, "
        "what the allocator reserves, and so the peak",
    )


@torch.no_grad()
def logits_of(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Logits of the real tokens, float32, on the CPU -> [tokens, V]."""
    model.eval()
    logits_BTV = model(input_ids=batch.input_ids_BT.to(device), use_cache=False).logits
    model.train()
    return logits_BTV.float().cpu()[batch.valid_BT]


def peft_round_trip(
    adapter: Path, stock: nn.Module, own: Tensor, batch: Batch, device: torch.device
) -> Check:
    """The written adapter, loaded by PEFT on transformers' own model, gives the same logits.

    The adapter must also do something: its effect on the logits has to stand clear of the error.
    """
    from peft import PeftModel

    base = logits_of(stock, batch, device)
    wrapped: Callable = PeftModel.from_pretrained(stock, str(adapter))  # type: ignore[arg-type]
    logits = logits_of(wrapped, batch, device)  # type: ignore[arg-type]
    error = float((logits - own).abs().max())
    effect = float((logits - base).abs().max())
    return check(
        "peft_round_trip",
        error <= LOGITS_TOLERANCE and effect > 10 * error,
        error,
        0.0,
        tolerance=LOGITS_TOLERANCE,
        detail=f"largest difference of logits over {own.shape[0]} tokens; the adapter changes them "
        f"by up to {effect:.3g}",
    )
