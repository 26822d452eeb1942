import xml.etree.ElementTree as ET

import pytest

from adapter_agent import figures

SVG = [
    figures.stacked_bar({"a": 1.0, "b": 3.0}, unit="GiB", label="memory"),
    figures.line_chart([1, 2, 3], [3.0, 2.0, 1.0], x_label="step", y_label="loss", label="loss"),
    figures.heat_map({"moe 0": [1, 2], "moe 1": [0, 0]}, column="expert", label="experts"),
    figures.layer_strip([("kda", "dense"), ("mla", "moe")], label="layers"),
]


@pytest.mark.parametrize("svg", SVG, ids=["bar", "line", "heat", "layers"])
def test_every_figure_is_well_formed_and_labelled(svg):
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    for mark in [*root.iter("rect"), *root.iter("circle")]:
        assert mark.findtext("title")


def test_a_stacked_bar_is_cut_in_proportion():
    root = ET.fromstring(SVG[0])
    bar = [r for r in root.iter("rect") if r.get("height") == "34.00"]
    starts = [float(r.get("x", "nan")) / figures.WIDTH for r in bar]
    assert starts == pytest.approx([0, 1 / 4], abs=1e-3)
    assert [r.findtext("title") for r in bar] == ["a: 1 GiB (25.0%)", "b: 3 GiB (75.0%)"]


def test_a_falling_loss_is_drawn_falling_and_a_nan_is_left_out():
    svg = figures.line_chart(
        [1, 2, 3], [4.0, float("nan"), 1.0], x_label="s", y_label="l", label="l"
    )
    heights = [float(c.get("cy", "nan")) for c in ET.fromstring(svg).iter("circle")]
    assert len(heights) == 2
    assert heights[0] < heights[1]


def test_a_wide_heat_map_sums_neighbours():
    svg = figures.heat_map({"moe 0": [1] * 896}, column="expert", label="e")
    cells = list(ET.fromstring(svg).iter("rect"))
    assert len(cells) == 128
    assert "expert 0-6: 7 tokens, 1.00 x the mean" in (cells[0].findtext("title") or "")


def test_names_are_escaped():
    svg = figures.stacked_bar({"<script>": 1.0}, unit='"', label='a"b<c>')
    assert "<script>" not in svg
    ET.fromstring(svg)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.0, "1234"), (0.35, "0.35"), (2.0, "2"), (1e-7, "1.00e-07"), (13.72, "13.7")],
)
def test_numbers_have_three_digits(value, text):
    assert figures.number(value) == text
