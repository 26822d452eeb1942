"""The fastest plan of a space that fits, by branch and bound; proven, not guessed.

Stems (layout, batch, schedule, recomputation) are taken in the order of a lower bound of their
seconds a token. Those that cannot fit by a lower bound of their memory are dropped; the leaves of
the others are priced until the next bound is above the best plan found.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from strategies.candidates import (
    DISPATCHERS,
    RECOMPUTATION,
    Candidates,
    Column,
)
from strategies.space import PACKED, Space

MAX_OOM_PROBABILITY = 0.05
"""A plan that is likelier to run out of memory is not offered."""
QUANTILE = 1.6448536269514722
"""Standard deviations above the mean that a normal value exceeds with MAX_OOM_PROBABILITY."""
LAYOUTS = 1 << 12
"""Layouts whose stems are bounded at once."""
LEAVES = 1 << 15
"""Plans priced at once: few enough that their columns stay in the cache."""
ROUNDING = 1 + 1e-9
"""A bound is compared with this margin, so that rounding never prunes the best plan."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Of one plan a row."""

    seconds: Column
    """One optimizer step."""
    peak: Column
    """Bytes on the fullest device."""
    deviation: Column
    """Standard deviation of the real peak around the predicted one, bytes."""


class Pricing(Protocol):
    """What the solver knows of a cost model."""

    capacity: float
    """Bytes of a device."""

    def evaluate(self, c: Candidates) -> Prices: ...

    def time_bound(self, c: Candidates, *, even: bool) -> Column:
        """Seconds of a step that no leaf of these stems can beat; with `even`, however evenly it
        loads the experts."""
        ...

    def memory_bound(self, c: Candidates, *, even: bool) -> Column:
        """Bytes that every leaf of these stems needs at least."""
        ...


@dataclass(frozen=True, kw_only=True)
class Points:
    """Priced plans, one a row."""

    plans: Candidates
    seconds: Column
    """One optimizer step."""
    per_token: Column
    """Seconds a token of the whole cluster."""
    peak: Column
    deviation: Column
    simplicity: Column
    """Mechanisms switched on; fewer is simpler."""
    fits: Column

    def __len__(self) -> int:
        return len(self.plans)

    def take(self, rows: Any) -> Points:
        taken = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "plans"}
        return Points(plans=self.plans.take(rows), **taken)

    @property
    def best(self) -> Points:
        return self.sorted().take(slice(0, 1))

    def sorted(self) -> Points:
        """Fastest first; equals: simpler, leaner, then a fixed order of the settings."""
        c = self.plans
        settings = [getattr(c, f.name) for f in fields(c)]
        keys = [self.per_token, self.simplicity, self.peak, *settings]
        return self.take(np.lexsort(keys[::-1]))


@dataclass(frozen=True, kw_only=True)
class Solution:
    best: Points | None
    """One row; None where nothing fits or nothing is as fast as the plan to beat."""
    bound: float
    """Seconds a token that no plan of the space can beat, by bounds alone."""
    plans: int
    """Of the space."""
    priced: int
    too_large: int
    """Left out because a lower bound of their memory is above what the device has."""
    too_slow: int
    """Left out because a lower bound of their time is above the best plan."""


def price(pricing: Pricing, plans: Candidates) -> Points:
    costs = pricing.evaluate(plans)
    room = pricing.capacity - costs.peak
    return Points(
        plans=plans,
        seconds=costs.seconds,
        per_token=costs.seconds / step_tokens(plans),
        peak=costs.peak,
        deviation=costs.deviation,
        simplicity=_simplicity(plans),
        fits=(room >= 0) & (room >= QUANTILE * costs.deviation),
    )


def price_all(space: Space, pricing: Pricing) -> Points:
    """Every plan of a space that is small enough, whether it fits or not."""
    rows, picks = space.branches(slice(0, len(space.layouts)))
    if not len(rows):
        return _no_points(space)
    return price(pricing, space.leaves(space.stems(rows, picks)))


