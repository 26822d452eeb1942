"""NVIDIA topograph: model files, and the labels that it puts on Kubernetes nodes.

Shapes: docs/modeling.md and docs/engines/k8s.md of github.com/NVIDIA/topograph (1.1, and the
models of before it, which list nodes at switches and in capacity blocks). What its Slurm engine
writes is topology.conf or topology.yaml, which `slurm` reads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import networkx as nx
from pydantic import BaseModel, BeforeValidator, ConfigDict

from analyzers.errors import InputError
from strategies.cluster.hostlist import expand_hostlist, is_name
from strategies.cluster.importers.found import Found
from strategies.cluster.reading import YamlFile, shown

DOMAIN = "accelerator.topology.test/domain"
SUB_DOMAIN = "accelerator.topology.test/sub-domain"
_TIER = re.compile(r"fabric\.topograph\.run/tier-(\d{1,2})")
_OLD_TIERS = (
    ("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/block"),
    ("network.topology.nvidia.com/spine",),
    ("network.topology.nvidia.com/core", "network.topology.nvidia.com/datacenter"),
)
_DOMAINS = (
    "accelerator.topograph.run/domain",
    "network.topology.nvidia.com/accelerator",
    "nvidia.com/gpu.clique",
)
_SUB_DOMAINS = ("accelerator.topograph.run/sub-domain",)
_GPU_COUNT = "nvidia.com/gpu.count"
ROOT = "network"

Names = Annotated[
    list[str], BeforeValidator(lambda v: [str(x) for x in v] if isinstance(v, list) else v)
]


class _Open(BaseModel):
    """Other keys are other tools' business."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class SwitchEntry(_Open):
    annotations: dict[str, str] = {}
    switches: Names = []
    nodes: Names = []


class BlockEntry(_Open):
    nodes: Names
    switch: str | None = None
    annotations: dict[str, str] = {}


class CapacityBlock(_Open):
    nodes: Names = []
    attributes: dict[str, Any] = {}


class ModelNode(_Open):
    capacity_block: str | None = None
    attributes: dict[str, Any] = {}


class Model(_Open):
    switches: dict[str, SwitchEntry] = {}
    blocks: list[BlockEntry] = []
    nodes: dict[str, ModelNode] = {}
    capacity_blocks: dict[str, CapacityBlock] = {}


class Metadata(_Open):
    name: str
    labels: dict[str, str] = {}


class Item(_Open):
    metadata: Metadata


class NodeList(_Open):
    items: list[Item]


@dataclass(frozen=True)
class _Place:
    """Where a node hangs: its switches from the closest outwards, and its accelerator domain."""

    switches: tuple[str, ...]
    domain: str | None
    sub_domain: str | None = None


def read_model(yaml: YamlFile) -> Found:
    """A model file: `switches` with `blocks`, or with `nodes` and `capacity_blocks`."""
    model = yaml.checked(Model)
    parent: dict[str, str] = {}
    for name, switch in model.switches.items():
        for child in switch.switches:
            if parent.setdefault(child, name) != name:
                fault = f"switch '{child}' hangs on '{parent[child]}' and on '{name}'"
                raise yaml.error(("switches", name), fault=fault, fix="keep one of them")
    leaf_of, domain_of, sub_of = _members(yaml, model)
    if not leaf_of and not domain_of:
        fix = "give a model with blocks or nodes"
        raise InputError(yaml.path, fault="names no node", fix=fix)
    places = {}
    for node in [*leaf_of, *(n for n in domain_of if n not in leaf_of)]:
        switches, at = [], leaf_of.get(node)
        while at is not None:
            if at in switches:
                raise InputError(yaml.path, fault=f"switch '{at}' is above itself", fix="mend it")
            switches.append(at)
            at = parent.get(at)
        inherited = (model.switches[s].annotations for s in switches if s in model.switches)
        annotations = {k: v for a in reversed(list(inherited)) for k, v in a.items()}
        domain = domain_of.get(node) or annotations.get(DOMAIN)
        places[node] = _Place(
            tuple(switches), domain, sub_of.get(node) or annotations.get(SUB_DOMAIN)
        )
    return _found(yaml.path, places, None, ())


def _members(yaml: YamlFile, model: Model) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """The leaf switch, the accelerator domain and the sub-domain of each node that has one."""
    leaf_of: dict[str, str] = {}
    domain_of: dict[str, str] = {}
    sub_of: dict[str, str] = {}
    known = {*model.switches, *(c for s in model.switches.values() for c in s.switches)}

    def put(into: dict[str, str], node: str, value: str | None, at: tuple[int | str, ...]) -> None:
        if value is not None and into.setdefault(node, value) != value:
            fault = f"node '{node}' is in '{into[node]}' and in '{value}'"
            raise yaml.error(at, fault=fault, fix="keep one of them")

    for name, switch in model.switches.items():
        for node in _expand(yaml, switch.nodes, ("switches", name, "nodes")):
            put(leaf_of, node, name, ("switches", name, "nodes"))
    for i, block in enumerate(model.blocks):
        if block.switch is not None and block.switch not in known:
            fix = f"one of: {', '.join(sorted(known)[:8])}"
            fault = f"no switch is called '{block.switch}'"
            raise yaml.error(("blocks", i, "switch"), fault=fault, fix=fix)
        for node in _expand(yaml, block.nodes, ("blocks", i, "nodes")):
            put(leaf_of, node, block.switch, ("blocks", i))
            put(domain_of, node, block.annotations.get(DOMAIN), ("blocks", i))
            put(sub_of, node, block.annotations.get(SUB_DOMAIN), ("blocks", i))
            if block.switch is None and DOMAIN not in block.annotations:
                put(domain_of, node, f"block {i}", ("blocks", i))
    for name, held in model.capacity_blocks.items():
        for node in _expand(yaml, held.nodes, ("capacity_blocks", name, "nodes")):
            put(domain_of, node, held.attributes.get("nvlink"), ("capacity_blocks", name))
    for name, node in model.nodes.items():
        shared = model.capacity_blocks.get(node.capacity_block or "")
        domain = node.attributes.get("nvlink") or (shared and shared.attributes.get("nvlink"))
        put(domain_of, name, domain or None, ("nodes", name))
    return leaf_of, domain_of, sub_of


