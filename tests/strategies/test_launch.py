import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from analyzers.errors import InputError
from strategies import load_cluster, write_launch
from strategies.launch import headline
from strategies.schema import Parallelism
from tests.strategies.plans import make_plan

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


@pytest.fixture(scope="module")
def plan_of():
    def make(name, devices=None):
        cluster = load_cluster(CLUSTERS / f"{name}.yaml")
        size = devices or cluster.world_size
        layout = Parallelism(fsdp=size, ep=size)
        return make_plan(cluster=cluster.name, world_size=size, parallelism=layout), cluster

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
    assert f"--nproc-per-node {cluster.devices_per_node}" in paths[0].read_text()
    assert os.access(paths[0], os.X_OK)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, *paths], check=True)


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
    group = ["--standalone", "--max-restarts", "3", "--nproc-per-node", "2"]
    expected = [*group, "-m", "runtime", str(run_dir.resolve())]
    assert started == [*expected, "--stage", "train"]
    assert run(torchrun, tmp_path / "bin", "validate").stdout.splitlines()[-1] == "validate"


def test_many_nodes_ask_for_their_rank_and_the_first_node(plan_of, tmp_path):
    plan, cluster = plan_of("hgx-h200-128")
    torchrun, _ = write_launch(plan, cluster, tmp_path / "run")
    fake(tmp_path / "bin", "torchrun", 'echo "$@"')
    refused = run(torchrun, tmp_path / "bin")
    assert refused.returncode != 0
    assert "set NODE_RANK to 0..15" in refused.stderr
    started = run(torchrun, tmp_path / "bin", NODE_RANK="3", MASTER_ADDR="gpu01").stdout
    assert "--nnodes 16 --node-rank 3 --master-addr gpu01 --master-port 29500" in started


def test_another_trainer_is_started_in_place_of_the_runtime(plan_of, tmp_path):
    torchrun, _ = write_launch(*plan_of("two-ranks"), tmp_path / "run")
    fake(tmp_path / "bin", "torchrun", 'printf "%s\\n" "$@"')
    given = ["-m", "torchtitan.train", "--module", "my job"]
    assert run(torchrun, tmp_path / "bin", *given).stdout.splitlines()[-4:] == given


def test_slurm_gets_the_nodes_of_the_topology(plan_of, tmp_path):
    plan, cluster = plan_of("hgx-h200-128")
    run_dir = tmp_path / "it's a run"
    _, sbatch = write_launch(plan, cluster, run_dir)
    text = sbatch.read_text()
    for directive in ("--nodes=16", "--nodelist=gpu[01-16]", "--gpus-per-node=8", "--requeue"):
        assert f"#SBATCH {directive}\n" in text


def test_a_plan_on_fewer_nodes_asks_for_no_more(plan_of, tmp_path):
    text = write_launch(*plan_of("hgx-h200-128", devices=32), tmp_path)[1].read_text()
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --nodelist=gpu[01-04]\n" in text
    part = write_launch(*plan_of("hgx-h200-128", devices=4), tmp_path)
    assert "#SBATCH --gpus-per-node=4\n" in part[1].read_text()
    assert "--standalone" in part[0].read_text()
    with pytest.raises(InputError, match="do not fill nodes of 8"):
        write_launch(*plan_of("hgx-h200-128", devices=12), tmp_path)


SLURM = {"SLURM_JOB_NODELIST": "gpu[01-16]", "SLURM_JOB_ID": "7"}


def test_slurm_numbers_the_nodes_as_the_topology_does(plan_of, tmp_path):
    """Not by name, as torchrun's own rendezvous does: `gpu10` is not the second node."""
    run_dir = tmp_path / "it's a run"
    _, sbatch = write_launch(*plan_of("hgx-h200-128"), run_dir)
    # Enough lines to overflow a pipe: a reader that stops at the first would kill the job.
    fake(tmp_path / "bin", "scontrol", "printf 'gpu%05d\\n' {1..20000}")
    fake(tmp_path / "bin", "srun", 'shift 2; SLURM_NODEID=9 "$@"')
    fake(tmp_path / "bin", "torchrun", 'printf "%s\\n" "$@"')
    started = run(sbatch, tmp_path / "bin", "validate", **SLURM).stdout.splitlines()
    assert started[:6] == ["--nnodes", "16", "--node-rank", "9", "--master-addr", "gpu00001"]
    assert started[-4:] == ["runtime", str(run_dir.resolve()), "--stage", "validate"]


