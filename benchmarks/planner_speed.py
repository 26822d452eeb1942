"""How long the plan search takes and how much memory: 128, 10,240 and 102,400 devices.

    python benchmarks/planner_speed.py [MODEL] [--devices 128 10240 102400] [--json FILE]

The search alone, the analysis given: the plan that can be run, what each feature that the runtime
lacks would gain, and the best of all plans with all features. Larger clusters are supernodes of 128
behind a slower fabric. Each size runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUPERNODE = ROOT / "examples" / "clusters" / "supernode-128.yaml"
DEVICES = (128, 10_240, 102_400)
LIMITS = {128: 1.0, 10_240: 5.0, 102_400: 20.0}
"""Seconds on two cores."""
MEMORY_LIMIT = 1e9
"""Bytes of the process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / "examples/models/kimi-k3")
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args()
    from analyzers import analyze

    analysis = analyze(given.model)
    context = multiprocessing.get_context("spawn")
    rows = []
    for devices in given.devices:
        with context.Pool(1) as pool:
            row = pool.apply(measure, (analysis, devices))
        rows.append(row)
        print(
            f"{devices:>8,} devices: {row['seconds']:6.2f} s "
            f"({row['processor_seconds']:.2f} of a core), {row['peak_bytes'] / 1e9:.2f} GB; "
            f"{row['plans']:,} plans, {row['priced']:,} priced: {row['plan']}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps({"model": given.model.name, "rows": rows}, indent=2))


def measure(analysis: Any, devices: int) -> dict[str, Any]:
    """The first search of a process; imports are not counted."""
    from strategies import search
    from strategies.schema import Job

    job = Job(model="", cluster="", backend="")
    cluster = cluster_of(devices)
    start, used = time.perf_counter(), time.process_time()
    plan = search(analysis, cluster, job)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    wide = plan.searched_beyond or plan.searched
    assert wide
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "devices": devices,
        "seconds": seconds,
        "processor_seconds": used,
        "peak_bytes": peak,
        "plans": wide.plans,
        "priced": wide.priced,
        "plan": plan.explanation[1].split(":")[0],
        "within": seconds <= LIMITS.get(devices, float("inf")) and peak <= MEMORY_LIMIT,
    }


def cluster_of(devices: int) -> Any:
    """Supernodes of 128 behind a fabric of one 400 Gbit/s port a device."""
    from dataclasses import replace

    from strategies import load_cluster
    from strategies.cluster import Fabric, Tier

    supernode = load_cluster(SUPERNODE)
    count, rest = divmod(devices, supernode.world_size)
    if rest:
        raise SystemExit(f"{devices} devices are no whole number of supernodes of 128")
    if count == 1:
        return supernode
    fabric = Fabric(kind="clos", bw_gbps=50, latency_us=12, efficiency=0.9)
    top = Tier(name="cluster", size=count, devices=devices, fabric=fabric)
    return replace(
        supernode, tiers=(*supernode.tiers, top), node_names=(), hostlist=(), name=f"{count} nodes"
    )


if __name__ == "__main__":
    main()
