"""The cost model as the solver sees it, and one of its rows as a plan states it."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np

from strategies import cost
from strategies.candidates import Candidates, Column
from strategies.cluster import Cluster
from strategies.cost.constants import load_constants, load_deviations
from strategies.schema import Memory, Predicted, StepTime
from strategies.solver import QUANTILE, Points, Prices, step_tokens
from strategies.workload import Workload

GIB = 2**30
FOUR_IN_FIVE = 1.2815515655446004
"""Standard deviations on either side of the mean that hold four of five normal values."""


class CostModel:
    """`strategies.cost` for one model on one cluster: a `solver.Pricing`."""

    def __init__(self, work: Workload, cluster: Cluster) -> None:
        self.work, self.cluster = work, cluster
        self.constants, self.deviations = load_constants(), load_deviations()
        self.capacity = cluster.device.memory_gib.value * GIB

    def evaluate(self, c: Candidates) -> Prices:
        costs = self._costs(c)
        return Prices(
            seconds=costs.seconds, peak=costs.peak, deviation=self._deviation(costs.memory)
        )

    def time_bound(self, c: Candidates) -> Column:
        return cost.time_bound(self.work, self.cluster, c, self.constants)

    def memory_bound(self, c: Candidates) -> Column:
        least = cost.memory_bound(self.work, self.cluster, c, self.constants)
        return least.peak + QUANTILE * self._deviation(least)

    def _costs(self, c: Candidates) -> cost.Costs:
        return cost.evaluate(self.work, self.cluster, c, self.constants)

    def _deviation(self, held: cost.Bytes) -> Column:
        """Resident state is predicted closely, what comes and goes less so; errors independent."""
        known = held.state + held.reserved
        d = self.deviations
        return np.hypot(d.state * known, d.transient * (held.peak - known))

    def predicted(self, point: Points, bound: float) -> Predicted:
        """What a plan states; `bound` in seconds a token of the cluster."""
        costs = self._costs(point.plans)
        seconds, peak = float(costs.seconds[0]), float(costs.peak[0])
        lowest = bound * int(step_tokens(point.plans)[0])
        devices = int(point.plans.devices[0])
        spread = math.exp(FOUR_IN_FIVE * self.deviations.seconds)
        reach = FOUR_IN_FIVE * float(point.deviation[0])
        return Predicted(
            step_seconds=seconds,
            step=_row(StepTime, costs.time, 1.0),
            tokens_per_second_per_device=1 / float(point.per_token[0]) / devices,
            memory_gib=_row(Memory, costs.memory, GIB, peak=peak, capacity=self.capacity),
            oom_probability=oom_probability(point, self.capacity),
            lower_bound_seconds=lowest,
            optimality_gap=(seconds - lowest) / seconds,
            step_seconds_interval=(seconds / spread, seconds * spread),
            memory_gib_interval=((peak - reach) / GIB, (peak + reach) / GIB),
        )


def oom_probability(point: Points, capacity: float) -> float:
    """Chance that the real peak, normal around the predicted one, exceeds the capacity."""
    room, deviation = capacity - float(point.peak[0]), float(point.deviation[0])
    if deviation == 0:
        return 0.0 if room >= 0 else 1.0
    return 0.5 * math.erfc(room / deviation / math.sqrt(2))
