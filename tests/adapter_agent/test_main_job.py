"""The main job as a user runs it, whole and killed in every stage."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adapter_agent.run_directory import STAGES, files_of

ROOT = Path(__file__).parents[2]
COMMAND = [
    sys.executable,
    "-c",
    "from adapter_agent.cli import main; main()",
    str(ROOT / "examples/models/tiny-kimi-k3"),
    "--cluster",
    str(ROOT / "examples/clusters/two-ranks.yaml"),
    "--data",
    str(ROOT / "examples/data/classes-train.jsonl"),
    "--steps",
    "32",
    "--sequence-length",
    "128",
    "--global-batch-size",
    "8",
    "--fix",
    "ep=2",
]

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def events(folder):
    try:
        text = (folder / "events.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def last_lines(folder):
    return "\n".join(str(e) for e in events(folder)[-20:])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run: its directory and what the command printed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(
        [*COMMAND, "--run-dir", str(folder), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_ends_well_and_says_where_the_report_is(whole):
    folder, done = whole
    result = json.loads(done.stdout)
    assert result["ending"] == "done"
    assert Path(result["report"]) == folder / "report.html"
    assert [s["state"] for s in result["stages"].values()] == ["done"] * 8


def test_a_run_writes_every_document(whole):
    folder, _ = whole
    for name in (
        "job.json",
        "cluster.yaml",
        "analysis.json",
        "operators.json",
        "kernels/manifest.json",
        "plan.json",
        "review.patch",
        "review.json",
        "validation.json",
        "train/metrics.jsonl",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "report.html",
        "report.md",
        "run.json",
        "events.jsonl",
    ):
        assert (folder / name).stat().st_size > 0, name


def test_kernels_are_generated_and_every_gate_passes(whole):
    kernels = json.loads((whole[0] / "kernels/manifest.json").read_text())["kernels"]
    assert "kda" in {k["operator"] for k in kernels}
    assert all(gate["passed"] for k in kernels for gate in k["gates"])


def test_the_loss_falls_by_more_than_half(whole):
    lines = (whole[0] / "train/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 32
    assert losses[-1] < losses[0] / 2


def test_the_validation_passes(whole):
    report = json.loads((whole[0] / "validation.json").read_text())
    assert report["passed"]
    assert report["checks"]
    assert all(c["passed"] for c in report["checks"])


def test_the_report_of_a_real_run_is_complete(whole):
    folder, _ = whole
    page = (folder / "report.html").read_text()
    for label in ("Layers", "Parameters", "Memory", "Step time", "Training loss", "Tokens per"):
        assert f'aria-label="{label}' in page
    assert "://" not in page
    assert 'class="soft">pending' not in page
    assert len((folder / "report.md").read_text()) < 65_536


def test_resuming_a_finished_run_does_nothing(whole):
    folder, _ = whole
    before = {p: p.stat().st_mtime_ns for p in files_of(folder)}
    command = [*COMMAND, "--run-dir", str(folder), "--resume", "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert {p: p.stat().st_mtime_ns for p in files_of(folder)} == before


def test_review_check_passes_on_what_was_generated_and_fails_on_a_change(whole):
    folder, _ = whole
    command = [*COMMAND[:3], "review", str(folder), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernel = next(p for p in files_of(folder / "kernels") if p.name.startswith("kda"))
    text = kernel.read_text()
    kernel.write_text(text + "\n# changed by hand\n")
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        kernel.write_text(text)
    assert done.returncode == 4
    assert kernel.name in done.stderr


def test_a_run_that_is_killed_in_every_stage_ends_as_if_it_had_not_been(whole, tmp_path):
    undisturbed, _ = whole
    folder = tmp_path / "run"
    for stage in STAGES:
        kill_in(stage, folder)
        assert not ranks_of(folder), f"ranks outlive the run that was killed in {stage}"
    done = subprocess.run(
        [*COMMAND, "--run-dir", str(folder), "--resume", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ending"] == "done"

    assert (folder / "plan.json").read_bytes() == (undisturbed / "plan.json").read_bytes()
    for path in files_of(undisturbed / "kernels"):
        twin = folder / path.relative_to(undisturbed)
        assert twin.read_bytes() == path.read_bytes(), path.name
    page = (folder / "report.html").read_text()
    sections = re.findall(r'<section id="(\w+)">', (undisturbed / "report.html").read_text())
    assert re.findall(r'<section id="(\w+)">', page) == sections
    assert 'class="soft">pending' not in page

    for stage in STAGES:
        went = [e["event"] for e in events(folder) if e["stage"] == stage]
        assert went.count("done") == 1, (stage, went)
        assert "running" not in went[went.index("done") :], (stage, went)
    resumed = [e.get("line") for e in events(folder) if e["stage"] == "train"]
    assert "resumed after step 20" in resumed
    losses = {}
    for run in (undisturbed, folder):
        lines = (run / "train/metrics.jsonl").read_text().splitlines()
        losses[run] = [json.loads(line)["loss"] for line in lines]
    assert losses[folder] == pytest.approx(losses[undisturbed], rel=1e-4)


def kill_in(stage, folder):
    """Starts or resumes the run, and ends it with SIGKILL while it is in `stage`."""
    seen = len(events(folder))
    with (folder.parent / f"{stage}.log").open("w") as log:
        child = subprocess.Popen(
            [*COMMAND, "--run-dir", str(folder), "--resume"], stdout=log, stderr=log
        )
        deadline = time.monotonic() + 300
        try:
            while child.poll() is None:
                new = [e for e in events(folder)[seen:] if e["stage"] == stage]
                steps = sum(e.get("line", "").startswith("step ") for e in new)
                # In training, when a checkpoint is written and a step more is made.
                if any(e["event"] == "running" for e in new) and (stage != "train" or steps > 20):
                    break
                assert time.monotonic() < deadline, last_lines(folder)
                time.sleep(0.02)
            assert child.poll() is None, f"ended before {stage}: {Path(log.name).read_text()}"
        finally:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
            child.wait()


def ranks_of(folder):
    """Command lines of live processes that work on this run, after a moment to die."""
    for _ in range(50):
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line and "-m runtime" in line:
                found.append(line)
        if not found:
            return []
        time.sleep(0.1)
    return found


def test_the_twin_of_a_plan_for_absent_devices_trains_apart_from_it(tmp_path):
    job = [*COMMAND, "--run-dir", str(tmp_path), "--until", "review"]
    job[job.index("--cluster") + 1] = str(ROOT / "examples/clusters/h200-x2.yaml")
    job[job.index("--steps") + 1] = "2"
    done = subprocess.run(job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    twin = [*COMMAND[:3], "train", str(tmp_path), "--twin", "--json"]
    done = subprocess.run(twin, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ep 2 on 2 devices" in json.loads(done.stdout)["note"]
    assert len((tmp_path / "twin/train/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "twin/adapter/adapter_model.safetensors").stat().st_size > 0
    # The full plan would take these checkpoints for its own.
    assert not (tmp_path / "train").exists()
    assert not (tmp_path / "adapter").exists()
