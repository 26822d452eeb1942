"""The graph of a block as inline SVG: calls coloured by part, top to bottom, regions in boxes.

Regions are laid out as single nodes of the graph first, then their calls inside them, so that a box
never holds a call that is not of its region.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, get_args

from analyzers.schema import PartName

if TYPE_CHECKING:
    import networkx as nx

    from analyzers.schema import Graph, GraphNode

BOX_W, BOX_H = 136, 34
GAP_X, GAP_Y = 14, 22
PAD, TITLE = 12, 18  # of a region: around its calls, and for its name
ACROSS = 6
"""Most boxes in a row; a wider row is broken."""
LETTERS = 22
LEGEND = 150
PARTS: list[PartName] = [p for p in get_args(PartName) if p not in ("embedding", "head", "vision")]
"""Those of blocks."""


@dataclass
class _Box:
    """A rectangle; `inside` are the calls of a region, relative to its corner."""

    w: float
    h: float
    inside: dict[str, tuple[float, float]]


def block_figure(graph: Graph, *, label: str) -> str:
    """SVG; every call has a `<title>` with its operator, part and region."""
    flow = _flow(graph)
    boxes = {name: _box(flow, members) for name, members in _groups(graph).items()}
    kernels = _contracted(graph)
    corners, width, height = _place(kernels, {k: (b.w, b.h) for k, b in boxes.items()})
    nodes = {node.name: node for node in graph.nodes}
    at = {
        call: (corners[kernel][0] + x, corners[kernel][1] + y)
        for kernel, box in boxes.items()
        for call, (x, y) in box.inside.items()
    }
    present = {node.part for node in graph.nodes}
    # The same colour in every figure.
    colour = {part: f"c{i}" for i, part in enumerate(PARTS) if part in present}
    drawn = [_outline(corners[r.name], boxes[r.name], r.name) for r in graph.regions]
    drawn += [_edge(at[source], at[reader]) for source, reader in flow.edges]
    drawn += [_call(nodes[name], place, colour[nodes[name].part]) for name, place in at.items()]
    drawn.append(_legend(colour, height))
    width = max(width, len(colour) * LEGEND)
    return (
        f'<svg viewBox="-4 -4 {width + 8:.0f} {height + 40:.0f}" role="img" '
        f'aria-label="{escape(label)}" class="block">{"".join(drawn)}</svg>'
    )


# -------------------------------------------------------------------------------------- layout


def _flow(graph: Graph) -> nx.DiGraph[str]:
    import networkx as nx

    flow = nx.DiGraph()
    flow.add_nodes_from(node.name for node in graph.nodes)
    flow.add_edges_from((i, node.name) for node in graph.nodes for i in node.inputs)
    return flow


def _groups(graph: Graph) -> dict[str, list[str]]:
    """Calls by region; one outside every region is alone, under its own name."""
    groups: dict[str, list[str]] = {}
    for node in graph.nodes:
        groups.setdefault(node.region or node.name, []).append(node.name)
    return groups


def _contracted(graph: Graph) -> nx.DiGraph[str]:
    """The graph of regions and of the calls outside them."""
    import networkx as nx

    kernel = {node.name: node.region or node.name for node in graph.nodes}
    contracted = nx.DiGraph()
    contracted.add_nodes_from(kernel.values())
    edges = ((kernel[i], kernel[node.name]) for node in graph.nodes for i in node.inputs)
    contracted.add_edges_from((a, b) for a, b in edges if a != b)
    return contracted


def _box(flow: nx.DiGraph[str], members: list[str]) -> _Box:
    if len(members) == 1:
        return _Box(BOX_W, BOX_H, {members[0]: (0, 0)})
    corners, w, h = _place(flow.subgraph(members), dict.fromkeys(members, (BOX_W, BOX_H)))
    inside = {name: (x + PAD, y + PAD + TITLE) for name, (x, y) in corners.items()}
    return _Box(w + 2 * PAD, h + 2 * PAD + TITLE, inside)


def _place(
    graph: nx.DiGraph[str], sizes: Mapping[str, tuple[float, float]]
) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Top left corners in rows, every edge downwards; and the size of it all.

    In a row, nodes stand in the order of the middle of what they read.
    """
    rows = _rows(graph)
    middle: dict[str, float] = {}
    corners: dict[str, tuple[float, float]] = {}
    width = max(_row_width(row, sizes) for row in rows)
    y = 0.0
    for row in rows:
        row = sorted(row, key=lambda n: _mean(middle[p] for p in graph.predecessors(n)))
        x = (width - _row_width(row, sizes)) / 2
        for name in row:
            corners[name] = (x, y)
            middle[name] = x + sizes[name][0] / 2
            x += sizes[name][0] + GAP_X
        y += max(sizes[name][1] for name in row) + GAP_Y
    return corners, width, y - GAP_Y


