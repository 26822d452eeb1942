"""The cluster: reading topo.yaml, what the planner knows of it, importers and pictures."""

from strategies.cluster.hostlist import compress_hostlist, expand_hostlist
from strategies.cluster.loading import copy_topology, load_cluster
from strategies.cluster.model import (
    DEFAULT_EFFICIENCY,
    DEFAULT_LATENCY_US,
    MAX_DEVICES,
    Cluster,
    Curve,
    Fabric,
    Group,
    Host,
    Tier,
    UnifiedMemory,
    degraded,
    flat_cluster,
    lowest_common_tier,
    members,
)

__all__ = [
    "DEFAULT_EFFICIENCY",
    "DEFAULT_LATENCY_US",
    "MAX_DEVICES",
    "Cluster",
    "Curve",
    "Fabric",
    "Group",
    "Host",
    "Tier",
    "UnifiedMemory",
    "compress_hostlist",
    "copy_topology",
    "degraded",
    "expand_hostlist",
    "flat_cluster",
    "load_cluster",
    "lowest_common_tier",
    "members",
]
