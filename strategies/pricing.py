"""The cost model as the solver sees it, and a priced row as a plan states it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from strategies import cost
from strategies.candidates import (
    DISPATCHERS,
    EXPERT_FORMATS,
    RECOMPUTATION,
    Candidates,
    Column,
    columns,
)
from strategies.cluster import Cluster
from strategies.cost import GIB, collectives
from strategies.cost.compute import rates
from strategies.cost.routing import BALANCED
from strategies.schema import Capacity, Mapping, Memory, Parallelism, Plan, Predicted, StepTime
from strategies.solver import QUANTILE, Points, Prices, price, step_tokens
from strategies.workload import Workload

FOUR_IN_FIVE = 1.2815515655446004
"""Standard deviations on either side of the mean that hold four of five normal values."""


class CostModel:
    """`strategies.cost` for one model on one cluster: a `solver.Pricing`."""

    def __init__(
        self,
        work: Workload,
        cluster: Cluster,
        constants: cost.Constants | None = None,
        pace: float = 1.0,
    ) -> None:
        self.work, self.cluster, self.pace = work, cluster, pace
        self.even = replace(work, routing=BALANCED)
        self.constants = constants or cost.load_constants()
        self.deviations = cost.load_deviations()
        self.capacity = cluster.device.memory_gib.value * GIB

    def evaluate(self, c: Candidates) -> Prices:
        costs = cost.evaluate(self.work, self.cluster, c, self.constants)
        return Prices(seconds=self.pace * costs.seconds, peak=costs.peak, deviation=costs.deviation)

    def time_bound(self, c: Candidates, *, even: bool = False) -> Column:
        work = self.even if even else self.work
        return self.pace * cost.time_bound(work, self.cluster, c, self.constants)

    def memory_bound(self, c: Candidates, *, even: bool = False) -> Column:
        work = self.even if even else self.work
        least = cost.memory_bound(work, self.cluster, c, self.constants)
        return least.peak * (1 + QUANTILE * self.deviations.peak)

    def predicted(self, point: Points, bound: float) -> Predicted:
        """What a plan states of one point; `bound` in seconds a token of the cluster."""
        costs = cost.evaluate(self.work, self.cluster, point.plans, self.constants)
        seconds, peak = float(point.seconds[0]), float(point.peak[0])
        lowest = bound * int(step_tokens(point.plans)[0])
        spread = math.exp(FOUR_IN_FIVE * self.deviations.seconds)
        reach = FOUR_IN_FIVE * float(point.deviation[0])
        memory = {f.name: getattr(costs.memory, f.name) for f in fields(costs.memory)}
        devices = int(point.plans.devices[0])
        return Predicted(
            step_seconds=seconds,
            step=StepTime(
                **_first(
                    {f.name: self.pace * getattr(costs.time, f.name) for f in fields(costs.time)}
                )
            ),
            tokens_per_second_per_device=1 / float(point.per_token[0]) / devices,
            memory_gib=Memory(
                **_first({name: column / GIB for name, column in memory.items()}),
                peak=peak / GIB,
                capacity=self.capacity / GIB,
            ),
            oom_probability=oom_probability(point, self.capacity),
            lower_bound_seconds=lowest,
            optimality_gap=(seconds - lowest) / seconds,
            step_seconds_interval=(seconds / spread, seconds * spread),
            memory_gib_interval=((peak - reach) / GIB, (peak + reach) / GIB),
        )

    def origins(self, c: Candidates) -> dict[str, str]:
        """Where each rate behind the prediction of one row came from."""
        found = dict(rates(self.cluster.device, self.work.precision).origins)
        row = c.row(0)
        if row["fsdp"] > 1:
            found["weight_gather"] = collectives.origin(
                self.cluster, "all_gather", row["fsdp"], row["tp"]
            )
        dispatcher = DISPATCHERS[row["dispatcher"]]
        if dispatcher != "none":
            op = "all_gather" if dispatcher == "all_gather" else "all_to_all_dispatch"
            found["token_exchange"] = collectives.origin(self.cluster, op, row["ep"])
        return found


def _first(values: dict[str, Column]) -> dict[str, float]:
    return {name: float(column[0]) for name, column in values.items()}


def oom_probability(point: Points, capacity: float) -> float:
    """Chance that the real peak, normal around the predicted one, exceeds the capacity."""
    room, deviation = capacity - float(point.peak[0]), float(point.deviation[0])
    if deviation == 0:
        return 0.0 if room >= 0 else 1.0
    return 0.5 * math.erfc(room / deviation / math.sqrt(2))


def plan_fields(c: Candidates, compute_dtype: str, *, experts: int) -> dict[str, Any]:
    """One row as the fields of a Plan; `experts` are those of a layer of the model, if any."""
    row = c.row(0)
    factor = row["capacity_factor"]
    overflow = "none" if math.isinf(factor) else "reroute" if row["reroute"] else "drop"
    axes = {f.name: row[f.name] for f in fields(Parallelism) if f.name != "efsdp"}
    return {
        "parallelism": Parallelism(**axes, efsdp=int(c.efsdp[0])),
        "micro_batch_size": row["micro_batch_size"],
        "sequence_length": row["sequence_length"],
        "gradient_accumulation": row["gradient_accumulation"],
        "virtual_stages": row["virtual_stages"],
        "activation_checkpointing": RECOMPUTATION[row["recomputation"]],
        "reshard_after_forward": row["reshard_after_forward"],
        "expert_weight_format": EXPERT_FORMATS[row["expert_format"]] if experts else None,
        "compute_dtype": compute_dtype,
        "dispatcher": DISPATCHERS[row["dispatcher"]],
        "capacity": Capacity(factor=None if math.isinf(factor) else factor, overflow=overflow),
        "expert_copies": row["expert_copies"],
        "offload_optimizer": row["offload"],
        "mapping": Mapping(
            shards_inside=row["shards_inside"], replicas_outside=row["replicas_outside"]
        ),
    }


def row_of(plan: Plan) -> Candidates:
    """A plan as the one row that it is."""
    p = plan.parallelism
    factor = plan.capacity.factor
    return columns(
        **{name: value for name, value in vars(p).items() if name != "efsdp"},
        micro_batch_size=plan.micro_batch_size,
        sequence_length=plan.sequence_length,
        gradient_accumulation=plan.gradient_accumulation,
        virtual_stages=plan.virtual_stages,
        recomputation=RECOMPUTATION.index(plan.activation_checkpointing),
        reshard_after_forward=plan.reshard_after_forward,
        expert_format=EXPERT_FORMATS.index(plan.expert_weight_format or "bf16"),
        dispatcher=DISPATCHERS.index(plan.dispatcher),
        capacity_factor=math.inf if factor is None else factor,
        reroute=plan.capacity.overflow == "reroute",
        expert_copies=plan.expert_copies,
        offload=plan.offload_optimizer,
        shards_inside=plan.mapping.shards_inside,
        replicas_outside=plan.mapping.replicas_outside,
    )


def predict(work: Workload, cluster: Cluster, plan: Plan) -> Predicted:
    """What the cost model says of a plan that was not searched for."""
    pricing = CostModel(work, cluster)
    point = price(pricing, row_of(plan))
    bound = float((pricing.time_bound(point.plans) / step_tokens(point.plans))[0])
    return pricing.predicted(point, bound)
