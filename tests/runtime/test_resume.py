"""A run that is saved at one EP size goes on at another, with the same losses."""

import dataclasses
import json
import shutil

import pytest

import runtime
from analyzers import analyze
from runtime.checkpoints import last_checkpoint
from strategies.schema import Evaluation, Plan
from tests.runtime.runs import plan_for, save_qwen, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, SAVED = 8, 4


def lines(run, name):
    return [json.loads(line) for line in (run / "train" / name).open()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_qwen(tmp_path_factory.mktemp("qwen") / "model", experts=8)


@pytest.fixture(scope="module")
def at_ep_4(tmp_path_factory, model):
    """Never stopped."""
    run = write_run(
        tmp_path_factory.mktemp("ep4"),
        model,
        plan_for(4, ep=4, micro_batch_size=1, backend="cpu"),
        analyze(model),
        steps=STEPS,
        checkpoint_every=SAVED,
        evaluation=Evaluation(fraction=0.1, every=6),
    )
    said = []
    runtime.train(run, progress=said.append)
    return run, said


def stopped(at_ep_4, tmp_path, plan):
    """The run as it was after step `SAVED`, with another plan."""
    run = tmp_path / "run"
    shutil.copytree(at_ep_4[0], run)
    shutil.rmtree(run / "train" / "checkpoints" / f"step_{STEPS}")
    shutil.rmtree(run / "adapter")
    data = json.loads((run / "plan.json").read_text())
    changed = {f.name: getattr(plan, f.name) for f in dataclasses.fields(Plan)}
    for name in ("world_size", "micro_batch_size", "gradient_accumulation", "dispatcher"):
        data[name] = changed[name]
    data["parallelism"] = dataclasses.asdict(plan.parallelism)
    (run / "plan.json").write_text(json.dumps(data))
    return run


@pytest.mark.parametrize(
    ("ranks", "ep", "accumulation"), [(2, 2, 1), (1, 1, 2)], ids=["ep2", "ep1"]
)
def test_a_run_saved_at_ep_4_goes_on_with_the_same_losses(
    at_ep_4, tmp_path, ranks, ep, accumulation
):
    plan = plan_for(ranks, ep=ep, micro_batch_size=2, gradient_accumulation=accumulation)
    run = stopped(at_ep_4, tmp_path, plan)
    runtime.train(run)
    for name, keys in (("metrics", ("loss", "grad_norm")), ("evaluation", ("loss",))):
        straight, again = (lines(r, f"{name}.jsonl") for r in (at_ep_4[0], run))
        assert [m["step"] for m in again] == [m["step"] for m in straight]
        for key in keys:
            assert [m[key] for m in again] == pytest.approx([m[key] for m in straight], rel=1e-5)
    assert lines(run, "metrics.jsonl")[-1]["tokens_per_expert"]


def test_documents_are_packed_and_evaluated(at_ep_4):
    run, said = at_ep_4
    assert not any("not packed" in line or "all logits" in line for line in said)
    metrics = lines(run, "metrics.jsonl")
    assert max(m["padding"] for m in metrics) < 0.35  # of rows of one document it is over half
    assert all(0 < m["mfu"] < 1 for m in metrics)
    evaluated = lines(run, "evaluation.jsonl")
    assert [e["step"] for e in evaluated] == [0, 6, STEPS]
    assert len({e["tokens"] for e in evaluated}) == 1
    assert evaluated[-1]["loss"] < evaluated[0]["loss"]
    assert last_checkpoint(run / "train" / "checkpoints") == STEPS
