"""Tokens go to the ranks that own their experts, and the weighted sums of the experts come back.

Legend of shapes: T tokens of this rank, K choices (experts) a token, D expert width, E experts of
the model, L experts of this rank, G ranks of the `ep` group, S (token, rank) rows sent, R rows
received, P (row, choice) pairs that this rank computes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Spread(torch.autograd.Function):
    """`x[source]`; gradients are added in float32 and in one order.

    Indexing itself adds them in the dtype of x, and with more than one thread in no fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, by_source: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(by_source, counts)
        ctx.dtype = x.dtype
        return x[source]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        by_source, counts = ctx.saved_tensors
        return _segment_sums(grad[by_source], counts).to(ctx.dtype), None, None, None


class _Collect(torch.autograd.Function):
    """The transpose of `_Spread`: float32 sums of what lies behind each source."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, source: Tensor, by_source: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        ctx.dtype = y.dtype
        return _segment_sums(y[by_source], counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        return grad.to(ctx.dtype)[source], None, None, None


def _segment_sums(x: Tensor, counts: Tensor) -> Tensor:
    """Sums of consecutive rows, `counts[i]` of them for output i, in float32; zero for none."""
    if x.numel() == 0:
        return x.new_zeros(counts.shape[0], x.shape[1], dtype=torch.float32)
    return torch.segment_reduce(x.float(), "sum", lengths=counts, unsafe=True, initial=0)


@dataclass(frozen=True)
class Fan:
    """Items made of sources, each source any number of times."""

    source: Tensor
    """Source of each item."""
    by_source: Tensor
    """The items in order of their sources."""
    counts: Tensor
    """Items of each source."""

    def spread(self, x: Tensor) -> Tensor:
        """[sources, D] -> [items, D]"""
        return _Spread.apply(x, self.source, self.by_source, self.counts)  # type: ignore

    def collect(self, y: Tensor) -> Tensor:
        """[items, D] -> float32 sums [sources, D]"""
        return _Collect.apply(y, self.source, self.by_source, self.counts)  # type: ignore


@dataclass(frozen=True)
class Pairs:
    """The (row, choice) pairs of this rank in order of its experts."""

    counts: list[int]
    """Pairs of each of the L experts, on the host."""
    offsets_L: Tensor
    """int32, cumulative counts; the last one is P."""
    fan: Fan
    """From rows to pairs."""
    weights_P: Tensor

    @functools.cached_property
    def expert_P(self) -> Tensor:
        """This rank's number of each pair's expert."""
        counts_L = torch.tensor(self.counts, device=self.offsets_L.device)
        ids_L = torch.arange(counts_L.numel(), device=counts_L.device)
        return ids_L.repeat_interleave(counts_L, output_size=sum(self.counts))

    @classmethod
    def of(
        cls, ids_RK: Tensor, weights_RK: Tensor, counts_L: Tensor, counts: list[int] | None = None
    ) -> Pairs:
        """`ids_RK` are local expert ids, L for a choice that is another rank's; `counts` are
        `counts_L` where the host already knows them."""
        counts = counts_L.tolist() if counts is None else counts
        # Other ranks' choices sort to the end and are cut off.
        pair_P = torch.argsort(ids_RK.reshape(-1), stable=True)[: sum(counts)]
        here_RK = ids_RK < counts_L.shape[0]
        fan = Fan(pair_P // ids_RK.shape[1], torch.argsort(pair_P), here_RK.sum(1))
        offsets_L = counts_L.cumsum(0).to(torch.int32)
        return cls(counts, offsets_L, fan, weights_RK.reshape(-1)[pair_P])

    def weighted_sums(self, y_PD: Tensor) -> Tensor:
        """Sum over the choices that a row has here -> float32 [R, D]."""
        return self.fan.collect(y_PD.float() * self.weights_P.float().unsqueeze(-1))


@dataclass(frozen=True)
class Sent:
    """What `dispatch` did, taken back by `combine`."""

    pairs: Pairs
    fan: Fan | None = None
    """From tokens to the rows sent; `AllToAll` alone."""
    send: tuple[int, ...] = ()
    """Rows for each rank."""
    receive: tuple[int, ...] = ()
    """Rows from each rank."""


class Dispatcher(Protocol):
    def dispatch(
        self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, experts: int
    ) -> tuple[Tensor, Sent]:
        """-> [P, D] in order of this rank's experts."""
        ...

    def combine(self, y_PD: Tensor, sent: Sent) -> Tensor:
        """-> float32 [T, D], weighted and summed over a token's choices."""
        ...


class Local:
    """No exchange: this rank has all experts."""

    def dispatch(
        self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, experts: int
    ) -> tuple[Tensor, Sent]:
        counts_E = torch.bincount(index_TK.reshape(-1), minlength=experts)
        pairs = Pairs.of(index_TK, weights_TK, counts_E)
        return pairs.fan.spread(x_TD), Sent(pairs)

    def combine(self, y_PD: Tensor, sent: Sent) -> Tensor:
        return sent.pairs.weighted_sums(y_PD)


