"""Other tools' descriptions of a cluster -> the tiers of topo.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from analyzers.errors import InputError
from strategies.cluster.importers.assemble import Assembled, assemble
from strategies.cluster.importers.found import Format, Found
from strategies.cluster.reading import YamlFile, parse_yaml, read_json, read_text

if TYPE_CHECKING:
    from analyzers.backends import Backend
    from strategies.cluster.schema import TierEntry, TopologyFile

FORMATS: tuple[str, ...] = get_args(Format)
MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_YAML_BYTES = 1024 * 1024
"""Parsing takes seconds a megabyte, and JSON none."""


def read_foreign(path: Path, format: str | None = None, *, topology: str | None = None) -> Found:
    """Reads a file of one of FORMATS; without `format` its content tells which.

    `topology` picks one of several in Slurm's topology.yaml. Raises InputError.
    """
    from strategies.cluster.importers import nccl_xml, nvidia_smi, slurm, topograph

    larger = "give the topology alone"
    text = read_text(path, MAX_FILE_BYTES, missing="give a file to import", larger=larger)
    if not text.strip():
        raise InputError(path, fault="is empty", fix=f"give a file of: {', '.join(FORMATS)}")
    if format in (None, "nccl_xml") and (text.lstrip().startswith("<") or format):
        return nccl_xml.read_xml(path, text)
    if format in (None, "nvidia_smi") and nvidia_smi.is_matrix(text):
        return nvidia_smi.read_matrix(path, text)
    if format in (None, "slurm") and slurm.is_conf(text):
        return slurm.read_conf(path, text)
    if format == "nvidia_smi":
        fault = "has no line of GPU0 GPU1 ..."
        raise InputError(path, fault=fault, fix="give the output of nvidia-smi topo -m")
    yaml = _values(path, text)
    if isinstance(yaml.data, list) and format in (None, "slurm"):
        return slurm.read_topologies(yaml, topology)
    if isinstance(yaml.data, dict) and format in (None, "topograph"):
        if "items" in yaml.data or yaml.data.get("kind") == "Node":
            return topograph.read_labels(yaml)
        if yaml.data.keys() & {"switches", "blocks", "nodes", "capacity_blocks"}:
            return topograph.read_model(yaml)
    fault = "is in no format that is known" if format is None else f"is not of the format {format}"
    raise InputError(path, fault=fault, fix=f"--format one of: {', '.join(FORMATS)}")


def _values(path: Path, text: str) -> YamlFile:
    """JSON or YAML."""
    if text.lstrip()[0] in "{[":
        return YamlFile(path, read_json(path, text), None)
    if len(text) > MAX_YAML_BYTES:
        fault = f"is YAML of more than {MAX_YAML_BYTES // 1024} KiB"
        raise InputError(path, fault=fault, fix="give it as JSON, e.g. kubectl get nodes -o json")
    return parse_yaml(path, text)


def fill_in(
    yaml: YamlFile, file: TopologyFile, device: Backend
) -> tuple[list[TierEntry], tuple[str, ...], tuple[str, ...]]:
    """Tiers, hostlist and notes of a topo.yaml with `import:`.

    The imported files say what it leaves out. Where it has tiers of its own they count, and their
    sizes must be those that were imported.
    """
    from strategies.cluster.schema import TierEntry

    founds = []
    for i, entry in enumerate(file.imports):
        path = yaml.path.parent / entry.file
        try:
            founds.append(read_foreign(path, entry.source))
        except InputError as e:
            at = yaml.error(("import", i, "file"), fault="")
            raise InputError(at.where, field=at.field, fault=str(e)) from e
    given = file.tiers[0].size if file.tiers else None
    try:
        made = assemble(founds, device=device.name, devices_per_node=given)
    except InputError as e:
        fault = f"{e.where}: {e.fault}"
        raise yaml.error(("import",), fault=fault, fix="write the tiers in this file") from e
    hostlist = tuple(file.nodes.names) if file.nodes else made.hostlist
    if not file.tiers:
        return [TierEntry.model_validate(t) for t in made.tiers], hostlist, made.notes
    sizes = [t["size"] for t in made.tiers]
    own = [t.size for t in file.tiers]
    agree = own == sizes if made.hostlist else own[0] == sizes[0]
    if not agree:
        fault = f"have the sizes {own}, the imported ones {sizes}"
        raise yaml.error(("tiers",), fault=fault, fix="correct them, or leave the tiers out")
    return list(file.tiers), hostlist, made.notes


__all__ = ["FORMATS", "Assembled", "Found", "assemble", "fill_in", "read_foreign"]
