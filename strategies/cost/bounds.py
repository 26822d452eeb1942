"""Lower bounds of seconds and bytes for plans of which not everything is decided yet.

They hold for every `dispatcher`, `reshard_after_forward` and `offload` and honour the other
columns. Gathers and reductions of sharded weights are left out; the rest is counted as `evaluate`
does, so that the bounds are close. They depend on few columns, so few distinct rows are priced.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from strategies.candidates import DISPATCHERS, Candidates, Column
from strategies.cluster import Cluster
from strategies.cost.columns import distinct
from strategies.cost.communication import context, exchange, permutation, tensor
from strategies.cost.compute import (
    COMPUTE_COLUMNS,
    FULL,
    block_passes,
    head_seconds,
    rates,
    routed,
)
from strategies.cost.constants import Constants, load_constants
from strategies.cost.memory import Bytes, memory
from strategies.cost.model import sends
from strategies.cost.stages import stages

if TYPE_CHECKING:
    from strategies.workload import Workload

MICRO_BATCH_COLUMNS = (
    *(name for name in COMPUTE_COLUMNS if name != "dispatcher"),
    *("reroute", "expert_copies"),
)
EXCHANGES = tuple(i for i, name in enumerate(DISPATCHERS) if name != "none")


def time_bound(
    work: Workload, cluster: Cluster, c: Candidates, constants: Constants | None = None
) -> Column:
    """Seconds of a step that no row can beat."""
    k = constants or load_constants()
    few, at = distinct(c, MICRO_BATCH_COLUMNS)
    layers, head = _micro_batch(work, cluster, few, k)
    layers, head = layers[at], head[at]
    placed = stages(work, c)
    body = placed.share * layers
    last = placed.last_share * layers + head
    slowest = np.where(c.pp > 1, np.maximum(body, last), body + head)
    size = rates(cluster.device, work.precision).dtype_bytes
    return (c.gradient_accumulation + placed.bubble) * slowest + sends(work, c, cluster, size)


def _micro_batch(
    work: Workload, cluster: Cluster, c: Candidates, k: Constants
) -> tuple[Column, Column]:
    """Seconds of one micro-batch in all layers, and in the head."""
    known = rates(cluster.device, work.precision)
    size = known.dtype_bytes
    load = routed(work, c)
    again = c.recomputation == FULL
    passes = np.where(again, 3.0, 2.0)
    passes_of_split = passes + (0.5 if work.training == "full" else 0.0)
    host = work.calls / max(work.layers, 1) * k.host_calls * known.launch
    permute = permutation(work, c, known, k, load)
    swap = np.full(len(c), np.inf)
    for code in EXCHANGES:
        direct = replace(c, dispatcher=np.full(len(c), code))
        swap = np.minimum(swap, exchange(work, direct, cluster, known, k, load))
    swap = swap * (1 - k.exchange_overlap) + np.where(c.ep > 1, 2 * k.dispatch_seconds, 0.0)

    layers = np.zeros(len(c))
    for kind in work.kinds:
        p = block_passes(kind, work, c, known, k, load)
        moe = 1.0 if kind.routed_parameters and work.experts else 0.0
        forward = np.maximum(p.forward + moe * permute, host)
        backward = p.backward + moe * permute * np.where(again, 2.0, 1.0)
        backward = np.maximum(backward, host * passes)
        split = tensor(kind, work, c, cluster, size) * passes_of_split * (1 - k.tensor_overlap)
        passed, passed_back = context(kind, c, cluster, size)
        ring = np.maximum(passed - p.core, 0.0) * np.where(again, 2.0, 1.0)
        ring = ring + np.maximum(passed_back - 2 * p.core, 0.0)
        layers = layers + kind.layers * (forward + backward + moe * swap * passes + split + ring)
    return layers, head_seconds(work, c, known, k)


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
    few, at = distinct(c, ("ep", "capacity_factor", "expert_copies", "reroute"))
    load = routed(work, few)
    load = replace(load, **{f.name: getattr(load, f.name)[at] for f in fields(load)})
    return memory(work, leanest, cluster.device, stages(work, c), k, load)