def _rows(graph: nx.DiGraph[str]) -> list[list[str]]:
    """Each node below all that it reads; what reads nothing stands just above its first reader."""
    import networkx as nx

    rank = {n: i for i, row in enumerate(nx.topological_generations(graph)) for n in row}
    for name in graph:
        readers = [rank[reader] for reader in graph.successors(name)]
        if readers and not graph.in_degree(name):
            rank[name] = min(readers) - 1
    rows: dict[int, list[str]] = {}
    for name in graph:
        rows.setdefault(rank[name], []).append(name)
    whole = [rows[i] for i in sorted(rows)]
    return [row[i : i + ACROSS] for row in whole for i in range(0, len(row), ACROSS)]


def _row_width(row: Iterable[str], sizes: Mapping[str, tuple[float, float]]) -> float:
    return sum(sizes[name][0] + GAP_X for name in row) - GAP_X


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


# --------------------------------------------------------------------------------------- marks


def _call(node: GraphNode, corner: tuple[float, float], colour: str) -> str:
    x, y = corner
    name = node.operator.split(".")[1] if "." in node.operator else node.operator
    title = f"{node.name}: {node.operator}, {node.part.replace('_', ' ')}"
    title += f", {node.region.replace('_', ' ')}" if node.region else ""
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{BOX_W}" '
        f'height="{BOX_H}" rx="4" class="call"/>'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="6" height="{BOX_H}" rx="2" class="{colour}"/>'
        f'<text x="{x + 12:.1f}" y="{y + 14:.1f}" class="strong">{escape(_cut(name))}</text>'
        f'<text x="{x + 12:.1f}" y="{y + 27:.1f}" class="soft">{escape(_cut(_tail(node.path)))}'
        f"</text></g>"
    )


def _tail(path: str) -> str:
    """The last two names of a path, or one when two do not fit."""
    words = path.split(".")
    two = ".".join(words[-2:])
    return two if len(two) <= LETTERS else words[-1]


def _cut(text: str) -> str:
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"


def _edge(source: tuple[float, float], reader: tuple[float, float]) -> str:
    x0, y0 = source[0] + BOX_W / 2, source[1] + BOX_H
    x1, y1 = reader[0] + BOX_W / 2, reader[1]
    bend = max(GAP_Y, (y1 - y0) / 2)
    path = (
        f"M{x0:.1f},{y0:.1f} C{x0:.1f},{y0 + bend:.1f} {x1:.1f},{y1 - bend:.1f} {x1:.1f},{y1:.1f}"
    )
    return f'<path d="{path}" class="edge"/>'


def _outline(corner: tuple[float, float], box: _Box, name: str) -> str:
    x, y = corner
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{box.w:.1f}" height="{box.h:.1f}" rx="8" '
        f'class="region"/><text x="{x + PAD:.1f}" y="{y + 17:.1f}" class="soft">'
        f"{escape(name.replace('_', ' '))}</text>"
    )


def _legend(colour: Mapping[str, str], height: float) -> str:
    marks = []
    for i, (part, css) in enumerate(colour.items()):
        x, y = i * LEGEND, height + 20
        marks.append(f'<rect x="{x}" y="{y:.1f}" width="12" height="12" rx="2" class="{css}"/>')
        text = escape(part.replace("_", " "))
        marks.append(f'<text x="{x + 18}" y="{y + 10.5:.1f}">{text}</text>')
    return "".join(marks)
