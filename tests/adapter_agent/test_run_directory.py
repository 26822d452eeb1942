import os
import signal
import subprocess
import sys
import textwrap

import pytest

from adapter_agent.run_directory import (
    STAGES,
    RunDirectory,
    existing_run,
    model_sha256,
    open_run,
)
from analyzers.errors import InputError

INPUTS = {"model": "/models/a", "steps": 3}


def test_an_empty_directory_starts_a_run_with_every_stage_pending(tmp_path):
    with open_run(tmp_path / "runs" / "first", INPUTS) as run:
        assert [run.record.stages[name].state for name in STAGES] == ["pending"] * 8
        assert run.record.inputs == INPUTS
        assert "torch" in run.record.versions


def test_the_same_run_again_tells_of_resume(tmp_path):
    with open_run(tmp_path, INPUTS):
        pass
    with pytest.raises(InputError, match=r"unfinished run \(next: analyze\).*--resume"):  # noqa: SIM117
        with open_run(tmp_path, INPUTS):
            pass
    with open_run(tmp_path, INPUTS, resume=True) as run:
        assert run.record.inputs == INPUTS


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_of_another_model_is_refused_and_named(tmp_path, resume):
    with open_run(tmp_path, INPUTS):
        pass
    other = {**INPUTS, "model": "/models/b"}
    with pytest.raises(InputError, match=r"model: holds a run made with /models/a, not /models/b"):  # noqa: SIM117
        with open_run(tmp_path, other, resume=resume):
            pass


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = [p.name for p in tmp_path.iterdir()]
    with pytest.raises(InputError, match="is not empty and holds no run"):  # noqa: SIM117
        with open_run(tmp_path, INPUTS):
            pass
    assert [p.name for p in tmp_path.iterdir()] == before


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match=r"cannot be made a run directory.*--run-dir"):  # noqa: SIM117
        with open_run(tmp_path / "run", INPUTS):
            pass


def test_two_runs_in_one_directory_are_refused(tmp_path):
    with open_run(tmp_path, INPUTS):
        with pytest.raises(InputError, match="another run is working"):  # noqa: SIM117
            with open_run(tmp_path, INPUTS, resume=True):
                pass
        with pytest.raises(InputError, match="another run is working"):  # noqa: SIM117
            with existing_run(tmp_path):
                pass


def test_a_killed_process_leaves_no_lock(tmp_path):
    script = textwrap.dedent(f"""
        from pathlib import Path
        from adapter_agent.run_directory import open_run
        with open_run(Path({str(tmp_path)!r}), {INPUTS!r}):
            print("locked", flush=True)
            input()
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "locked\n"
    with pytest.raises(InputError, match="another run is working"):  # noqa: SIM117
        with open_run(tmp_path, INPUTS, resume=True):
            pass
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with open_run(tmp_path, INPUTS, resume=True) as run:
        assert run.record.inputs == INPUTS


def test_a_run_that_was_killed_at_once_leaves_a_directory_that_starts_afresh(tmp_path):
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".run.json.x7").write_text("{")
    with open_run(tmp_path, INPUTS, resume=True) as run:
        assert run.record.stages["analyze"].state == "pending"


def test_a_stage_is_finished_only_while_its_inputs_and_files_stand(tmp_path):
    with open_run(tmp_path, INPUTS) as run:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "kda.py").write_text("x = 1\n")
        run.set_stage("generate", "done", inputs_sha256="a", outputs=run.hashes(["kernels"]))
        assert run.is_finished("generate", "a")
        assert not run.is_finished("generate", "b")
        (tmp_path / "kernels" / "__pycache__").mkdir()
        (tmp_path / "kernels" / "__pycache__" / "kda.pyc").write_bytes(b"")
        assert run.is_finished("generate", "a")
        (tmp_path / "kernels" / "kda.py").write_text("x = 2\n")
        assert not run.is_finished("generate", "a")
        (tmp_path / "kernels" / "kda.py").unlink()
        assert not run.is_finished("generate", "a")


def test_a_folder_without_a_run_is_not_a_run_directory(tmp_path):
    with pytest.raises(InputError, match=r"has no run\.json"):  # noqa: SIM117
        with existing_run(tmp_path):
            pass


def test_the_hash_of_a_model_sees_its_config_and_the_size_of_its_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 10)
    first = model_sha256(tmp_path)
    assert model_sha256(tmp_path) == first
    (tmp_path / "config.json").write_text('{"a": 1}')
    second = model_sha256(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"0" * 11)
    assert len({first, second, model_sha256(tmp_path)}) == 3


def test_the_hash_of_a_model_is_blind_to_hidden_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = model_sha256(tmp_path)
    (tmp_path / ".DS_Store").write_text("x")
    assert model_sha256(tmp_path) == before


def test_a_model_that_was_changed_in_place_is_named(tmp_path):
    inputs = {**INPUTS, "model_sha256": "a"}
    with open_run(tmp_path, inputs):
        pass
    with pytest.raises(InputError, match=r"model: /models/a has changed since"):  # noqa: SIM117
        with open_run(tmp_path, {**inputs, "model_sha256": "b"}, resume=True):
            pass


@pytest.mark.parametrize("content", [b"\x98\xff\n", b"{broken\n"])
def test_metrics_that_cannot_be_read_are_bad_input(tmp_path, content):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/metrics.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be read"):
        RunDirectory(tmp_path).metrics()