def solve(space: Space, pricing: Pricing, *, to_beat: float = np.inf) -> Solution:
    """The fastest plan a token that fits; `to_beat` is one known already, seconds a token."""
    counts = space.leaf_counts()
    stems = _bounded(space, pricing, counts, to_beat)
    rows, picks, bound = stems.rows, stems.picks, stems.bound
    lowest = float(min(bound[0], to_beat)) if len(bound) else float(to_beat)
    best: Points | None = None
    ends = np.cumsum(counts[rows])
    at = priced = 0
    while at < len(bound) and bound[at] <= to_beat * ROUNDING:
        # The first step is short: it finds a plan whose time cuts the later ones.
        size = LEAVES if priced else LEAVES // 8
        end = max(int(np.searchsorted(ends, priced + size, side="right")), at + 1)
        points = price(pricing, space.leaves(space.stems(rows[at:end], picks[at:end])))
        priced, at = priced + len(points), end
        found = points.take(points.fits & (points.per_token <= to_beat * ROUNDING))
        if len(found):
            best = (_joined(best, found) if best else found).best
            to_beat = min(to_beat, float(best.per_token[0]))
    return Solution(
        best=best,
        bound=lowest,
        plans=stems.plans,
        priced=priced,
        too_large=stems.too_large,
        too_slow=stems.plans - stems.too_large - priced,
    )


@dataclass(frozen=True, kw_only=True)
class _Stems:
    """Those that may hold the best plan, lowest bound first."""

    bound: Column
    """Seconds a token."""
    rows: Column
    """Of the space's layouts."""
    picks: Column
    """Of the space's options of stems."""
    plans: int
    """Leaves of all stems."""
    too_large: int
    """Leaves of the stems that cannot fit."""


def _bounded(space: Space, pricing: Pricing, counts: Column, to_beat: float) -> _Stems:
    """Bounds all stems, some layouts at a time."""
    plans = too_large = 0
    kept: list[tuple[Column, Column, Column]] = [(np.empty(0), np.empty(0, int), np.empty(0, int))]
    for start in range(0, len(space.layouts), LAYOUTS):
        rows, picks = space.branches(slice(start, start + LAYOUTS))
        grows = counts[rows] > 0
        rows, picks = rows[grows], picks[grows]
        if not len(rows):
            continue
        plans += int(counts[rows].sum())
        stems = space.stems(rows, picks)
        bound = pricing.time_bound(stems, even=space.evens) / step_tokens(stems)
        quick = bound <= to_beat * ROUNDING
        if not quick.any():
            continue
        rows, picks, bound = rows[quick], picks[quick], bound[quick]
        least = pricing.memory_bound(stems.take(quick), even=space.evens)
        fits = least <= pricing.capacity
        too_large += int(counts[rows[~fits]].sum())
        kept.append((bound[fits], rows[fits], picks[fits]))
    bound, rows, picks = (np.concatenate(columns) for columns in zip(*kept, strict=True))
    order = np.argsort(bound, kind="stable")
    return _Stems(
        bound=bound[order], rows=rows[order], picks=picks[order], plans=plans, too_large=too_large
    )


def _no_points(space: Space) -> Points:
    none = np.empty(0)
    names = [f.name for f in fields(Points) if f.name not in ("plans", "fits")]
    return Points(
        plans=space.layouts.take(slice(0, 0)), fits=none.astype(bool), **dict.fromkeys(names, none)
    )


def _joined(a: Points, b: Points) -> Points:
    def columns(x: Any, y: Any) -> dict[str, Column]:
        names = [f.name for f in fields(x) if f.name != "plans"]
        return {n: np.concatenate([getattr(x, n), getattr(y, n)]) for n in names}

    return Points(plans=Candidates(**columns(a.plans, b.plans)), **columns(a, b))


def step_tokens(c: Candidates) -> Column:
    """Tokens of one optimizer step over all devices."""
    sequences = c.micro_batch_size * c.gradient_accumulation * c.data_ranks
    return sequences * c.sequence_length


def _simplicity(c: Candidates) -> Column:
    switched_on = (
        c.pp > 1,
        c.virtual_stages > 1,
        c.dp_replicate > 1,
        c.tp > 1,
        c.cp > 1,
        c.ep > 1,
        (c.ep > 1) & (c.efsdp > 1),
        c.gradient_accumulation > 1,
        c.recomputation != RECOMPUTATION.index("none"),
        ~c.reshard_after_forward,
        c.dispatcher == DISPATCHERS.index("hierarchical"),
        c.expert_format >= PACKED,
        np.isfinite(c.capacity_factor),
        c.expert_copies > 0,
        c.offload,
        c.shards_inside,
        c.replicas_outside,
    )
    return np.sum(switched_on, axis=0)
