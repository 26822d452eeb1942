"""The benchmark of routing: it measures what is right, and nothing that is wrong."""

import json
import sys
from dataclasses import replace

import expert_routing
import pytest


def run(monkeypatch, folder):
    """The exit status, and the rows by name."""
    file = folder / "rows.json"
    monkeypatch.setattr(sys, "argv", ["expert_routing.py", "--tiny", "--output", str(file)])
    return expert_routing.main(), json.loads(file.read_text())["results"]


def test_a_rehearsal_on_the_cpu_measures_every_part(monkeypatch, tmp_path):
    status, rows = run(monkeypatch, tmp_path)
    assert status == 0
    for row in rows.values():
        assert list(row["ms"]) == [
            "whole",
            "choose",
            "choose_backward",
            "order",
            "spread",
            "combine",
        ]
    # Torch's own code drops the same; asking again drops less.
    assert rows["dropped"]["dropped"] == rows["dropped, torch"]["dropped"]
    assert rows["rerouted"]["dropped"] < rows["dropped"]["dropped"] / 2


@pytest.mark.parametrize("part", ["choose", "reroute", "combine"])
def test_what_is_wrong_is_not_timed(part, monkeypatch, tmp_path):
    made = expert_routing.generated

    def spoiled(function):
        def wrong(*args, **kwargs):
            out = function(*args, **kwargs)
            return (out[0].flip(0), *out[1:]) if isinstance(out, tuple) else out * 1.001

        return wrong

    def generated(*args):
        peer = made(*args)
        if part == "choose":
            return replace(peer, choose=spoiled(peer.choose))
        function = spoiled(getattr(peer.kernels, part))
        return replace(peer, kernels=replace(peer.kernels, **{part: function}))

    monkeypatch.setattr(expert_routing, "generated", generated)
    status, rows = run(monkeypatch, tmp_path)
    assert status == 1
    assert rows["rerouted"]["status"].startswith("wrong")
    assert "ms" not in rows["rerouted"]
    assert rows["torch"]["status"] == "right"
