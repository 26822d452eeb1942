"""The benchmark of training: one process that plays a rank of several."""

import json
import math
import sys

import pytest
import training_speed


@pytest.mark.parametrize(
    "layout", [["--ep=2"], ["--ep=1", "--replicate=2"]], ids=["experts over ranks", "replicas"]
)
def test_one_process_plays_a_rank_of_two(layout, monkeypatch, tmp_path):
    file = tmp_path / "speed.json"
    options = ["--tiny", "--peers=ours", "--ranks=2", "--alone", *layout, f"--output={file}"]
    monkeypatch.setattr(sys, "argv", ["training_speed.py", *options])
    assert training_speed.main() == 0
    found = json.loads(file.read_text())["results"]["ours"]
    assert found["losses"][0] == pytest.approx(math.log(512), rel=0.02)
    assert all(math.isfinite(loss) for loss in found["losses"])
    assert found["step_seconds"] > 0
