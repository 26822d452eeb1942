"""Copies of loaded experts on ranks with little to do, between steps, without changing the result.

A copy is the frozen weights of another rank's expert, outside of sharding, optimizer and
checkpoints. Its adapter is the owner's: each forward sends the factors to where copies are, and
backward brings their gradients home, so that an update sees what it would without copies.

Legend of shapes: T tokens, K choices, E experts, J lanes, L experts of this rank, C slots of this
rank, S rows sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from analyzers.experts import experts_of
from runtime.experts.dispatch import exchange
from runtime.experts.placement import (
    LANES,
    Forecast,
    Placement,
    next_placement,
    owners_only,
)
from runtime.shards import local_rows

if TYPE_CHECKING:
    from strategies.schema import Plan

INTERVAL = 5
"""Steps between two looks at the loads: copying experts costs time."""


class Copies:
    """The slots of one experts module on this rank."""

    def __init__(self, experts: Any, ep: dist.ProcessGroup, shards: dist.ProcessGroup) -> None:
        """`ep`: the ranks that share the experts; `shards`: all that hold a part of them."""
        self.experts, self.ep, self.shards = experts, ep, shards
        self.placement: Placement | None = None
        """None until there is something to copy: then every token goes to the owner."""
        self.frozen: dict[str, Tensor] = {}
        self._held: dict[str, list[tuple[int, int]]] = {}
        """Rows of each frozen parameter that each rank of `shards` has."""

    def adopt(self, placement: Placement) -> None:
        """Fetches what the slots hold now and did not hold before. All ranks of `shards` call it
        together, between steps, while parameters are sharded."""
        rank = dist.get_rank(self.ep)
        slots, own = placement.slots, self.experts.num_experts // placement.ranks
        device = next(self.experts.parameters()).device
        before = self.placement.slots if self.placement else ((),) * placement.ranks
        new = [sorted(set(b) - set(a)) for a, b in zip(before, slots, strict=True)]
        # Ranks of `ep` are neighbours in `shards`, which may have several such groups.
        wanted = [new[r % placement.ranks] for r in range(self.shards.size())]
        there = [*before[rank], *new[rank]]
        rows_C = torch.tensor([there.index(e) for e in slots[rank]], device=device)
        for key, parameter in self.experts.named_parameters(recurse=False):
            if not parameter.requires_grad:
                got = self._fetch(key, parameter, wanted)
                rows = torch.cat([self.frozen[key], got]) if key in self.frozen else got
                self.frozen[key] = rows.index_select(0, rows_C)
        self.placement, self.own = placement, own
        self.place_EJ = torch.from_numpy(placement.place_EJ).to(device)
        # Owners send factors in order of the slots of each receiver.
        first = rank * own
        sent = [[e - first for e in theirs if first <= e < first + own] for theirs in slots]
        self.send, self.rows_S = _listed(sent, device)
        owners = [expert // own for expert in slots[rank]]
        self.receive, self.order_C = _arrivals(owners, placement.ranks, device)

    def places(self, index_TK: Tensor) -> Tensor:
        """Expert ids -> places among all ranks' experts and slots, each token in a lane."""
        lane_T = torch.arange(index_TK.shape[0], device=index_TK.device) % LANES
        return self.place_EJ[index_TK, lane_T.unsqueeze(1)]

    def weight(self, key: str, own: Tensor) -> Tensor:
        """The rows of a parameter for this rank's slots; `own` are those of its own experts."""
        if key in self.frozen:
            return self.frozen[key]
        rows = own.index_select(0, self.rows_S).flatten(1)
        got = exchange(rows, self.receive, self.send, self.ep)
        return got.index_select(0, self.order_C).view(-1, *own.shape[1:])

    def _fetch(self, key: str, parameter: Tensor, wanted: list[list[int]]) -> Tensor:
        """Rows of a sharded parameter: those that `wanted` has for this rank of `shards`."""
        shard, low, high = local_rows(parameter)
        ranks = self.shards.size()
        if key not in self._held:
            held: list[Any] = [None] * ranks
            dist.all_gather_object(held, (low, high), group=self.shards)
            self._held[key] = held
        held = self._held[key]
        mine = wanted[dist.get_rank(self.shards)]
        holders = [next(r for r, (a, b) in enumerate(held) if a <= row < b) for row in mine]
        sent = [[row - low for row in theirs if low <= row < high] for theirs in wanted]
        send, rows_S = _listed(sent, shard.device)
        receive, order = _arrivals(holders, ranks, shard.device)
        got = shard.new_empty(len(mine), *shard.shape[1:])
        rows = shard.index_select(0, rows_S)
        dist.all_to_all_single(got, rows, receive, send, group=self.shards)
        return got.index_select(0, order)


def _listed(sent: list[list[int]], device: torch.device) -> tuple[list[int], Tensor]:
    """How many rows go to each rank, and all of them."""
    rows = [row for part in sent for row in part]
    return [len(part) for part in sent], torch.tensor(rows, dtype=torch.long, device=device)


def _arrivals(sources: list[int], ranks: int, device: torch.device) -> tuple[list[int], Tensor]:
    """How many rows come from each rank, and which of the arrived ones each slot takes."""
    arrived = sorted(range(len(sources)), key=lambda slot: sources[slot])
    order = torch.tensor(arrived, dtype=torch.long, device=device).argsort()
    return [sources.count(rank) for rank in range(ranks)], order


class Balancer:
    """Watches the loads of every layer and places copies for the steps to come.

    Every rank sees the same loads and so finds the same placement.
    """

    def __init__(self, model: nn.Module, plan: Plan, interval: int = INTERVAL) -> None:
        self.layers = [m for m in experts_of(model).values() if hasattr(m, "copies")]
        self.interval, self.steps = interval, 0
        self.ranks, self.slots = plan.parallelism.ep, plan.expert_copies
        self.forecasts = [Forecast(m.num_experts) for m in self.layers]

    def after_step(self, tokens_per_expert: list[list[int]]) -> None:
        """All ranks call it together, with the loads of a step by layer."""
        if not self.layers:
            return
        for forecast, counts in zip(self.forecasts, tokens_per_expert, strict=True):
            forecast.update(counts)
        self.steps += 1
        if self.steps % self.interval:
            return
        for experts, forecast in zip(self.layers, self.forecasts, strict=True):
            if forecast.share_E is None:
                continue
            start = owners_only(forecast.experts, self.ranks, self.slots)
            now = experts.copies.placement or start
            placement = next_placement(now, forecast.share_E)
            if placement is not now:
                experts.copies.adopt(placement)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what `restore` needs so that a resumed run places copies as this one
        does, and adds up its sums in the same order."""
        placements = [m.copies.placement for m in self.layers]
        return {
            "steps": self.steps,
            "shares": [None if f.share_E is None else f.share_E.tolist() for f in self.forecasts],
            "slots": [None if p is None else p.slots for p in placements],
            "places": [None if p is None else p.place_EJ.tolist() for p in placements],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """All ranks call it together, with weights loaded. What was placed for other ranks or slots
        is placed anew at the next look."""
        self.steps = state["steps"]
        for forecast, share in zip(self.forecasts, state["shares"], strict=True):
            forecast.share_E = None if share is None else np.asarray(share)
        for m, slots, places in zip(self.layers, state["slots"], state["places"], strict=True):
            if slots is not None and (len(slots), len(slots[0])) == (self.ranks, self.slots):
                m.copies.adopt(Placement(self.ranks, slots, np.asarray(places)))
