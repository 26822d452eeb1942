"""Slurm's topology.conf and topology.yaml, plugins topology/tree and topology/block.

Keys and meanings: slurm.schedmd.com/topology.conf.html and topology.yaml.html (25.05).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import networkx as nx
from pydantic import Field, RootModel

from analyzers.errors import InputError
from strategies.cluster.graph import merge_planes, prune_empty
from strategies.cluster.hostlist import expand_hostlist, is_name, split_hostlist
from strategies.cluster.importers.found import Found
from strategies.cluster.reading import YamlFile, shown
from strategies.cluster.schema import Strict

ROOT = "all blocks"
_KEYS = {
    "SwitchName": ("switches", "nodes", "linkspeed"),
    "BlockName": ("nodes",),
    "BlockSizes": (),
}


class SwitchEntry(Strict):
    switch: str
    children: str | None = None
    nodes: str | None = None
    link_speed: Any = None


class TreeEntry(Strict):
    switches: list[SwitchEntry]


class BlockEntry(Strict):
    block: str
    nodes: str | None = None


class BlocksEntry(Strict):
    block_sizes: list[int] = Field(default_factory=list)
    blocks: list[BlockEntry]


class TopologyEntry(Strict):
    topology: str
    cluster_default: bool = False
    tree: TreeEntry | None = None
    block: BlocksEntry | None = None
    flat: Any = None


class SlurmYaml(RootModel[list[TopologyEntry]]):
    root: list[TopologyEntry] = Field(min_length=1)


def read_conf(path: Path, text: str) -> Found:
    """`SwitchName=` or `BlockName=` lines; keys in any case, comments after `#`."""
    lines = [_Line(path, number, words) for number, words in _words(text)]
    kinds = {line.kind for line in lines}
    if {"SwitchName", "BlockName"} <= kinds:
        fix = "split it, or write topology.yaml, which holds several topologies"
        raise InputError(path, fault="mixes switches and blocks", fix=fix)
    if "BlockName" in kinds:
        blocks = [
            (line, line.name, line.get("nodes")) for line in lines if line.kind == "BlockName"
        ]
        sizes = [line.name for line in lines if line.kind == "BlockSizes"]
        return _blocks(path, blocks, ",".join(sizes))
    switches = [(line, line.name, line.get("switches"), line.get("nodes")) for line in lines]
    return _switches(path, switches)


def read_topologies(yaml: YamlFile, wanted: str | None) -> Found:
    """topology.yaml: the topology `wanted`, or the cluster's default, or the only one."""
    file = yaml.checked(SlurmYaml)
    named = {t.topology: (i, t) for i, t in enumerate(file.root)}
    if wanted is not None and wanted not in named:
        fault = f"has no topology '{wanted}'"
        raise InputError(yaml.path, fault=fault, fix=f"one of: {', '.join(named)}")
    default = next((n for n, (_, t) in named.items() if t.cluster_default), None)
    if wanted is None and default is None and len(named) > 1:
        fault = f"holds {len(named)} topologies and none is cluster_default"
        raise InputError(yaml.path, fault=fault, fix=f"--topology one of: {', '.join(named)}")
    index, chosen = named[wanted or default or next(iter(named))]
    if chosen.tree is not None:
        places = [
            _Place(yaml, (index, "tree", "switches", i)) for i in range(len(chosen.tree.switches))
        ]
        rows = [
            (place, s.switch, s.children, s.nodes)
            for place, s in zip(places, chosen.tree.switches, strict=True)
        ]
        return _switches(yaml.path, rows)
    if chosen.block is not None:
        rows = [
            (_Place(yaml, (index, "block", "blocks", i)), b.block, b.nodes)
            for i, b in enumerate(chosen.block.blocks)
        ]
        return _blocks(yaml.path, rows, ",".join(str(s) for s in chosen.block.block_sizes))
    fault = f"'{chosen.topology}' is flat: it says nothing of the network"
    raise yaml.error((index,), fault=fault, fix="give --nodes gpu[01-16] without this file")


class _Place:
    """Where an entry of a YAML file stands."""

    def __init__(self, yaml: YamlFile, location: tuple[int | str, ...]) -> None:
        self._yaml, self._location = yaml, location

    def error(self, fault: str, fix: str) -> InputError:
        return self._yaml.error(self._location, fault=fault, fix=fix)


