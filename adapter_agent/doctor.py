"""What this machine has for the job, what it lacks, and what the lack means."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adapter_agent.run_directory import versions
from adapter_agent.words import GIB

_OPTIONAL = {
    "fla": "flash-linear-attention: existing GPU kernels are not offered to the operator map",
    "hypothesis": "the property tests are not run (pip install 'adapter-agent[test]')",
}


def examine() -> dict[str, Any]:
    """Looks at versions, devices, compilers, memory and disk. Never raises for a lack."""
    found: dict[str, Any] = {
        "versions": {**versions(), "sqlite": sqlite3.sqlite_version},
        "devices": _devices(),
        "collectives": _collectives(),
        "triton": _triton(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "free_disk_gib": round(shutil.disk_usage(Path.cwd()).free / GIB, 1),
    }
    found["missing"] = _missing(found)
    return found


def _devices() -> dict[str, Any]:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return {"type": "cpu", "count": 0, "names": []}
    count = torch.accelerator.device_count()
    module = torch.get_device_module(accelerator)
    names = [module.get_device_name(i) for i in range(count)]
    return {"type": accelerator.type, "count": count, "names": names}


def _collectives() -> list[str]:
    import torch.distributed as dist

    offered = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return [name for name, there in offered.items() if there]


def _triton() -> dict[str, Any]:
    """Compiler families inside the installed Triton: they compile without the device."""
    try:
        backends = importlib.import_module("triton.backends").backends
        return {"compilers": sorted(backends), "interpreter": True}
    except Exception as e:  # a broken compiler is a finding here, not a fault of this command
        return {"compilers": [], "interpreter": False, "fault": f"{type(e).__name__}: {e}"}


def _missing(found: dict[str, Any]) -> list[dict[str, str]]:
    from analyzers.backends import backend_names, load_backend

    lacks: list[dict[str, str]] = []

    def lack(what: str, meaning: str) -> None:
        lacks.append({"what": what, "meaning": meaning})

    if not found["devices"]["count"]:
        lack(
            "accelerator",
            "kernels are proved in Triton's interpreter and cross-compiled, not timed; "
            "plans for other devices are validated on CPU ranks and end with launch scripts",
        )
    if "gloo" not in found["collectives"]:
        lack("gloo", "no multi-rank run on the CPU: validate and train cannot start")
    if not found["triton"]["compilers"]:
        lack("triton compilers", "the cross-compile gate fails, so no kernel is accepted")
    triton_families = {"cuda": "nvidia", "hip": "amd", "npu": "ascend"}
    for name in backend_names():
        target = load_backend(name).triton
        if target is None:
            continue
        family = triton_families[target.backend]
        if family not in found["triton"]["compilers"]:
            lack(f"triton {family} compiler", f"kernels for {name} are not cross-compiled here")
    for module, meaning in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            lack(module, meaning)
    if found["memory_gib"] < 4:
        lack("memory", "less than 4 GiB: two local ranks may not fit")
    if found["free_disk_gib"] < 2:
        lack("disk", "less than 2 GiB free: checkpoints may not fit")
    return lacks


def picture(found: dict[str, Any]) -> RenderableType:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, version in found["versions"].items():
        table.add_row(name, version)
    devices = found["devices"]
    here = ", ".join(devices["names"]) or "none: CPU only"
    table.add_row("accelerator", here)
    table.add_row("collectives", ", ".join(found["collectives"]))
    table.add_row("triton compilers", ", ".join(found["triton"]["compilers"]) or "none")
    table.add_row("cpu cores", str(found["cpu_cores"]))
    table.add_row("memory", f"{found['memory_gib']} GiB")
    table.add_row("free disk", f"{found['free_disk_gib']} GiB")
    lines = [Text(f"missing: {m['what']}: {m['meaning']}") for m in found["missing"]]
    return Group(table, *(lines or [Text("nothing is missing")]))
