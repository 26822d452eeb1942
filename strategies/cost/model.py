"""Seconds and bytes of plans: the one formula path of search, plan and back-test."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from strategies.candidates import Candidates, Column
from strategies.cluster import Cluster
from strategies.cost import collectives
from strategies.cost.columns import distinct, total
from strategies.cost.communication import (
    ALL_TO_ALL,
    HIERARCHICAL,
    Sharding,
    exchange,
    root_sharding,
    sharding,
)
from strategies.cost.compute import Rates, rates, routed
from strategies.cost.constants import Constants, Deviations, load_constants, load_deviations
from strategies.cost.layers import MICRO_BATCH_COLUMNS, Layers, forward_passes, micro_batch
from strategies.cost.memory import GIB, Bytes, memory, offloaded, owned_parameters
from strategies.cost.stages import Stages, stages, straggler

if TYPE_CHECKING:
    from strategies.workload import Workload

BODY_COLUMNS = (
    *MICRO_BATCH_COLUMNS,
    *("pp", "dp_replicate", "fsdp", "dispatcher", "reshard_after_forward"),
    *("shards_inside", "replicas_outside"),
)
"""All that one micro-batch's seconds depend on, but for the stages of a pipeline."""


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
        return total(getattr(self, f.name) for f in fields(self))


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
    def deviation(self) -> Column:
        """Standard deviation of the real peak, taken as normal around the predicted one, bytes."""
        return self.deviations.peak * self.peak

    @property
    def oom_probability(self) -> Column:
        """Chance that the real peak exceeds the capacity."""
        return _above(self.peak, self.deviation, self.capacity)


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
    load = routed(work, c)
    time = _seconds(work, cluster, c, k, known, placed)
    held = memory(work, c, cluster, placed, k, load)
    return Costs(
        time=time,
        memory=held,
        capacity=np.full(len(c), cluster.device.memory_gib.value * GIB),
        dropped=load.dropped,
        deviations=load_deviations(),
    )


def _seconds(
    work: Workload, cluster: Cluster, c: Candidates, k: Constants, known: Rates, placed: Stages
) -> Seconds:
    """The slowest stage's micro-batches, the schedule's bubble, and what is done once a step.

    Without sharded parameters, gradients are reduced and weights gathered once a step, behind the
    backward and forward pass of one micro-batch of the stage.
    """
    few, at_rows = distinct(c, BODY_COLUMNS)
    body = _body(work, cluster, few, k, known).take(at_rows)
    m, share, outer = c.gradient_accumulation, placed.share, placed.outer_share
    gather = share * body.whole_gather + outer * body.root_gather
    gather = np.maximum(gather - k.shard_overlap * share * body.forward, 0.0)
    reduce = share * body.whole_reduce + outer * body.root_reduce
    reduce = np.maximum(reduce - k.shard_overlap * share * body.backward, 0.0)
    each_gather = share * body.all_gather + outer * body.root_gather
    each_reduce = share * body.reduce_scatter + outer * body.root_reduce
    every = c.shard_parameters
    names = ("compute", "overhead", "all_to_all", "tensor_parallel", "context_parallel")
    part = {name: share * getattr(body, name) for name in names}
    slow = straggler(c.devices)
    part["compute"], head = part["compute"] * slow, body.head * slow
    stage = total(part.values()) + np.where(every, each_gather + each_reduce, 0.0)
    alone = c.pp == 1
    last = stage * (placed.last_share / share) + head
    slowest = np.where(alone, stage + head, np.maximum(stage, last))
    part["compute"] = part["compute"] + np.where(alone, head, 0.0)
    uneven = np.where(alone, 0.0, slowest - stage)
    return Seconds(
        **{name: m * seconds for name, seconds in part.items()},
        all_gather=np.where(every, m * each_gather, gather),
        reduce_scatter=np.where(every, m * each_reduce, reduce),
        pipeline=m * uneven + placed.bubble * slowest + sends(work, c, cluster, known.dtype_bytes),
        optimizer=_update(work, cluster, c, known, placed),
    )