class _Line:
    """One `Key=value Key=value` line of topology.conf."""

    def __init__(self, path: Path, number: int, words: list[str]) -> None:
        self._where = f"{path}:{number}"
        pairs = [word.split("=", 1) for word in words]
        wrong = next((p for p in pairs if len(p) != 2), None)
        if wrong is not None:
            raise self.error(f"'{wrong[0]}' has no '='", "write Key=value")
        first = pairs[0][0]
        kind = next((k for k in _KEYS if k.lower() == first.lower()), None)
        if kind is None:
            close = difflib.get_close_matches(first, _KEYS, n=1)
            fix = f"did you mean '{close[0]}'?" if close else f"one of: {', '.join(_KEYS)}"
            raise self.error(f"'{first}' starts no line of topology.conf", fix)
        self.kind, self.name = kind, pairs[0][1]
        self._values: dict[str, str] = {}
        for key, value in pairs[1:]:
            if key.lower() not in _KEYS[kind]:
                known = ", ".join(_KEYS[kind]) or "nothing else"
                close = difflib.get_close_matches(key.lower(), _KEYS[kind], n=1)
                fix = f"did you mean '{close[0]}'?" if close else f"{kind} takes {known}"
                raise self.error(f"unknown key '{key}'", fix)
            self._values[key.lower()] = value

    def get(self, key: str) -> str | None:
        return self._values.get(key)

    def error(self, fault: str, fix: str) -> InputError:
        return InputError(self._where, fault=fault, fix=fix)


def _words(text: str) -> list[tuple[int, list[str]]]:
    """The words of each line without comments, lines that end in a backslash joined."""
    found, held, start = [], "", 1
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#", 1)[0].rstrip()
        start = number if not held else start
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        if words := (held + line).split():
            found.append((start, words))
        held = ""
    if words := held.split():
        found.append((start, words))
    return found


def _names(place: _Line | _Place, text: str | None) -> list[str]:
    try:
        return [n for part in split_hostlist(text or "") for n in expand_hostlist(part)]
    except ValueError as e:
        raise place.error(str(e), "write e.g. gpu[01-16]") from e


def _check_name(place: _Line | _Place, name: str) -> None:
    if not is_name(name):
        raise place.error(f"{shown(name)} is not a name", "use letters, digits, '-', '_' and '.'")


def _switches(path: Path, rows: list[tuple[Any, str, str | None, str | None]]) -> Found:
    tree = nx.DiGraph()
    nodes: dict[str, None] = {}
    seen: set[str] = set()
    for place, name, children, held in rows:
        if name in seen:
            raise place.error(f"switch '{name}' is there twice", "name each switch once")
        _check_name(place, name)
        seen.add(name)
        tree.add_node(name)
        if children and held:
            fault = f"switch '{name}' has both nodes and switches"
            raise place.error(fault, "hang the nodes on a switch of their own")
        for child in _names(place, children):
            tree.add_edge(name, child)
        for node in _names(place, held):
            nodes[node] = None
            tree.add_edge(name, node)
    unknown = [v for v in tree if v not in seen and v not in nodes]
    if unknown:
        fault = f"names the switch '{unknown[0]}' but does not describe it"
        raise InputError(path, fault=fault, fix=f"add a line for '{unknown[0]}'")
    both = next((n for n in nodes if n in seen), None)
    if both is not None:
        raise InputError(path, fault=f"'{both}' is a node and a switch", fix="rename one")
    notes: list[str] = []
    if empty := prune_empty(tree, nodes):
        notes.append(f"switches without nodes are left out: {', '.join(empty[:8])}")
    if planes := merge_planes(tree):
        notes.append(f"switches with the children of another are one with it: {', '.join(planes)}")
    return Found(path=path, format="slurm", tree=tree, notes=tuple(notes))


def _blocks(path: Path, rows: list[tuple[Any, str, str | None]], sizes: str) -> Found:
    tree = nx.DiGraph()
    nodes: list[str] = []
    notes: list[str] = []
    for place, name, held in rows:
        if name in tree or name == ROOT:
            raise place.error(f"block '{name}' is there twice", "name each block once")
        _check_name(place, name)
        tree.add_node(name, level="block")
        members = _names(place, held)
        if twice := next((n for n in members if n in tree), None):
            raise place.error(f"'{twice}' is in two blocks", "put each node in one block")
        tree.add_edges_from((name, n) for n in members)
        nodes += members
    empty = prune_empty(tree, nodes)
    if empty:
        notes.append(f"blocks without nodes are left out: {', '.join(empty[:8])}")
    blocks = [v for v in tree if tree.out_degree(v)]
    if len(blocks) > 1:
        tree.add_node(ROOT, level="cluster")
        tree.add_edges_from((ROOT, b) for b in blocks)
        notes.append("the file says nothing of the network between blocks: one fabric is assumed")
    if sizes:
        notes.append(f"block sizes {sizes} are for scheduling and make no tiers")
    return Found(path=path, format="slurm", tree=tree, notes=tuple(notes))


def is_conf(text: str) -> bool:
    first = next(iter(_words(text)), (0, [""]))[1][0]
    return first.split("=", 1)[0].lower() in {k.lower() for k in _KEYS}
