"""Tokens go to the ranks that own their experts, and the weighted sums of the experts come back.

A dispatcher turns the experts of each token into a `Route` once, from ids alone; tokens, weights
and outputs then follow it any number of times, so a recomputed layer sends exactly what the first
forward sent and asks nothing again.

Legend of shapes: T tokens of this rank, K choices (experts) a token, D expert width, E experts of
the model, L experts of this rank, G ranks of the `ep` group, S (token, rank) rows sent, R rows
received, P (row, choice) pairs that this rank computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from runtime.experts.fan import TORCH, Fan, Pairs, RowKernels, tally


class Hop(Protocol):
    """One exchange between ranks, there and back."""

    sums: ClassVar[torch.dtype | None]
    """Of the sums that go back: that of the tokens when None."""

    def there(self, x_TD: Tensor, kernels: RowKernels) -> Tensor:
        """-> [R, D]"""
        ...

    def back(self, sums_RD: Tensor, dtype: torch.dtype, kernels: RowKernels) -> Tensor:
        """Sums of this rank's experts -> sums of all ranks' [T, D], in `dtype`."""
        ...


@dataclass(frozen=True)
class Route:
    """Where every token of this rank goes."""

    pairs: Pairs
    hops: tuple[Hop, ...] = ()

    def dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, kernels: RowKernels = TORCH
    ) -> tuple[Tensor, Tensor]:
        """-> tokens [P, D] in order of this rank's experts, and their weights [P]."""
        for hop in self.hops:
            x_TD, weights_TK = hop.there(x_TD, kernels), hop.there(weights_TK, kernels)
        return self.pairs.fan.spread(x_TD, kernels), self.pairs.weights(weights_TK)

    def combine(self, y_PD: Tensor, weights_P: Tensor, kernels: RowKernels = TORCH) -> Tensor:
        """-> [T, D] in the dtype of y, weighted and summed over a token's choices in float32."""
        first = self.hops[-1].sums if self.hops else None
        sums = self.pairs.fan.collect(y_PD, weights_P, kernels, dtype=first)
        for hop in reversed(self.hops):
            sums = hop.back(sums, y_PD.dtype, kernels)
        return sums


@dataclass(frozen=True)
class Limit:
    """What bounds the traffic before any token is seen, so that no rank has to ask another."""

    tokens: int
    """Most tokens of a rank."""
    capacity: int
    """Most tokens of one rank for one expert."""

    def rows(self, experts: int) -> int:
        """Most tokens of a rank that go to any of so many experts."""
        return min(self.tokens, experts * self.capacity)

    def check(self, tokens: int) -> None:
        if tokens > self.tokens:
            raise ValueError(f"{tokens} tokens on a rank whose buffers are for {self.tokens}")


class Dispatcher(Protocol):
    def route(self, index_TK: Tensor, experts: int, kernels: RowKernels = TORCH) -> Route:
        """With a limit, an id of `experts` is no expert: that choice is not computed."""
        ...


@dataclass(frozen=True)
class Local:
    """No exchange: this rank has all experts."""

    limit: Limit | None = None

    def route(self, index_TK: Tensor, experts: int, kernels: RowKernels = TORCH) -> Route:
        size = index_TK.numel()
        if self.limit is None:
            return Route(Pairs.of(index_TK, experts, size, kernels))
        self.limit.check(index_TK.shape[0])
        size = min(size, experts * self.limit.capacity)
        return Route(Pairs.of(index_TK, experts, size, kernels, padded=True))


@dataclass(frozen=True)
class AllToAll:
    """A token travels once to each rank that owns any of its experts, however many it has there.

    The expert ids and routing weights travel beside it; the rank that receives a token weights and
    sums its own experts' outputs and sends back one partial sum in the dtype of the token, which
    the home rank adds in float32. That is `G (1 - (1 - 1/G)^K)` rows a token under balanced
    routing, each way, which is what `strategies.cost.communication` prices.

    Counts go first, so every rank joins every collective with the sizes that its peers expect, also
    when it sends or receives nothing. One host synchronisation a call, for those sizes; none with a
    `limit`, where every rank sends every other the same number of rows, some of them padding.
    """

    group: dist.ProcessGroup
    limit: Limit | None = None

    def route(self, index_TK: Tensor, experts: int, kernels: RowKernels = TORCH) -> Route:
        ranks = self.group.size()
        local = experts // ranks
        goes = _Going.of(index_TK, local, ranks)
        if self.limit is not None:
            self.limit.check(index_TK.shape[0])
            rows = [self.limit.rows(local)] * ranks
            hop, ids_RK = goes.exchange(self.group, rows, rows, padded=True)
            size = min(ids_RK.numel(), ranks * local * self.limit.capacity)
            return Route(Pairs.of(ids_RK, local, size, kernels, padded=True), (hop,))
        mine = torch.stack([goes.rows_G, goes.pairs_G], dim=1)
        theirs = _exchanged(mine, self.group)
        send, receive, pairs = _known(mine[:, 0], *theirs.T)
        hop, ids_RK = goes.exchange(self.group, send, receive)
        return Route(Pairs.of(ids_RK, local, sum(pairs), kernels), (hop,))


