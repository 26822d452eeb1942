"""What a plan costs in seconds and in bytes."""

from strategies.cost.bounds import memory_bound, time_bound
from strategies.cost.compute import PEAK_SHARE
from strategies.cost.constants import Constants, Deviations, load_constants, load_deviations
from strategies.cost.memory import GIB, Bytes
from strategies.cost.model import Costs, Seconds, evaluate
from strategies.cost.scalar import (
    Rates,
    distinct_destinations,
    exchange,
    gather_block,
    lower_bound,
    origins,
    predict,
    rates,
    step_time,
    total,
)

__all__ = [
    "GIB",
    "PEAK_SHARE",
    "Bytes",
    "Constants",
    "Costs",
    "Deviations",
    "Rates",
    "Seconds",
    "distinct_destinations",
    "evaluate",
    "exchange",
    "gather_block",
    "load_constants",
    "load_deviations",
    "lower_bound",
    "memory_bound",
    "origins",
    "predict",
    "rates",
    "step_time",
    "time_bound",
    "total",
]
