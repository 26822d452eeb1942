"""Seconds of collectives on groups of ranks: measured curves where there are, else formulas.

Sizes are columns and so are the groups' sizes and strides; groups that occur many times are looked
at once. `size` is the whole message as NCCL's tests count it: the gathered output of an all-gather,
the input of a reduce-scatter, the buffer of an all-reduce, and what one rank hands to an
all-to-all (its own share included).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from strategies.candidates import Column
from strategies.cluster import Cluster, Curve, Group, members
from strategies.cost.columns import codes_of
from strategies.cost.routing import Choice, distinct_domains


@dataclass(frozen=True)
class Line:
    """Seconds of one group: `latency + bytes * per_byte`, or by a measured curve of sizes."""

    latency: float = 0.0
    per_byte: float = 0.0
    curve: Curve | None = None
    measured: bool = False


def all_gather(cluster: Cluster, size: Column, ranks: Column, stride: Column | int = 1) -> Column:
    """Ring or direct exchange tier by tier, outermost first, one after the other.

    With `m_i` of the n members inside a domain of tier i, a device receives over tier i
    `size * (1 / m_(i-1) - 1 / m_i)`: its `m_i / m_(i-1) - 1` counterparts each hand on the
    `size / m_i` that the outer tiers have brought. Summed over tiers that is `size * (n - 1) / n`.
    Nothing is pipelined between tiers, so this errs upwards.
    """
    return _seconds(cluster, "all_gather", size, ranks, stride)


def reduce_scatter(
    cluster: Cluster, size: Column, ranks: Column, stride: Column | int = 1
) -> Column:
    """The mirror image of `all_gather`: the same bytes in the opposite direction."""
    return _seconds(cluster, "reduce_scatter", size, ranks, stride)


def all_reduce(cluster: Cluster, size: Column, ranks: Column, stride: Column | int = 1) -> Column:
    """A reduce-scatter followed by an all-gather."""
    return _seconds(cluster, "all_reduce", size, ranks, stride)


def all_to_all(
    cluster: Cluster,
    size: Column,
    ranks: Column,
    stride: Column | int = 1,
    *,
    op: str = "all_to_all",
    share: float | Column = 1.0,
) -> Column:
    """Direct exchange, bound by the slowest tier that the group spans.

    Of the `size` bytes of a device, `(n - m_(i-1)) / n` leave its domain of tier i - 1 and cross
    tier i: `max_i size * (n - m_(i-1)) / n / rate_i`, plus one latency of the outermost tier.
    `op` may be `all_to_all_dispatch` or `all_to_all_combine`, for curves measured apart. `share`
    is the part of the links' rate that is reached where nothing was measured.
    """
    return _seconds(cluster, op, size, ranks, stride, share)


def hierarchical(
    cluster: Cluster,
    row: Column,
    choice: Choice,
    ranks: Column,
    stride: Column | int = 1,
    *,
    op: str,
    share: float | Column = 1.0,
) -> Column:
    """All-to-all of tokens of `row` bytes in all that crosses each tier once for each domain.

    A token goes over tier i to every other domain of tier i - 1 that holds some of its experts,
    and is handed on inside it: `row * distinct(n / m_(i-1)) * (1 - m_(i-1) / m_i)` bytes
    over tier i. Tiers work at once, so the slowest binds; each adds its latency. A curve measured
    for the whole group wins, as for the direct exchange.
    """
    ranks, stride = np.broadcast_arrays(ranks, stride)
    groups, codes = _groups(ranks, stride)
    direct = [_measured(cluster, op, g) or _measured(cluster, "all_to_all", g) for g in groups]
    per_byte, latency = np.zeros(len(groups)), np.zeros(len(groups))
    for i, group in enumerate(groups):
        if group.size == 1 or direct[i]:
            continue
        inside = 1
        for tier, m in zip(cluster.tiers, _inside(cluster, group), strict=True):
            if m > inside:
                copies = distinct_domains(choice, group.size / inside) * (1 - inside / m)
                per_byte[i] = max(per_byte[i], copies / tier.fabric.rate(m // inside))
                latency[i] += tier.fabric.latency_us * 1e-6
                inside = m
    seconds = latency[codes] + row * per_byte[codes] / share
    for i, line in enumerate(direct):
        if line:
            rows = codes == i
            size = row[rows] * distinct_domains(choice, groups[i].size)
            seconds[rows] = _apply(line, size)
    return np.where(row > 0, seconds, 0.0)


def send(cluster: Cluster, size: Column, stride: Column) -> Column:
    """To the rank that is `stride` away, e.g. in the next pipeline stage."""
    groups, codes = _groups(np.full_like(stride, 2), stride)
    rate, latency = np.zeros(len(groups)), np.zeros(len(groups))
    for i, group in enumerate(groups):
        tier = next((t for t in cluster.tiers if group.stride < t.devices), cluster.tiers[-1])
        rate[i], latency[i] = tier.fabric.rate(2), tier.fabric.latency_us * 1e-6
    return latency[codes] + size / rate[codes]


def destinations(choice: Choice, ranks: Column) -> Column:
    """Ranks that a token is sent to: once to each however many of its experts live there."""
    codes, count = codes_of(ranks)
    found = np.empty(count)
    found[codes] = ranks
    return np.array([distinct_domains(choice, float(n)) for n in found])[codes]


def origin(cluster: Cluster, op: str, ranks: int, stride: int = 1) -> str:
    """`measured`, `spec`, or `default` where the file gives no efficiency or latency."""
    group = Group(ranks, stride)
    if _measured(cluster, op, group) or (
        op.startswith("all_to_all") and _measured(cluster, "all_to_all", group)
    ):
        return "measured"
    spanned = cluster.tiers[: len(members(cluster, group))]
    return "default" if any(t.fabric.origin == "default" for t in spanned) else "spec"


def _seconds(
    cluster: Cluster,
    op: str,
    size: Column,
    ranks: Column,
    stride: Column | int,
    share: float | Column = 1.0,
) -> Column:
    size, ranks, stride = np.broadcast_arrays(size, ranks, stride)
    groups, codes = _groups(ranks, stride)
    lines = [_line(cluster, op, g) for g in groups]
    latency = np.array([line.latency for line in lines])[codes]
    per_byte = np.array([line.per_byte for line in lines])[codes]
    if np.any(np.asarray(share) != 1.0):
        measured = np.array([line.measured for line in lines])[codes]
        per_byte = np.where(measured, per_byte, per_byte / share)
    seconds = latency + size * per_byte
    for i, line in enumerate(lines):
        if line.curve is not None:
            rows = codes == i
            seconds[rows] = _apply(line, size[rows])
    return np.where(size > 0, seconds, 0.0)


def _groups(ranks: Column, stride: Column) -> tuple[list[Group], np.ndarray]:
    """The distinct groups, and which of them each row is."""
    size, _ = codes_of(ranks)
    apart, strides = codes_of(stride)
    codes, count = codes_of(size * strides + apart)
    first = np.empty(count, dtype=np.int64)
    first[codes] = np.arange(len(codes))
    return [Group(int(ranks[i]), int(stride[i])) for i in first], codes


def _line(cluster: Cluster, op: str, group: Group) -> Line:
    if group.size == 1:
        return Line()
    if found := _measured(cluster, op, group):
        return found
    if op.startswith("all_to_all"):
        return _measured(cluster, "all_to_all", group) or _direct(cluster, group)
    line = _staged(cluster, group)
    return Line(2 * line.latency, 2 * line.per_byte) if op == "all_reduce" else line


def _inside(cluster: Cluster, group: Group) -> list[int]:
    """Members inside one domain of each tier; the whole group in the outermost one that it needs,
    so that a group that fits no tier evenly is never priced too cheap."""
    found = list(members(cluster, group))
    found[-1] = group.size
    return found + [group.size] * (len(cluster.tiers) - len(found))


def _staged(cluster: Cluster, group: Group) -> Line:
    latency, per_byte, inside = 0.0, 0.0, 1
    for tier, m in zip(cluster.tiers, _inside(cluster, group), strict=True):
        if m > inside:
            steps = m / inside - 1
            # Trees and recursive doubling need the logarithm; a ring has no shortcut.
            hops = steps if tier.fabric.kind == "ring" else math.log2(steps + 1)
            latency += hops * tier.fabric.latency_us * 1e-6
            per_byte += steps / m / tier.fabric.rate(max(m // inside, 2))
            inside = m
    return Line(latency, per_byte)


def _direct(cluster: Cluster, group: Group) -> Line:
    latency, per_byte, inside, n = 0.0, 0.0, 1, group.size
    for tier, m in zip(cluster.tiers, _inside(cluster, group), strict=True):
        if m > inside:
            # On a ring a message travels a quarter of the ring on average.
            hops = max(m / inside / 4, 1.0) if tier.fabric.kind == "ring" else 1.0
            rate = tier.fabric.rate(max(m // inside, 2))
            per_byte = max(per_byte, (n - inside) / n * hops / rate)
            latency = tier.fabric.latency_us * 1e-6
            inside = m
    return Line(latency, per_byte)


def _measured(cluster: Cluster, op: str, group: Group) -> Line | None:
    """From the closest tier's curve that holds the whole group; None where nothing was measured.

    Curves are of neighbouring devices: a group that strides is no faster than the neighbours that
    it spans.
    """
    if group.size == 1:
        return None
    spanned = len(members(cluster, group)) - 1
    curves = [c for c in cluster.measured if c.op == op and c.within >= spanned]
    for curve in sorted(curves, key=lambda c: c.within):
        same_size = curve.devices == (group.size,)
        if curve.rates and (same_size or len(curve.devices) > 1):
            latency = cluster.tiers[spanned].fabric.latency_us * 1e-6
            rate = min(_rate(curve, n) for n in {group.size, group.size * group.stride})
            return Line(latency, 1 / rate, measured=True)
        if curve.seconds and same_size:
            return Line(curve=curve, measured=True)
    return None


def _apply(line: Line, size: Column) -> Column:
    if line.curve is None:
        return line.latency + size * line.per_byte
    return _by_size(line.curve, size)


def _rate(curve: Curve, devices: int) -> float:
    """Between two measured group sizes on a log-log line; below the first one its rate; beyond the
    last one along the last line where that falls, since larger groups do not get faster."""
    x, y = curve.devices, curve.rates
    if devices <= x[0]:
        return y[0]
    if len(x) == 1:
        return y[0]
    i = min(bisect_left(x, devices), len(x) - 1)
    slope = math.log(y[i] / y[i - 1]) / math.log(x[i] / x[i - 1])
    if devices > x[-1]:
        slope = min(slope, 0.0)
        return y[-1] * (devices / x[-1]) ** slope
    return y[i - 1] * (devices / x[i - 1]) ** slope


def _by_size(curve: Curve, size: Column) -> Column:
    """Log-log between measured sizes; the smallest one's time below; its last rate beyond."""
    x, y = np.array(curve.bytes), np.array(curve.seconds)
    inner = np.exp(np.interp(np.log(np.maximum(size, x[0])), np.log(x), np.log(y)))
    return np.where(size > x[-1], y[-1] * size / x[-1], inner)
