"""Measures this machine and describes it as a topo.yaml: rates of a device, collectives by size."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analyzers.backends import backend_names, load_backend, load_links
from analyzers.errors import InputError
from runtime.launch import Progress, local_devices, run_ranks

SIZES_MIB = {"cpu": (0.0625, 0.25, 1.0, 4.0, 16.0)}
DEFAULT_SIZES_MIB = (0.0625, 1.0, 16.0, 64.0, 256.0, 1024.0)
COPY_MIB = {"cpu": 64.0}
DEFAULT_COPY_MIB = 512.0
SECONDS = {"cpu": 0.2}
DEFAULT_SECONDS = 0.05
"""For one measurement; a probe of two ranks makes about thirty."""
MIB, GIB = 2**20, 2**30


def measure(
    *,
    ranks: int | None = None,
    sizes_mib: Sequence[float] | None = None,
    copy_mib: float | None = None,
    seconds: float | None = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Runs the probe on `ranks` local devices (all of them by default) and gives what it found.

    `progress` gets lines `done/total what`. Raises InputError for more ranks than devices, and
    RuntimeError with a rank's last lines when it fails.
    """
    kind, count = local_devices()
    ranks = count if ranks is None else ranks
    if ranks < 1 or (ranks > count and kind != "cpu"):
        fault = f"{ranks}, but here are {count} {kind} devices"
        raise InputError("cluster probe", field="ranks", fault=fault, fix="ask for fewer")
    sizes = list(sizes_mib or SIZES_MIB.get(kind, DEFAULT_SIZES_MIB))
    with tempfile.TemporaryDirectory(prefix="adapt-probe-") as folder:
        out = Path(folder) / "found.json"
        arguments = ["runtime.probe_ranks", str(out)]
        arguments += ["--sizes", *(f"{s:g}" for s in sizes)]
        arguments += ["--copy-mib", f"{copy_mib or COPY_MIB.get(kind, DEFAULT_COPY_MIB):g}"]
        arguments += ["--seconds", f"{seconds or SECONDS.get(kind, DEFAULT_SECONDS):g}"]
        run_ranks("probe", arguments, ranks, Path(folder) / "logs", progress=progress)
        return json.loads(out.read_text(encoding="utf-8"))


def describe(
    found: dict[str, Any], *, name: str, device: str | None = None, host: str = "localhost"
) -> dict[str, Any]:
    """What the probe found, as topo.yaml has it.

    `device` is the backend; by default the one whose name the devices bear. The fabric's numbers
    are fitted to the all-gather of the whole machine: bytes that each device receives over the time
    of the largest message, and what is left of the smallest one's time a step.
    """
    backend = device or _backend(found)
    source = f"adapt cluster probe, {found['names'][0]}, {found['backend']}"
    overrides: dict[str, Any] = {
        "memory_gib": found["memory_bytes"] / GIB,
        "memory_gbps": found["memory_gbps"],
        "launch_overhead_us": found["launch_overhead_us"],
        "matmul_tflops": dict(found["matmul_tflops"]),
        "origin": "measured",
        "source": source,
    }
    if overrides["memory_gib"] <= load_backend(backend).reserved_gib.value:
        overrides["reserved_gib"] = 0.0
    data: dict[str, Any] = {
        "version": 1,
        "name": name,
        "device": backend,
        "device_overrides": overrides,
        "tiers": [
            {"name": "node", "size": found["ranks"], "fabric": _fabric(found, backend, source)}
        ],
    }
    if found["host_gbps"]:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        data["host"] = {
            "mem_gib": memory / GIB,
            "d2h_gbps": found["host_gbps"],
            "share": "node",
            "origin": "measured",
            "source": source,
        }
    data["nodes"] = {"names": [re.sub(r"[^A-Za-z0-9._-]", "-", host).strip("-._") or "localhost"]}
    if found["collectives"]:
        data["measured"] = [
            {
                "within": "node",
                "op": c["op"],
                "devices": c["devices"],
                "size_mib": found["sizes_mib"],
                "ms": [s * 1e3 for s in c["seconds"]],
            }
            for c in found["collectives"]
        ]
    return data


def _fabric(found: dict[str, Any], backend: str, source: str) -> dict[str, Any]:
    ranks = found["ranks"]
    gathers = [c for c in found["collectives"] if c["op"] == "all_gather"]
    if not gathers:  # one device: no link is used, whatever its rate
        links = load_links(backend)
        rate = links.scale_up.gbps.value if links else 1.0
        return {"kind": "switch", "bw_gbps": rate, "origin": "default"}
    times, sizes = gathers[-1]["seconds"], [s * MIB for s in found["sizes_mib"]]
    received = [s * (ranks - 1) / ranks for s in sizes]
    rate = received[-1] / times[-1]
    latency = max(times[0] - received[0] / rate, 0.0) / (ranks - 1)
    return {
        "kind": "switch",
        "bw_gbps": rate / 1e9,
        "latency_us": latency * 1e6,
        "efficiency": 1.0,
        "origin": "measured",
        "source": source,
    }


def _backend(found: dict[str, Any]) -> str:
    """The backend of that kind whose name the devices bear; the longest of several."""
    shown = re.sub(r"[^a-z0-9]", "", found["names"][0].lower())
    kind = found["device_type"]
    bearing = [
        n
        for n in backend_names()
        if load_backend(n).device_type == kind and n.replace("-", "") in shown
    ]
    if not bearing:
        known = ", ".join(n for n in backend_names() if load_backend(n).device_type == kind)
        fault = f"no backend is known for '{found['names'][0]}'"
        fix = f"give the nearest one with --device: {known or ', '.join(backend_names())}"
        raise InputError("cluster probe", field="device", fault=fault, fix=fix)
    return max(bearing, key=len)
