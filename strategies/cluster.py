"""Cluster: the devices of a topology file as ordered tiers, closest first.

Costs need only the tiers, never all pairs, so a cluster of 100,000 devices is as cheap as one of 8.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from analyzers.backends import Backend, Fact, backend_names, load_backend
from analyzers.errors import InputError

if TYPE_CHECKING:
    from strategies.topology import DeviceOverridesEntry, MeasuredEntry, TopologyFile

MAX_DEVICES = 1_000_000
DEFAULT_LATENCY_US = 5.0
DEFAULT_EFFICIENCY = 0.7
"""Share of a link's nominal rate that a collective reaches where nobody measured it."""

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Links of one tier; rates are nominal, GB/s (1e9) in one direction for each device."""

    kind: Literal["switch", "clos", "fullmesh", "ring"]
    bw_gbps: float
    latency_us: float = DEFAULT_LATENCY_US
    efficiency: float = DEFAULT_EFFICIENCY
    oversubscription: float = 1.0
    link_gbps: float | None = None
    """Of one of the direct links of a full mesh."""
    multicast: bool = False
    scale: float = 1.0
    """Below 1 when a member is degraded: a collective runs at the pace of its slowest member."""
    origin: Literal["spec", "default"] = "spec"
    """`default` where the file gives no efficiency or no latency."""

    def __str__(self) -> str:
        shared = f" / {self.oversubscription:g}" if self.oversubscription > 1 else ""
        slowed = f", slowed to {self.scale:.0%}" if self.scale < 1 else ""
        return (
            f"{self.kind}, {self.bw_gbps:g} GB/s{shared} at {self.efficiency:.0%}, "
            f"{self.latency_us:g} us{slowed}"
        )

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
class Tier:
    name: str
    size: int
    """Children of the tier before it."""
    devices: int
    """Devices in one domain of this tier."""
    fabric: Fabric


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


@dataclass(frozen=True, kw_only=True)
class Cluster:
    name: str
    device: Backend
    tiers: tuple[Tier, ...]
    measured: tuple[Curve, ...] = ()
    node_names: tuple[str, ...] = ()
    hostlist: tuple[str, ...] = ()
    """The nodes as written in the file, e.g. `gpu[01-16]`."""

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


def load_cluster(path: str | Path) -> Cluster:
    """Reads a topology file.

    Raises InputError that names the file, the key path, the fault and the fix.
    """
    from strategies.topology import read_topology

    path = Path(path)
    file = read_topology(path)
    if file.imports:
        fault, fix = "importing other formats is not supported yet", "write the tiers in this file"
        raise InputError(path, field="import", fault=fault, fix=fix)
    tiers = _tiers(path, file)
    per_node, world_size = tiers[0].devices, tiers[-1].devices
    hostlist = tuple(file.nodes.names) if file.nodes else ()
    names = _node_names(path, hostlist, world_size // per_node)
    return Cluster(
        name=file.name,
        device=_device(path, file),
        tiers=_degraded(path, file, tiers, names),
        measured=tuple(_curve(path, i, m, tiers) for i, m in enumerate(file.measured)),
        node_names=names,
        hostlist=hostlist,
    )


def flat_cluster(
    name: str, device: Backend, world_size: int, *, bw_gbps: float, latency_us: float
) -> Cluster:
    """`world_size` devices behind one switch of assumed rate, where no file describes them."""
    fabric = Fabric(kind="switch", bw_gbps=bw_gbps, latency_us=latency_us, origin="default")
    tier = Tier(name="node", size=world_size, devices=world_size, fabric=fabric)
    return Cluster(name=name, device=device, tiers=(tier,))


def _tiers(path: Path, file: TopologyFile) -> tuple[Tier, ...]:
    tiers: list[Tier] = []
    devices = 1
    for i, entry in enumerate(file.tiers):
        if entry.name in [t.name for t in tiers]:
            fault, fix = f"'{entry.name}' is there twice", "give each tier its own name"
            raise InputError(path, field=f"tiers[{i}].name", fault=fault, fix=fix)
        devices *= entry.size
        if devices > MAX_DEVICES:
            fault = f"makes {devices:,} devices; at most {MAX_DEVICES:,} are planned for"
            raise InputError(path, field=f"tiers[{i}].size", fault=fault, fix="lower the sizes")
        given = entry.fabric
        if given.link_gbps is not None and given.kind != "fullmesh":
            fault = f"only a fullmesh has direct links, this fabric is a {given.kind}"
            field = f"tiers[{i}].fabric.link_gbps"
            raise InputError(path, field=field, fault=fault, fix="remove it or set kind: fullmesh")
        assumed = given.latency_us is None or given.efficiency is None
        fabric = Fabric(
            kind=given.kind,
            bw_gbps=given.bw_gbps,
            latency_us=DEFAULT_LATENCY_US if given.latency_us is None else given.latency_us,
            efficiency=DEFAULT_EFFICIENCY if given.efficiency is None else given.efficiency,
            oversubscription=given.oversubscription,
            link_gbps=given.link_gbps,
            multicast=given.multicast,
            origin="default" if assumed else "spec",
        )
        tiers.append(Tier(name=entry.name, size=entry.size, devices=devices, fabric=fabric))
    return tuple(tiers)


def _device(path: Path, file: TopologyFile) -> Backend:
    known = backend_names()
    if file.device not in known:
        close = difflib.get_close_matches(file.device, known, n=1)
        fix = f"did you mean '{close[0]}'? known: {', '.join(known)}" if close else ", ".join(known)
        fault = f"'{file.device}' is not a known backend"
        raise InputError(path, field="device", fault=fault, fix=fix if close else f"one of: {fix}")
    device = load_backend(file.device)
    if file.device_overrides is None:
        return device
    device = _overridden(device, file.device_overrides, path)
    if device.reserved_gib.value >= device.memory_gib.value:
        fault = (
            f"{device.reserved_gib.value:g} GiB reserved of {device.memory_gib.value:g} GiB "
            "leaves nothing"
        )
        field = "device_overrides.reserved_gib"
        raise InputError(path, field=field, fault=fault, fix="lower it")
    return device


def _overridden(device: Backend, given: DeviceOverridesEntry, path: Path) -> Backend:
    def fact(value: float) -> Fact:
        return Fact(value=value, origin="note", source=f"device_overrides of {path.name}")

    changes: dict = {
        key: fact(value)
        for key, value in given.model_dump(exclude={"matmul_tflops"}).items()
        if value is not None
    }
    if given.matmul_tflops:
        rates = {dtype: fact(value) for dtype, value in given.matmul_tflops.items()}
        changes["matmul_tflops"] = {**device.matmul_tflops, **rates}
    return replace(device, **changes)


def _curve(path: Path, index: int, entry: MeasuredEntry, tiers: tuple[Tier, ...]) -> Curve:
    def refuse(key: str, fault: str, fix: str) -> InputError:
        return InputError(path, field=f"measured[{index}].{key}", fault=fault, fix=fix)

    names = [t.name for t in tiers]
    if entry.within not in names:
        raise refuse("within", f"no tier is called '{entry.within}'", f"one of: {', '.join(names)}")
    within = names.index(entry.within)
    if max(entry.devices) > tiers[within].devices and entry.size_mib is not None:
        fault = f"{max(entry.devices)} devices, but '{entry.within}' has {tiers[within].devices}"
        raise refuse("devices", fault, "name the tier that holds them all")
    by_size = entry.size_mib is not None or entry.ms is not None
    by_group = entry.gbps is not None
    if by_size == by_group:
        fix = "give size_mib and ms, or devices and gbps"
        raise refuse("op", "needs one curve: time by size or rate by devices", fix)
    if by_group:
        x_key, x, y_key, y = "devices", entry.devices, "gbps", entry.gbps or []
    else:
        x_key, x, y_key, y = "size_mib", entry.size_mib or [], "ms", entry.ms or []
        if len(entry.devices) != 1:
            fix = "make one entry for each number of devices"
            raise refuse("devices", "a curve by size is for one number of devices", fix)
    if len(x) != len(y):
        fault = f"has {len(y)} values for the {len(x)} of {x_key}"
        raise refuse(y_key, fault, "give both lists the same length")
    if not x:
        raise refuse(x_key, "is empty", "give at least one point")
    if any(b <= a for a, b in itertools.pairwise(x)):
        raise refuse(x_key, "is not in rising order", "sort the points")
    return Curve(
        within=within,
        op=entry.op,
        devices=tuple(entry.devices),
        bytes=tuple(v * 2**20 for v in entry.size_mib or ()),
        seconds=tuple(v * 1e-3 for v in entry.ms or ()),
        rates=tuple(v * 1e9 for v in entry.gbps or ()),
    )


def _node_names(path: Path, hostlist: tuple[str, ...], nodes: int) -> tuple[str, ...]:
    names: list[str] = []
    for i, pattern in enumerate(hostlist):
        try:
            names += expand_hostlist(pattern)
        except ValueError as e:
            fix = "write e.g. gpu[01-16]"
            raise InputError(path, field=f"nodes.names[{i}]", fault=str(e), fix=fix) from e
    if not names:
        return ()
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        fault = f"node '{twice}' is there twice"
        raise InputError(path, field="nodes.names", fault=fault, fix="name each node once")
    if len(names) != nodes:
        fault = f"names {len(names)} nodes, the tiers make {nodes}"
        fix = "correct the hostlist or the tier sizes (the first tier is one node)"
        raise InputError(path, field="nodes.names", fault=fault, fix=fix)
    return tuple(names)


def expand_hostlist(pattern: str) -> list[str]:
    """`gpu[01-03,7]` -> gpu01 gpu02 gpu03 gpu7, as Slurm reads it; several brackets multiply.

    Raises ValueError for a pattern that is no hostlist or names more than MAX_DEVICES nodes.
    """
    names = [""]
    for i, piece in enumerate(_RANGE.split(pattern)):
        values = [piece] if i % 2 == 0 else _expand_ranges(piece, pattern)
        if len(names) * len(values) > MAX_DEVICES:
            raise ValueError(f"'{pattern}' names more than {MAX_DEVICES:,} nodes")
        names = [name + value for name in names for value in values]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ValueError(f"'{pattern}' is not a hostlist")
    return names


def _expand_ranges(text: str, pattern: str) -> list[str]:
    values: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item.strip())
        if match is None:
            raise ValueError(f"'{pattern}' has a bad range '{item}'")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"'{pattern}' has a range that runs backwards: '{item}'")
        if int(last) - int(first) >= MAX_DEVICES:
            raise ValueError(f"'{pattern}' names more than {MAX_DEVICES:,} nodes")
        values += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return values


def _degraded(
    path: Path, file: TopologyFile, tiers: tuple[Tier, ...], names: tuple[str, ...]
) -> tuple[Tier, ...]:
    """Slows the tiers that a degraded part takes part in: `node/nic*` everything above the node,
    `node` or `node/*` every tier."""
    for i, override in enumerate(file.overrides):
        node, _, part = override.match.partition("/")
        if not any(fnmatchcase(name, node) for name in names):
            fix = "match a name of nodes.names, e.g. gpu07/nic3"
            fault = f"'{override.match}' matches no node"
            raise InputError(path, field=f"overrides[{i}].match", fault=fault, fix=fix)
        if override.down:
            fix = "leave the node out of nodes.names and lower the tier's size"
            fault = "plans around a node that is down are not supported yet"
            raise InputError(path, field=f"overrides[{i}].down", fault=fault, fix=fix)
        if override.bw_scale is None:
            fault, fix = "says nothing", "add bw_scale: 0.5"
            raise InputError(path, field=f"overrides[{i}]", fault=fault, fix=fix)
        start = 1 if part.startswith("nic") else 0
        tiers = tuple(
            replace(t, fabric=replace(t.fabric, scale=min(t.fabric.scale, override.bw_scale)))
            if index >= start
            else t
            for index, t in enumerate(tiers)
        )
    return tiers


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
