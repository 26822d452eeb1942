"""Launch scripts of a plan: torchrun by hand on each node, and a Slurm batch file."""

from __future__ import annotations

import shlex
from pathlib import Path

from analyzers.documents import write_text
from strategies.cluster import Cluster
from strategies.schema import Plan

PORT = 29500

_TORCHRUN = """\
#!/usr/bin/env bash
# {title}
{usage}
set -euo pipefail

run_dir=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
{environment}
exec torchrun {rendezvous} \\
    --nproc-per-node {per_node} \\
    -m runtime "$run_dir" --stage "${{1:-train}}"
"""

_SBATCH = """\
#!/usr/bin/env bash
# {title}
# sbatch {script} [train|validate]
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{directives}#SBATCH --output=%x-%j.log
set -euo pipefail

run_dir={run_dir}
{environment}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
srun torchrun \\
    --nnodes {nodes} \\
    --nproc-per-node {per_node} \\
    --rdzv-backend c10d \\
    --rdzv-id "$SLURM_JOB_ID" \\
    --rdzv-endpoint "${{hosts[0]}}:{port}" \\
    -m runtime "$run_dir" --stage "${{1:-train}}"
"""


def write_launch(plan: Plan, cluster: Cluster, run_dir: str | Path) -> list[Path]:
    """Writes `launch/torchrun.sh` and `launch/slurm.sbatch`, and returns their paths.

    Both start `python -m runtime RUN_DIR` on every device and need nothing but the run directory,
    on a path that all nodes see. Raises InputError when the directory cannot be written.
    """
    run_dir = Path(run_dir).resolve()
    nodes, per_node = cluster.nodes, cluster.devices_per_node
    p = plan.parallelism
    facts = {
        "title": (
            f"{plan.world_size} devices of {_plain(plan.cluster)}: FSDP {p.fsdp}, "
            f"EP {p.ep} x {p.efsdp}, {p.dp_replicate} replica(s)"
        ),
        "nodes": nodes,
        "per_node": per_node,
        "port": PORT,
        "environment": _environment(cluster),
    }
    if nodes == 1:
        usage = "# launch/torchrun.sh [train|validate]"
        rendezvous = "--standalone"
    else:
        head = cluster.node_names[0] if cluster.node_names else "HOST"
        usage = (
            "# On every node:  NODE_RANK=<0.."
            f"{nodes - 1}> MASTER_ADDR={head} launch/torchrun.sh [train|validate]"
        )
        rendezvous = (
            f'--nnodes {nodes} --node-rank "${{NODE_RANK:?set to 0..{nodes - 1}}}" '
            '--master-addr "${MASTER_ADDR:?set to the first node}" '
            f'--master-port "${{MASTER_PORT:-{PORT}}}"'
        )
    directives = ""
    if cluster.hostlist:
        directives += f"#SBATCH --nodelist={','.join(cluster.hostlist)}\n"
    device = cluster.device.device_type
    if device == "cuda":
        directives += f"#SBATCH --gpus-per-node={per_node}\n"
    elif device != "cpu":
        directives += f"#SBATCH --gres={device}:{per_node}\n"
    torchrun = write_text(
        run_dir / "launch" / "torchrun.sh",
        _TORCHRUN.format(usage=usage, rendezvous=rendezvous, **facts),
    )
    torchrun.chmod(0o755)
    sbatch = write_text(
        run_dir / "launch" / "slurm.sbatch",
        _SBATCH.format(
            job=f"adapt-{_plain(plan.cluster)}",
            directives=directives,
            run_dir=shlex.quote(str(run_dir)),
            script="launch/slurm.sbatch",
            **facts,
        ),
    )
    return [torchrun, sbatch]


def _environment(cluster: Cluster) -> str:
    lines = ["export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"]
    if cluster.device.device_type == "cuda":
        # Collective buffers live outside the allocator's pool and decide many an overflow.
        lines.append("export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}")
    return "\n".join(lines)


def _plain(name: str) -> str:
    """A cluster's name as it may stand in a comment and a job name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
