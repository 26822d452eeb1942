import os
import subprocess
from pathlib import Path

import pytest

from analyzers.errors import InputError
from strategies import load_cluster, search, write_launch
from strategies.schema import Job

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


@pytest.fixture(scope="module")
def plan_of(tiny):
    def make(name):
        cluster = load_cluster(CLUSTERS / f"{name}.yaml")
        job = Job(model="m", cluster="c", backend=cluster.device.name, sequence_length=256)
        return search(tiny, cluster, job), cluster

    return make


@pytest.mark.parametrize("name", ["two-ranks", "hgx-h200-128", "supernode-128", "gb200-nvl72-x2"])
def test_launch_scripts_are_valid_shell(plan_of, name, tmp_path):
    plan, cluster = plan_of(name)
    run_dir = tmp_path / "it's a run"
    paths = write_launch(plan, cluster, run_dir)
    assert [p.name for p in paths] == ["torchrun.sh", "slurm.sbatch"]
    for path in paths:
        assert path.parent == run_dir.resolve() / "launch"
        subprocess.run(["bash", "-n", path], check=True)
        assert f"--nproc-per-node {cluster.devices_per_node}" in path.read_text()
    assert os.access(paths[0], os.X_OK)


def fake(folder, name, body):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)


def run(script, folder, *args, **environment):
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", script, *args],
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_node_starts_its_ranks_on_the_run_directory(plan_of, tmp_path):
    plan, cluster = plan_of("two-ranks")
    run_dir = tmp_path / "it's a run"
    torchrun, _ = write_launch(plan, cluster, run_dir)
    fake(tmp_path / "bin", "torchrun", 'printf "%s\\n" "$@"')
    started = run(torchrun, tmp_path / "bin").stdout.splitlines()
    expected = ["--standalone", "--nproc-per-node", "2", "-m", "runtime", str(run_dir.resolve())]
    assert started == [*expected, "--stage", "train"]
    assert run(torchrun, tmp_path / "bin", "validate").stdout.splitlines()[-1] == "validate"


def test_many_nodes_ask_for_their_rank_and_the_first_node(plan_of, tmp_path):
    plan, cluster = plan_of("hgx-h200-128")
    torchrun, _ = write_launch(plan, cluster, tmp_path / "run")
    fake(tmp_path / "bin", "torchrun", 'echo "$@"')
    refused = run(torchrun, tmp_path / "bin")
    assert refused.returncode != 0
    assert "NODE_RANK: set to 0..15" in refused.stderr
    started = run(torchrun, tmp_path / "bin", NODE_RANK="3", MASTER_ADDR="gpu01").stdout
    assert "--nnodes 16 --node-rank 3 --master-addr gpu01 --master-port 29500" in started


def test_slurm_gets_the_nodes_of_the_topology(plan_of, tmp_path):
    plan, cluster = plan_of("hgx-h200-128")
    run_dir = tmp_path / "it's a run"
    _, sbatch = write_launch(plan, cluster, run_dir)
    text = sbatch.read_text()
    for directive in ("--nodes=16", "--nodelist=gpu[01-16]", "--gpus-per-node=8"):
        assert f"#SBATCH {directive}\n" in text
    # Enough lines to overflow a pipe: a reader that stops at the first would kill the job.
    fake(tmp_path / "bin", "scontrol", "printf 'gpu%05d\\n' {1..20000}")
    fake(tmp_path / "bin", "srun", 'printf "%s\\n" "$@"')
    slurm = {"SLURM_JOB_NODELIST": "gpu[01-16]", "SLURM_JOB_ID": "7"}
    started = run(sbatch, tmp_path / "bin", **slurm).stdout.splitlines()
    assert started[0] == "torchrun"
    assert "gpu00001:29500" in started
    assert started[-4:] == ["runtime", str(run_dir.resolve()), "--stage", "train"]


def test_another_device_type_asks_slurm_for_its_own_resource(plan_of, tmp_path):
    plan, cluster = plan_of("supernode-128")
    text = write_launch(plan, cluster, tmp_path)[1].read_text()
    assert "#SBATCH --gres=npu:8\n" in text
    assert "gpus" not in text


def test_a_folder_that_cannot_be_written_is_named(plan_of, tmp_path):
    plan, cluster = plan_of("two-ranks")
    (tmp_path / "launch").write_text("in the way")
    with pytest.raises(InputError, match="launch"):
        write_launch(plan, cluster, tmp_path)
