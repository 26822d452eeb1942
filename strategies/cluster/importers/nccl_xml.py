"""NCCL's topology XML (`NCCL_TOPO_DUMP_FILE`), and RCCL's: GPUs, their links and NICs of one node.

Elements and attributes as NCCL's src/graph/xml.cc writes them. No DTD, no entities.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.parsers import expat

import networkx as nx

from analyzers.errors import InputError
from strategies.cluster.importers.found import Found, NodeInside

MAX_ELEMENTS = 100_000
MAX_DEPTH = 64
SWITCH_CLASS = "0x068"
"""PCI class of an NVSwitch; links to a GPU carry 0x0302."""


@dataclass
class _Element:
    tag: str
    attributes: dict[str, str]
    line: int
    parent: _Element | None
    children: list[_Element] = field(default_factory=list)

    def all(self, *tags: str) -> Iterator[_Element]:
        for child in self.children:
            if child.tag in tags:
                yield child
            yield from child.all(*tags)

    def above(self, *tags: str) -> _Element | None:
        at = self.parent
        while at is not None and at.tag not in tags:
            at = at.parent
        return at


def read_xml(path: Path, text: str) -> Found:
    """Raises InputError for broken or hostile XML, and for a file without GPUs."""
    system = _parse(path, text)
    if system.tag != "system":
        fault = f"starts with <{system.tag}>, not with NCCL's <system>"
        raise InputError(f"{path}:{system.line}", fault=fault, fix="dump NCCL_TOPO_DUMP_FILE")
    gpus = list(system.all("gpu"))
    if not gpus:
        raise InputError(path, fault="names no GPU", fix="dump it from a job that uses GPUs")
    hosts = Counter(_host(g) for g in gpus)
    notes: list[str] = []
    if len(hosts) > 1:
        if len(set(hosts.values())) > 1:
            shown = " and ".join(str(n) for n in sorted(set(hosts.values())))
            fault = f"has hosts of {shown} GPUs"
            raise InputError(path, fault=fault, fix="dump it from nodes of one kind")
        notes.append(f"the dump holds {len(hosts)} hosts; the first one is taken")
        gpus = [g for g in gpus if _host(g) == next(iter(hosts))]
    kind, links, gbps, said = _inside(path, gpus)
    nics, nic_gbps = _nics(path, system, _host(gpus[0]))
    sms = {_number(path, g, "sm") for g in gpus if "sm" in g.attributes}
    return Found(
        path=path,
        format="nccl_xml",
        node=NodeInside(
            devices=len(gpus),
            kind=kind,
            links=links,
            gbps=gbps,
            nics=nics,
            nic_gbps=nic_gbps,
            arch=int(sms.pop()) if len(sms) == 1 else None,
        ),
        notes=(*notes, *said),
    )


def _parse(path: Path, text: str) -> _Element:
    """The elements of the file; comments and text are skipped."""
    parser = expat.ParserCreate()
    top = _Element("", {}, 0, None)
    state = {"at": top, "depth": 0, "count": 0}

    def refuse(fault: str) -> InputError:
        where = f"{path}:{parser.CurrentLineNumber}"
        return InputError(where, fault=fault, fix="give the file as NCCL wrote it")

    def start(tag: str, attributes: dict[str, str]) -> None:
        state["depth"] += 1
        state["count"] += 1
        if state["depth"] > MAX_DEPTH or state["count"] > MAX_ELEMENTS:
            raise refuse("is nested too deeply or has too many elements")
        made = _Element(tag, attributes, parser.CurrentLineNumber, state["at"])
        state["at"].children.append(made)
        state["at"] = made

    def end(tag: str) -> None:
        state["depth"] -= 1
        state["at"] = state["at"].parent

    def doctype(*_: object) -> None:
        raise refuse("a document type or entity is not accepted")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    parser.EntityDeclHandler = doctype
    try:
        parser.Parse(text.encode(), True)
    except expat.ExpatError as e:
        fault = f"broken XML: {expat.ErrorString(e.code)}"
        raise InputError(f"{path}:{e.lineno}", fault=fault, fix="mend that line") from e
    return top.children[0]


def _host(element: _Element) -> str:
    cpu = element.above("cpu")
    return cpu.attributes.get("host_hash", "") if cpu else ""


def _number(path: Path, element: _Element, name: str) -> float:
    try:
        value = float(element.attributes[name])
    except (KeyError, ValueError) as e:
        fault = f"<{element.tag}> has no number '{name}'"
        fix = "give the file as NCCL wrote it"
        raise InputError(f"{path}:{element.line}", fault=fault, fix=fix) from e
    if not 0 <= value < 1e12:
        fault = f"<{element.tag}> has {name}={value:g}"
        raise InputError(f"{path}:{element.line}", fault=fault, fix="correct the number")
    return value


def _inside(
    path: Path, gpus: list[_Element]
) -> tuple[Literal["switch", "fullmesh"], int | None, float | None, tuple[str, ...]]:
    """Kind of fabric, links of a device (of a pair in a full mesh), GB/s, and notes."""
    switched, direct = [], nx.DiGraph()
    bus = {_bus(g): i for i, g in enumerate(gpus)}
    direct.add_nodes_from(range(len(gpus)))
    for i, gpu in enumerate(gpus):
        links = 0
        for link in gpu.all("nvlink", "xgmi"):
            count = int(_number(path, link, "count"))
            target = bus.get(link.attributes.get("target", "").lower())
            if target is not None and target != i:
                direct.add_edge(i, target, count=count)
            elif link.attributes.get("tclass", "").startswith(SWITCH_CLASS):
                links += count
        switched.append(links)
    if min(switched) > 0:
        notes = ()
        if len(set(switched)) > 1:
            notes = (f"GPUs have {min(switched)} to {max(switched)} links: the fewest are taken",)
        return "switch", min(switched), None, notes
    counts = {d["count"] for _, _, d in direct.edges(data=True)}
    n = len(gpus)
    if n > 1 and direct.number_of_edges() == n * (n - 1):
        return "fullmesh", min(counts), None, ()
    notes = ()
    if counts:
        notes = ("direct links do not join every pair of GPUs: planned at the rate of PCIe",)
    return "switch", None, _pcie(gpus), notes


def _bus(gpu: _Element) -> str:
    pci = gpu.above("pci")
    return pci.attributes.get("busid", "").lower() if pci else ""


def _pcie(gpus: list[_Element]) -> float | None:
    """GB/s of the slowest GPU's PCIe link: GT/s x lanes / 8, 128 of 130 bits carrying data."""
    rates = []
    for gpu in gpus:
        pci = gpu.above("pci")
        speed = re.match(r"([\d.]{1,6}) GT/s", pci.attributes.get("link_speed", "") if pci else "")
        width = pci.attributes.get("link_width", "") if pci else ""
        if speed is None or not re.fullmatch(r"[1-9]\d?", width):
            return None
        rates.append(float(speed[1]) * int(width) / 8 * 128 / 130)
    return min(rates)


def _nics(path: Path, system: _Element, host: str) -> tuple[int, float | None]:
    """Number and GB/s of the fastest kind of NIC; `speed` is in Mb/s."""
    nets = [n for n in system.all("net") if _host(n) == host]
    speeds = Counter(_number(path, n, "speed") for n in nets if "speed" in n.attributes)
    if not speeds or max(speeds) == 0:
        return 0, None
    return speeds[max(speeds)], max(speeds) / 8e3
