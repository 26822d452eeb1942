"""Seconds of a collective on a group of ranks: a measured curve where there is one, else a formula

`size` is always the whole message as NCCL's tests count it: the gathered output of an all-gather,
the input of a reduce-scatter, the buffer of an all-reduce, and what one rank hands to an
all-to-all (its own share included).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from strategies.cluster import Cluster, Curve, Group, members


@dataclass(frozen=True)
class Timing:
    seconds: float
    origin: str
    """`measured`, `spec` or `default` (the file gives no efficiency or latency)."""


NOTHING = Timing(0.0, "spec")


def all_gather(cluster: Cluster, size: float, group: Group) -> Timing:
    """Ring or direct exchange tier by tier, outermost first, one after the other.

    With `m_i` of the n members inside a domain of tier i, a device receives over tier i
    `size * (1 / m_(i-1) - 1 / m_i)`: its `m_i / m_(i-1) - 1` counterparts each hand on the
    `size / m_i` that the outer tiers have brought. Summed over tiers that is `size * (n - 1) / n`.
    Each step costs the tier's latency. Nothing is pipelined between tiers, so this errs upwards.
    """
    return _measured(cluster, "all_gather", size, group) or _staged(cluster, size, group)


def reduce_scatter(cluster: Cluster, size: float, group: Group) -> Timing:
    """The mirror image of `all_gather`: the same bytes in the opposite direction."""
    return _measured(cluster, "reduce_scatter", size, group) or _staged(cluster, size, group)


def all_reduce(cluster: Cluster, size: float, group: Group) -> Timing:
    """A reduce-scatter followed by an all-gather."""
    measured = _measured(cluster, "all_reduce", size, group)
    if measured:
        return measured
    half = _staged(cluster, size, group)
    return Timing(2 * half.seconds, half.origin)


def all_to_all(cluster: Cluster, size: float, group: Group, *, op: str = "all_to_all") -> Timing:
    """Direct exchange, bound by the slowest tier that the group spans.

    Of the `size` bytes of a device, `(n - m_(i-1)) / n` leave its domain of tier i - 1 and cross
    tier i: `max_i size * (n - m_(i-1)) / n / rate_i`, plus one latency of the outermost tier.
    `op` may be `all_to_all_dispatch` or `all_to_all_combine`, for curves measured apart.
    """
    measured = _measured(cluster, op, size, group) or _measured(cluster, "all_to_all", size, group)
    if measured:
        return measured
    n = group.size
    if n == 1 or size == 0:
        return NOTHING
    seconds, latency, inside, origin = 0.0, 0.0, 1, "spec"
    for tier, m in zip(cluster.tiers, members(cluster, group), strict=False):
        if m > inside:
            # On a ring a message travels a quarter of the ring on average.
            hops = max(m / inside / 4, 1.0) if tier.fabric.kind == "ring" else 1.0
            crossing = size * (n - inside) / n * hops
            seconds = max(seconds, crossing / tier.fabric.rate(m // inside))
            latency = tier.fabric.latency_us * 1e-6
            origin = "default" if tier.fabric.origin == "default" else origin
            inside = m
    return Timing(seconds + latency, origin)


def _staged(cluster: Cluster, size: float, group: Group) -> Timing:
    n = group.size
    if n == 1 or size == 0:
        return NOTHING
    seconds, inside, origin = 0.0, 1, "spec"
    for tier, m in zip(cluster.tiers, members(cluster, group), strict=False):
        steps = m / inside - 1
        if steps > 0:
            rate, latency = tier.fabric.rate(m // inside), tier.fabric.latency_us * 1e-6
            seconds += steps * (size / m / rate + latency)
            origin = "default" if tier.fabric.origin == "default" else origin
            inside = m
    return Timing(seconds, origin)


def _measured(cluster: Cluster, op: str, size: float, group: Group) -> Timing | None:
    """From the closest tier's curve that holds the whole group; None where nothing was measured."""
    if group.size == 1 or size == 0:
        return NOTHING
    spanned = len(members(cluster, group)) - 1
    curves = [c for c in cluster.measured if c.op == op and c.within >= spanned]
    for curve in sorted(curves, key=lambda c: c.within):
        same_size = curve.devices == (group.size,)
        if curve.rates and (same_size or len(curve.devices) > 1):
            tier = cluster.tiers[spanned]
            seconds = tier.fabric.latency_us * 1e-6 + size / _rate(curve, group.size)
            return Timing(seconds, "measured")
        if curve.seconds and same_size:
            return Timing(_seconds(curve, size), "measured")
    return None


def _rate(curve: Curve, devices: int) -> float:
    """Between two measured group sizes on a log-log line; below the first one its rate; beyond the
    last one along the last line where that falls, since larger groups do not get faster."""
    x, y = curve.devices, curve.rates
    if devices <= x[0]:
        return y[0]
    i = min(bisect_left(x, devices), len(x) - 1)
    slope = math.log(y[i] / y[i - 1]) / math.log(x[i] / x[i - 1])
    if devices > x[-1]:
        slope = min(slope, 0.0)
        return y[-1] * (devices / x[-1]) ** slope
    return y[i - 1] * (devices / x[i - 1]) ** slope


def _seconds(curve: Curve, size: float) -> float:
    """Log-log between measured sizes; the smallest one's time below; its last rate beyond."""
    x, y = curve.bytes, curve.seconds
    if size <= x[0]:
        return y[0]
    if size >= x[-1]:
        return y[-1] * size / x[-1]
    i = bisect_left(x, size)
    share = math.log(size / x[i - 1]) / math.log(x[i] / x[i - 1])
    return y[i - 1] * (y[i] / y[i - 1]) ** share
