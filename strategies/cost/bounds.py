"""Lower bounds of seconds and bytes for plans of which not everything is decided yet.

They hold for every `dispatcher`, `reshard_after_forward`, `offload` and `replicas_outside` and
honour the other columns. Gathers and reductions of sharded weights and what stages send are left
out; the rest is counted as `evaluate` does, so that the bounds are close. They depend on few
columns, so few distinct rows are priced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from strategies.candidates import DISPATCHERS, Candidates, Column
from strategies.cluster import Cluster
from strategies.cost.columns import distinct
from strategies.cost.compute import Rates, rates, routed
from strategies.cost.constants import Constants, load_constants
from strategies.cost.layers import MICRO_BATCH_COLUMNS, micro_batch
from strategies.cost.memory import Bytes, memory
from strategies.cost.model import swaps
from strategies.cost.stages import stages, straggler

if TYPE_CHECKING:
    from strategies.workload import Workload

EXCHANGES = tuple(i for i, name in enumerate(DISPATCHERS) if name != "none")


def time_bound(
    work: Workload, cluster: Cluster, c: Candidates, constants: Constants | None = None
) -> Column:
    """Seconds of a step that no row can beat."""
    k = constants or load_constants()
    known = rates(cluster.device, work.precision)
    few, at = distinct(c, MICRO_BATCH_COLUMNS)
    layers = micro_batch(work, cluster, few, k, known)
    rest = layers.overhead + layers.tensor_parallel + layers.context_parallel
    swap = _cheapest_swaps(work, cluster, c, k, known)
    slow = straggler(c.devices)
    body = slow * layers.compute[at] + rest[at] + swap
    head = slow * layers.head[at]
    placed = stages(work, c)
    last = placed.last_share * body + head
    slowest = np.where(c.pp > 1, np.maximum(placed.share * body, last), body + head)
    return (c.gradient_accumulation + placed.bubble) * slowest


def _cheapest_swaps(
    work: Workload, cluster: Cluster, c: Candidates, k: Constants, known: Rates
) -> Column:
    """Of all dispatchers. Where expert parallelism strides over shards, their number counts too."""
    names = MICRO_BATCH_COLUMNS
    if np.any(c.shards_inside):
        names = (*names, "fsdp", "shards_inside")
    few, at = distinct(c, names)
    each = [
        swaps(work, replace(few, dispatcher=np.full(len(few), code)), cluster, k, known)
        for code in EXCHANGES
    ]
    return np.min(each, axis=0)[at]


def memory_bound(
    work: Workload, cluster: Cluster, c: Candidates, constants: Constants | None = None
) -> Bytes:
    """Bytes by part that no row can do without: sharded weights gathered a block at a time, no
    dispatch buffers, optimizer states elsewhere."""
    k = constants or load_constants()
    leanest = replace(
        c,
        reshard_after_forward=np.ones(len(c), bool),
        dispatcher=np.zeros(len(c), int),
        offload=np.ones(len(c), bool),
    )
    load = routed(work, c)
    return memory(work, leanest, cluster, stages(work, c), k, load)