@dataclass(frozen=True)
class AllToAll:
    """A token travels once to each rank that owns any of its experts, however many it has there.

    The expert ids and routing weights travel beside it; the rank that receives a token weights and
    sums its own experts' outputs and sends back one partial sum in the dtype of the token, which
    the home rank adds in float32. That is `G (1 - (1 - 1/G)^K)` rows a token under balanced
    routing, each way, which is what `strategies.cost.communication` prices.

    Counts go first, so every rank joins every collective with the sizes that its peers expect, also
    when it sends or receives nothing. One host synchronisation a call, for the split sizes.
    """

    group: dist.ProcessGroup

    def dispatch(
        self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, experts: int
    ) -> tuple[Tensor, Sent]:
        ranks = self.group.size()
        local = experts // ranks
        rank_TK = index_TK // local
        goes_TG = torch.zeros(x_TD.shape[0], ranks, dtype=torch.bool, device=x_TD.device)
        goes_TG.scatter_(1, rank_TK, True)
        pairs_GL = torch.bincount(index_TK.reshape(-1), minlength=experts).view(ranks, local)
        counts = torch.cat([pairs_GL, goes_TG.sum(0).unsqueeze(1)], dim=1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)

        pairs_L = received[:, :-1].sum(0)
        known = torch.cat([counts[:, -1], received[:, -1], pairs_L]).tolist()
        send, receive, pairs = known[:ranks], known[ranks : 2 * ranks], known[2 * ranks :]

        token_S, rank_S = _rows_by_rank(goes_TG, sum(send))
        fan = Fan(token_S, torch.argsort(token_S, stable=True), goes_TG.sum(1))
        here_SK = rank_TK[token_S] == rank_S.unsqueeze(1)
        ids_SK = torch.where(here_SK, index_TK[token_S] % local, local).to(torch.int32)
        weights_SK = torch.where(here_SK, fan.spread(weights_TK), 0)

        ids_RK = ids_SK.new_empty(sum(receive), ids_SK.shape[1])
        dist.all_to_all_single(ids_RK, ids_SK, receive, send, group=self.group)
        weights_RK = _exchange(weights_SK, receive, send, self.group)
        x_RD = _exchange(fan.spread(x_TD), receive, send, self.group)
        sent = Sent(Pairs.of(ids_RK, weights_RK, pairs_L, pairs), fan, tuple(send), tuple(receive))
        return sent.pairs.fan.spread(x_RD), sent

    def combine(self, y_PD: Tensor, sent: Sent) -> Tensor:
        assert sent.fan is not None
        y_RD = sent.pairs.weighted_sums(y_PD).to(y_PD.dtype)
        y_SD = _exchange(y_RD, list(sent.send), list(sent.receive), self.group)
        return sent.fan.collect(y_SD)


def _rows_by_rank(goes_TG: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Token and rank of each True, ordered by rank, then token; `nonzero` would ask the host."""
    tokens = goes_TG.shape[0]
    goes = goes_TG.T.reshape(-1)
    # What does not travel is written to one place beyond the end.
    place = torch.where(goes, goes.cumsum(0) - 1, rows)
    row_S = place.new_empty(rows + 1)
    row_S[place] = torch.arange(goes.shape[0], device=goes.device)
    row_S = row_S[:rows]
    return row_S % max(tokens, 1), row_S // max(tokens, 1)


def _exchange(x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    out = collectives.all_to_all_single_autograd(x.contiguous(), receive, send, group)
    return collectives.wait_tensor(out)


@dataclass(frozen=True)
class AllGather:
    """Every rank sees every token, keeps those of its experts, and sums come back reduce-scattered.

    Cheaper than all-to-all where most tokens go to most ranks; needs equal T on all ranks.
    """

    group: dist.ProcessGroup

    def dispatch(
        self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, experts: int
    ) -> tuple[Tensor, Sent]:
        local = experts // self.group.size()
        x_RD = _gather(x_TD, self.group)
        index_RK = _gather_ids(index_TK, self.group)
        weights_RK = _gather(weights_TK, self.group)
        ids_RK = index_RK - dist.get_rank(self.group) * local
        ids_RK = torch.where((ids_RK >= 0) & (ids_RK < local), ids_RK, local)
        counts_L = torch.bincount(ids_RK.reshape(-1), minlength=local + 1)[:local]
        pairs = Pairs.of(ids_RK, weights_RK, counts_L)
        return pairs.fan.spread(x_RD), Sent(pairs)

    def combine(self, y_PD: Tensor, sent: Sent) -> Tensor:
        sums_RD = sent.pairs.weighted_sums(y_PD)
        out = collectives.reduce_scatter_tensor_autograd(sums_RD, "sum", 0, self.group)
        return collectives.wait_tensor(out)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = collectives.all_gather_tensor_autograd(x.contiguous(), 0, group)
    return collectives.wait_tensor(out)


def _gather_ids(ids_TK: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = ids_TK.new_empty(group.size() * ids_TK.shape[0], ids_TK.shape[1])
    dist.all_gather_into_tensor(out, ids_TK.contiguous(), group=group)
    return out
