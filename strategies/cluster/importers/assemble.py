"""What was found in foreign files, with the device's own facts, as the tiers of topo.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyzers.backends import Link, Links, load_backend, load_links
from analyzers.errors import InputError
from strategies.cluster.graph import Levels, levels_of
from strategies.cluster.hostlist import compress_hostlist
from strategies.cluster.importers.found import Found, NodeInside
from strategies.cluster.model import DEFAULT_EFFICIENCY, DEFAULT_LATENCY_US
from strategies.cluster.uniform import largest_uniform

MAX_GBPS = 1_000_000
GIVEN = "given on the command line"
MIN_USED = 0.5
"""Share of the nodes that the even part of an uneven tree must hold to be worth planning."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    tiers: list[dict[str, Any]]
    """As topo.yaml has them."""
    hostlist: tuple[str, ...]
    """Empty where no file names nodes."""
    notes: tuple[str, ...]


def assemble(
    founds: Sequence[Found],
    *,
    device: str,
    devices_per_node: int | None = None,
    node_gbps: float | None = None,
    network_gbps: float | None = None,
    nodes: Sequence[str] = (),
    under: str | None = None,
    scale_up: Sequence[str] = (),
) -> Assembled:
    """Tiers from at most one tree of switches and one description of a node's inside.

    What no file says (rates, latencies, devices of a node) is the device's usual machine, with its
    origin. `nodes` are names under one switch, where no file has a tree. Levels named in `scale_up`
    are joined by the devices' own fabric, as are accelerator domains, and Slurm's blocks where that
    fabric leaves the node and is large enough. An uneven tree is cut to its largest even part,
    which the notes tell. Raises InputError that says what to add.
    """
    for option, asked in (("--node-gbps", node_gbps), ("--network-gbps", network_gbps)):
        if asked is not None and not 0 < asked <= MAX_GBPS:
            fix = f"give GB/s above 0 and at most {MAX_GBPS:,}"
            raise InputError(option, fault=f"{asked} is no rate", fix=fix)
    trees = [f for f in founds if f.tree is not None]
    insides = [f for f in founds if f.node is not None]
    for several in (trees, insides):
        if len(several) > 1:
            fault = f"says the same as {several[0].path}"
            raise InputError(several[1].path, fault=fault, fix="give one of the two")
    path = founds[0].path if founds else Path("import")
    inside = insides[0].node if insides else None
    inside_path = insides[0].path if insides else path
    links = load_links(device)
    up, out = (links.scale_up, links.scale_out) if links else (None, None)
    notes = [note for f in founds for note in f.notes]
    per_node = _devices_per_node(path, founds, links, devices_per_node)
    if inside is not None:
        _check_device(inside_path, inside, device)
    levels = _levels(path, trees, nodes, under)
    own = _fabric(_inside_rate(inside_path, per_node, inside, up, node_gbps), up)
    tiers: list[dict[str, Any]] = [{"name": "node", "size": per_node, "fabric": own}]
    if levels is None:
        return Assembled(tiers=tiers, hostlist=(), notes=tuple(notes))
    left = largest_uniform([per_node] * len(levels.nodes), levels.parents)
    assert left is not None
    used, all_nodes = len(left.nodes), len(levels.nodes)
    names = [levels.nodes[i] for i in left.nodes]
    if used < all_nodes:
        notes.append(_uneven(trees[0].path, left.sizes, names, levels))
    if unknown := [n for n in scale_up if n not in levels.names]:
        fix = f"one of: {', '.join(levels.names)}"
        raise InputError(path, fault=f"has no level '{unknown[0]}'", fix=fix)
    devices = per_node
    for name, own_fabric, size in zip(levels.names, levels.scale_up, left.sizes[1:], strict=True):
        devices *= size
        if size == 1:
            continue
        if own_fabric or name in scale_up or (name == "block" and _one_domain(links, devices)):
            fabric = dict(own)
        else:
            fabric = _fabric(_network_rate(path, per_node, inside, out, network_gbps), out)
        tiers.append({"name": name, "size": size, "fabric": fabric})
    return Assembled(
        tiers=tiers, hostlist=tuple(compress_hostlist(names)), notes=tuple(dict.fromkeys(notes))
    )


def _one_domain(links: Links | None, devices: int) -> bool:
    return links is not None and links.devices_per_node < devices <= links.domain


def _levels(
    path: Path, trees: list[Found], nodes: Sequence[str], under: str | None
) -> Levels | None:
    """Of the tree, or of `nodes` under one switch; None where nothing names nodes."""
    if trees and nodes:
        fault = "names the nodes already"
        raise InputError(trees[0].path, fault=fault, fix="leave --nodes out")
    if trees:
        assert trees[0].tree is not None
        return levels_of(trees[0].tree, trees[0].path, under=under)
    if under is not None:
        raise InputError(path, fault="has no tree of switches", fix="leave --under out")
    if not nodes:
        return None
    if len(nodes) == 1:
        return Levels(nodes=tuple(nodes), names=(), scale_up=(), parents=())
    return Levels(
        nodes=tuple(nodes), names=("cluster",), scale_up=(False,), parents=((0,) * len(nodes),)
    )


