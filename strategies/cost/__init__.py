"""What a plan costs in seconds and in bytes."""

from strategies.cost.bounds import memory_bound, time_bound
from strategies.cost.constants import Constants, Deviations, load_constants, load_deviations
from strategies.cost.memory import GIB, Bytes
from strategies.cost.model import Costs, Seconds, evaluate

__all__ = [
    "GIB",
    "Bytes",
    "Constants",
    "Costs",
    "Deviations",
    "Seconds",
    "evaluate",
    "load_constants",
    "load_deviations",
    "memory_bound",
    "time_bound",
]
