"""What a foreign file says of a cluster, in our words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import networkx as nx

Format = Literal["slurm", "topograph", "nccl_xml", "nvidia_smi"]


@dataclass(frozen=True, kw_only=True)
class NodeInside:
    """The devices of one node and the links between them."""

    devices: int
    kind: Literal["switch", "fullmesh"]
    links: int | None = None
    """Links of one device (of one pair in a full mesh); None where the file counts none."""
    gbps: float | None = None
    """GB/s of one device in one direction, where the file gives a rate instead."""
    nics: int = 0
    nic_gbps: float | None = None
    """GB/s of one NIC in one direction."""
    arch: int | None = None
    """Compute capability times ten, as NCCL writes it (`sm`)."""


@dataclass(frozen=True, kw_only=True)
class Found:
    path: Path
    format: Format
    tree: nx.DiGraph | None = None
    """Switches above nodes. Vertices may carry `name` (theirs in the file), `level` and `scale_up`
    (joined by the devices' own fabric, such as an NVLink domain)."""
    devices_per_node: int | None = None
    node: NodeInside | None = None
    notes: tuple[str, ...] = ()
    """What was left out or assumed while reading, in sentences."""
