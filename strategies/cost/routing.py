"""How tokens spread over experts, and what that means for the fullest device.

Every figure is relative to an even spread, so that 1.0 is balanced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Routing:
    """Loads of the experts of a layer, largest first, as shares of the mean.

    `exponent` is that of a power law (0: balanced); a measured histogram is given as `loads`,
    tokens by expert. Experts lie on devices in no order of load, as a router leaves them.
    """

    exponent: float = 0.0
    loads: tuple[float, ...] = ()

    def relative(self, experts: int) -> np.ndarray:
        """Load of each expert over the mean, [experts], largest first. A histogram of another
        number of experts is read by quantile."""
        if self.loads:
            given = np.sort(np.asarray(self.loads, dtype=float))[::-1]
            at = (np.arange(experts) + 0.5) / experts * len(given) - 0.5
            load = np.interp(at, np.arange(len(given)), given)
        else:
            load = np.arange(1, experts + 1, dtype=float) ** -self.exponent
        return load / load.mean()


BALANCED = Routing()


@lru_cache(maxsize=4096)
def device_overload(
    routing: Routing, experts: int, ep: int, capacity: float = np.inf, spare: int = 0
) -> float:
    """Tokens of the fullest of `ep` devices over the mean.

    Experts are dealt out at random, `experts / ep` a device: the expected maximum, from a fixed
    draw of placements. `capacity` cuts every expert's load at that multiple of the mean.
    `spare` slots a device hold copies of the most loaded experts, whose tokens are split evenly.
    """
    if ep <= 1 or routing == BALANCED:
        return 1.0
    load = np.minimum(routing.relative(experts), capacity)
    if spare:
        load = replicated(load, spare * ep)
    rng = np.random.default_rng(0)
    each = -(-len(load) // ep)
    padded = np.concatenate([load, np.zeros(each * ep - len(load))])
    draws = rng.permuted(np.tile(padded, (64, 1)), axis=1).reshape(64, ep, each)
    sums = draws.sum(axis=2)
    return float((sums.max(axis=1) / sums.mean(axis=1)).mean())


def replicated(load: np.ndarray, copies: int) -> np.ndarray:
    """Loads after `copies` more slots went, one by one, to the expert with most tokens a copy."""
    counts = np.ones(len(load), dtype=int)
    for _ in range(copies):
        counts[np.argmax(load / counts)] += 1
    return np.repeat(load / counts, counts)


@lru_cache(maxsize=4096)
def dropped_share(routing: Routing, experts: int, capacity: float) -> float:
    """Share of the assignments above the capacity of their expert."""
    if not np.isfinite(capacity):
        return 0.0
    load = routing.relative(experts)
    return float(np.maximum(load - capacity, 0.0).sum() / load.sum())
