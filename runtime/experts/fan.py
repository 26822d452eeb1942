"""Items made of sources: tokens copied to where they are needed, and the sums of what comes back.

Legend of shapes: N sources, I items, D width, R rows that a rank holds, K choices a row, L experts
of this rank, P (row, choice) pairs that this rank computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

COLUMNS = 512
"""Float32 copies are made of so many columns at a time, never of all items at full width."""


def tally(ids: Tensor, kinds: int) -> Tensor:
    """How often each of `0 .. kinds - 1` occurs; other ids are not counted. (`bincount` asks the
    host for the largest.)"""
    ids = ids.reshape(-1).long().clamp(max=kinds)
    return ids.new_zeros(kinds + 1).scatter_add_(0, ids, torch.ones_like(ids))[:kinds]


@dataclass(frozen=True)
class RowKernels:
    """What puts pairs in order, copies rows to items and sums items to rows, and finds room under a
    capacity: generated kernels, torch where there is none."""

    spread: Callable[..., Tensor] | None = None
    combine: Callable[..., Tensor] | None = None
    order: Callable[..., tuple[Tensor, ...]] | None = None
    reroute: Callable[..., tuple[Tensor, Tensor]] | None = None

    @classmethod
    def of(cls, experts: Any) -> RowKernels:
        """Those that `codegen.bind` gave an experts module."""
        names = "spread", "combine", "order", "reroute"
        return cls(**{name: getattr(experts, f"moe_{name}", None) for name in names})


TORCH = RowKernels()


@dataclass(frozen=True)
class Fan:
    """Items made of sources, each source any number of times.

    With `padded`, source N stands for nothing: such items are zero and lead nowhere.
    """

    source: Tensor
    """Source of each item."""
    by_source: Tensor
    """The items in order of their sources."""
    offsets: Tensor
    """Where the items of each source begin in `by_source`, and where those of the last end; with
    `padded`, those of nothing follow."""
    padded: bool = False

    @classmethod
    def of(cls, source: Tensor, counts: Tensor, *, padded: bool = False) -> Fan:
        """From the items of each source."""
        by_source = torch.argsort(source, stable=True)
        return cls(source, by_source, F.pad(counts.cumsum(0), (1, 0)), padded)

    @functools.cached_property
    def counts(self) -> Tensor:
        """Items of each source; with `padded`, those of nothing come last."""
        ends = self.offsets
        if self.padded:
            ends = F.pad(ends, (0, 1), value=self.by_source.shape[0])
        return ends.diff()

    def spread(self, x_ND: Tensor, kernels: RowKernels = TORCH) -> Tensor:
        """-> [I, D]; gradients are added in float32."""
        if kernels.spread is not None:
            return kernels.spread(x_ND, self.source, self.by_source, self.offsets)
        return _Spread.apply(x_ND, self)  # type: ignore

    def collect(
        self,
        y_ID: Tensor,
        weights_I: Tensor | None = None,
        kernels: RowKernels = TORCH,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """-> sums [N, D] of the items, times their weights, in `dtype` (that of the items when
        None); added in float32."""
        if kernels.combine is not None:
            ids = self.source, self.by_source, self.offsets
            return kernels.combine(y_ID, weights_I, *ids, dtype=dtype)
        return _Collect.apply(y_ID, weights_I, self, dtype or y_ID.dtype)  # type: ignore

    def take(self, x_ND: Tensor) -> Tensor:
        return (F.pad(x_ND, (0, 0, 0, 1)) if self.padded else x_ND)[self.source]

    def sums(self, y_ID: Tensor, weights_I: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Added in float32 in the order of the items, so that the same call gives the same bits."""
        out = y_ID.new_zeros(self.counts.shape[0], y_ID.shape[1], dtype=dtype)
        if y_ID.numel():
            order = self.by_source
            scale = None if weights_I is None else weights_I.float()[order].unsqueeze(1)
            for part, total in zip(y_ID.split(COLUMNS, 1), out.split(COLUMNS, 1), strict=True):
                rows = part[order].float()
                rows = rows if scale is None else rows.mul_(scale)
                total.copy_(
                    torch.segment_reduce(rows, "sum", lengths=self.counts, unsafe=True, initial=0)
                )
        return out[:-1] if self.padded else out


