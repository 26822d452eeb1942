"""Where the tokens of each expert should be computed next, from where they went until now.

Every expert stays with its owner; a rank has besides a few slots for copies of others' experts. An
expert's tokens are dealt to `LANES` lanes, and each lane to the owner or to a copy: all lanes on a
copy move the expert, some of them replicate it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LANES = 16
"""A share of an expert's tokens is a number of lanes."""
KEEP = 1.05
"""A placement that loads the fullest rank at most so many times as a new one would is kept: copies
of experts are large."""


@dataclass
class Forecast:
    """Moving distribution of a layer's tokens over its experts: what the next steps are taken to
    bring, in shares."""

    experts: int
    memory: float = 0.5
    """Weight of what was known before against the newest step's loads."""
    share_E: np.ndarray | None = None

    def update(self, counts: Sequence[int]) -> None:
        total = sum(counts)
        if not total:
            return
        newest = np.asarray(counts, dtype=float) / total
        kept = newest if self.share_E is None else self.share_E
        self.share_E = self.memory * kept + (1 - self.memory) * newest


@dataclass(frozen=True)
class Placement:
    """Which experts lie in the slots of each rank, and where each lane of an expert is computed."""

    ranks: int
    slots: tuple[tuple[int, ...], ...]
    """Experts by rank and slot; a slot that nothing needs holds an expert of its own rank."""
    place_EJ: np.ndarray
    """Rank-major place of each lane: `rank * (experts of a rank + slots) + local id`; own experts
    come before the slots."""

    @property
    def per_rank(self) -> int:
        """Own experts and slots of a rank."""
        return len(self.place_EJ) // self.ranks + len(self.slots[0])

    @property
    def places(self) -> int:
        return self.ranks * self.per_rank

    def loads(self, load_E: np.ndarray) -> np.ndarray:
        """Load of each rank, when an expert's tokens spread evenly over its lanes."""
        ranks = (self.place_EJ // self.per_rank).reshape(-1)
        share = np.repeat(np.asarray(load_E, dtype=float) / LANES, LANES)
        return np.bincount(ranks, weights=share, minlength=self.ranks)


def owners_only(experts: int, ranks: int, slots: int) -> Placement:
    own = experts // ranks
    expert = np.arange(experts)
    place_E = expert // own * (own + slots) + expert % own
    spare = tuple((rank * own,) * slots for rank in range(ranks))
    return Placement(ranks, spare, np.repeat(place_E[:, None], LANES, axis=1))


def place(load_E: np.ndarray, ranks: int, slots: int) -> Placement:
    """Evens out the ranks: again and again the fullest rank hands lanes of its largest expert to
    the emptiest rank with a slot left, as many as bring one of the two to the mean.

    Deterministic, so that every rank finds the same.
    """
    load_E = np.asarray(load_E, dtype=float)
    start = owners_only(len(load_E), ranks, slots)
    own = len(load_E) // ranks
    place_EJ, rank_EJ = start.place_EJ.copy(), start.place_EJ // (own + slots)
    held: list[list[int]] = [[] for _ in range(ranks)]
    load_G, mean = start.loads(load_E), float(load_E.sum()) / ranks
    lane_E = load_E / LANES
    while slots:
        full = int(load_G.argmax())
        free = [g for g in range(ranks) if len(held[g]) < slots and load_G[g] < mean]
        there_E = (rank_EJ == full).sum(1)
        expert = int((there_E * lane_E).argmax())
        free = [g for g in free if g != expert // own and expert not in held[g]]
        if not free or load_G[full] <= mean:
            break
        empty = min(free, key=lambda g: load_G[g])
        wanted = min(load_G[full] - mean, mean - load_G[empty])
        lanes = min(round(wanted / lane_E[expert]), int(there_E[expert]))
        if lanes == 0:
            break
        moved = np.flatnonzero(rank_EJ[expert] == full)[:lanes]
        place_EJ[expert, moved] = empty * (own + slots) + own + len(held[empty])
        rank_EJ[expert, moved] = empty
        held[empty].append(expert)
        load_G[full] -= lanes * lane_E[expert]
        load_G[empty] += lanes * lane_E[expert]
    filled = tuple(
        tuple(mine + [rank * own] * (slots - len(mine))) for rank, mine in enumerate(held)
    )
    return Placement(ranks, filled, place_EJ)


def next_placement(now: Placement, load_E: np.ndarray) -> Placement:
    """`now`, or a new one where that is worth copying experts for."""
    new = place(load_E, now.ranks, len(now.slots[0]))
    worth = now.loads(load_E).max() > KEEP * new.loads(load_E).max()
    return new if worth else now
