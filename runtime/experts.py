"""Routed experts: tokens go to the ranks that own their experts, through a grouped GEMM, and back.

The function `run_experts` enters a model through transformers' `ExpertsInterface`; the expert
weights stay where the model put them, as DTensors `Shard(0)` on the `ep` axis.

Legend of shapes: T tokens of this rank, K experts a token, D expert width, I intermediate width,
E experts of the model, L experts of this rank, P ranks of the `ep` axis, S = T * K rows sent,
R rows received, r adapter rank, F features in, O features out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

IMPLEMENTATION = "adapter_agent"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows sorted by local expert: how many each expert has, on the host and on the device."""

    counts: list[int]
    """Rows of each of the L experts."""
    offsets_L: Tensor
    """int32, cumulative counts; the last one is R."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What `dispatch` did, taken back by `combine`."""

    rows: Rows
    order_S: Tensor
    """(token, choice) pair behind each sorted row."""
    shape_TK: torch.Size
    by_expert_R: Tensor | None = None
    """Received row behind each row in expert order."""
    send_splits: list[int] = field(default_factory=list)
    receive_splits: list[int] = field(default_factory=list)
    weights_S: Tensor | None = None
    """Routing weights of all ranks' pairs, in the all-gather form only."""


class Dispatcher(Protocol):
    def dispatch(
        self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, experts: int
    ) -> tuple[Tensor, Sent]: ...

    def combine(self, y_RD: Tensor, weights_TK: Tensor, sent: Sent) -> Tensor: ...


def _weighted_sum(y_SD: Tensor, weights_TK: Tensor, sent: Sent) -> Tensor:
    """Back to (token, choice) order, then the weighted sum over a token's choices in float32."""
    unsorted_SD = y_SD[_inverse(sent.order_S)]
    y_TKD = unsorted_SD.view(*sent.shape_TK, -1)
    return (y_TKD.float() * weights_TK.float().unsqueeze(-1)).sum(dim=1)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


