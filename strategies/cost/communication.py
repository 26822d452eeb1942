"""Seconds of communication of one micro-batch in one layer, before anything hides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strategies.candidates import DISPATCHERS, Candidates, Column
from strategies.cluster import Cluster
from strategies.cost import collectives
from strategies.cost.compute import Rates, Routed, expert_bytes
from strategies.cost.constants import Constants

if TYPE_CHECKING:
    from strategies.workload import Kind, Workload

PARTIAL_SUM_BYTES = 4
"""The all-gather dispatcher adds the outputs of a token's experts in float32."""
ALL_TO_ALL, HIERARCHICAL, ALL_GATHER = (
    DISPATCHERS.index(d) for d in ("all_to_all", "hierarchical", "all_gather")
)
TENSOR_PARTS = ("mixer", "dense", "shared_experts")
"""Split over tensor-parallel ranks, with a gather before and a reduce-scatter behind."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    gather: Column
    """Of a layer's weights, once."""
    reduce: Column
    """Of the gradients of what is trained in it, over shards and replicas."""
    mixer_gather: Column | float = 0.0
    """Of `gather`, the mixer's weights: what a layer needs first."""
    mixer_reduce: Column | float = 0.0
    """Of `reduce`, the mixer's gradients: what a layer's backward pass has last."""


def sharding(work: Workload, kind: Kind, c: Candidates, cluster: Cluster, size: int) -> Sharding:
    """Dense weights are sharded over fsdp, experts over efsdp; `size` bytes of the compute dtype.

    Frozen weights are never reduced. Without `shard_parameters` only what is trained is gathered,
    once a step.
    """
    stored = expert_bytes(c, size)
    dense, routed = kind.dense_parameters, kind.routed_parameters
    full = work.training == "full"
    trained_dense = dense if full else kind.dense_adapter
    trained_routed = routed if full else kind.expert_adapter
    frozen_dense = np.where(c.shard_parameters, 0 if full else dense, 0)
    frozen_routed = np.where(c.shard_parameters, 0 if full else routed, 0)
    gathered = (frozen_dense + trained_dense) * size / c.tp
    gathered_experts = (frozen_routed * stored + trained_routed * size) / c.ep
    gather_dense = collectives.all_gather(cluster, gathered, c.fsdp, c.tp)
    gather = gather_dense + collectives.all_gather(
        cluster, gathered_experts, c.efsdp, c.efsdp_stride
    )
    gradient = work.state.gradient
    reduced, reduced_experts = trained_dense * gradient / c.tp, trained_routed * gradient / c.ep
    reduce_dense = collectives.reduce_scatter(cluster, reduced, c.fsdp, c.tp)
    reduce = reduce_dense + collectives.reduce_scatter(
        cluster, reduced_experts, c.efsdp, c.efsdp_stride
    )
    shard = reduced / c.fsdp + reduced_experts / c.efsdp
    replicas = collectives.all_reduce(cluster, shard, c.dp_replicate, c.replica_stride)
    mixer = sum(p.parameters for p in kind.works if p.name == "mixer") / max(dense, 1)
    return Sharding(
        gather=gather,
        reduce=reduce + replicas,
        mixer_gather=mixer * gather_dense,
        mixer_reduce=mixer * reduce_dense,
    )


def root_sharding(work: Workload, c: Candidates, cluster: Cluster, size: int) -> Sharding:
    """Embedding, head and last norm."""
    parameters = float(work.outer_parameters)
    full = work.training == "full"
    gathered = np.where(c.shard_parameters | full, parameters * size / c.tp, 0.0)
    reduced = np.full(len(c), parameters * work.state.gradient if full else 0.0) / c.tp
    gather = collectives.all_gather(cluster, gathered, c.fsdp, c.tp)
    reduce = collectives.reduce_scatter(cluster, reduced, c.fsdp, c.tp)
    replicas = collectives.all_reduce(cluster, reduced / c.fsdp, c.dp_replicate, c.replica_stride)
    return Sharding(gather=gather, reduce=reduce + replicas)