@pytest.mark.parametrize(("limit", "starts"), [({}, 4), ({"MAX_RESTARTS": "1"}, 2)])
def test_slurm_starts_a_failed_job_again(plan_of, tmp_path, limit, starts):
    _, sbatch = write_launch(*plan_of("hgx-h200-128"), tmp_path / "run")
    fake(tmp_path / "bin", "scontrol", "echo gpu01")
    fake(tmp_path / "bin", "srun", "echo start; exit 1")
    ended = run(sbatch, tmp_path / "bin", **SLURM, **limit)
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == ["start"] * starts
    fake(tmp_path / "bin", "srun", "echo start")
    assert run(sbatch, tmp_path / "bin", **SLURM).stdout.splitlines() == ["start"]


def test_what_the_environment_sets_wins(plan_of, tmp_path):
    torchrun, _ = write_launch(*plan_of("supernode-128"), tmp_path / "run")
    fake(tmp_path / "bin", "torchrun", 'echo "$HCCL_CONNECT_TIMEOUT $PYTORCH_NPU_ALLOC_CONF"')
    node = {"NODE_RANK": "0", "MASTER_ADDR": "sn01"}
    said = run(torchrun, tmp_path / "bin", **node).stdout.split()
    assert said == ["1800", "expandable_segments:True"]
    said = run(torchrun, tmp_path / "bin", **node, HCCL_CONNECT_TIMEOUT="60").stdout.split()
    assert said[0] == "60"


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


def test_the_headline_names_experts_where_there_are_some(plan_of):
    plan, _ = plan_of("two-ranks")
    assert "FSDP 2, EP 2 x 1, 1 replica(s)" in headline(plan)
    assert headline(replace(plan, expert_weight_format=None)).endswith("FSDP 2, 1 replica(s)")


@pytest.fixture
def with_a_device_down(tmp_path):
    """A cluster of whose nodes device 2 is down, and a plan on what is left of it."""

    def make(name):
        path = tmp_path / f"{name}.yaml"
        data = yaml.safe_load((CLUSTERS / path.name).read_text())
        data["overrides"] = [{"match": "*/device2", "down": True}]
        path.write_text(yaml.safe_dump(data))
        cluster = load_cluster(path)
        size = cluster.world_size
        layout = Parallelism(fsdp=size, ep=1, efsdp=size)
        return make_plan(cluster=cluster.name, world_size=size, parallelism=layout), cluster

    return make


@pytest.mark.parametrize(
    ("name", "node", "variable"),
    [
        ("hgx-h200-128", "gpu07", "CUDA_VISIBLE_DEVICES"),
        ("supernode-128", "sn07", "ASCEND_RT_VISIBLE_DEVICES"),
    ],
)
def test_ranks_do_not_see_a_device_that_is_down(with_a_device_down, tmp_path, name, node, variable):
    plan, cluster = with_a_device_down(name)
    assert cluster.devices_per_node == 7
    torchrun = write_launch(plan, cluster, tmp_path / "run")[0]
    fake(tmp_path / "bin", "torchrun", f'echo "${{{variable}-all}}"')
    launch = {"NODE_RANK": "0", "MASTER_ADDR": "h"}

    def seen(host, **given):
        fake(tmp_path / "bin", "hostname", f"echo {host}")
        return run(torchrun, tmp_path / "bin", **launch, **given).stdout.strip()

    assert seen(node) == "0,1,3,4,5,6,7"
    assert seen("another") == "all"
    assert seen("alias", SLURMD_NODENAME=node) == "0,1,3,4,5,6,7"
    # A scheduler gave all of the node, or knew of the fault and gave what is left.
    assert seen(node, **{variable: "0,1,2,3,4,5,6,7"}) == "0,1,3,4,5,6,7"
    assert seen(node, **{variable: "0,1,2,3,4,5,6"}) == "0,1,2,3,4,5,6"
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, torchrun], check=True)


def test_nothing_is_hidden_where_every_device_works(plan_of, tmp_path):
    text = write_launch(*plan_of("hgx-h200-128"), tmp_path)[0].read_text()
    assert "VISIBLE_DEVICES" not in text
