"""Degraded and missing parts: which tiers they slow, and what is left without them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from strategies.cluster.hostlist import compress_hostlist
from strategies.cluster.model import Cluster, Tier, slowed, stretched
from strategies.cluster.uniform import largest_uniform

if TYPE_CHECKING:
    from strategies.cluster.reading import YamlFile
    from strategies.cluster.schema import OverrideEntry

DEVICE_WORDS = ("gpu", "npu", "device")
FORMS = "match a node or a part of one: gpu07, gpu07/*, gpu07/gpu3, gpu07/nic3"


@dataclass
class _Faults:
    slow: list[tuple[int, Sequence[int], float]] = field(default_factory=list)
    """Node, tiers, and the share of their rate that is left."""
    devices: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Devices that are down, by node."""
    nics: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


def apply_overrides(yaml: YamlFile, overrides: list[OverrideEntry], cluster: Cluster) -> Cluster:
    """The cluster as its degraded parts leave it.

    Around what is down the largest even part of the cluster is used. A slow NIC in it slows every
    tier that NICs serve, a slow device or node every tier: a collective runs at the pace of its
    slowest member. Of R NICs with d down, one carries the traffic of ceil(R / (R - d)) devices; a
    node without any is down.
    """
    faults = _Faults()
    for i, override in enumerate(overrides):
        _note(yaml, i, override, cluster, faults)
    nics, served = _nics(cluster), _nic_tiers(cluster)
    for node, down in faults.nics.items():
        if served and len(down) == nics:
            faults.devices[node] = set(range(cluster.devices_per_node))
        elif served:
            shared = math.ceil(nics / (nics - len(down)))
            faults.slow.append((node, served, 1 / shared))
    used: Sequence[int] = range(cluster.nodes)
    if faults.devices:
        cluster, used = _without(yaml, cluster, faults)
    return _slowed(cluster, faults, set(used))


def _slowed(cluster: Cluster, faults: _Faults, used: set[int]) -> Cluster:
    scales = [1.0] * len(cluster.tiers)
    for node, tiers, scale in faults.slow:
        if node in used:
            for i in tiers:
                scales[i] = min(scales[i], scale)
    if min(scales) == 1:
        return cluster
    return replace(
        cluster,
        tiers=tuple(slowed(t, s) for t, s in zip(cluster.tiers, scales, strict=True)),
        measured=tuple(stretched(c, min(scales[: c.within + 1])) for c in cluster.measured),
    )


def _note(
    yaml: YamlFile, index: int, override: OverrideEntry, cluster: Cluster, faults: _Faults
) -> None:
    node_pattern, _, part = override.match.partition("/")
    at = ("overrides", index)
    nodes = [i for i, n in enumerate(cluster.node_names) if fnmatchcase(n, node_pattern)]
    if not nodes:
        fault = f"'{override.match}' matches no node"
        fix = "match a name of nodes.names, e.g. gpu07/nic3"
        raise yaml.error((*at, "match"), fault=fault, fix=fix)
    if override.down and override.bw_scale is not None:
        raise yaml.error(at, fault="what is down has no bw_scale", fix="remove one of the two")
    if not override.down and override.bw_scale is None:
        raise yaml.error(at, fault="says nothing", fix="add bw_scale: 0.5 or down: true")
    whole = part in ("", "*")
    kind = "nic" if part.startswith("nic") else "device"
    count = _nics(cluster) if kind == "nic" else cluster.devices_per_node
    words = ("nic",) if kind == "nic" else DEVICE_WORDS
    parts = {n for n in range(count) if any(fnmatchcase(f"{w}{n}", part) for w in words)}
    if not whole and not parts:
        fault = f"'{part}' matches no part of a node of {count} {kind}s"
        raise yaml.error((*at, "match"), fault=fault, fix=FORMS)
    if override.bw_scale is not None:
        tiers = _nic_tiers(cluster) if kind == "nic" else range(len(cluster.tiers))
        faults.slow += [(node, tiers, override.bw_scale) for node in nodes]
        return
    missing = faults.nics if kind == "nic" else faults.devices
    for node in nodes:
        missing[node] |= set(range(count)) if whole else parts


def _nics(cluster: Cluster) -> int:
    """NICs of a node: one a rail, or one a device where the file names no rails."""
    return next((t.fabric.rails for t in cluster.tiers if t.fabric.rails), None) or (
        cluster.devices_per_node
    )


def _nic_tiers(cluster: Cluster) -> list[int]:
    """The tiers with rails, or all above the node where none has them."""
    railed = [i for i, t in enumerate(cluster.tiers) if i and t.fabric.rails]
    return railed or list(range(1, len(cluster.tiers)))


def _without(yaml: YamlFile, cluster: Cluster, faults: _Faults) -> tuple[Cluster, tuple[int, ...]]:
    """The largest even part without the devices that are down, and its nodes."""
    per_node = cluster.devices_per_node
    devices = [per_node - len(faults.devices.get(i, ())) for i in range(cluster.nodes)]
    spans = [t.devices // per_node for t in cluster.tiers]
    parents = [
        [i // t.size for i in range(cluster.nodes // span)]
        for span, t in zip(spans, cluster.tiers[1:], strict=False)
    ]
    left = largest_uniform(devices, parents)
    if left is None:
        raise yaml.error(("overrides",), fault="leave no device", fix="bring a node back up")
    tiers: list[Tier] = []
    total = 1
    for tier, size in zip(cluster.tiers, left.sizes, strict=True):
        total *= size
        tiers.append(replace(tier, size=size, devices=total))
    names = tuple(cluster.node_names[i] for i in left.nodes)
    lost = [cluster.node_names[i] for i in sorted(faults.devices)]
    shape = " x ".join(str(s) for s in left.sizes)
    note = (
        f"{total} of {cluster.world_size} devices are used, as {shape}: "
        f"devices are down on {', '.join(compress_hostlist(lost))}"
    )
    working: dict[tuple[int, ...], tuple[str, ...]] = {}
    for i in left.nodes:
        if down := faults.devices.get(i):
            up = tuple(n for n in range(per_node) if n not in down)
            working[up] = (*working.get(up, ()), cluster.node_names[i])
    notes = (
        f"ranks on {','.join(compress_hostlist(on))} may see devices {','.join(map(str, up))} alone"
        for up, on in working.items()
    )
    part = replace(
        cluster,
        tiers=tuple(tiers),
        node_names=names,
        hostlist=tuple(compress_hostlist(names)),
        working=tuple(working.items()),
        notes=(*cluster.notes, note, *notes),
    )
    return part, left.nodes
