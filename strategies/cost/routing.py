"""How tokens spread over experts, and what that means for the fullest device.

Every figure is relative to an even spread, so that 1.0 is balanced.
"""

from __future__ import annotations

import math
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
    consecutive: bool = False
    """Each token visits neighbouring experts, as the balanced gates of benchmarks do (token i the
    `top_k` after expert `i * top_k` in NeMo AutoModel's)."""

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
    routing: Routing,
    experts: int,
    ep: int,
    *,
    capacity: float = np.inf,
    reroute: bool = False,
    spare: int = 0,
) -> float:
    """Assignments that the fullest of `ep` devices takes, over the mean of all that were made.

    Experts are dealt out at random, `experts / ep` a device: the expected maximum, from a fixed
    draw of placements. `capacity` cuts every expert's load at that multiple of the mean; with
    `reroute` the rest goes evenly to experts with room. `spare` slots a device hold copies of the
    most loaded experts, whose tokens are split evenly.
    """
    if ep <= 1 or not (routing.exponent or routing.loads):
        return 1.0
    load = limited(routing.relative(experts), capacity, reroute)
    if spare:
        load = replicated(load, spare * ep)
    rng = np.random.default_rng(0)
    each = -(-len(load) // ep)
    padded = np.concatenate([load, np.zeros(each * ep - len(load))])
    draws = rng.permuted(np.tile(padded, (64, 1)), axis=1).reshape(64, ep, each)
    return float(draws.sum(axis=2).max(axis=1).mean() * ep / experts)


def limited(load: np.ndarray, capacity: float, reroute: bool) -> np.ndarray:
    """Loads over their mean after the capacity; rerouting fills every expert's room by the same
    share, as far as there is any."""
    kept = np.minimum(load, capacity)
    if not reroute or not np.isfinite(capacity):
        return kept
    rest = load.sum() - kept.sum()
    room = np.maximum(capacity - kept, 0.0)
    return kept + room * min(rest / max(room.sum(), 1e-12), 1.0)


def replicated(load: np.ndarray, copies: int) -> np.ndarray:
    """Loads after `copies` more slots went, one by one, to the expert with most tokens a copy."""
    counts = np.ones(len(load), dtype=int)
    for _ in range(copies):
        counts[np.argmax(load / counts)] += 1
    return np.repeat(load / counts, counts)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How many domains of experts one token reaches."""

    experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1
    """A token chooses among the experts of so many of the groups."""
    consecutive: bool = False


@lru_cache(maxsize=4096)
def distinct_domains(choice: Choice, domains: float) -> float:
    """Expected number of equal domains that a token's experts lie in; it is sent once to each.

    Independent choices: `D (1 - (1 - 1/D)^k)`. Of `G` groups `g` are chosen first: what counts are
    the domains that those groups reach, `D (1 - C(G - G/D, g) / C(G, g))`, or `g D / G` where a
    group spans several. Consecutive choices: the mean over all first experts.
    """
    if domains <= 1:
        return 1.0
    k, groups = choice.top_k, choice.groups
    if choice.consecutive:
        width = choice.experts / domains
        first = np.arange(0, choice.experts, math.gcd(k, choice.experts))
        reached = np.floor((first + k - 1) / width) - np.floor(first / width) + 1
        return float(np.minimum(reached, domains).mean())
    reachable = float(domains)
    if groups > choice.top_groups:
        if domains > groups:
            reachable = domains * choice.top_groups / groups
        else:
            left = round(groups - groups / domains)
            missed = math.comb(left, choice.top_groups) / math.comb(groups, choice.top_groups)
            reachable = domains * (1 - missed)
    return reachable * (1 - (1 - 1 / reachable) ** k) if reachable > 1 else 1.0


@lru_cache(maxsize=4096)
def dropped_share(routing: Routing, experts: int, capacity: float, reroute: bool = False) -> float:
    """Share of the assignments that no expert takes."""
    if not np.isfinite(capacity):
        return 0.0
    load = routing.relative(experts)
    return max(float(1 - limited(load, capacity, reroute).sum() / load.sum()), 0.0)
