"""The graph with small stages in place of the real ones: order, resuming, reviewing, failing.

The real stages run in test_main_job.py.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from adapter_agent import cli
from adapter_agent.pipeline import StageError, run_pipeline
from adapter_agent.review import decide, write_decision
from adapter_agent.run_directory import STAGES, open_run
from adapter_agent.stages import WORK, Context, Outcome
from adapter_agent.terminal import Terminal
from analyzers.documents import write_document
from analyzers.errors import InputError, ProofError
from strategies.schema import Job
from tests.adapter_agent.samples import plan, write_kernels

INPUTS = {
    "model": "/m",
    "model_sha256": "0",
    "backend": "cpu",
    "data_sha256": None,
    "eval_data_sha256": None,
    "trust_remote_code": False,
}


@pytest.fixture
def called():
    return []


@pytest.fixture(autouse=True)
def small_stages(monkeypatch, called):
    """Each stage writes its first document and notes that it was called."""

    def small(name):
        def work(context):
            called.append(name)
            if name == "generate":
                write_kernels(context.run)
            elif name == "plan":
                write_document(plan(), context.run / "plan.json")
            elif name == "review":
                return Outcome(decide(context.run, context.review))
            else:
                path = context.run / WORK[name].writes[0]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(name)
            return Outcome(f"{name} is done")

        return work

    for name, stage in list(WORK.items()):
        monkeypatch.setitem(WORK, name, replace(stage, work=small(name)))


def go(path, *, resume=False, until=None, review="auto"):
    terminal = Terminal(quiet=True)
    with open_run(path, INPUTS, resume=resume) as run:
        job = Job(model="/m", cluster="/c", backend="cpu")
        context = Context(
            run=run,
            job=job,
            trust_remote_code=False,
            review=review,
            terminal=terminal,
            progress=terminal,
        )
        return run_pipeline(context, until=until)


def failing(monkeypatch, name, error):
    def work(context):
        raise error

    monkeypatch.setitem(WORK, name, replace(WORK[name], work=work))


def test_all_stages_run_once_in_order(tmp_path, called):
    assert go(tmp_path) == "done"
    assert called == list(STAGES)
    assert go(tmp_path, resume=True) == "done"
    assert called == list(STAGES)


def test_until_stops_after_its_stage_and_resume_goes_on(tmp_path, called):
    assert go(tmp_path, until="plan") == "stopped"
    assert called == ["analyze", "map", "generate", "plan"]
    assert go(tmp_path, until="map", resume=True) == "stopped"
    assert called == ["analyze", "map", "generate", "plan"]
    assert go(tmp_path, resume=True) == "done"
    assert called == list(STAGES)


def test_until_the_last_stage_is_the_whole_job(tmp_path, called):
    assert go(tmp_path, until="report") == "done"
    assert called == list(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_broke_is_the_first_to_run_again(tmp_path, called, monkeypatch, name):
    whole = WORK[name]
    failing(monkeypatch, name, RuntimeError("lost power"))
    with pytest.raises(StageError, match=r"RuntimeError: lost power .*error\.log") as caught:
        go(tmp_path)
    assert caught.value.exit_status == 1
    assert "Traceback" in (tmp_path / "error.log").read_text()
    monkeypatch.setitem(WORK, name, whole)
    assert go(tmp_path, resume=True) == "done"
    assert called == list(STAGES)


def test_a_failed_rank_is_quoted_with_its_own_error(tmp_path, monkeypatch):
    said = "rank 1 failed (status 1):\n  File x.py, line 3\nOSError: no space left\n"
    failing(monkeypatch, "train", RuntimeError(said))
    with pytest.raises(StageError, match=r"rank 1 failed .*OSError: no space left") as caught:
        go(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_a_user_caused_is_not_logged_as_a_bug(tmp_path, monkeypatch):
    failing(monkeypatch, "plan", InputError("topo.yaml", fault="is wrong"))
    with pytest.raises(InputError):
        go(tmp_path)
    assert not (tmp_path / "error.log").exists()


def test_resuming_without_the_checkpoint_does_nothing_twice(tmp_path, called):
    go(tmp_path, until="plan")
    (tmp_path / "checkpoints.sqlite").unlink()
    assert go(tmp_path, resume=True) == "done"
    assert called == list(STAGES)


def test_a_document_that_was_changed_is_made_again(tmp_path, called):
    go(tmp_path)
    (tmp_path / "operators.json").unlink()
    called.clear()
    assert go(tmp_path, resume=True) == "done"
    # It comes out as it was, so that what follows from it still stands.
    assert called == ["map"]


def test_training_goes_on_from_its_checkpoints_only_with_the_same_plan(
    tmp_path, called, monkeypatch
):
    whole = WORK["train"]
    checkpoint = tmp_path / "train/checkpoints/step-20"

    def killed(context):
        checkpoint.mkdir(parents=True, exist_ok=True)
        raise RuntimeError("lost power")

    monkeypatch.setitem(WORK, "train", replace(whole, work=killed))
    for resume in (False, True):
        with pytest.raises(StageError):
            go(tmp_path, resume=resume)
    monkeypatch.setitem(WORK, "train", whole)
    with open_run(tmp_path, INPUTS, resume=True) as run:
        assert run.record.stages["train"].inputs_sha256
    go(tmp_path, resume=True)
    assert checkpoint.exists()
    write_document(replace(plan(), micro_batch_size=7), tmp_path / "plan.json")
    monkeypatch.setitem(WORK, "plan", replace(WORK["plan"], work=lambda c: Outcome("kept")))
    go(tmp_path, resume=True)
    assert called.count("train") == 2
    assert not checkpoint.exists()


def test_a_broken_checkpoint_database_is_named(tmp_path):
    go(tmp_path, until="plan")
    (tmp_path / "checkpoints.sqlite").write_text("junk")
    with pytest.raises(InputError, match=r"checkpoints\.sqlite: cannot be read"):
        go(tmp_path, resume=True)
    (tmp_path / "checkpoints.sqlite").unlink()
    assert go(tmp_path, resume=True) == "done"


def test_review_require_waits_until_somebody_decides(tmp_path, called):
    assert go(tmp_path, review="require") == "waiting"
    assert go(tmp_path, review="require", resume=True) == "waiting"
    assert "validate" not in called
    with open_run(tmp_path, INPUTS, resume=True) as run:
        assert run.record.stages["review"].state == "waiting"
        write_decision(run, approve=True, by="ada", why="")
    assert go(tmp_path, review="require", resume=True) == "done"
    assert called == ["analyze", "map", "generate", "plan", *["review"] * 3, *STAGES[5:]]


def test_a_rejected_review_stops_the_run(tmp_path, called):
    assert go(tmp_path, review="require") == "waiting"
    with open_run(tmp_path, INPUTS, resume=True) as run:
        write_decision(run, approve=False, by="ada", why="too clever")
    with pytest.raises(ProofError, match="rejected by ada: too clever"):
        go(tmp_path, review="require", resume=True)
    assert "validate" not in called


def test_a_failed_validation_is_reported_and_not_trained(tmp_path, called, monkeypatch):
    whole = WORK["validate"]
    failed = replace(whole, work=lambda context: Outcome("ep_invariance: 0.1 apart", "failed"))
    monkeypatch.setitem(WORK, "validate", failed)
    for resume in (False, True):
        with pytest.raises(ProofError, match=r"validation failed: ep_invariance: 0\.1 apart"):
            go(tmp_path, resume=resume)
    assert "train" not in called
    assert (tmp_path / "report.html").exists()
    monkeypatch.setitem(WORK, "validate", whole)
    assert go(tmp_path, resume=True) == "done"
    assert "train" in called


def test_on_the_command_line_a_review_is_status_5_until_it_is_approved(
    tmp_path, called, monkeypatch, capfd
):
    def adapt(*words):
        monkeypatch.setattr(sys, "argv", ["adapt", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code or 0, capfd.readouterr().out

    examples = Path(__file__).parents[2] / "examples"
    job = [examples / "models/tiny-kimi-linear", "--cluster", examples / "clusters/two-ranks.yaml"]
    job += ["--run-dir", tmp_path / "run", "--review", "require"]
    status, out = adapt(*job)
    assert status == 5
    assert f"adapt review {tmp_path / 'run'} --approve" in out
    assert adapt(*job, "--resume", "--json")[0] == 5
    assert adapt("review", tmp_path / "run")[0] == 0
    for stage in (["validate"], ["train"], ["train", "--twin"]):
        assert adapt(stage[0], tmp_path / "run", *stage[1:]) == (5, "")
    assert adapt("review", tmp_path / "run", "--reject", "--by", "ada")[0] == 0
    assert adapt("train", tmp_path / "run") == (4, "")
    status, out = adapt("review", tmp_path / "run", "--approve", "--by", "ada")
    assert status == 0
    assert "approved by ada" in out
    status, out = adapt(*job, "--resume", "--json")
    assert status == 0
    assert json.loads(out)["ending"] == "done"
    assert called.count("analyze") == 1


def test_the_stages_of_the_command_line_are_those_of_the_pipeline():
    from typing import get_args

    assert get_args(cli.StageName) == STAGES
    assert tuple(WORK) == STAGES
