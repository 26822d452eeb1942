"""The cluster as a graph: trees of switches that importers find, and pictures of loaded clusters.

Edges run from a switch to what hangs on it. Costs never look at a graph: they need the tiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from analyzers.errors import InputError
from strategies.cluster.model import Cluster

MAX_SHOWN = 400
"""Vertices of a picture; beyond them equal siblings are drawn once."""
LEVEL_NAMES = ("leaf", "spine", "core")
"""Of switches, by their distance from the nodes, where a file does not name its levels."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """A tree of equal depth as arrays, closest level first."""

    nodes: tuple[str, ...]
    names: tuple[str, ...]
    """Of the levels above the nodes."""
    scale_up: tuple[bool, ...]
    """Levels that the file itself calls a fabric of accelerators."""
    parents: tuple[tuple[int, ...], ...]
    """`parents[t][j]` is the domain of level t + 1 that holds domain j of level t."""


def levels_of(tree: nx.DiGraph, path: Path, *, under: str | None = None) -> Levels:
    """The levels of a tree of switches whose leaves are nodes.

    Vertices may carry `level`, the name of their level, and `name`, theirs in the file. Levels on
    which every switch has one child say nothing and are left out. Raises InputError where the graph
    is not one tree of equal depth: it names the part that does not fit and how to import the rest
    (`under`, one switch).
    """
    if under is not None:
        tree = _part(tree, path, under)
    root = _root(tree, path)
    order = list(nx.dfs_preorder_nodes(tree, root))
    depths = nx.single_source_shortest_path_length(tree, root)
    nodes = [v for v in order if tree.out_degree(v) == 0]
    deepest = max(nodes, key=lambda v: depths[v])
    uneven = next((v for v in nodes if depths[v] != depths[deepest]), None)
    if uneven is not None:
        fault = (
            f"is not one tree of equal depth: '{uneven}' is {depths[uneven]} below '{root}', "
            f"'{deepest}' {depths[deepest]}"
        )
        raise InputError(path, fault=fault, fix="import one part with --under SWITCH")
    below, names, scale_up, parents = nodes, [], [], []
    for height in range(1, depths[deepest] + 1):
        level = [v for v in order if depths[v] == depths[deepest] - height]
        if len(level) == len(below):
            below = level
            continue
        index = {v: i for i, v in enumerate(level)}
        parents.append(tuple(index[next(tree.predecessors(v))] for v in below))
        given = {tree.nodes[v].get("level") for v in level}
        names.append(given.pop() if len(given) == 1 else None)
        scale_up.append(all(tree.nodes[v].get("scale_up") for v in level))
        below = level
    named = [n or _level_name(i, len(names)) for i, n in enumerate(names)]
    return Levels(
        nodes=tuple(nodes), names=tuple(named), scale_up=tuple(scale_up), parents=tuple(parents)
    )


def _part(tree: nx.DiGraph, path: Path, under: str) -> nx.DiGraph:
    """What hangs on the switch of that name."""
    names = {facts.get("name", v): v for v, facts in tree.nodes(data=True) if tree.out_degree(v)}
    if under not in names:
        some = ", ".join(list(names)[:8])
        raise InputError(path, fault=f"has no switch '{under}'", fix=f"some: {some}")
    kept = {names[under], *nx.descendants(tree, names[under])}
    part = nx.DiGraph()  # in the file's order, which nx.subgraph does not keep
    part.add_nodes_from((v, facts) for v, facts in tree.nodes(data=True) if v in kept)
    part.add_edges_from((a, b) for a, b in tree.edges if a in kept)
    return part


def _level_name(level: int, count: int) -> str:
    if count == 1:
        return "cluster"
    return LEVEL_NAMES[level] if level < len(LEVEL_NAMES) else f"level-{level + 1}"


def _root(tree: nx.DiGraph, path: Path) -> str:
    """The one root. Raises InputError for a cycle, two parents, or several trees."""
    if tree.number_of_nodes() == 0:
        raise InputError(path, fault="names no node", fix="give a file with nodes in it")
    twice = next((v for v, n in tree.in_degree() if n > 1), None)
    if twice is not None:
        above = " and ".join(f"'{p}'" for p in sorted(tree.predecessors(twice)))
        fault = f"is no tree: '{twice}' hangs on {above}"
        fix = "import one part with --under SWITCH, or describe the tiers by hand"
        raise InputError(path, fault=fault, fix=fix)
    if not nx.is_directed_acyclic_graph(tree):
        around = " -> ".join(a for a, *_ in nx.find_cycle(tree))
        raise InputError(path, fault=f"goes in a circle: {around}", fix="mend the parents")
    roots = [v for v, n in tree.in_degree() if n == 0]
    if len(roots) > 1:
        shown = ", ".join(f"'{r}'" for r in roots[:6]) + (" ..." if len(roots) > 6 else "")
        fault = f"is {len(roots)} separate trees, from {shown}"
        raise InputError(path, fault=fault, fix="import one of them with --under SWITCH")
    return roots[0]


def prune_empty(tree: nx.DiGraph, nodes: Iterable[str]) -> list[str]:
    """Removes switches without nodes below them, and gives their names."""
    kept, removed = set(nodes), []
    while empty := [v for v, n in tree.out_degree() if n == 0 and v not in kept]:
        removed += empty
        tree.remove_nodes_from(empty)
    return removed


def merge_planes(tree: nx.DiGraph) -> list[str]:
    """Removes switches with the same children as an earlier one, and gives their names.

    They are planes of one Clos: the tier's rate counts them all.
    """
    first: dict[frozenset[str], str] = {}
    same = []
    for switch in tree:
        if children := frozenset(tree.successors(switch)):
            if children in first:
                same.append(switch)
            else:
                first[children] = switch
    tree.remove_nodes_from(same)
    return same


def build_graph(cluster: Cluster, *, limit: int = MAX_SHOWN) -> nx.DiGraph:
    """The cluster as a tree: tiers as switches, devices as leaves.

    Vertices carry `tier` (name, or `device`), `label`, `count` (equal siblings that the vertex
    stands for) and `devices`. Above `limit` vertices the children of the inner tiers are drawn once
    with their count, so that a cluster of any size gives a small graph.
    """
    sizes = [t.size for t in cluster.tiers]
    folded: set[int] = set()
    for tier in range(len(sizes)):
        if _vertices(sizes, folded) <= limit:
            break
        folded.add(tier)
    graph = nx.DiGraph()

    def add(parent: str | None, tier: int, first: int, count: int) -> None:
        kind = cluster.tiers[tier].name if tier >= 0 else "device"
        devices = cluster.tiers[tier].devices if tier >= 0 else 1
        name = f"{kind}:{first}"
        label = _label(cluster, tier, first)
        graph.add_node(name, tier=kind, label=label, count=count, devices=devices)
        if parent is not None:
            graph.add_edge(parent, name, gbps=cluster.tiers[tier + 1].fabric.bw_gbps)
        if tier < 0:
            return
        inner = cluster.tiers[tier - 1].devices if tier else 1
        if tier in folded:
            add(name, tier - 1, first, sizes[tier])
            return
        for child in range(sizes[tier]):
            add(name, tier - 1, first + child * inner, 1)

    add(None, len(sizes) - 1, 0, 1)
    return graph


def _vertices(sizes: list[int], folded: set[int]) -> int:
    total = count = 1
    for i in range(len(sizes) - 1, -1, -1):
        count *= 1 if i in folded else sizes[i]
        total += count
    return total


def _label(cluster: Cluster, tier: int, first: int) -> str:
    if tier < 0:
        return f"{cluster.device.name} {first}"
    if tier == 0 and cluster.node_names:
        return cluster.node_names[first // cluster.devices_per_node]
    return f"{cluster.tiers[tier].name} {first // cluster.tiers[tier].devices}"
