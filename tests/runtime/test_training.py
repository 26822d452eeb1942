"""The training job on two ranks: it learns, it survives SIGKILL, and it says why it fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import runtime
from analyzers import analyze
from analyzers.errors import InputError
from runtime.checkpoints import KEPT, last_checkpoint
from tests.runtime.runs import EXAMPLES, plan_for, write_run

STEPS = 32
KILLED_STEPS = 12
MODEL = EXAMPLES / "models" / "tiny-kimi-linear"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def metrics(run):
    return [json.loads(line) for line in (run / "train" / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    plan = plan_for(2, ep=2, micro_batch_size=8)
    run = write_run(tmp_path_factory.mktemp("trained"), MODEL, plan, analyze(MODEL), steps=STEPS)
    lines = []
    runtime.train(run, progress=lines.append)
    return run, lines


def prepared(folder, model, analysis):
    plan = plan_for(2, ep=2)
    return write_run(folder, model, plan, analysis, steps=KILLED_STEPS, checkpoint_every=3)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, small_model, small_analysis):
    run = prepared(tmp_path_factory.mktemp("straight"), small_model, small_analysis)
    runtime.train(run)
    return run


def test_the_loss_falls_by_more_than_half_on_the_shipped_task(trained):
    run, lines = trained
    losses = [m["loss"] for m in metrics(run)]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 2
    assert sum(line.startswith("step ") for line in lines) == STEPS  # rank 0 alone speaks


def test_metrics_count_labelled_and_routed_tokens(trained):
    run, _ = trained
    experts = analyze(MODEL).experts
    for line in metrics(run):
        assert len(line["tokens_per_expert"]) == 7
        routed = {sum(row) for row in line["tokens_per_expert"]}
        assert len(routed) == 1
        assert routed.pop() > line["tokens"] * experts.top_k  # prompts are routed, not learned
        assert line["grad_norm"] > 0


def test_the_adapter_loads_in_stock_peft_and_helps(trained):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from runtime.build import build_tokenizer
    from runtime.packing import collate, load_dataset
    from runtime.step import loss_sum

    run, _ = trained
    job = json.loads((run / "job.json").read_text())
    dataset = load_dataset(job["data"], build_tokenizer(str(MODEL)), 64)
    batch = collate(dataset.rows(range(8)), 64, 0)
    stock = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        before = loss_sum(stock, batch, torch.device("cpu"))
        adapted = PeftModel.from_pretrained(stock, str(run / "adapter"))
        after = loss_sum(adapted, batch, torch.device("cpu"))
    assert after < before / 2


def test_only_the_last_checkpoints_are_kept(straight):
    folder = straight / "train" / "checkpoints"
    assert last_checkpoint(folder) == KILLED_STEPS
    assert sorted(p.name for p in folder.iterdir()) == ["step_12", "step_9"]
    assert KEPT == 2


def test_a_killed_run_resumes_to_the_same_adapter(straight, tmp_path, small_model, small_analysis):
    # KempnerForge#57: the second resume loses its place. labs-molt#57: a resume restores no
    # optimizer state. Automodel#1325: the adapter is silently not loaded.
    run = prepared(tmp_path, small_model, small_analysis)
    for after in (4, 8):
        kill_after(run, after)
    runtime.train(run)
    assert [m["step"] for m in metrics(run)] == list(range(1, KILLED_STEPS + 1))
    assert [m["loss"] for m in metrics(run)] == [m["loss"] for m in metrics(straight)]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run / "adapter" / name).read_bytes() == (straight / "adapter" / name).read_bytes()


def kill_after(run, steps):
    """Starts the run and kills it with SIGKILL after `steps` steps; its ranks must die with it."""
    code = f"import runtime; runtime.train({str(run)!r})"
    child = subprocess.Popen([sys.executable, "-c", code])
    file = run / "train" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    # A resumed run first drops the steps after its checkpoint, so the last step is looked at.
    while time.monotonic() < deadline and child.poll() is None:
        if file.exists() and f'"step": {steps},' in file.read_text():
            break
        time.sleep(0.05)
    assert child.poll() is None, "the run ended before it could be killed"
    child.send_signal(signal.SIGKILL)
    child.wait()
    for _ in range(100):
        if not ranks_of(run):
            break
        time.sleep(0.1)
    assert ranks_of(run) == []


def ranks_of(run):
    """Processes whose command line names the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(run).encode() in command and b"torch.distributed.run" in command:
                found.append(int(entry.name))
    return found


def rewritten(run, name, **fields):
    data = json.loads((run / name).read_text()) | fields
    (run / name).write_text(json.dumps(data))


def test_a_bad_line_of_data_fails_the_launch_with_one_line(tmp_path, small_model, small_analysis):
    run = prepared(tmp_path, small_model, small_analysis)
    data = tmp_path / "bad.jsonl"
    data.write_text('{"text": "a"}\n{"text": \n')
    rewritten(run, "job.json", data=str(data))
    with pytest.raises(InputError) as caught:
        runtime.train(run)
    assert str(caught.value).startswith(f"{data}: line 2: broken JSON")
    assert caught.value.exit_status == 2


def test_a_plan_that_does_not_add_up_is_refused(tmp_path, small_model, small_analysis):
    run = prepared(tmp_path, small_model, small_analysis)
    parallelism = json.loads((run / "plan.json").read_text())["parallelism"]
    rewritten(run, "plan.json", parallelism=parallelism | {"ep": 2, "efsdp": 2})
    with pytest.raises(InputError, match="does not make 2 ranks"):
        runtime.train(run)


def test_a_rank_that_crashes_is_quoted(tmp_path, small_model, small_analysis):
    model = tmp_path / "model"
    shutil.copytree(small_model, model)
    (model / "tokenizer.json").write_text("{")
    run = prepared(tmp_path, model, small_analysis)
    with pytest.raises(RuntimeError, match=r"(?s)train: rank \d failed .*Error") as caught:
        runtime.train(run)
    assert len(str(caught.value).splitlines()) < 20
