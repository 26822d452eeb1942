import json
import shutil

import pytest

from adapter_agent.report import write_report
from tests.adapter_agent import samples
from tests.adapter_agent.test_cli import CLUSTER, MODEL, adapt  # noqa: F401

FILES = {
    "exports/transformers_plan.py",
    "exports/torchtitan_plan.py",
    "exports/automodel.yaml",
    "launch/torchrun.sh",
    "launch/slurm.sbatch",
}


@pytest.fixture
def run(tmp_path):
    with samples.finished_run(tmp_path / "run") as run:
        shutil.copyfile(CLUSTER, run / "cluster.yaml")
    return run


def test_a_run_is_exported_for_every_target(adapt, run):  # noqa: F811
    status, out, err = adapt("export", run.path, "--json")
    assert status == 0, err
    paths = {p for written in json.loads(out) for p in written["paths"]}
    assert paths == {str(run / name) for name in FILES}
    status, out, _ = adapt("export", run.path, "--format", "automodel")
    assert status == 0
    assert "names of the adapted layers" in " ".join(out.split())
    assert "transformers" not in out


def test_the_report_names_what_was_exported(adapt, run):  # noqa: F811
    adapt("export", run.path)
    write_report(run)
    for name in ("report.html", "report.md"):
        assert "exports/torchtitan_plan.py" in (run / name).read_text()


def test_without_a_plan_there_is_nothing_to_export(adapt, run):  # noqa: F811
    (run / "plan.json").unlink()
    status, _, err = adapt("export", run.path)
    assert status == 2
    assert "plan.json: does not exist" in err


def test_a_plan_is_exported_and_drawn_without_a_run(adapt, tmp_path):  # noqa: F811
    words = ["plan", MODEL, "--cluster", CLUSTER, "--quiet", "--sequence-length", "128"]
    status, out, err = adapt(*words, "--export", tmp_path, "--figures", tmp_path)
    assert status == 0, err
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.suffix != ".png"}
    assert written >= FILES | {"plan.json", "plan.html", "step.svg", "curve.svg"}
    assert "what they do not say of the plan" in " ".join(out.split())


def test_a_question_makes_no_plan_to_write(adapt, tmp_path):  # noqa: F811
    words = ["plan", MODEL, "--cluster", CLUSTER, "--ask", "ep-curve", "--export", tmp_path]
    status, _, err = adapt(*words)
    assert status == 2
    assert "--ask does not make one" in " ".join(err.split())
