"""topo.yaml -> Cluster: what the file's numbers mean together."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from analyzers.backends import Backend, Fact, backend_names, load_backend, nearest_backend
from analyzers.documents import write_text
from analyzers.errors import InputError
from strategies.cluster.hostlist import expand_hostlist
from strategies.cluster.model import (
    DEFAULT_EFFICIENCY,
    DEFAULT_LATENCY_US,
    MAX_DEVICES,
    Cluster,
    Curve,
    Fabric,
    Host,
    Tier,
    UnifiedMemory,
)
from strategies.cluster.overrides import apply_overrides

if TYPE_CHECKING:
    from strategies.cluster.reading import YamlFile
    from strategies.cluster.schema import (
        DeviceOverridesEntry,
        FabricEntry,
        MeasuredEntry,
        TierEntry,
        TopologyFile,
    )

MAX_FILE_BYTES = 256 * 1024
"""A description of 100,000 devices by tiers is a few kilobytes; more is not a topology."""


def load_cluster(path: str | Path) -> Cluster:
    """Reads a topology file.

    Raises InputError that names the file, the line, the key path, the fault and the fix.
    """
    return _cluster(*_read(Path(path)))


def copy_topology(source: Path, target: Path) -> Path:
    """Copies a topology file so that it stands alone: what it imports is written out in it.

    Raises InputError as `load_cluster`, and where `target` cannot be written.
    """
    yaml, file = _read(source)
    if not file.imports:
        return write_text(target, source.read_text(encoding="utf-8"))
    from strategies.cluster.importers import fill_in
    from strategies.cluster.writing import write_topology

    tiers, hostlist, notes = fill_in(yaml, file, _device(yaml, file))
    data = {key: value for key, value in yaml.data.items() if key != "import"}
    data["tiers"] = [t.model_dump(exclude_none=True) for t in tiers]
    if hostlist:
        data["nodes"] = {"names": list(hostlist)}
    return write_topology(data, target, notes)


def _read(path: Path) -> tuple[YamlFile, TopologyFile]:
    from strategies.cluster.reading import read_yaml
    from strategies.cluster.schema import TopologyFile

    missing = "give --cluster the path of a topology file, e.g. one of examples/clusters/"
    larger = "describe tiers by size instead of every device"
    yaml = read_yaml(path, MAX_FILE_BYTES, missing=missing, larger=larger)
    if yaml.data is None:
        fix = "describe the cluster: version, name, device, tiers"
        raise InputError(path, fault="is empty", fix=fix)
    if not isinstance(yaml.data, dict):
        fault = f"must be a mapping of keys, found a {type(yaml.data).__name__}"
        raise InputError(path, fault=fault, fix="start with 'version: 1'")
    return yaml, yaml.checked(TopologyFile)


def _cluster(yaml: YamlFile, file: TopologyFile) -> Cluster:
    device = _device(yaml, file)
    entries, hostlist, notes = list(file.tiers or ()), _hostlist(file), ()
    if file.imports:
        from strategies.cluster.importers import fill_in

        entries, hostlist, notes = fill_in(yaml, file, device)
    if not entries:
        fix = "describe the tiers, closest first, or import them"
        raise yaml.error(("tiers",), fault="is missing", fix=fix)
    tiers = _tiers(yaml, entries)
    names = _node_names(yaml, hostlist, tiers[-1].devices // tiers[0].devices)
    host = file.host
    cluster = Cluster(
        name=file.name,
        device=device,
        tiers=tiers,
        measured=_curves(yaml, file.measured, tiers),
        node_names=names,
        hostlist=hostlist,
        host=Host(**host.model_dump()) if host else None,
        notes=notes,
    )
    return apply_overrides(yaml, file.overrides, cluster)


def _tiers(yaml: YamlFile, entries: list[TierEntry]) -> tuple[Tier, ...]:
    tiers: list[Tier] = []
    devices = 1
    for i, entry in enumerate(entries):
        if entry.name in [t.name for t in tiers]:
            fault, fix = f"'{entry.name}' is there twice", "give each tier its own name"
            raise yaml.error(("tiers", i, "name"), fault=fault, fix=fix)
        devices *= entry.size
        if devices > MAX_DEVICES:
            fault = f"makes {devices:,} devices; at most {MAX_DEVICES:,} are planned for"
            raise yaml.error(("tiers", i, "size"), fault=fault, fix="lower the sizes")
        pool = entry.unified_memory
        tiers.append(
            Tier(
                name=entry.name,
                size=entry.size,
                devices=devices,
                fabric=_fabric(yaml, i, entry),
                unified_memory=UnifiedMemory(**pool.model_dump()) if pool else None,
            )
        )
    return tuple(tiers)


def _fabric(yaml: YamlFile, tier: int, entry: TierEntry) -> Fabric:
    given = entry.fabric
    if given.link_gbps is not None and given.kind != "fullmesh":
        fault = f"only a fullmesh has direct links, this fabric is a {given.kind}"
        field = ("tiers", tier, "fabric", "link_gbps")
        raise yaml.error(field, fault=fault, fix="remove it or set kind: fullmesh")
    if given.link_gbps is not None and given.link_gbps > given.bw_gbps:
        fault = f"one link of {given.link_gbps:g} GB/s is more than the {given.bw_gbps:g} of all"
        field = ("tiers", tier, "fabric", "link_gbps")
        raise yaml.error(field, fault=fault, fix="bw_gbps is the sum of a device's links")
    origins = _origins(given)
    return Fabric(
        kind=given.kind,
        bw_gbps=given.bw_gbps,
        latency_us=DEFAULT_LATENCY_US if given.latency_us is None else given.latency_us,
        efficiency=DEFAULT_EFFICIENCY if given.efficiency is None else given.efficiency,
        oversubscription=given.oversubscription,
        rails=given.rails,
        link_gbps=given.link_gbps,
        multicast=given.multicast,
        origin=_summary(origins),
        origins=origins,
        source=given.source or "",
    )


def _origins(given: FabricEntry) -> dict[str, str]:
    origins: dict[str, str] = {}
    for name in ("bw_gbps", "latency_us", "efficiency"):
        if getattr(given, name) is None:
            origins[name] = "default"
        elif isinstance(given.origin, dict):
            origins[name] = given.origin.get(name, "spec")
        else:
            origins[name] = given.origin or "spec"
    return origins


def _summary(origins: dict[str, str]):
    found = set(origins.values())
    if "default" in found:
        return "default"
    return "measured" if found == {"measured"} else "spec"


def _device(yaml: YamlFile, file: TopologyFile) -> Backend:
    if file.device not in backend_names():
        fault, fix = f"'{file.device}' is not a known backend", nearest_backend(file.device)
        raise yaml.error(("device",), fault=fault, fix=fix)
    device = load_backend(file.device)
    if file.device_overrides is None:
        return device
    device = _overridden(device, file.device_overrides, yaml.path)
    if device.reserved_gib.value >= device.memory_gib.value:
        fault = (
            f"{device.reserved_gib.value:g} GiB reserved of {device.memory_gib.value:g} GiB "
            "leaves nothing"
        )
        raise yaml.error(("device_overrides", "reserved_gib"), fault=fault, fix="lower it")
    return device


def _overridden(device: Backend, given: DeviceOverridesEntry, path: Path) -> Backend:
    source = given.source or f"device_overrides of {path.name}"

    def fact(value: float) -> Fact:
        return Fact(value=value, origin=given.origin, source=source)

    changes: dict = {
        key: fact(value)
        for key, value in given.model_dump(exclude={"matmul_tflops", "origin", "source"}).items()
        if value is not None
    }
    if given.matmul_tflops:
        rates = {dtype: fact(value) for dtype, value in given.matmul_tflops.items()}
        changes["matmul_tflops"] = {**device.matmul_tflops, **rates}
    return replace(device, **changes)


def _curves(
    yaml: YamlFile, entries: list[MeasuredEntry], tiers: tuple[Tier, ...]
) -> tuple[Curve, ...]:
    found: list[Curve] = []
    for i, entry in enumerate(entries):
        curve = _curve(yaml, i, entry, tiers)
        key = (curve.within, curve.op, curve.devices)
        if key in [(c.within, c.op, c.devices) for c in found]:
            fault = f"{entry.op} of these devices within '{entry.within}' is there twice"
            raise yaml.error(("measured", i), fault=fault, fix="keep one of the two")
        found.append(curve)
    return tuple(found)


def _curve(yaml: YamlFile, index: int, entry: MeasuredEntry, tiers: tuple[Tier, ...]) -> Curve:
    def refuse(key: str, fault: str, fix: str) -> InputError:
        return yaml.error(("measured", index, key), fault=fault, fix=fix)

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
        tokens=entry.tokens,
    )


def _hostlist(file: TopologyFile) -> tuple[str, ...]:
    return tuple(file.nodes.names) if file.nodes else ()


def _node_names(yaml: YamlFile, hostlist: tuple[str, ...], nodes: int) -> tuple[str, ...]:
    names: list[str] = []
    for i, pattern in enumerate(hostlist):
        try:
            names += expand_hostlist(pattern)
        except ValueError as e:
            fix = "write e.g. gpu[01-16]"
            raise yaml.error(("nodes", "names", i), fault=str(e), fix=fix) from e
        if len(names) > MAX_DEVICES:
            fault = f"name more than {MAX_DEVICES:,} nodes"
            raise yaml.error(("nodes", "names"), fault=fault, fix="shorten the hostlist")
    if not names:
        return ()
    if len(set(names)) != len(names):
        seen: set[str] = set()
        twice = next(n for n in names if n in seen or seen.add(n))
        fault = f"node '{twice}' is there twice"
        raise yaml.error(("nodes", "names"), fault=fault, fix="name each node once")
    if len(names) != nodes:
        fault = f"names {len(names)} nodes, the tiers make {nodes}"
        fix = "correct the hostlist or the tier sizes (the first tier is one node)"
        raise yaml.error(("nodes", "names"), fault=fault, fix=fix)
    return tuple(names)