@dataclass(frozen=True, kw_only=True)
class Body:
    """Seconds of one micro-batch in all layers of the model, and in the head."""

    compute: Column
    overhead: Column
    all_gather: Column
    """Not hidden, with sharded parameters."""
    reduce_scatter: Column
    all_to_all: Column
    tensor_parallel: Column
    context_parallel: Column
    forward: Column
    """Behind which gathers hide."""
    backward: Column
    whole_gather: Column
    """Hidden or not."""
    whole_reduce: Column
    root_gather: Column
    root_reduce: Column
    head: Column

    def take(self, rows: slice | np.ndarray) -> Body:
        return Body(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def _body(work: Workload, cluster: Cluster, c: Candidates, k: Constants, known: Rates) -> Body:
    """Gathers of weights hide behind a share of the layer's time, reductions of gradients behind
    what the gathers leave of backward's; token exchanges hide by a share of themselves."""
    layers = micro_batch(work, cluster, c, k, known)
    names = ("all_gather", "reduce_scatter", "forward", "backward", "whole_gather", "whole_reduce")
    sums = {name: np.zeros(len(c)) for name in names}
    for i, kind in enumerate(work.kinds):
        s = sharding(work, kind, c, cluster, known.dtype_bytes)
        window, window_back = layers.forward[i], layers.backward[i]
        exposed, left = _exposed(work, c, s, layers, i, k)
        layer = {
            "all_gather": exposed,
            "reduce_scatter": left,
            "forward": window,
            "backward": window_back,
            "whole_gather": s.gather,
            "whole_reduce": s.reduce,
        }
        for name, seconds in layer.items():
            sums[name] = sums[name] + kind.layers * seconds
    root = root_sharding(work, c, cluster, known.dtype_bytes)
    return Body(
        **sums,
        root_gather=root.gather,
        root_reduce=root.reduce,
        compute=layers.compute,
        overhead=layers.overhead,
        tensor_parallel=layers.tensor_parallel,
        context_parallel=layers.context_parallel,
        all_to_all=swaps(work, c, cluster, k, known),
        head=layers.head,
    )


def _exposed(
    work: Workload, c: Candidates, s: Sharding, layers: Layers, i: int, k: Constants
) -> tuple[Column, Column]:
    """Seconds of a layer's gathers and reductions that nothing hides.

    With prefetching, gathers travel behind a share of another layer's time and reductions behind
    what they leave of backward's. Without, nothing leaves its layer: the mixer's weights are waited
    for, the others travel while it computes, their gradients while its backward pass does.
    """
    back = np.where(c.reshard_after_forward, 1.0, 0.0)
    window = k.shard_overlap * layers.forward[i]
    window_back = k.shard_overlap * layers.backward[i]
    if work.prefetch:
        hidden = np.minimum(back * s.gather, window_back)
        gather = np.maximum(s.gather - window, 0.0) + back * s.gather - hidden
        return gather, np.maximum(s.reduce - np.maximum(window_back - hidden, 0.0), 0.0)
    own, own_back = k.shard_overlap * layers.mixer[i], k.shard_overlap * layers.mixer_backward[i]
    once = s.mixer_gather + np.maximum(s.gather - s.mixer_gather - own, 0.0)
    reduce = s.mixer_reduce + np.maximum(s.reduce - s.mixer_reduce - own_back, 0.0)
    return (1.0 + back) * once, reduce


def swaps(work: Workload, c: Candidates, cluster: Cluster, k: Constants, known: Rates) -> Column:
    """Seconds of one micro-batch that tokens are exchanged and nothing hides, in all layers."""
    moe = sum(kind.layers for kind in work.kinds if kind.routed_parameters)
    if not (moe and work.experts):
        return np.zeros(len(c))
    once = exchange(work, c, cluster, known, k, routed(work, c)) * (1 - k.exchange_overlap)
    # An all-gather needs no counts: every rank gets everything.
    counted = np.isin(c.dispatcher, (ALL_TO_ALL, HIERARCHICAL)) & (c.ep > 1)
    fixed = np.where(counted, 2 * k.dispatch_seconds, 0.0)
    return moe * (forward_passes(c) + 1) * (once + fixed)


def _update(
    work: Workload, cluster: Cluster, c: Candidates, known: Rates, placed: Stages
) -> Column:
    """AdamW reads gradient, weight and states and writes weight and states; from host memory where
    they are offloaded."""
    owned, state = owned_parameters(work, c, placed), work.state
    touched = state.gradient + 2 * state.optimizer + 2 * state.weight
    update = owned * touched / known.bandwidth
    if cluster.host is None:
        return update
    states = owned * state.optimizer
    moved = 2 * states / (cluster.host.d2h_gbps * 1e9)
    return update + np.where(offloaded(c, states, cluster), moved, 0.0)


def sends(work: Workload, c: Candidates, cluster: Cluster, size: int) -> Column:
    """Hidden states between stages: each hop of filling and draining the pipeline is waited for,
    and with one chunk a stage so is each micro-batch's; chunks hide theirs behind one another."""
    if not np.any(c.pp > 1):
        return np.zeros(len(c))
    states = c.tokens * float(work.hidden_size * size) / c.tp
    once = collectives.send(cluster, states, c.stage_stride)
    waited = 2 * (c.pp - 1) + np.where(c.virtual_stages > 1, 0, 2 * c.gradient_accumulation)
    return np.where(c.pp > 1, waited * once, 0.0)