class Local:
    """No exchange: this rank has all experts."""

    def dispatch(
        self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, experts: int
    ) -> tuple[Tensor, Sent]:
        order_S = torch.argsort(index_TK.reshape(-1), stable=True)
        counts_E = torch.bincount(index_TK.reshape(-1), minlength=experts)
        rows = Rows(counts=counts_E.tolist(), offsets_L=counts_E.cumsum(0).to(torch.int32))
        sent = Sent(rows=rows, order_S=order_S, shape_TK=index_TK.shape)
        return x_TD[order_S // index_TK.shape[1]], sent

    def combine(self, y_RD: Tensor, weights_TK: Tensor, sent: Sent) -> Tensor:
        return _weighted_sum(y_RD, weights_TK, sent)


@dataclass(frozen=True)
class AllToAll:
    """Each row travels to the rank that owns its expert: sorted by destination rank, then expert.

    Counts go first, so every rank joins every collective with the sizes that its peers expect, also
    when it sends or receives nothing. One host synchronisation a call, for the split sizes.
    """

    group: dist.ProcessGroup

    def dispatch(
        self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, experts: int
    ) -> tuple[Tensor, Sent]:
        ranks = self.group.size()
        # Expert ids are contiguous on a rank, so expert order is destination order too.
        order_S = torch.argsort(index_TK.reshape(-1), stable=True)
        counts_E = torch.bincount(index_TK.reshape(-1), minlength=experts)
        received_E = torch.empty_like(counts_E)
        dist.all_to_all_single(received_E, counts_E, group=self.group)
        counts_PL, received_PL = counts_E.view(ranks, -1), received_E.view(ranks, -1)

        plan = torch.cat([counts_PL.sum(1), received_PL.sum(1), received_PL.sum(0)]).tolist()
        send, receive, per_expert = plan[:ranks], plan[ranks : 2 * ranks], plan[2 * ranks :]

        x_SD = x_TD[order_S // index_TK.shape[1]]
        x_RD = _exchange(x_SD, receive, send, self.group)
        local_ids = torch.arange(received_PL.shape[1], device=x_TD.device).repeat(ranks)
        ids_R = torch.repeat_interleave(local_ids, received_E, output_size=sum(receive))
        by_expert_R = torch.argsort(ids_R, stable=True)
        sent = Sent(
            rows=Rows(counts=per_expert, offsets_L=received_PL.sum(0).cumsum(0).to(torch.int32)),
            order_S=order_S,
            shape_TK=index_TK.shape,
            by_expert_R=by_expert_R,
            send_splits=send,
            receive_splits=receive,
        )
        return x_RD[by_expert_R], sent

    def combine(self, y_RD: Tensor, weights_TK: Tensor, sent: Sent) -> Tensor:
        assert sent.by_expert_R is not None
        y_RD = y_RD[_inverse(sent.by_expert_R)]
        y_SD = _exchange(y_RD, sent.send_splits, sent.receive_splits, self.group)
        return _weighted_sum(y_SD, weights_TK, sent)


def _exchange(x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    out = collectives.all_to_all_single_autograd(x.contiguous(), receive, send, group)
    return collectives.wait_tensor(out)


@dataclass(frozen=True)
class AllGather:
    """Every rank sees every token, keeps those of its experts, and sums come back reduce-scattered.

    Cheaper than all-to-all while P < K * (share of distinct ranks); needs equal T on all ranks.
    """

    group: dist.ProcessGroup

    def dispatch(
        self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, experts: int
    ) -> tuple[Tensor, Sent]:
        local = experts // self.group.size()
        x_ND = _gather(x_TD, self.group)
        index_NK = _gather_ids(index_TK, self.group)
        weights_NK = _gather(weights_TK, self.group)
        ids = index_NK.reshape(-1) - dist.get_rank(self.group) * local
        ids = torch.where((ids >= 0) & (ids < local), ids, local)  # others sort to the end
        counts_L = torch.bincount(ids, minlength=local + 1)[:local]
        counts = counts_L.tolist()
        order_R = torch.argsort(ids, stable=True)[: sum(counts)]
        sent = Sent(
            rows=Rows(counts=counts, offsets_L=counts_L.cumsum(0).to(torch.int32)),
            order_S=order_R,
            shape_TK=index_NK.shape,
            weights_S=weights_NK.reshape(-1)[order_R],
        )
        return x_ND[order_R // index_NK.shape[1]], sent

    def combine(self, y_RD: Tensor, weights_TK: Tensor, sent: Sent) -> Tensor:
        assert sent.weights_S is not None
        tokens, choices = sent.shape_TK
        weighted_RD = y_RD.float() * sent.weights_S.float().unsqueeze(-1)
        sums_ND = weighted_RD.new_zeros(tokens, y_RD.shape[-1])
        sums_ND = sums_ND.index_add(0, sent.order_S // choices, weighted_RD)
        out = collectives.reduce_scatter_tensor_autograd(sums_ND, "sum", 0, self.group)
        return collectives.wait_tensor(out)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = collectives.all_gather_tensor_autograd(x.contiguous(), 0, group)
    return collectives.wait_tensor(out)


def _gather_ids(ids_TK: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = ids_TK.new_empty(group.size() * ids_TK.shape[0], ids_TK.shape[1])
    dist.all_gather_into_tensor(out, ids_TK.contiguous(), group=group)
    return out


def grouped_linear(x_RF: Tensor, w_LOF: Tensor, rows: Rows) -> Tensor:
    """`x @ w[expert].T` for rows sorted by expert -> [R, O].

    Exactly `offsets[-1]` rows go in: rows beyond are uninitialised in torch's output and gradient.
    """
    if _has_grouped_gemm(x_RF):
        return F.grouped_mm(x_RF, w_LOF.transpose(-2, -1), offs=rows.offsets_L)
    parts = zip(x_RF.split(rows.counts), w_LOF.unbind(0), strict=True)
    return torch.cat([F.linear(x, w) for x, w in parts])


def _has_grouped_gemm(x_RF: Tensor) -> bool:
    # torch's kernel refuses an empty operand; CUDA has it for bfloat16 alone.
    return x_RF.shape[0] > 0 and (x_RF.device.type == "cpu" or x_RF.dtype == torch.bfloat16)


def adapted_linear(
    experts: Any, name: str, x_RF: Tensor, rows: Rows, row_expert_R: Tensor | None
) -> Tensor:
    """The bank `name` with bias and low-rank adapter; base weight plus delta never exist as one."""
    weight = local(getattr(experts, name))
    w_LOF = weight.transpose(-2, -1) if experts.is_transposed else weight
    y_RO = grouped_linear(x_RF, w_LOF, rows)
    if row_expert_R is not None:
        y_RO = y_RO + local(getattr(experts, f"{name}_bias"))[row_expert_R]
    a_LrF = getattr(experts, f"lora_{name}_A", None)
    if a_LrF is None:
        return y_RO
    a_LrF, b_LOr = _padded(local(a_LrF), local(getattr(experts, f"lora_{name}_B")), x_RF.dtype)
    low_Rr = grouped_linear(x_RF, a_LrF, rows)
    return y_RO + grouped_linear(low_Rr, b_LOr, rows) * experts.lora_scale


def _padded(a_LrF: Tensor, b_LOr: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors in the compute dtype, the rank padded with zeros to a stride of 16 bytes, as
    grouped GEMM asks for."""
    a_LrF, b_LOr = a_LrF.to(dtype), b_LOr.to(dtype)
    pad = -a_LrF.shape[1] % (16 // dtype.itemsize)
    return F.pad(a_LrF, (0, 0, 0, pad)), F.pad(b_LOr, (0, pad))


def local(parameter: Tensor) -> Tensor:
    """This rank's experts; the gradient returns to the DTensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def run_experts(self: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The experts forward that transformers calls, on this rank's tokens -> [T, D]."""
    recorder.add(self, index_TK)
    dispatcher: Dispatcher = getattr(self, "dispatcher", None) or Local()
    x_RD, sent = dispatcher.dispatch(x_TD, index_TK, weights_TK, self.num_experts)
    row_expert_R = None
    if self.has_bias:
        counts_L = torch.tensor(sent.rows.counts, device=x_RD.device)
        ids_L = torch.arange(counts_L.numel(), device=x_RD.device)
        row_expert_R = torch.repeat_interleave(ids_L, counts_L, output_size=x_RD.shape[0])
    name = "gate_up_proj" if self.has_gate else "up_proj"
    h_RI = adapted_linear(self, name, x_RD, sent.rows, row_expert_R)
    h_RI = self._apply_gate(h_RI) if self.has_gate else self.act_fn(h_RI)
    y_RD = adapted_linear(self, "down_proj", h_RI, sent.rows, row_expert_R)
    if self.has_post_expert_norm:
        y_RD = self.post_expert_norm(y_RD)
    return dispatcher.combine(y_RD, weights_TK, sent).to(x_TD.dtype)


def experts_of(model: nn.Module) -> dict[str, Any]:
    """All modules whose experts run through transformers' registry, by name.

    Typed loosely: what transformers' decorator adds to them is not declared anywhere.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate")
    }


def use_own_experts(model: nn.Module) -> None:
    """Makes every experts module of the model run `run_experts`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
    for module in experts_of(model).values():
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
        ids = index_TK[self._valid_T].reshape(-1)
        counts_E = torch.bincount(ids, minlength=module.num_experts)
        self.counts[module] = self.counts.get(module, 0) + counts_E

    def take(self) -> list[Tensor]:
        """Counts [E] by layer, in order of the forward pass, and starts again."""
        counts, self.counts = list(self.counts.values()), {}
        return counts


recorder = Recorder()
