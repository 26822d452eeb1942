"""Launch scripts of a plan: torchrun on each node by hand, and a Slurm batch file over it.

Ranks are numbered node by node in the order of the topology file, one process a device, because
the plan lays its groups over the tiers in that order. Rendezvous is therefore static: torchrun's
c10d rendezvous numbers nodes by name, and `gpu10` comes before `gpu2`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from analyzers.documents import write_text
from analyzers.errors import InputError
from strategies.cluster import Cluster, compress_hostlist
from strategies.schema import Plan

PORT = 29500
RESTARTS = 3
"""A restarted job goes on from its last complete checkpoint."""

ENVIRONMENT: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "cuda": {
        "PYTORCH_ALLOC_CONF": (
            "expandable_segments:True",
            "sizes vary from step to step, and fixed segments fragment",
        ),
    },
    "npu": {
        "PYTORCH_NPU_ALLOC_CONF": (
            "expandable_segments:True",
            "sizes vary from step to step, and fixed segments fragment",
        ),
        "HCCL_CONNECT_TIMEOUT": (
            "1800",
            "seconds; by default ranks that load weights for two minutes are given up",
        ),
    },
}
"""Device type -> variable -> (value, why). What the environment already sets wins."""


VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Device type -> variable with the devices of a node that its processes see."""


class RefusedError(InputError):
    """A launcher or another trainer cannot run the plan's layout at all."""


_TORCHRUN = """\
#!/usr/bin/env bash
# {headline}
{usage}
# Other arguments are given to torchrun instead, e.g. -m torchtitan.train ...
set -euo pipefail

run_dir=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
{environment}
case ${{1:-train}} in
    train | validate) set -- -m runtime "$run_dir" --stage "${{1:-train}}" ;;
esac
exec torchrun {rendezvous} \\
    --nproc-per-node {per_node} \\
    "$@"
"""

_SBATCH = """\
#!/usr/bin/env bash
# {headline}
# sbatch launch/slurm.sbatch [train|validate]
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{directives}#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail

run_dir={run_dir}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${{hosts[0]}} MASTER_PORT=${{MASTER_PORT:-{port}}}

# torchrun cannot restart a group of several nodes with static ranks; the job is started again.
# One task a node holds all of its ranks: without --cpu-bind=none they would share one core.
for attempt in $(seq 0 "${{MAX_RESTARTS:-{restarts}}}"); do
    if ((attempt)); then
        echo "restart $attempt" >&2
    fi
    srun --kill-on-bad-exit=1 --cpu-bind=none "$run_dir/launch/torchrun.sh" "$@" && exit 0
done
exit 1
"""


def write_launch(plan: Plan, cluster: Cluster, run_dir: str | Path) -> list[Path]:
    """Writes `launch/torchrun.sh` and `launch/slurm.sbatch`, and returns their paths.

    Both start `python -m runtime RUN_DIR` on every device and need nothing but the run directory,
    on a path that all nodes see. Raises InputError when the directory cannot be written.
    """
    run_dir = Path(run_dir)
    nodes, per_node = _nodes(plan, cluster)
    script = _SBATCH.format(
        headline=headline(plan),
        job=f"adapt-{_plain(plan.cluster)}",
        nodes=nodes,
        directives=_directives(cluster, nodes, per_node),
        run_dir=shlex.quote(str(run_dir.resolve())),
        port=PORT,
        restarts=RESTARTS,
    )
    torchrun = write_torchrun(plan, cluster, run_dir)
    return [*torchrun, write_text(run_dir / "launch" / "slurm.sbatch", script)]