def _devices_per_node(
    path: Path, founds: Sequence[Found], links: Links | None, asked: int | None
) -> int:
    said = {f.path: f.devices_per_node or (f.node and f.node.devices) for f in founds}
    counts = {n for n in (*said.values(), asked) if n}
    if len(counts) > 1:
        shown = " and ".join(str(n) for n in sorted(counts))
        fault = f"a node has {shown} devices, by what was given"
        raise InputError(path, fault=fault, fix="give the files of one kind of node")
    found = next(iter(counts), None) or (links.devices_per_node if links else None)
    if found is None:
        fault = "does not say how many devices a node has"
        raise InputError(path, fault=fault, fix="give --devices-per-node")
    return found


def _check_device(path: Path, inside: NodeInside, device: str) -> None:
    triton = load_backend(device).triton
    known = triton.arch if triton is not None else None
    if inside.arch is not None and isinstance(known, int) and known != inside.arch:
        fault = f"its GPUs are sm {inside.arch}, those of {device} sm {known}"
        raise InputError(path, fault=fault, fix="give their --device")


@dataclass(frozen=True)
class _Rate:
    """What is known of the links of one device, GB/s in one direction."""

    kind: str
    gbps: float
    origin: str
    source: str
    link_gbps: float | None = None
    rails: int | None = None


def _inside_rate(
    path: Path, devices: int, inside: NodeInside | None, link: Link | None, asked: float | None
) -> _Rate:
    """Between the devices of a node: as asked, as counted in a file, or the usual links."""
    kind = inside.kind if inside else link.kind if link else "switch"
    one = link.link_gbps.value if link and link.link_gbps else None
    if asked is not None:
        return _Rate(kind, asked, "spec", GIVEN)
    if inside and inside.links and one and link:
        return _counted(path, devices, inside.kind, inside.links, one, link.gbps.value)
    if inside and inside.gbps:
        return _Rate(kind, round(inside.gbps, 3), "spec", f"PCIe link in {path.name}")
    if link is not None and (inside is None or devices == 1):
        mesh = one if link.kind == "fullmesh" else None
        return _Rate(link.kind, link.gbps.value, link.gbps.origin, link.gbps.source, mesh)
    fault = "does not carry the bandwidth between the devices of a node"
    raise InputError(path, fault=fault, fix="give --node-gbps, GB/s of one device one way")


def _counted(path: Path, devices: int, kind: str, links: int, one: float, most: float) -> _Rate:
    """From a number of links of `one` GB/s: those of a pair in a full mesh, else of a device.

    A matrix of equal counts is a full mesh where the links to all others are no more than a device
    has (`most`), and a switch otherwise.
    """
    counted = "1 link" if links == 1 else f"{links} links"
    source = f"{counted} of {one:g} GB/s in {path.name}"
    if kind == "fullmesh" or (devices > 2 and links * (devices - 1) * one <= most):
        return _Rate("fullmesh", links * one * (devices - 1), "spec", source, links * one)
    return _Rate(kind, links * one, "spec", source)


def _network_rate(
    path: Path, devices: int, inside: NodeInside | None, link: Link | None, asked: float | None
) -> _Rate:
    """Between nodes: the NICs of the file, shared by the node's devices, or the usual ones."""
    rails = inside.nics if inside and inside.nics > 1 else None
    if asked is not None:
        return _Rate("clos", asked, "spec", GIVEN, rails=rails)
    if inside and inside.nic_gbps:
        gbps = round(inside.nics * inside.nic_gbps / devices, 3)
        source = f"{inside.nics} NICs of {inside.nic_gbps:g} GB/s for {devices} devices"
        return _Rate("clos", gbps, "spec", source, rails=rails)
    if link is None:
        fault = "does not carry the bandwidth between nodes"
        raise InputError(path, fault=fault, fix="give --network-gbps, GB/s of one device one way")
    return _Rate(link.kind, link.gbps.value, link.gbps.origin, link.gbps.source, rails=rails)


def _fabric(rate: _Rate, link: Link | None) -> dict[str, Any]:
    """As topo.yaml has it: latency and efficiency are the usual ones, each with its origin."""
    latency, efficiency = DEFAULT_LATENCY_US, DEFAULT_EFFICIENCY
    origins = {"bw_gbps": rate.origin, "latency_us": "default", "efficiency": "default"}
    if link is not None:
        latency, efficiency = link.latency_us.value, link.efficiency.value
        origins |= {"latency_us": link.latency_us.origin, "efficiency": link.efficiency.origin}
    fabric: dict[str, Any] = {
        "kind": rate.kind,
        "bw_gbps": rate.gbps,
        "link_gbps": rate.link_gbps,
        "latency_us": latency,
        "efficiency": efficiency,
        "rails": rate.rails,
        "origin": {n: "note" if o == "uncertain" else o for n, o in origins.items()},
        "source": rate.source,
    }
    return {key: value for key, value in fabric.items() if value is not None}


def _uneven(path: Path, sizes: tuple[int, ...], used: list[str], levels: Levels) -> str:
    kept = set(used)
    idle = [n for n in levels.nodes if n not in kept]
    if len(used) < MIN_USED * len(levels.nodes):
        fault = (
            f"is too uneven: the largest part with equal domains holds {len(used)} of "
            f"{len(levels.nodes)} nodes"
        )
        raise InputError(path, fault=fault, fix="import one part with --under SWITCH")
    shape = " x ".join(str(s) for s in sizes[1:])
    shown = compress_hostlist(idle)
    return (
        f"the tree is uneven: {len(used)} of {len(levels.nodes)} nodes are used, as {shape}; "
        f"idle: {', '.join(shown[:8])}{' ...' if len(shown) > 8 else ''}"
    )
