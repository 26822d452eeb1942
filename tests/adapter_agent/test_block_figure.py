import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from adapter_agent.block_figure import ACROSS, BOX_H, BOX_W, block_figure
from analyzers.schema import Graph, GraphNode
from tests.adapter_agent import samples

GRAPH = samples.graph()


def drawn(graph):
    """Corners of the calls by name, and of the regions in order."""
    root = ET.fromstring(block_figure(graph, label="a block"))
    calls, regions = {}, []
    for group in root.iter("g"):
        box = next(r for r in group.iter("rect") if r.get("class") == "call")
        name = (group.findtext("title") or "").partition(":")[0]
        calls[name] = (float(box.get("x", "nan")), float(box.get("y", "nan")))
    for box in root.iter("rect"):
        if box.get("class") == "region":
            regions.append(tuple(float(box.get(k, "nan")) for k in ("x", "y", "width", "height")))
    return root, calls, regions


def test_the_figure_is_well_formed_labelled_and_has_every_call():
    root, calls, regions = drawn(GRAPH)
    assert (root.get("role"), root.get("aria-label")) == ("img", "a block")
    assert set(calls) == {n.name for n in GRAPH.nodes}
    assert len(regions) == len(GRAPH.regions)
    assert len([p for p in root.iter("path") if p.get("class") == "edge"]) == 4


def test_what_reads_stands_below_what_it_reads():
    _, calls, _ = drawn(GRAPH)
    for node in GRAPH.nodes:
        for source in node.inputs:
            assert calls[source][1] + BOX_H <= calls[node.name][1]


def test_a_region_holds_its_calls_and_no_other():
    _, calls, boxes = drawn(GRAPH)
    for region, (x, y, w, h) in zip(GRAPH.regions, boxes, strict=True):
        inside = {
            name
            for name, (cx, cy) in calls.items()
            if x <= cx and cx + BOX_W <= x + w and y <= cy and cy + BOX_H <= y + h
        }
        assert inside == set(region.nodes)


def test_no_two_calls_overlap_and_a_wide_row_is_broken():
    nodes = [
        GraphNode(name=f"p{i}", operator="linear", path=f"p{i}", part="mixer", inputs=["norm"])
        for i in range(2 * ACROSS + 1)
    ]
    norm = GraphNode(name="norm", operator="rms_norm", path="norm", part="norm", inputs=[])
    _, calls, _ = drawn(Graph(nodes=[norm, *nodes]))
    corners = list(calls.values())
    for i, (x, y) in enumerate(corners):
        for u, v in corners[i + 1 :]:
            assert abs(x - u) >= BOX_W or abs(y - v) >= BOX_H
    assert len({y for _, y in corners}) == 1 + 3


def test_a_part_has_one_colour_in_all_figures():
    def colours(graph):
        root, _, _ = drawn(graph)
        return {g.findtext("title").split(", ")[1]: g[2].get("class") for g in root.iter("g")}

    mixed = [replace(GRAPH.nodes[0], part="norm", region=None), *GRAPH.nodes[1:]]
    both = colours(Graph(nodes=mixed, regions=GRAPH.regions[1:]))
    assert both["mixer"] == colours(GRAPH)["mixer"]
    assert both["norm"] != both["mixer"]


def test_names_are_escaped():
    node = GraphNode(name="<b>", operator='a"&', path="<script>", part="mixer", inputs=[])
    svg = block_figure(Graph(nodes=[node]), label='a"b<c>')
    assert "<script>" not in svg
    ET.fromstring(svg)


@pytest.mark.parametrize("path", ["", "a", "self_attn.forget_gate.f_a_proj", "x" * 80])
def test_long_names_stay_inside_their_box(path):
    node = GraphNode(name="n", operator="linear", path=path, part="mixer", inputs=[])
    root = ET.fromstring(block_figure(Graph(nodes=[node]), label="one"))
    assert all(len(t.text or "") <= 22 for t in root.iter("text"))