def write_torchrun(plan: Plan, cluster: Cluster, run_dir: str | Path) -> list[Path]:
    """Writes `launch/torchrun.sh`, which finds the run directory as the folder above its own."""
    nodes, per_node = _nodes(plan, cluster)
    if nodes == 1:
        usage = "# launch/torchrun.sh [train|validate]"
        rendezvous = f'--standalone --max-restarts "${{MAX_RESTARTS:-{RESTARTS}}}"'
    else:
        head = cluster.node_names[0] if cluster.node_names else "HOST"
        usage = (
            "# On every node:  NODE_RANK=<0.."
            f"{nodes - 1}> MASTER_ADDR={head} launch/torchrun.sh [train|validate]"
        )
        rendezvous = (
            f"--nnodes {nodes} "
            f'--node-rank "${{NODE_RANK:-${{SLURM_NODEID:?set NODE_RANK to 0..{nodes - 1}}}}}" '
            '--master-addr "${MASTER_ADDR:?set to the first node}" '
            f'--master-port "${{MASTER_PORT:-{PORT}}}"'
        )
    script = _TORCHRUN.format(
        headline=headline(plan),
        usage=usage,
        environment="\n".join([*_environment(cluster), *_visible(cluster, nodes, per_node)]),
        rendezvous=rendezvous,
        per_node=per_node,
    )
    path = write_text(Path(run_dir) / "launch" / "torchrun.sh", script)
    path.chmod(0o755)
    return [path]


def _nodes(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """Nodes and processes on each. Raises RefusedError when the devices do not fill whole nodes."""
    per_node = min(cluster.devices_per_node, plan.world_size)
    nodes, left = divmod(plan.world_size, per_node)
    if left:
        fault = f"{plan.world_size} devices do not fill nodes of {per_node}"
        fix = "plan for a whole number of nodes"
        raise RefusedError("plan.json", field="world_size", fault=fault, fix=fix)
    return nodes, per_node


def _directives(cluster: Cluster, nodes: int, per_node: int) -> str:
    lines = []
    if cluster.node_names:
        names = compress_hostlist(cluster.node_names[:nodes])
        lines.append(f"--nodelist={','.join(names)}")
    device = cluster.device.device_type
    if device == "cuda":
        lines.append(f"--gpus-per-node={per_node}")
    elif device != "cpu":
        lines.append(f"--gres={device}:{per_node}")
    return "".join(f"#SBATCH {line}\n" for line in lines)


def _environment(cluster: Cluster) -> list[str]:
    lines = ["export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"]
    for name, (value, why) in ENVIRONMENT.get(cluster.device.device_type, {}).items():
        lines += [f"# {why}", f"export {name}=${{{name}:-{value}}}"]
    return lines


def _visible(cluster: Cluster, nodes: int, per_node: int) -> list[str]:
    """Hides the devices that are down from the ranks of their nodes.

    What the environment already hides wins: a scheduler that knows of them numbers anew.
    """
    name = VISIBLE.get(cluster.device.device_type)
    used = set(cluster.node_names[:nodes])
    cases = [
        f"    {' | '.join(map(shlex.quote, names))}) working={','.join(map(str, devices))} ;;"
        for devices, on in cluster.working
        if (names := [node for node in on if node in used])
    ]
    if name is None or not cases:
        return []
    return [
        "# The topology names devices of these nodes as down.",
        "case ${SLURMD_NODENAME:-$(hostname -s)} in",
        *cases,
        "    *) working= ;;",
        "esac",
        f'IFS=, read -ra seen <<<"${{{name}:-}}"',
        f"if [[ $working && ( ${{#seen[@]}} -eq 0 || ${{#seen[@]}} -gt {per_node} ) ]]; then",
        f"    export {name}=$working",
        "fi",
    ]


def headline(plan: Plan) -> str:
    """The layout in one line that may stand in a comment of any language."""
    p = plan.parallelism
    axes = {"PP": p.pp, "TP": p.tp, "CP": p.cp}
    others = "".join(f", {name} {size}" for name, size in axes.items() if size > 1)
    experts = f", EP {p.ep} x {p.efsdp}" if plan.has_experts else ""
    return (
        f"{plan.world_size} devices of {_plain(plan.cluster)}: FSDP {p.fsdp}"
        f"{experts}, {p.dp_replicate} replica(s){others}"
    )


def _plain(name: str) -> str:
    """A cluster's name as it may stand in a comment and a job name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