def exchange(
    work: Workload, c: Candidates, cluster: Cluster, known: Rates, k: Constants, load: Routed
) -> Column:
    """Dispatch and combine of one layer's tokens, one direction (forward, or their gradients).

    all_to_all: a token travels once to each rank that holds some of its experts. hierarchical:
    once to each domain of every tier. all_gather: every rank of the group gets all of the group's
    tokens; float32 partial sums are reduce-scattered. The width is the experts' own: half the
    model's in a latent mixture of experts. The fullest rank receives `overload` times the mean.
    Around an all-to-all every visit is copied into the order of the experts and back: four reads
    and writes of `top_k` rows.
    """
    if not work.experts:
        return np.zeros(len(c))
    row = work.expert_width * known.dtype_bytes
    tokens = c.tokens / c.tp
    loaded = tokens * row * load.overload
    size = loaded * collectives.destinations(work.choice, c.ep)
    seconds = np.zeros(len(c))
    for code, call in ((ALL_TO_ALL, _direct), (HIERARCHICAL, _hierarchical)):
        chosen = c.dispatcher == code
        if chosen.any():
            there, back = (
                call(cluster, op, loaded, size, c, work.choice, k.exchange_share)
                for op in ("all_to_all_dispatch", "all_to_all_combine")
            )
            seconds = np.where(chosen, there + back, seconds)
    chosen = c.dispatcher == ALL_GATHER
    if chosen.any():
        size = tokens * row * c.ep
        partial = size * PARTIAL_SUM_BYTES / known.dtype_bytes
        there = collectives.all_gather(cluster, size, c.ep, c.ep_stride)
        back = collectives.reduce_scatter(cluster, partial, c.ep, c.ep_stride)
        # Each rank clears sums for all of the group's tokens and reads them again.
        sums = 2 * partial / (known.bandwidth * k.memory_share)
        seconds = np.where(chosen, there + back + sums, seconds)
    return np.where(c.ep > 1, seconds, 0.0)


def _direct(cluster, op, loaded, size, c, choice, share) -> Column:
    return collectives.all_to_all(cluster, size, c.ep, c.ep_stride, op=op, share=share)


def _hierarchical(cluster, op, loaded, size, c, choice, share) -> Column:
    return collectives.hierarchical(cluster, loaded, choice, c.ep, c.ep_stride, op=op, share=share)


def permutation(work: Workload, c: Candidates, known: Rates, k: Constants, load: Routed) -> Column:
    """Copies of every visit into the order of the experts and back, one direction."""
    if not work.experts:
        return np.zeros(len(c))
    rows = c.tokens / c.tp * work.top_k * load.overload
    moved = 4 * rows * work.expert_width * known.dtype_bytes
    return moved / (known.bandwidth * k.memory_share)


def tensor(kind: Kind, work: Workload, c: Candidates, cluster: Cluster, size: int) -> Column:
    """Sequence-parallel tensor parallelism, one direction: hidden states are gathered before and
    reduce-scattered behind the mixer, and again around a dense feed-forward or shared experts."""
    names = {p.name for p in kind.works if p.parameters}
    pairs = sum(name in names for name in TENSOR_PARTS)
    states = c.tokens * float(work.hidden_size * size)
    once = collectives.all_gather(cluster, states, c.tp)
    once = once + collectives.reduce_scatter(cluster, states, c.tp)
    return pairs * once


def context(kind: Kind, c: Candidates, cluster: Cluster, size: int) -> tuple[Column, Column]:
    """Keys and values passed around the ranks of a sequence, forward and backward (again, and
    their gradients back)."""
    whole = c.tokens * c.cp * float(kind.kv_width * size) / c.tp
    once = collectives.all_gather(cluster, whole, c.cp, c.tp)
    back = collectives.reduce_scatter(cluster, whole, c.cp, c.tp)
    return once, once + back
