"""The largest part of an uneven tree that is even: every domain of a tier with as many children.

The planner's tiers are even. A tree with a node missing, or racks of unequal size, is planned as
its largest even part; what remains stays idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Uniform:
    sizes: tuple[int, ...]
    """Devices of a node, nodes of a domain of the next tier, and so on to the root."""
    nodes: tuple[int, ...]
    """Indices of the nodes in use."""


def largest_uniform(devices: Sequence[int], parents: Sequence[Sequence[int]]) -> Uniform | None:
    """The even part with the most devices; of equal ones that with larger inner domains.

    `devices[i]` are those of node i, `parents[t][j]` is the domain of tier t + 1 that holds domain
    j of tier t (tier 0 are the nodes). The last tier has one domain. Exact: every combination of
    sizes that can occur is tried, and cut off where it cannot beat the best one. None where no
    device is left.
    """
    levels = [np.asarray(p, dtype=np.int64) for p in parents]
    best_total, best_sizes = 0, ()

    def descend(counts: np.ndarray, level: int, product: int, sizes: tuple[int, ...]) -> None:
        nonlocal best_total, best_sizes
        for size in sorted({int(c) for c in counts if c > 0}, reverse=True):
            alive = counts >= size
            if product * size * int(alive.sum()) <= best_total:
                continue
            if level == len(levels):
                best_total, best_sizes = product * size, (*sizes, size)
                continue
            above = int(levels[level].max()) + 1
            held = np.bincount(levels[level][alive], minlength=above)
            descend(held, level + 1, product * size, (*sizes, size))

    descend(np.asarray(devices, dtype=np.int64), 0, 1, ())
    if not best_total:
        return None
    return Uniform(best_sizes, _chosen(np.asarray(devices), levels, best_sizes))


def _chosen(
    devices: np.ndarray, levels: list[np.ndarray], sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """The nodes of the first domains that are large enough, top tier first."""
    alive, counts = [], devices
    for i, size in enumerate(sizes):
        alive.append(counts >= size)
        if i < len(levels):
            counts = np.bincount(levels[i][alive[i]], minlength=int(levels[i].max()) + 1)
    chosen = [0]
    for i in range(len(levels) - 1, -1, -1):
        room = dict.fromkeys(chosen, sizes[i + 1])
        chosen = []
        for child, domain in enumerate(levels[i].tolist()):
            if alive[i][child] and room.get(domain):
                room[domain] -= 1
                chosen.append(child)
    return tuple(chosen)
