"""The machine that a published row ran on: a GPU's name and count -> Cluster."""

from __future__ import annotations

import functools
import re
from dataclasses import field, replace
from importlib import resources

import yaml

from analyzers.backends import Backend, Fact, load_backend, load_links
from analyzers.documents import document, from_data
from strategies.cluster import Cluster, Fabric, Tier

RACK = 64
"""GPUs of one NVL72 rack in a job of several: what a power of two leaves of 72."""


@document
class Gpu:
    names: str
    """Pattern of the names that tables use."""
    base: str
    """Backend that it shares all other facts with."""
    facts: dict = field(default_factory=dict)
    scale_up_gbps: Fact | None = None
    link_gbps: Fact | None = None
    scale_out_gbps: Fact | None = None


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    where = resources.files("strategies.calibration") / "hardware.yaml"
    data = yaml.safe_load(where.read_text(encoding="utf-8"))
    return tuple(from_data(Gpu, entry, "hardware.yaml") for entry in data)


def find_gpu(name: str) -> Gpu | None:
    return next((g for g in gpus() if re.search(g.names, name, re.IGNORECASE)), None)


@functools.cache
def device_of(gpu: str) -> Backend | None:
    """The backend of a GPU's name with what differs; None for a name nobody described."""
    found = find_gpu(gpu)
    if found is None:
        return None
    base = load_backend(found.base)
    changes: dict = {}
    for name, value in found.facts.items():
        if name == "matmul_tflops":
            rates = {k: from_data(Fact, v, "hardware.yaml") for k, v in value.items()}
            changes[name] = {**base.matmul_tflops, **rates}
        else:
            changes[name] = from_data(Fact, value, "hardware.yaml")
    rates = changes.get("matmul_tflops", base.matmul_tflops)
    if "float8" in rates and "mxfloat8" not in rates:
        # Before Blackwell blocks are scaled outside of the tensor cores, at most as fast as float8.
        changes["matmul_tflops"] = {**rates, "mxfloat8": rates["float8"]}
    return replace(base, name=gpu, **changes)


@functools.cache
def cluster_of(gpu: str, devices: int) -> Cluster | None:
    """`devices` of a GPU joined as they usually are; None where no file says how.

    A job takes whole nodes, or a part of one. Of NVL72 racks 64 GPUs are used where several are.
    """
    found, device = find_gpu(gpu), device_of(gpu)
    links = load_links(found.base) if found else None
    if found is None or device is None or links is None:
        return None
    sizes = [min(links.devices_per_node, devices)]
    if links.domain > links.devices_per_node and devices > sizes[0]:
        domain = devices if devices <= links.domain else RACK
        sizes.append(domain // sizes[0])
    inner = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    if devices % inner:
        return None
    up, out = links.scale_up, links.scale_out
    fast = Fabric(
        kind=up.kind,
        bw_gbps=(found.scale_up_gbps or up.gbps).value,
        link_gbps=(found.link_gbps or up.link_gbps).value if up.link_gbps else None,
        latency_us=up.latency_us.value,
        efficiency=up.efficiency.value,
    )
    slow = Fabric(
        kind=out.kind,
        bw_gbps=(found.scale_out_gbps or out.gbps).value,
        latency_us=out.latency_us.value,
        efficiency=out.efficiency.value,
    )
    tiers = [Tier(name="node", size=sizes[0], devices=sizes[0], fabric=fast)]
    if len(sizes) > 1:
        tiers.append(Tier(name="domain", size=sizes[1], devices=inner, fabric=fast))
    if devices > inner:
        tiers.append(Tier(name="cluster", size=devices // inner, devices=devices, fabric=slow))
    return Cluster(name=f"{devices} x {gpu}", device=device, tiers=tuple(tiers))
