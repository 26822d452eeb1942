"""Seconds and bytes of plans: the one formula path of search, plan and back-test."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from strategies.candidates import Candidates, Column
from strategies.cluster import Cluster
from strategies.cost import collectives
from strategies.cost.columns import distinct
from strategies.cost.communication import (
    SHARD_COLUMNS,
    context,
    exchange,
    permutation,
    root_sharding,
    sharding,
    tensor,
)
from strategies.cost.compute import (
    COMPUTE_COLUMNS,
    FULL,
    Rates,
    block_passes,
    head_seconds,
    rates,
    routed,
)
from strategies.cost.constants import Constants, Deviations, load_constants, load_deviations
from strategies.cost.memory import GIB, Bytes, memory, owned_parameters
from strategies.cost.stages import Stages, stages

if TYPE_CHECKING:
    from strategies.workload import Workload

HOST_GBPS = 25.0
"""Device to host, where optimizer states are offloaded (PCIe 4 x16, the usual achieved rate)."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Columns of seconds of one optimizer step; what is hidden behind other work is not counted."""

    compute: Column
    overhead: Column
    """By which the host launches more slowly than the device computes, and fixed dispatch costs."""
    all_gather: Column
    reduce_scatter: Column
    all_to_all: Column
    tensor_parallel: Column
    context_parallel: Column
    pipeline: Column
    """Bubble, uneven stages and sends."""
    optimizer: Column

    @property
    def total(self) -> Column:
        return np.sum([getattr(self, f.name) for f in fields(self)], axis=0)


@dataclass(frozen=True, kw_only=True)
class Costs:
    time: Seconds
    memory: Bytes
    capacity: Column
    """Bytes that the device has."""
    dropped: Column
    """Share of the token-expert assignments that nothing computes."""
    deviations: Deviations

    @property
    def seconds(self) -> Column:
        return self.time.total

    @property
    def peak(self) -> Column:
        return self.memory.peak

    @property
    def transient(self) -> Column:
        """Of the peak, all but resident state and runtime: what is predicted less closely."""
        return self.peak - self.memory.state - self.memory.reserved

    @property
    def oom_probability(self) -> Column:
        """Chance that the real peak exceeds the capacity.

        The real peak is taken as normal around the predicted one, with independent relative errors
        of the resident state and of the rest.
        """
        d, rest = self.deviations, self.transient
        deviation = np.hypot(d.state * (self.peak - rest), d.transient * rest)
        return _above(self.peak, deviation, self.capacity)


def _above(mean: Column, deviation: Column, limit: Column) -> Column:
    """P(X > limit) of normal columns; Abramowitz and Stegun 26.2.17, |error| < 7.5e-8."""
    z = (limit - mean) / np.maximum(deviation, 1e-30)
    x = np.minimum(np.abs(z), 38.0)
    t = 1 / (1 + 0.2316419 * x)
    series = t * (
        0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    )
    tail = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * series
    return np.where(z >= 0, tail, 1 - tail)


def evaluate(
    work: Workload, cluster: Cluster, c: Candidates, constants: Constants | None = None
) -> Costs:
    """Costs of every row. Raises InputError when the device has no rate for the precision."""
    k = constants or load_constants()
    known = rates(cluster.device, work.precision)
    placed = stages(work, c)
    load = _expand(routed, work, c, ("ep", "capacity_factor", "expert_copies", "reroute"))
    time = _seconds(work, cluster, c, k, known, placed)
    held = memory(work, c, cluster.device, placed, k, load)
    return Costs(
        time=time,
        memory=held,
        capacity=np.full(len(c), cluster.device.memory_gib.value * GIB),
        dropped=load.dropped,
        deviations=load_deviations(),
    )


def _expand(function, work, c, names):
    """Evaluates on the distinct rows of the columns that matter."""
    few, where = distinct(c, names)
    found = function(work, few)
    return type(found)(**{f.name: getattr(found, f.name)[where] for f in fields(found)})