def _expand(yaml: YamlFile, patterns: list[str], at: tuple[int | str, ...]) -> list[str]:
    try:
        return [name for p in patterns for name in expand_hostlist(p)]
    except ValueError as e:
        raise yaml.error(at, fault=str(e), fix="write e.g. gpu[01-16]") from e


def read_labels(yaml: YamlFile) -> Found:
    """`kubectl get nodes -o yaml` (or json) with topograph's labels."""
    data = yaml.data if "items" in yaml.data else {"items": [yaml.data]}
    root = yaml.root if "items" in yaml.data else None
    listed = YamlFile(yaml.path, data, root).checked(NodeList)
    places: dict[str, _Place] = {}
    skipped: list[str] = []
    counts: set[int] = set()
    for i, item in enumerate(listed.items):
        labels, name = item.metadata.labels, item.metadata.name
        place = _Place(_tiers(labels), _first(labels, _DOMAINS), _first(labels, _SUB_DOMAINS))
        if not place.switches and place.domain is None:
            skipped.append(name)
            continue
        if name in places:
            raise yaml.error(("items", i), fault=f"node '{name}' is there twice", fix="keep one")
        places[name] = place
        if (count := labels.get(_GPU_COUNT, "")).isdecimal() and len(count) < 6:
            counts.add(int(count))
    if not places:
        fault = "has no node with labels of topograph"
        fix = "run topograph's k8s engine first, or give another file"
        raise InputError(yaml.path, fault=fault, fix=fix)
    if len(counts) > 1:
        fault = f"has nodes of {' and '.join(str(c) for c in sorted(counts))} devices"
        raise InputError(yaml.path, fault=fault, fix="give the nodes of one kind")
    notes = ()
    if skipped:
        notes = (f"{len(skipped)} nodes without labels are left out: {', '.join(skipped[:8])}",)
    return _found(yaml.path, places, next(iter(counts), None), notes)


def _tiers(labels: dict[str, str]) -> tuple[str, ...]:
    """Switches from the closest outwards."""
    numbered = {int(m[1]): v for k, v in labels.items() if (m := _TIER.fullmatch(k))}
    if numbered:
        return tuple(numbered[n] for n in sorted(numbered))
    return tuple(v for keys in _OLD_TIERS if (v := _first(labels, keys)))


def _first(labels: dict[str, str], keys: tuple[str, ...]) -> str | None:
    return next((labels[k] for k in keys if labels.get(k)), None)


def _found(
    path: Path, places: dict[str, _Place], devices_per_node: int | None, notes: tuple[str, ...]
) -> Found:
    """The tree of nodes, accelerator domains, and the switches above whole domains."""
    for node, place in places.items():
        for name in (node, *place.switches, place.domain, place.sub_domain):
            if name is not None and not is_name(name.replace(" ", "").replace("/", "")):
                fix = "use letters, digits, '-', '_' and '.'"
                raise InputError(path, fault=f"{shown(name)} is not a name", fix=fix)
    said = list(notes)
    with_domain = {n: p for n, p in places.items() if p.domain is not None}
    if with_domain and len(with_domain) < len(places):
        out = [n for n in places if n not in with_domain]
        said.append(
            f"{len(out)} nodes without an accelerator domain are left out: {', '.join(out[:8])}"
        )
        places = with_domain
    lengths = {len(p.switches) for p in places.values()}
    if len(lengths) > 1:
        shallow = min(places, key=lambda n: len(places[n].switches))
        fault = f"is not one tree of equal depth: '{shallow}' has fewer switches above it"
        raise InputError(path, fault=fault, fix="give the nodes of one fabric")
    inside = _levels_inside_domains(places) if with_domain else 0
    if inside:
        said.append(
            f"{inside} level(s) of switches lie inside accelerator domains and are left out: "
            "traffic there takes the domain's own links"
        )
    tree = nx.DiGraph()
    for node, place in places.items():
        chain = [(f"switch {s}", {"name": s}) for s in place.switches[inside:]]
        if place.domain is not None:
            facts = {"name": place.domain, "level": "domain", "scale_up": True}
            chain.insert(0, (f"domain {place.domain}", facts))
        if place.sub_domain is not None:
            facts = {"name": place.sub_domain, "level": "sub-domain", "scale_up": True}
            chain.insert(0, (f"sub-domain {place.domain}/{place.sub_domain}", facts))
        if not place.switches[inside:]:
            chain.append((ROOT, {"level": "cluster"}))
        below = node
        for name, facts in chain:
            tree.add_node(name, **facts)
            tree.add_edge(name, below)
            below = name
    if ROOT in tree and tree.out_degree(ROOT) > 1:
        said.append("the file says nothing of the network between domains: one fabric is assumed")
    return Found(
        path=path,
        format="topograph",
        tree=tree,
        devices_per_node=devices_per_node,
        notes=tuple(said),
    )


def _levels_inside_domains(places: dict[str, _Place]) -> int:
    """Levels of switches below the first one on which no domain is split."""
    above: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for place in places.values():
        above[place.domain or ""].add(place.switches)
    depth = len(next(iter(places.values())).switches)
    for level in range(depth):
        if all(len({s[level:] for s in switches}) == 1 for switches in above.values()):
            return level
    return depth
