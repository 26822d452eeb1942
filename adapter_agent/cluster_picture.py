"""A cluster on the terminal: its tree, and its numbers with their origins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    import networkx as nx

    from strategies.cluster import Cluster, Tier

ROWS_OF_TREE = 24
"""Vertices of the tree on the terminal; equal siblings are folded until it is that small."""
MIB = 2**20


def picture_of_cluster(cluster: Cluster) -> RenderableType:
    d = cluster.device
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    head = Text.assemble(
        (f"{cluster.name}: {cluster.world_size} x {d.title}\n", "bold"),
        f"{nodes} of {cluster.devices_per_node}, backend {d.name} ({d.status})",
    )
    notes = [Text(f"note: {note}") for note in cluster.notes]
    parts = [head, *notes, _tree(cluster), _numbers(cluster)]
    return Group(*parts, _curves(cluster)) if cluster.measured else Group(*parts)


def _tree(cluster: Cluster) -> Tree:
    from strategies.cluster.graph import build_graph

    graph = build_graph(cluster, limit=ROWS_OF_TREE)
    root = next(v for v, n in graph.in_degree() if n == 0)

    def grow(vertex: str, at: Tree) -> Tree:
        for child in graph.successors(vertex):
            grow(child, at.add(Text(_vertex(graph, child))))
        return at

    return grow(root, Tree(Text(f"{cluster.name} ({graph.nodes[root]['tier']})")))


def _vertex(graph: nx.DiGraph, vertex: str) -> str:
    facts = graph.nodes[vertex]
    times = f"{facts['count']} x " if facts["count"] > 1 else ""
    inside = f", {facts['devices']} devices" if facts["devices"] > 1 else ""
    label = facts["tier"] if facts["count"] > 1 else facts["label"]
    return f"{times}{label}{inside}"


def _numbers(cluster: Cluster) -> Table:
    columns = ("", ">value", "unit", "origin", "source")
    table = _table("Numbers of one device, one direction", *columns)
    for row in (*_device_rows(cluster), *_host_rows(cluster)):
        table.add_row(*row)
    for tier in cluster.tiers:
        for row in _tier_rows(tier):
            table.add_row(*row)
    return table


def _device_rows(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    d = cluster.device
    facts = {
        ("memory", "GiB"): d.memory_gib,
        ("reserved", "GiB"): d.reserved_gib,
        ("copy, read plus written", "GB/s"): d.memory_gbps,
        **{(f"products in {t}", "TFLOPS"): f for t, f in d.matmul_tflops.items()},
        ("launch", "us"): d.launch_overhead_us,
    }
    for (name, unit), fact in facts.items():
        yield name, _value(fact.value), unit, fact.origin, fact.source


def _host_rows(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    host = cluster.host
    if host is not None:
        share, whole = _value(cluster.host_bytes / 2**30), f"{host.mem_gib:g} GiB a {host.share}"
        yield "host memory of a device", share, "GiB", host.origin, whole
        yield "copy to the host", _value(host.d2h_gbps), "GB/s", host.origin, host.source


def _tier_rows(tier: Tier) -> Iterator[tuple[str, ...]]:
    f = tier.fabric
    kind = [f.kind, *([f"{f.rails} rails"] if f.rails else [])]
    kind += ["multicast"] if f.multicast else []
    kind += [f"links of {f.link_gbps:g} GB/s"] if f.link_gbps else []
    yield f"{tier.name}, {tier.devices} devices", "", "", "", ", ".join(kind)
    yield "  link", _value(f.bw_gbps), "GB/s", f.origin_of("bw_gbps"), f.source
    yield "  latency", _value(f.latency_us), "us", f.origin_of("latency_us"), ""
    yield "  reached", f"{f.efficiency:.0%}", "", f.origin_of("efficiency"), ""
    if f.oversubscription > 1:
        yield "  oversubscribed", f"{f.oversubscription:g}", "times", "spec", ""
    if f.scale < 1:
        yield "  slowed to", f"{f.scale:.0%}", "", "spec", "a degraded part"
    rate = f.rate(tier.size) / 1e9
    yield "  rate of a collective", _value(rate), "GB/s", f.origin, "derived"
    pool = tier.unified_memory
    if pool is not None:
        yield (
            "  pooled memory",
            _value(pool.pool_gib),
            "GiB",
            "spec",
            f"at {pool.bw_gbps:g} GB/s a device",
        )


def _value(value: float) -> str:
    """Four significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 1e4 else f"{value:.4g}"


def _curves(cluster: Cluster) -> Table:
    table = _table(
        "Measured collectives, which win over the rates", "", "tier", "devices", "from", "to"
    )
    for c in cluster.measured:
        devices = f"{c.devices[0]}" if len(c.devices) == 1 else f"{c.devices[0]} to {c.devices[-1]}"
        if c.seconds:
            ends = (
                f"{s * 1e3:.4g} ms for {b / MIB:g} MiB"
                for b, s in ((c.bytes[0], c.seconds[0]), (c.bytes[-1], c.seconds[-1]))
            )
        else:
            ends = (f"{r / 1e9:.4g} GB/s" for r in (c.rates[0], c.rates[-1]))
        table.add_row(c.op, cluster.tiers[c.within].name, devices, *ends)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    return table
