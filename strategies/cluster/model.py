"""Cluster: devices as ordered tiers, closest first.

Costs need only the tiers, never all pairs, so a cluster of 100,000 devices is as cheap as one of 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from analyzers.backends import Backend

MAX_DEVICES = 1_000_000
DEFAULT_LATENCY_US = 5.0
DEFAULT_EFFICIENCY = 0.7
"""Share of a link's nominal rate that a collective reaches where nobody measured it."""

Origin = Literal["spec", "measured", "default"]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Links of one tier; rates are nominal, GB/s (1e9) in one direction for each device."""

    kind: Literal["switch", "clos", "fullmesh", "ring"]
    bw_gbps: float
    latency_us: float = DEFAULT_LATENCY_US
    efficiency: float = DEFAULT_EFFICIENCY
    oversubscription: float = 1.0
    rails: int | None = None
    """Separate planes: NIC i of every node is on rail i."""
    link_gbps: float | None = None
    """Of one of the direct links of a full mesh."""
    multicast: bool = False
    scale: float = 1.0
    """Below 1 when a member is degraded: a collective runs at the pace of its slowest member."""
    origin: Origin = "spec"
    """`default` where any number is the product's assumption, `measured` where all are measured."""
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Of single numbers (`bw_gbps`, `latency_us`, `efficiency`) that differ from `origin`."""
    source: str = ""
    """Where `bw_gbps` can be checked."""

    def __str__(self) -> str:
        shared = f" / {self.oversubscription:g}" if self.oversubscription > 1 else ""
        slowed = f", slowed to {self.scale:.0%}" if self.scale < 1 else ""
        return (
            f"{self.kind}, {self.bw_gbps:g} GB/s{shared} at {self.efficiency:.0%}, "
            f"{self.latency_us:g} us{slowed}"
        )

    def origin_of(self, name: str) -> str:
        return self.origins.get(name, self.origin)

    def rate(self, members: int) -> float:
        """Bytes/s that each of `members` devices sends while all of them send.

        A full mesh of which `members` take part uses `members - 1` links of each device (an
        MI300X pair gets one link of 64 GB/s, not 448).
        """
        gbps = self.bw_gbps / self.oversubscription
        if self.kind == "fullmesh" and self.link_gbps is not None:
            gbps = min(gbps, max(members - 1, 1) * self.link_gbps)
        return gbps * 1e9 * self.efficiency * self.scale


@dataclass(frozen=True, kw_only=True)
class UnifiedMemory:
    """Memory that every device of one domain of a tier can address."""

    pool_gib: float
    """Of one domain, shared by its devices."""
    bw_gbps: float
    """GB/s (1e9) of one device to the pool, one direction."""
    load_store: bool = False
    """Plain loads and stores reach it, without a copy by hand."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    name: str
    size: int
    """Children of the tier before it."""
    devices: int
    """Devices in one domain of this tier."""
    fabric: Fabric
    unified_memory: UnifiedMemory | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A measured collective: time by message size, or rate by group size."""

    within: int
    """Index of the tier in which it was measured."""
    op: str
    devices: tuple[int, ...]
    bytes: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    """Same length as `bytes`; for groups of `devices[0]`."""
    rates: tuple[float, ...] = ()
    """Bytes/s, same length as `devices`."""
    tokens: int | None = None
    """Tokens of a device when the rates were measured."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What offloaded states meet: the memory of a node, or a device's share of it."""

    mem_gib: float
    d2h_gbps: float
    """GB/s (1e9) of one device to host memory, one direction."""
    share: Literal["node", "device"] = "node"
    """Whose `mem_gib` is: the node's, divided by its devices, or one device's own."""
    origin: str = "spec"
    """Of both numbers."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    name: str
    device: Backend
    tiers: tuple[Tier, ...]
    measured: tuple[Curve, ...] = ()
    node_names: tuple[str, ...] = ()
    """The nodes in use, in rank order."""
    hostlist: tuple[str, ...] = ()
    """The same nodes as a hostlist, e.g. `gpu[01-16]`."""
    working: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = ()
    """Of nodes in use with devices that are down: the devices that are not, and the nodes' names.
    """
    host: Host | None = None
    notes: tuple[str, ...] = ()
    """What was left out or approximated, in sentences."""

    @property
    def world_size(self) -> int:
        return self.tiers[-1].devices

    @property
    def devices_per_node(self) -> int:
        """The first tier is the node: what one operating system sees."""
        return self.tiers[0].devices

    @property
    def nodes(self) -> int:
        return self.world_size // self.devices_per_node

    @property
    def host_bytes(self) -> float:
        """Host memory that one device may use, bytes; 0 where the file says nothing of it."""
        if self.host is None:
            return 0.0
        shared = self.devices_per_node if self.host.share == "node" else 1
        return self.host.mem_gib * GIB / shared

    @property
    def pool_bytes(self) -> float:
        """A device's share of the largest unified memory pool, bytes; 0 without one."""
        pools = (t.unified_memory.pool_gib / t.devices for t in self.tiers if t.unified_memory)
        return max(pools, default=0.0) * GIB