@dataclass(frozen=True)
class Hierarchical:
    """A token crosses once to each node that has any of its experts, and is handed on inside.

    First it goes to the rank of that node which has the sender's place in its own node (`rail`),
    then from there once to each rank of the node (`node`) that owns any of its experts. Partial
    sums take the same way back and are added where it branched, so a token's outputs cross once a
    node as well. Two small exchanges of counts, one host synchronisation (none with a `limit`).
    """

    rail: dist.ProcessGroup
    """The ranks with this one's place in their nodes, in order of nodes."""
    node: dist.ProcessGroup
    """The ranks of this node."""
    limit: Limit | None = None

    def route(self, index_TK: Tensor, experts: int, kernels: RowKernels = TORCH) -> Route:
        nodes, ranks = self.rail.size(), self.node.size()
        here = experts // nodes
        local = here // ranks
        out = _Going.of(index_TK, here, nodes)
        if self.limit is not None:
            return self._limited(out, index_TK.shape[0], local, kernels)
        final = _Going.of(index_TK, local, nodes * ranks)
        by_node = [final.rows_G.view(nodes, ranks), final.pairs_G.view(nodes, ranks)]
        mine = torch.cat([out.rows_G.unsqueeze(1), *by_node], dim=1)
        theirs = _exchanged(mine, self.rail)
        # Of the rows that arrive on the rail, those for each rank of this node, and their pairs.
        inside = theirs[:, 1:].sum(0).view(2, ranks).T.contiguous()
        arriving = _exchanged(inside, self.node)
        send, receive, hand, handed, pairs = _known(
            mine[:, 0], theirs[:, 0], inside[:, 0], *arriving.T
        )
        first, ids_NK = out.exchange(self.rail, send, receive)
        second, ids_RK = _Going.of(ids_NK, local, ranks).exchange(self.node, hand, handed)
        return Route(Pairs.of(ids_RK, local, sum(pairs), kernels), (first, second))

    def _limited(self, out: _Going, tokens: int, local: int, kernels: RowKernels) -> Route:
        assert self.limit is not None
        self.limit.check(tokens)
        nodes, ranks = self.rail.size(), self.node.size()
        rows = [self.limit.rows(local * ranks)] * nodes
        first, ids_NK = out.exchange(self.rail, rows, rows, padded=True)
        rows = [nodes * self.limit.rows(local)] * ranks
        inside = _Going.of(ids_NK, local, ranks)
        second, ids_RK = inside.exchange(self.node, rows, rows, padded=True)
        size = min(ids_RK.numel(), nodes * ranks * local * self.limit.capacity)
        return Route(Pairs.of(ids_RK, local, size, kernels, padded=True), (first, second))


@dataclass(frozen=True)
class AllGather:
    """Every rank sees every token, keeps those of its experts, and sums come back reduce-scattered.

    Cheaper than all-to-all where most tokens go to most ranks. Ranks with fewer tokens than the
    fullest send padding. One host synchronisation a call, none with a `limit`.
    """

    group: dist.ProcessGroup
    limit: Limit | None = None

    def route(self, index_TK: Tensor, experts: int, kernels: RowKernels = TORCH) -> Route:
        ranks, rank = self.group.size(), dist.get_rank(self.group)
        tokens, local = index_TK.shape[0], experts // self.group.size()
        if self.limit is not None:
            self.limit.check(tokens)
            rows, size = self.limit.tokens, ranks * local * self.limit.capacity
        else:
            mine = torch.cat([index_TK.new_full((1,), tokens), _by_rank(index_TK, local, ranks)])
            theirs = _gathered(mine.unsqueeze(0), self.group)
            everyone, pairs = _known(theirs[:, 0], theirs[:, 1 + rank])
            rows, size = max(1, *everyone), sum(pairs)  # a collective of nothing is no collective
        index_TK = F.pad(index_TK, (0, 0, 0, rows - tokens), value=experts)
        ids_RK = _gathered(index_TK, self.group) - rank * local
        ids_RK = torch.where((ids_RK >= 0) & (ids_RK < local), ids_RK, local)
        size = min(size, ids_RK.numel())
        pairs = Pairs.of(ids_RK, local, size, kernels, padded=self.limit is not None)
        return Route(pairs, (_Gather(self.group, tokens, rows),))


