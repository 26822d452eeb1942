"""What was found in foreign files, with the device's own facts, as the tiers of topo.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyzers.backends import Fact, Link, Links, load_backend, load_links
from analyzers.errors import InputError
from strategies.cluster.graph import Levels, levels_of
from strategies.cluster.hostlist import compress_hostlist
from strategies.cluster.importers.found import Found, NodeInside
from strategies.cluster.model import DEFAULT_EFFICIENCY, DEFAULT_LATENCY_US
from strategies.cluster.uniform import largest_uniform

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
    notes = [note for f in founds for note in f.notes]
    per_node = _devices_per_node(path, founds, inside, links, devices_per_node)
    if inside is not None:
        _check_device(inside_path, inside, device)
    levels = _levels(path, trees, nodes, under)
    tiers = [_node_tier(inside_path, per_node, inside, links, node_gbps)]
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
            fabric = dict(tiers[0]["fabric"])
        else:
            fabric = _network(path, inside, links, network_gbps, per_node)
        tiers.append({"name": name, "size": size, "fabric": fabric})
    return Assembled(
        tiers=tiers, hostlist=tuple(compress_hostlist(names)), notes=tuple(dict.fromkeys(notes))
    )


def _one_domain(links: Links | None, devices: int) -> bool:
    return links is not None and links.devices_per_node < devices <= links.domain


def _levels(
    path: Path, trees: list[Found], nodes: Sequence[str], under: str | None
) -> Levels | None:
    if trees and nodes:
        fault = "names the nodes already"
        raise InputError(trees[0].path, fault=fault, fix="leave --nodes out")
    if trees:
        assert trees[0].tree is not None
        return levels_of(trees[0].tree, trees[0].path, under=under)
    if under is not None:
        raise InputError(path, fault="has no tree of switches", fix="leave --under out")
    if len(nodes) < 2:
        return None
    return Levels(
        nodes=tuple(nodes), names=("cluster",), scale_up=(False,), parents=((0,) * len(nodes),)
    )


def _devices_per_node(
    path: Path,
    founds: Sequence[Found],
    inside: NodeInside | None,
    links: Links | None,
    asked: int | None,
) -> int:
    said = (
        inside.devices
        if inside
        else next((f.devices_per_node for f in founds if f.devices_per_node), None)
    )
    if said is not None and asked is not None and said != asked:
        fault = f"has {said} devices in a node, {asked} were asked for"
        raise InputError(path, fault=fault, fix="leave one of the two out")
    found = said or asked or (links.devices_per_node if links else None)
    if found is None:
        fault = "does not say how many devices a node has"
        raise InputError(path, fault=fault, fix="give --devices-per-node")
    return found


def _check_device(path: Path, inside: NodeInside, device: str) -> None:
    triton = load_backend(device).triton
    known = triton.arch if triton is not None else None
    if inside.arch is not None and isinstance(known, int) and known != inside.arch:
        fault = f"is of GPUs of sm {inside.arch}, a {device} is sm {known}"
        raise InputError(path, fault=fault, fix="give their --device")


def _node_tier(
    path: Path,
    devices: int,
    inside: NodeInside | None,
    links: Links | None,
    gbps: float | None,
) -> dict[str, Any]:
    link = links.scale_up if links else None
    fabric = _fabric(inside.kind if inside else link.kind if link else "switch", link)
    origins, source = fabric["origin"], [fabric.pop("source", "")]
    one = link.link_gbps.value if link and link.link_gbps else None
    if gbps is not None:
        fabric["bw_gbps"], origins["bw_gbps"] = gbps, "spec"
        source[0] = "given on the command line"
    elif inside and inside.links and one:
        source = [f"{inside.links} links of {one:g} GB/s in {path.name}"]
        total = inside.links * one
        limit = link.gbps.value if link else total
        # A pair's links, for every other device, or the links of a device into a switch.
        if inside.kind == "fullmesh" or (
            devices > 2 and inside.links * (devices - 1) * one <= limit
        ):
            fabric["kind"], fabric["link_gbps"] = "fullmesh", total
            total *= devices - 1
        fabric["bw_gbps"], origins["bw_gbps"] = total, "spec"
    elif inside and inside.gbps:
        fabric["bw_gbps"], origins["bw_gbps"] = round(inside.gbps, 3), "spec"
        source = [f"PCIe link in {path.name}"]
    elif inside is None and link is not None:
        if link.kind == "fullmesh" and one:
            fabric["link_gbps"] = one
    elif devices > 1:
        fault = "does not carry the bandwidth between the devices of a node"
        raise InputError(path, fault=fault, fix="give --node-gbps, GB/s of one device one way")
    else:
        fabric["bw_gbps"] = link.gbps.value if link else 1.0
    if inside and fabric["kind"] != "fullmesh":
        fabric.pop("link_gbps", None)
    fabric["source"] = source[0]
    return {"name": "node", "size": devices, "fabric": fabric}


def _network(
    path: Path,
    inside: NodeInside | None,
    links: Links | None,
    gbps: float | None,
    per_node: int,
) -> dict[str, Any]:
    """Between nodes: the NICs of the file, shared by the node's devices, or the usual ones."""
    link = links.scale_out if links else None
    fabric = _fabric("clos", link)
    origins = fabric["origin"]
    if inside and inside.nics > 1:
        fabric["rails"] = inside.nics
    if gbps is not None:
        fabric["bw_gbps"], origins["bw_gbps"] = gbps, "spec"
        fabric["source"] = "given on the command line"
    elif inside and inside.nic_gbps:
        fabric["bw_gbps"] = round(inside.nics * inside.nic_gbps / per_node, 3)
        origins["bw_gbps"] = "spec"
        fabric["source"] = f"{inside.nics} NICs of {inside.nic_gbps:g} GB/s for {per_node} devices"
    elif link is None:
        fault = "does not carry the bandwidth between nodes"
        raise InputError(path, fault=fault, fix="give --network-gbps, GB/s of one device one way")
    return fabric


def _fabric(kind: str, link: Link | None) -> dict[str, Any]:
    """Of the usual machine, with the origin of each number."""
    if link is None:
        return {
            "kind": kind,
            "bw_gbps": None,
            "latency_us": DEFAULT_LATENCY_US,
            "efficiency": DEFAULT_EFFICIENCY,
            "origin": {"bw_gbps": "default", "latency_us": "default", "efficiency": "default"},
        }
    facts: dict[str, Fact] = {
        "bw_gbps": link.gbps,
        "latency_us": link.latency_us,
        "efficiency": link.efficiency,
    }
    return {
        "kind": kind,
        **{name: fact.value for name, fact in facts.items()},
        "origin": {n: "note" if f.origin == "uncertain" else f.origin for n, f in facts.items()},
        "source": link.gbps.source,
    }


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
