import subprocess

import pytest

from adapter_agent.review import (
    check,
    read_decision,
    summary,
    write_decision,
    write_patch,
)
from analyzers.errors import ProofError
from tests.adapter_agent import samples


@pytest.fixture
def run(tmp_path):
    with samples.finished_run(tmp_path / "run") as run:
        yield run


def test_the_patch_applies_and_makes_the_same_files(run, tmp_path):
    (run / "kernels/no_newline.py").write_text("x = 2")
    patch = write_patch(run)
    target = tmp_path / "elsewhere"
    target.mkdir()
    subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=target, check=True)
    made = {p.name: p.read_bytes() for p in (target / "kernels").iterdir()}
    assert made == {p.name: p.read_bytes() for p in (run / "kernels").iterdir()}


def test_a_decision_is_about_what_was_there_when_it_was_made(run):
    write_decision(run, approve=True, by="ada", why="read it")
    decision = read_decision(run)
    assert decision is not None
    assert (decision.decision, decision.by) == ("approved", "ada")
    assert "approved by ada" in summary(run)
    (run / "kernels/kda.py").write_text("x = 666\n")
    assert read_decision(run) is None
    assert "adapt review" in summary(run)


def test_a_changed_kernel_fails_the_check(run):
    (run / "kernels/kda.py").write_text("x = 666\n")
    with pytest.raises(ProofError, match=r"kda\.py: differs from the manifest"):
        check(run)


def test_a_changed_kernel_cannot_be_approved(run):
    (run / "kernels/kda.py").write_text("x = 666\n")
    assert "CHANGED" in summary(run)
    with pytest.raises(ProofError, match=r"kda\.py: differs from the manifest"):
        write_decision(run, approve=True, by="ada", why="looks fine")
    assert not (run / "review.json").exists()
    write_decision(run, approve=False, by="ada", why="who edited this?")
    decision = read_decision(run)
    assert decision is not None
    assert decision.decision == "rejected"