@dataclass(frozen=True)
class _Exchange:
    """Rows to other ranks and what they return; a token that went to several adds up here."""

    group: dist.ProcessGroup
    fan: Fan = field(repr=False)
    """From tokens to the rows sent."""
    send: list[int]
    """Rows for each rank."""
    receive: list[int]
    """Rows from each rank."""
    sums: ClassVar[torch.dtype | None] = None

    def there(self, x_TD: Tensor, kernels: RowKernels) -> Tensor:
        x_SD = self.fan.spread(x_TD, kernels)
        return exchange(x_SD, self.receive, self.send, self.group)

    def back(self, sums_RD: Tensor, dtype: torch.dtype, kernels: RowKernels) -> Tensor:
        sums_SD = exchange(sums_RD, self.send, self.receive, self.group)
        return self.fan.collect(sums_SD, kernels=kernels)


def exchange(x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows by rank, with gradients; the one place where an all-to-all moves tokens."""
    out = collectives.all_to_all_single_autograd(x.contiguous(), receive, send, group)
    return collectives.wait_tensor(out)


@dataclass(frozen=True)
class _Gather:
    group: dist.ProcessGroup
    tokens: int
    rows: int
    """Of every rank, padding included."""
    sums: ClassVar[torch.dtype | None] = torch.float32

    def there(self, x_TD: Tensor, kernels: RowKernels) -> Tensor:
        x_TD = F.pad(x_TD, (0, 0, 0, self.rows - self.tokens)).contiguous()
        return collectives.wait_tensor(collectives.all_gather_tensor_autograd(x_TD, 0, self.group))

    def back(self, sums_RD: Tensor, dtype: torch.dtype, kernels: RowKernels) -> Tensor:
        out = collectives.reduce_scatter_tensor_autograd(sums_RD, "sum", 0, self.group)
        return collectives.wait_tensor(out)[: self.tokens].to(dtype)


@dataclass(frozen=True)
class _Going:
    """Which tokens go to which of G ranks, each owning `per` experts in order of ids."""

    ids_TK: Tensor
    per: int
    rank_TK: Tensor
    goes_TG: Tensor

    @classmethod
    def of(cls, ids_TK: Tensor, per: int, ranks: int) -> _Going:
        rank_TK = (ids_TK // per).clamp(max=ranks).long()
        goes_TG = torch.zeros(
            ids_TK.shape[0], ranks + 1, dtype=torch.bool, device=ids_TK.device
        ).scatter_(1, rank_TK, True)
        return cls(ids_TK, per, rank_TK, goes_TG[:, :ranks])

    @property
    def rows_G(self) -> Tensor:
        return self.goes_TG.sum(0)

    @property
    def pairs_G(self) -> Tensor:
        return _by_rank(self.ids_TK, self.per, self.goes_TG.shape[1])

    def exchange(
        self,
        group: dist.ProcessGroup,
        send: list[int],
        receive: list[int],
        *,
        padded: bool = False,
    ) -> tuple[_Exchange, Tensor]:
        """The hop, and the ids that arrive, counted from the receiver's first expert; `per` for a
        choice that is not the receiver's. With `padded` the sizes are bounds, alike for all."""
        tokens, ranks = self.goes_TG.shape
        rows = sum(send)
        first_G = (
            torch.arange(ranks, device=self.goes_TG.device) * send[0]
            if padded
            else self.rows_G.cumsum(0) - self.rows_G
        )
        # Ordered by rank, then token; what does not travel is written to one place beyond the end.
        # Sums along the last axis: those along the first are slow on GPUs.
        before_TG = self.goes_TG.T.contiguous().cumsum(1).T
        place_TG = torch.where(self.goes_TG, first_G + before_TG - 1, rows)
        cell_TG = torch.arange(tokens * ranks, device=place_TG.device).view(tokens, ranks)
        cell_S = place_TG.new_full((rows + 1,), tokens * ranks)
        cell_S[place_TG] = cell_TG
        cell_S = cell_S[:rows]
        token_S, rank_S = cell_S // ranks, cell_S % ranks
        fan = Fan.of(token_S, self.goes_TG.sum(1), padded=padded)
        last = int(padded)  # the row that stands for nothing
        rank_SK = F.pad(self.rank_TK, (0, 0, 0, last), value=ranks)[token_S]
        ids_SK = F.pad(self.ids_TK, (0, 0, 0, last))[token_S]
        ids_SK = torch.where(rank_SK == rank_S.unsqueeze(1), ids_SK % self.per, self.per)
        ids_RK = ids_SK.new_empty(sum(receive), ids_SK.shape[1], dtype=torch.int32)
        dist.all_to_all_single(ids_RK, ids_SK.to(torch.int32), receive, send, group=group)
        return _Exchange(group, fan, send, receive), ids_RK


def _by_rank(ids_TK: Tensor, per: int, ranks: int) -> Tensor:
    """Choices that lie on each rank [G]."""
    return tally(ids_TK // per, ranks)


def _known(*parts: Tensor) -> list[list[int]]:
    """On the host, with one wait for all."""
    joined = torch.cat(parts).cpu().split([p.shape[0] for p in parts])
    return [part.tolist() for part in joined]


def _exchanged(x_GF: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = torch.empty_like(x_GF)
    dist.all_to_all_single(out, x_GF.contiguous(), group=group)
    return out


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out
