import json
import shutil

import pytest

from adapter_agent.report import write_report
from tests.adapter_agent import samples
from tests.adapter_agent.test_cli import CLUSTER, adapt  # noqa: F401

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