def flat_cluster(
    name: str, device: Backend, world_size: int, *, bw_gbps: float, latency_us: float
) -> Cluster:
    """`world_size` devices behind one switch of assumed rate, where no file describes them."""
    fabric = Fabric(kind="switch", bw_gbps=bw_gbps, latency_us=latency_us, origin="default")
    tier = Tier(name="node", size=world_size, devices=world_size, fabric=fabric)
    return Cluster(name=name, device=device, tiers=(tier,))


def degraded(cluster: Cluster, tier: str, scale: float) -> Cluster:
    """The cluster with the links of one tier at `scale` of their rate: a what-if.

    Curves measured over those links are stretched as much. Raises ValueError for an unknown tier
    or a scale outside (0, 1].
    """
    names = [t.name for t in cluster.tiers]
    if tier not in names:
        raise ValueError(f"no tier is called '{tier}'; one of: {', '.join(names)}")
    if not 0 < scale <= 1:
        raise ValueError(f"scale must be above 0 and at most 1, found {scale}")
    at = names.index(tier)
    tiers = tuple(slowed(t, scale) if i == at else t for i, t in enumerate(cluster.tiers))
    measured = tuple(stretched(c, scale) if c.within >= at else c for c in cluster.measured)
    return replace(cluster, tiers=tiers, measured=measured)


def slowed(tier: Tier, scale: float) -> Tier:
    """The tier at `scale` of its rate, or slower where it is already."""
    return replace(tier, fabric=replace(tier.fabric, scale=min(tier.fabric.scale, scale)))


def stretched(curve: Curve, scale: float) -> Curve:
    """The curve at `scale` of its rate; latencies are stretched with it, so this errs upwards."""
    seconds = tuple(s / scale for s in curve.seconds)
    return replace(curve, seconds=seconds, rates=tuple(r * scale for r in curve.rates))


@dataclass(frozen=True)
class Group:
    """`size` ranks that communicate, `stride` ranks apart (innermost mesh axis: stride 1)."""

    size: int
    stride: int = 1


def members(cluster: Cluster, group: Group) -> tuple[int, ...]:
    """Members of the group inside one domain of each tier, up to the tier that holds them all.

    An aligned group of 16 consecutive ranks over nodes of 8 gives (8, 16). A group that does not
    fill its domains evenly counts the smaller share, so that it is never priced too cheap.
    """
    found: list[int] = []
    for tier in cluster.tiers:
        span = math.gcd(tier.devices, group.size * group.stride)
        found.append(span // group.stride if span % group.stride == 0 else 1)
        if found[-1] >= group.size:
            break
    return tuple(found)


def lowest_common_tier(cluster: Cluster, first: int, second: int) -> Tier | None:
    """The closest tier with a domain that holds both ranks; None for one rank and itself.

    Raises ValueError for a rank that the cluster has not.
    """
    for rank in (first, second):
        if not 0 <= rank < cluster.world_size:
            raise ValueError(f"rank {rank} is not one of {cluster.world_size}")
    if first == second:
        return None
    return next(t for t in cluster.tiers if first // t.devices == second // t.devices)