class _Spread(torch.autograd.Function):
    """Indexing itself adds gradients in the dtype of x, and with more than one thread in no fixed
    order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fan: Fan) -> Tensor:
        ctx.save_for_backward(fan.source, fan.by_source, fan.offsets)
        ctx.padded, ctx.dtype = fan.padded, x.dtype
        return fan.take(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        source, by_source, offsets = ctx.saved_tensors
        fan = Fan(source, by_source, offsets, ctx.padded)
        return fan.sums(grad, None, ctx.dtype), None


class _Collect(torch.autograd.Function):
    """The transpose of `_Spread`, with a weight an item."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weights: Tensor | None, fan: Fan, dtype: torch.dtype
    ) -> Tensor:
        weighted = () if weights is None else (y, weights)
        ctx.save_for_backward(fan.source, fan.by_source, fan.offsets, *weighted)
        ctx.padded, ctx.dtype = fan.padded, y.dtype
        return fan.sums(y, weights, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        source, by_source, offsets, *weighted = ctx.saved_tensors
        fan = Fan(source, by_source, offsets, ctx.padded)
        grad_y = fan.take(grad.to(ctx.dtype))
        if not weighted:
            return grad_y, None, None, None
        y, weights = weighted
        grad_weights = None
        if ctx.needs_input_grad[1]:
            grad_weights = grad.new_zeros(weights.shape, dtype=torch.float32)
            for g, part in zip(grad.split(COLUMNS, 1), y.split(COLUMNS, 1), strict=True):
                grad_weights += (fan.take(g).float() * part).sum(1)
            grad_weights = grad_weights.to(weights.dtype)
        return grad_y.mul_(weights.unsqueeze(1)), grad_weights, None, None


class Held(Protocol):
    """Weights of experts that lie elsewhere than in the module's own parameters."""

    experts: Any
    """The module."""

    def weight(self, key: str, own: Tensor) -> Tensor:
        """The rows of its parameter `key` for those experts; `own` are the module's own rows."""
        ...


@dataclass(frozen=True)
class Pairs:
    """The (row, choice) pairs of this rank in order of its experts."""

    offsets_L: Tensor
    """int32, cumulative counts; the last one is P."""
    choice_P: Tensor
    """Place of each pair's weight among the R * K; beyond them for padding."""
    fan: Fan
    """From rows to pairs."""
    copies: Held | None = None
    """Where the weights of these pairs lie, instead of the module's own parameters."""

    @property
    def size(self) -> int:
        """P"""
        return self.choice_P.shape[0]

    @functools.cached_property
    def counts(self) -> list[int]:
        """Pairs of each expert, on the host, which waits for them."""
        return self.offsets_L.diff(prepend=self.offsets_L.new_zeros(1)).tolist()

    @functools.cached_property
    def expert_P(self) -> Tensor:
        """This rank's number of each pair's expert."""
        pairs = torch.arange(self.size, device=self.offsets_L.device, dtype=torch.int32)
        return torch.searchsorted(self.offsets_L, pairs, right=True)

    @classmethod
    def of(
        cls,
        ids_RK: Tensor,
        experts: int,
        size: int,
        kernels: RowKernels = TORCH,
        *,
        padded: bool = False,
    ) -> Pairs:
        """`ids_RK` are local expert ids, `experts` or above for a choice that is not computed here;
        `size` is the number of the others. With `padded` it is a bound on them, and zero rows for
        the last expert make up the rest: nothing needs to know how many there are."""
        if kernels.order is not None:
            found = kernels.order(ids_RK, experts, size=size, padded=padded)
            choice_P, source, by_source, offsets, offsets_L = found
            return cls(offsets_L, choice_P, Fan(source, by_source, offsets, padded))
        rows, choices = ids_RK.shape
        ids = ids_RK.reshape(-1)
        # What is not computed here sorts to the end.
        choice_P = torch.argsort(ids, stable=True)[:size]
        counts = (ids_RK < experts).sum(1)
        offsets_L = tally(ids, experts).cumsum(0)
        if padded:
            offsets_L[-1:] = size
            choice_P = torch.where(ids[choice_P] < experts, choice_P, rows * choices)
        fan = Fan.of(choice_P // choices, counts, padded=padded)
        return cls(offsets_L.to(torch.int32), choice_P, fan)

    def split(self, own: int, copies: Held) -> tuple[Pairs, Pairs]:
        """Those of the first `own` experts, and those of the copies behind them; not to be spread
        or collected, only computed. The host waits for where they part."""
        first = sum(self.counts[:own])
        choices = self.choice_P.split([first, self.size - first])
        rest_L = self.offsets_L[own:] - first
        return (
            Pairs(self.offsets_L[:own], choices[0], self.fan),
            Pairs(rest_L, choices[1], self.fan, copies),
        )

    def weights(self, weights_RK: Tensor) -> Tensor:
        """-> [P]"""
        flat = weights_RK.reshape(-1)
        flat = F.pad(flat, (0, 1)) if self.fan.padded else flat
        return flat.index_select(0, self.choice_P)