def _seconds(
    work: Workload, cluster: Cluster, c: Candidates, k: Constants, known: Rates, placed: Stages
) -> Seconds:
    """Each kind of layer is priced once and multiplied by its layers.

    Gathers of weights hide behind a share of the layer's time, reductions of gradients behind what
    the gathers leave of backward's; tensor-parallel and token exchanges by a share of themselves;
    keys and values behind the attention core.
    """
    size = known.dtype_bytes
    few, at_compute = distinct(c, (*COMPUTE_COLUMNS, "expert_copies", "reroute"))
    load = routed(work, few)
    again = few.recomputation == FULL
    swap = exchange(work, few, cluster, known, k, load)
    permute = permutation(work, few, known, k, load)
    passes_of_swap = np.where(again, 3.0, 2.0)
    fixed = np.where((few.ep > 1) & (few.dispatcher > 0), 2 * passes_of_swap, 0.0)
    fixed = fixed * k.dispatch_seconds
    host = work.calls / max(work.layers, 1) * k.host_calls * known.launch
    host_backward = host * np.where(again, 3.0, 2.0)
    shards, at_shards = distinct(c, SHARD_COLUMNS)

    zero = np.zeros(len(c))
    names = ("compute", "overhead", "gather", "reduce", "swap", "tensor", "context")
    sums = dict.fromkeys(names, zero)
    once_forward = once_backward = once_gather = once_reduce = zero
    for kind in work.kinds:
        p = block_passes(kind, work, few, known, k, load)
        moe = 1.0 if kind.routed_parameters and work.experts else 0.0
        f = p.forward + moe * permute
        b = p.backward + moe * permute * np.where(again, 2.0, 1.0)
        late = np.maximum(host - f, 0.0) + np.maximum(host_backward - b, 0.0) + moe * fixed
        split = tensor(kind, work, few, cluster, size)
        # Backward gathers the inputs once more for the gradients of the weights.
        passes_of_split = np.where(again, 3.0, 2.0) + (0.5 if work.training == "full" else 0.0)
        split = split * passes_of_split * (1 - k.tensor_overlap)
        passed, passed_back = context(kind, few, cluster, size)
        ring = np.maximum(passed - p.core, 0.0) * np.where(again, 2.0, 1.0)
        ring = ring + np.maximum(passed_back - 2 * p.core, 0.0)
        moved = moe * swap * passes_of_swap * (1 - k.exchange_overlap)
        window = np.maximum(f, host)[at_compute]
        window_back = np.maximum(b, host_backward)[at_compute]

        s = sharding(work, kind, shards, cluster, size)
        gather, reduce = s.gather[at_shards], s.reduce[at_shards]
        gather_back = np.where(c.reshard_after_forward, gather, 0.0)
        hidden = np.minimum(gather_back, k.shard_overlap * window_back)
        exposed = np.maximum(gather - k.shard_overlap * window, 0.0) + gather_back - hidden
        left = np.maximum(k.shard_overlap * window_back - hidden, 0.0)
        n = kind.layers
        sums["compute"] = sums["compute"] + n * (f + b)[at_compute]
        sums["overhead"] = sums["overhead"] + n * late[at_compute]
        sums["gather"] = sums["gather"] + n * exposed
        sums["reduce"] = sums["reduce"] + n * np.maximum(reduce - left, 0.0)
        sums["swap"] = sums["swap"] + n * moved[at_compute]
        sums["tensor"] = sums["tensor"] + n * split[at_compute]
        sums["context"] = sums["context"] + n * ring[at_compute]
        once_forward = once_forward + n * window
        once_backward = once_backward + n * window_back
        once_gather, once_reduce = once_gather + n * gather, once_reduce + n * reduce

    root = root_sharding(work, shards, cluster, size)
    root_gather, root_reduce = root.gather[at_shards], root.reduce[at_shards]
    head = head_seconds(work, few, known, k)[at_compute]

    # Without sharded parameters, gradients are reduced and weights gathered once a step, behind
    # the backward and forward pass of one micro-batch of the stage.
    m, share = c.gradient_accumulation, placed.share
    every = c.shard_parameters
    hide = k.shard_overlap * share
    step_gather = share * once_gather + placed.outer_share * root_gather
    step_gather = np.maximum(step_gather - hide * once_forward, 0.0)
    step_reduce = share * once_reduce + placed.outer_share * root_reduce
    step_reduce = np.maximum(step_reduce - hide * once_backward, 0.0)
    gather = np.where(every, share * sums["gather"] + placed.outer_share * root_gather, 0.0)
    reduce = np.where(every, share * sums["reduce"] + placed.outer_share * root_reduce, 0.0)

    others = sum(share * sums[n] for n in ("overhead", "swap", "tensor", "context"))
    body = share * sums["compute"] + others + gather + reduce
    last = body * (placed.last_share / share) + head
    slowest = np.where(c.pp > 1, np.maximum(body, last), body + head)
    sent = sends(work, c, cluster, size)
    bubble = m * (slowest - body - np.where(c.pp > 1, 0.0, head)) + placed.bubble * slowest
    owned = owned_parameters(work, c, placed)
    state = work.state
    touched = state.gradient + 2 * state.optimizer + 2 * state.weight
    update = owned * touched / known.bandwidth
    update = update + np.where(c.offload, 2 * owned * state.optimizer / (HOST_GBPS * 1e9), 0.0)
    return Seconds(
        compute=m * (share * sums["compute"] + np.where(c.pp > 1, 0.0, head)),
        overhead=m * share * sums["overhead"],
        all_gather=np.where(every, m * gather, step_gather),
        reduce_scatter=np.where(every, m * reduce, step_reduce),
        all_to_all=m * share * sums["swap"],
        tensor_parallel=m * share * sums["tensor"],
        context_parallel=m * share * sums["context"],
        pipeline=bubble + sent,
        optimizer=update,
    )


def sends(work: Workload, c: Candidates, cluster: Cluster, size: int) -> Column:
    """Hidden states between stages: each hop of filling and draining the pipeline is waited for,
    and with one chunk a stage so is each micro-batch's; chunks hide theirs behind one another."""
    if not np.any(c.pp > 1):
        return np.zeros(len(c))
    states = c.tokens * float(work.hidden_size * size) / c.tp
    once = collectives.send(cluster, states, c.dp_replicate * c.fsdp * c.tp)
    waited = 2 * (c.pp - 1) + np.where(c.virtual_stages > 1, 0, 2 * c.gradient_accumulation)
    return np.where(c.pp > 1, waited * once, 0.0)
