"""The training job on two ranks: it learns, it survives SIGKILL, and it says why it fails."""

import json
import os
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

from .conftest import EXAMPLES, plan_for, write_run

STEPS = 20
MODEL = EXAMPLES / "models" / "tiny-kimi-linear"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def metrics(run):
    return [json.loads(line) for line in (run / "train" / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def analysis():
    return analyze(MODEL)


def prepared(folder, analysis):
    plan = plan_for(2, ep=2, micro_batch_size=4)
    return write_run(folder, MODEL, plan, analysis, steps=STEPS, checkpoint_every=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, analysis):
    run = prepared(tmp_path_factory.mktemp("trained"), analysis)
    lines = []
    runtime.train(run, progress=lines.append)
    return run, lines


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
    from runtime.data import collate, load_dataset
    from runtime.step import loss_sum

    run, _ = trained
    job = json.loads((run / "job.json").read_text())
    dataset = load_dataset(job["data"], build_tokenizer(str(MODEL)), 64)
    batch = collate(dataset.examples[:8], 64, 0)
    stock = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        before = loss_sum(stock, batch, torch.device("cpu"))
        adapted = PeftModel.from_pretrained(stock, str(run / "adapter"))
        after = loss_sum(adapted, batch, torch.device("cpu"))
    assert after < before / 2


def test_only_the_last_checkpoints_are_kept(trained):
    run, _ = trained
    folder = run / "train" / "checkpoints"
    assert last_checkpoint(folder) == STEPS
    assert sorted(p.name for p in folder.iterdir()) == ["step_16", f"step_{STEPS}"]
    assert KEPT == 2


def test_a_killed_run_resumes_to_the_same_adapter(trained, tmp_path, analysis):
    # KempnerForge#57: the second resume loses its place. labs-molt#57: a resume restores no
    # optimizer state. Automodel#1325: the adapter is silently not loaded.
    straight, _ = trained
    run = prepared(tmp_path, analysis)
    for after in (5, 13):
        kill_after(run, after)
    runtime.train(run)
    assert [m["step"] for m in metrics(run)] == list(range(1, STEPS + 1))
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


def test_a_bad_line_of_data_fails_the_launch_with_one_line(tmp_path, analysis):
    run = prepared(tmp_path, analysis)
    data = tmp_path / "bad.jsonl"
    data.write_text('{"text": "a"}\n{"text": \n')
    job = json.loads((run / "job.json").read_text()) | {"data": str(data)}
    (run / "job.json").write_text(json.dumps(job))
    with pytest.raises(InputError) as caught:
        runtime.train(run)
    assert str(caught.value).startswith(f"{data}: line 2: broken JSON")
    assert caught.value.exit_status == 2


def test_a_failing_rank_is_quoted(tmp_path, analysis):
    run = prepared(tmp_path, analysis)
    (run / "kernels").mkdir()
    (run / "kernels" / "manifest.json").mkdir()  # not readable as a file: passed over
    plan = json.loads((run / "plan.json").read_text()) | {"compute_dtype": "float32"}
    plan["parallelism"] |= {"ep": 2, "efsdp": 2}
    (run / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(InputError, match="does not make 2 ranks"):
        runtime.train(run)
