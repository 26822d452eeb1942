"""The benchmark of expert rows: it measures what is right, and nothing that is wrong."""

import json
import sys

import expert_rows
import pytest
import torch
from attention.layer import unproved_kernels

from analyzers import analyze
from analyzers.backends import load_backend
from runtime.experts.fan import TORCH

PARTS = ["spread", "spread_backward", "combine", "combine_backward"]


def run(monkeypatch, folder, *options):
    """The exit status, and the rows by name."""
    file = folder / "rows.json"
    arguments = ["expert_rows.py", "--tiny", "--peers", "ours,torch", "--output", str(file)]
    monkeypatch.setattr(sys, "argv", [*arguments, *options])
    return expert_rows.main(), json.loads(file.read_text())


def test_a_rehearsal_on_the_cpu_measures_every_part(monkeypatch, tmp_path):
    status, data = run(monkeypatch, tmp_path, "--sweep")
    assert status == 0
    assert data["machine"]["torch"] == torch.__version__
    # 64 tokens of 100 numbers and 8 times as many items, in float32.
    assert data["bytes"]["spread"] == 4 * 100 * (64 + 512)
    assert data["bytes"]["combine_backward"] == 4 * 100 * (64 + 2 * 512)
    for name in ("ours", "torch"):
        assert list(data["results"][name]["ms"]) == PARTS
        assert data["results"][name]["same_bits"]
    swept = {part for row in data["results"].values() for part in row["ms"]}
    assert len(data["results"]) > 15
    assert swept == set(PARTS)


@pytest.mark.parametrize("part", range(2), ids=["spread", "combine"])
def test_what_is_wrong_is_not_timed(part, monkeypatch, tmp_path):
    plain = expert_rows.by_fan

    def wrong(work, kernels):
        peer = plain(work, kernels)
        if kernels is TORCH:
            return peer
        functions = [peer.spread, peer.combine]
        right = functions[part]
        functions[part] = lambda *inputs: right(*inputs) * 1.001
        return expert_rows.Peer(*functions)

    monkeypatch.setattr(expert_rows, "by_fan", wrong)
    status, data = run(monkeypatch, tmp_path)
    assert status == 1
    assert data["results"]["ours"]["status"].startswith("wrong")
    assert "ms" not in data["results"]["ours"]
    assert data["results"]["torch"]["status"] == "right"


def test_kernels_of_a_training_benchmark_move_the_rows_of_experts(tmp_path):
    analysis = analyze("examples/models/tiny-kimi-linear")
    made = unproved_kernels(analysis, load_backend("cpu"), tmp_path)
    assert {"moe_spread", "moe_combine", "kda"} <= {loaded.kernel.operator for loaded in made}
