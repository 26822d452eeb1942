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
from tests.runtime.runs import EXAMPLES, plan_for, save_qwen, write_run

STEPS = 32
KILLED_STEPS = 40
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


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return save_qwen(tmp_path_factory.mktemp("qwen") / "model", experts=8)


def prepared(folder, model):
    plan = plan_for(2, ep=2)
    return write_run(folder, model, plan, analyze(model), steps=KILLED_STEPS, checkpoint_every=5)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, qwen):
    run = prepared(tmp_path_factory.mktemp("straight"), qwen)
    runtime.train(run)
    return run


def test_the_loss_falls_by_more_than_half_on_the_shipped_task(trained):
    run, lines = trained
    losses = [m["loss"] for m in metrics(run)]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 2
    assert sum(line.startswith("step ") for line in lines) == STEPS  # rank 0 alone speaks
    how = "all_to_all over gloo's collectives, not symmetric memory"
    assert f"experts on 2 ranks; tokens by {how}" in lines


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
    assert sorted(p.name for p in folder.iterdir()) == ["step_35", "step_40"]
    assert KEPT == 2


def test_interruptions_change_nothing(straight, tmp_path, qwen):
    # KempnerForge#57: the second resume loses its place. labs-molt#57: a resume restores no
    # optimizer state. Automodel#1325: the adapter is silently not loaded.
    run = prepared(tmp_path, qwen)
    killed(run, after=8)
    assert "was killed by SIGKILL" in a_rank_killed(run, after=17)
    saved = terminated(run, after=26)
    assert last_checkpoint(run / "train" / "checkpoints") == saved
    runtime.train(run)
    assert [m["step"] for m in metrics(run)] == list(range(1, KILLED_STEPS + 1))
    assert [m["loss"] for m in metrics(run)] == [m["loss"] for m in metrics(straight)]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run / "adapter" / name).read_bytes() == (straight / "adapter" / name).read_bytes()


def started(run, after):
    """The run in a process of its own, with `after` steps done."""
    code = f"import runtime; runtime.train({str(run)!r})"
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    file = run / "train" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    # A resumed run first drops the steps after its checkpoint, so the last step is looked at.
    while time.monotonic() < deadline and child.poll() is None:
        if file.exists() and f'"step": {after},' in file.read_text():
            break
        time.sleep(0.02)
    assert child.poll() is None, "the run ended before it could be interrupted"
    return child


def ended(run, child):
    """What it said at its end; no rank may outlive it."""
    said = child.communicate(timeout=120)[1]
    for _ in range(100):
        if not ranks_of(run):
            break
        time.sleep(0.1)
    assert ranks_of(run) == []
    return said


def killed(run, after):
    """SIGKILL to the launcher: its ranks must die with it."""
    child = started(run, after)
    child.send_signal(signal.SIGKILL)
    ended(run, child)


def a_rank_killed(run, after):
    child = started(run, after)
    os.kill(max(ranks_of(run, "LOCAL_RANK=1")), signal.SIGKILL)
    said = ended(run, child)
    assert "rank 1 on " in said
    return said


def terminated(run, after):
    """SIGTERM to the launcher: the step that is running is finished and saved."""
    child = started(run, after)
    child.send_signal(signal.SIGTERM)
    ended(run, child)
    assert child.returncode == 128 + signal.SIGTERM
    saved = metrics(run)[-1]["step"]
    assert after <= saved < KILLED_STEPS
    return saved


def ranks_of(run, variable=""):
    """Processes whose command line names the run directory, with `variable` in their environment:
    those of torchrun and its ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            there = str(run).encode() in command and b"-m\0" in command
            if there and (not variable or variable.encode() in environment):
                found.append(int(entry.name))
    return found


def rewritten(run, name, **fields):
    data = json.loads((run / name).read_text()) | fields
    (run / name).write_text(json.dumps(data))


def test_a_bad_line_of_data_fails_the_launch_with_one_line(tmp_path, qwen):
    run = prepared(tmp_path, qwen)
    data = tmp_path / "bad.jsonl"
    data.write_text('{"text": "a"}\n{"text": \n')
    rewritten(run, "job.json", data=str(data))
    with pytest.raises(InputError) as caught:
        runtime.train(run)
    assert str(caught.value).startswith(f"{data}: line 2: broken JSON")
    assert caught.value.exit_status == 2


def test_a_plan_that_does_not_add_up_is_refused(tmp_path, qwen):
    run = prepared(tmp_path, qwen)
    parallelism = json.loads((run / "plan.json").read_text())["parallelism"]
    rewritten(run, "plan.json", parallelism=parallelism | {"ep": 2, "efsdp": 2})
    with pytest.raises(InputError, match="does not make 2 ranks"):
        runtime.train(run)


def test_a_rank_that_crashes_is_quoted(tmp_path, qwen):
    model = tmp_path / "model"
    shutil.copytree(qwen, model)
    (model / "tokenizer.json").write_text("{")
    run = prepared(tmp_path, model)
    with pytest.raises(RuntimeError, match=r"(?s)train: rank \d on \S+ failed .*Error") as caught:
        runtime.train(run)
    assert len(str(caught.value).splitlines()) < 20
