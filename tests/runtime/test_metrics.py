"""What a training writes, and what a resumed one keeps of it."""

import json
import math
import sys

import pytest

from analyzers.errors import InputError
from runtime.metrics import MetricsLog, check_tensorboard
from runtime.schema import Evaluated
from tests.adapter_agent.samples import metrics


def evaluated(step):
    return Evaluated(step=step, loss=1.0, perplexity=math.e, tokens=5)


def steps(folder, name):
    return [json.loads(line)["step"] for line in (folder / name).open()]


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.evaluated(evaluated(0))
    for step in range(1, 6):
        log.step(metrics(step))
    log.evaluated(evaluated(4))
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 6, "lo')  # killed while it wrote
    again = MetricsLog(tmp_path, 4, tensorboard=False)
    assert steps(tmp_path, "metrics.jsonl") == [1, 2, 3, 4]
    assert steps(tmp_path, "evaluation.jsonl") == [0]  # the one after step 4 is made again
    again.step(metrics(5))
    assert steps(tmp_path, "metrics.jsonl") == [1, 2, 3, 4, 5]


def test_a_new_run_begins_anew(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.step(metrics(1))
    log.evaluated(evaluated(0))
    MetricsLog(tmp_path, 0, tensorboard=False)
    assert steps(tmp_path, "metrics.jsonl") == steps(tmp_path, "evaluation.jsonl") == []


def test_tensorboard_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"job.json: tensorboard: is set, but .* not installed"):
        check_tensorboard(tmp_path / "job.json")


def test_tensorboard_has_the_same_figures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, 0, tensorboard=True)
    for step in (1, 2):
        log.step(metrics(step))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("train/loss")] == [6.0, 3.0]
