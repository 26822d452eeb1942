"""ModelAnalysis + Cluster + Job -> Plan. Importing this loads nothing but the standard library."""

from strategies.cluster import Cluster, load_cluster
from strategies.launch import write_launch
from strategies.search import search
from strategies.twin import twin

__all__ = ["Cluster", "load_cluster", "search", "twin", "write_launch"]
