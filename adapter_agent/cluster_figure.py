"""A drawing of a cluster: tiers from the whole at the top down to devices, as inline SVG."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from adapter_agent.figures import WIDTH
from analyzers.documents import write_text
from analyzers.errors import InputError

if TYPE_CHECKING:
    import networkx as nx

    from strategies.cluster import Cluster

DRAWN = 260
"""Vertices; beyond them equal siblings are drawn once with their number."""
BAND, TOP, LETTER = 96, 44, 6.6
STYLE = """
svg { background: #fbfbfa; font: 12px system-ui, sans-serif } text { fill: #1d1d1b }
.soft { fill: #62625e } .edge { stroke: #a3a39d; fill: none }
.c0 { fill: #2a78d6 } .c1 { fill: #1baf7a } .c2 { fill: #eda100 }
.c3 { fill: #4a3aa7 } .c4 { fill: #e34948 }
"""


def write_figure(cluster: Cluster, path: Path) -> Path:
    """Raises InputError for another ending than .html or .svg, and where nothing can be written."""
    drawing = cluster_figure(cluster)
    if path.suffix == ".svg":
        start = drawing.index(">") + 1
        styled = f"{drawing[:start]}<style>{STYLE}</style>{drawing[start:]}\n"
        return write_text(
            path, styled.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        )
    if path.suffix != ".html":
        fix = "name a file that ends in .html or .svg"
        raise InputError(path, field="--figure", fault="is no kind of drawing", fix=fix)
    from adapter_agent.report import render

    facts = {"cluster": cluster, "drawing": drawing}
    return write_text(path, render("cluster.html.j2", facts))


def cluster_figure(cluster: Cluster) -> str:
    """Lines are as wide as the links are fast; what is slowed or folded says so on hover."""
    from strategies.cluster.graph import build_graph

    graph = build_graph(cluster, limit=DRAWN)
    places = _places(graph)
    fastest = max(t.fabric.bw_gbps for t in cluster.tiers)
    parts = []
    for a, b, gbps in graph.edges(data="gbps"):
        (x0, y0), (x1, y1) = places[a], places[b]
        width = 0.5 + 1.5 * gbps / fastest
        bend = (y0 + y1) / 2
        parts.append(
            f'<path class="edge" stroke-width="{width:.2f}" '
            f'd="M{x0:.1f},{y0:.1f} C{x0:.1f},{bend:.1f} {x1:.1f},{bend:.1f} {x1:.1f},{y1:.1f}"/>'
        )
    room = _room(graph, places)
    for vertex, (x, y) in places.items():
        parts.append(_mark(cluster, graph, vertex, x, y, room[y]))
    for i, tier in enumerate(reversed(cluster.tiers)):
        text = f"{tier.name}: {tier.devices} devices, {tier.fabric}"
        parts.append(_text(4, TOP + i * BAND - 26, text, 'class="soft"'))
    height = TOP + len(cluster.tiers) * BAND + 24
    label = escape(f"{cluster.name}: {cluster.world_size} devices in {len(cluster.tiers)} tiers")
    size = f'viewBox="0 0 {WIDTH} {height}"'
    return f'<svg {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _places(graph: nx.DiGraph) -> dict[str, tuple[float, float]]:
    """Leaves side by side, every other vertex above the middle of its children."""
    root = next(v for v, n in graph.in_degree() if n == 0)
    leaves = sum(1 for _, n in graph.out_degree() if n == 0)
    step, used = WIDTH / leaves, 0
    places: dict[str, tuple[float, float]] = {}

    def place(vertex: str, depth: int) -> float:
        nonlocal used
        children = [place(c, depth + 1) for c in graph.successors(vertex)]
        if not children:
            used += 1
        x = sum(children) / len(children) if children else (used - 0.5) * step
        places[vertex] = (x, TOP + depth * BAND)
        return x

    place(root, 0)
    return places


def _room(graph: nx.DiGraph, places: dict[str, tuple[float, float]]) -> dict[float, float]:
    """Pixels between neighbours of each row."""
    rows: dict[float, list[float]] = {}
    for x, y in places.values():
        rows.setdefault(y, []).append(x)
    return {
        y: min((b - a for a, b in zip(sorted(xs), sorted(xs)[1:], strict=False)), default=WIDTH)
        for y, xs in rows.items()
    }


def _mark(cluster: Cluster, graph: nx.DiGraph, vertex: str, x: float, y: float, room: float) -> str:
    facts = graph.nodes[vertex]
    names = [t.name for t in cluster.tiers]
    colour = names.index(facts["tier"]) + 1 if facts["tier"] in names else 0
    folded = facts["count"] > 1
    text = f"{facts['count']} x {facts['tier']}" if folded else facts["label"]
    name = f"x{facts['count']}" if folded else text
    side = min(14.0, max(2.0, room - 1))
    title = f"{text}: {facts['devices']} devices" if facts["devices"] > 1 else text
    mark = (
        f'<rect class="c{colour % 5}" x="{x - side / 2:.2f}" y="{y - side / 2:.2f}" '
        f'width="{side:.2f}" height="{side:.2f}" rx="2"><title>{escape(title)}</title></rect>'
    )
    if len(name) * LETTER < room and graph.in_degree(vertex):
        mark += _text(x, y + 22, name, 'text-anchor="middle"')
    return mark


def _text(x: float, y: float, text: str, attributes: str) -> str:
    """Text with the background around its letters, so that lines do not cross them."""
    halo = 'stroke="var(--card, #fbfbfa)" stroke-width="4" paint-order="stroke"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {halo} {attributes}>{escape(text)}</text>'
