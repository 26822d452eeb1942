"""The twin of a plan: the same structure on the few devices that are here, to prove it."""

from __future__ import annotations

from dataclasses import replace

from analyzers.backends import Backend
from analyzers.errors import InputError
from analyzers.schema import ModelAnalysis
from strategies.cluster import flat_cluster
from strategies.cost.routing import Routing
from strategies.pricing import CostModel, predict, row_of
from strategies.schema import Parallelism, Plan, Twin
from strategies.space import divisors
from strategies.workload import runtime_workload

MAX_MICRO_BATCH = 2
MAX_ACCUMULATION = 2
MAX_SEQUENCE_LENGTH = {"cpu": 256}
"""Longer sequences prove nothing more on a processor and take minutes."""
LOCAL_FABRIC = {"cpu": (1.0, 200.0)}
"""GB/s and microseconds between local ranks, by device type; assumed, nobody measured them here."""
DEFAULT_LOCAL_FABRIC = (50.0, 20.0)
TITLES = {
    "dispatcher": "dispatcher",
    "activation_checkpointing": "activation checkpointing",
    "reshard_after_forward": "resharding after forward",
    "expert_weight_format": "expert weight format",
    "compute_dtype": "compute dtype",
    "micro_batch_size": "micro-batch size",
    "sequence_length": "sequence length",
    "gradient_accumulation": "gradient accumulation",
}
OF_EXPERTS = ("dispatcher", "expert_weight_format")
"""Of these, what a model without experts does not have."""


def twin(plan: Plan, analysis: ModelAnalysis, world_size: int, backend: Backend) -> Plan:
    """The plan scaled down to `world_size` ranks of `backend`, and what that keeps of it.

    Expert parallelism stays on when the plan has it, and so does the sharding of experts within it
    where four or more ranks allow both. Raises InputError when `world_size` is not positive.
    """
    if world_size < 1:
        fault = f"must be > 0, found {world_size}"
        raise InputError("twin", field="world_size", fault=fault, fix="give the local ranks")
    if world_size == plan.world_size and backend.name == plan.backend:
        kept, _ = _compare(plan, plan)
        same = Twin(of_world_size=world_size, kept=kept, not_kept=["fewer steps than the job"])
        return replace(plan, twin=same)

    parallelism = _parallelism(plan.parallelism, analysis, world_size)
    longest = MAX_SEQUENCE_LENGTH.get(backend.device_type, plan.sequence_length)
    small = replace(
        plan,
        world_size=world_size,
        backend=backend.name,
        parallelism=parallelism,
        micro_batch_size=min(plan.micro_batch_size, MAX_MICRO_BATCH),
        sequence_length=min(plan.sequence_length, longest),
        gradient_accumulation=min(plan.gradient_accumulation, MAX_ACCUMULATION),
        dispatcher=plan.dispatcher if parallelism.ep > 1 else "none",
        node_size=_node_size(plan, parallelism.ep),
        expert_copies=plan.expert_copies if parallelism.ep > 1 else 0,
        compute_dtype=backend.training_dtype,
        expert_weight_format=_expert_format(plan, backend),
    )
    bw_gbps, latency_us = LOCAL_FABRIC.get(backend.device_type, DEFAULT_LOCAL_FABRIC)
    local = flat_cluster(plan.cluster, backend, world_size, bw_gbps=bw_gbps, latency_us=latency_us)
    routing = Routing(plan.routing.exponent, tuple(plan.routing.loads))
    work = runtime_workload(analysis, plan.lora, training=plan.training, routing=routing)
    kept, not_kept = _compare(plan, small)
    if world_size != plan.world_size:
        not_kept.append(f"{world_size} devices instead of {plan.world_size}")
    if backend.name != plan.backend and plan.backend:
        not_kept.append(f"{backend.title} instead of {plan.backend}")
    return replace(
        small,
        predicted=predict(work, local, small),
        alternatives=[],
        rejected={},
        families={},
        survey=[],
        ep_curve=None,
        searched=None,
        explanation=[
            f"Twin of the plan for {plan.world_size} devices of {plan.cluster}; the links between "
            f"the local ranks are assumed, {bw_gbps:g} GB/s and {latency_us:g} us."
        ],
        origins=CostModel(work, local).origins(row_of(small)),
        twin=Twin(of_world_size=plan.world_size, kept=kept, not_kept=not_kept),
    )


def _parallelism(p: Parallelism, analysis: ModelAnalysis, world_size: int) -> Parallelism:
    """Replicas are dropped first; then the largest EP that divides ranks and experts, among those
    that leave experts sharded within EP if the plan does so and enough ranks are there."""
    full_size = p.pp * p.dp_replicate * p.fsdp * p.tp
    if world_size == full_size:
        return p
    experts = analysis.experts.count if analysis.experts else 1
    possible = [d for d in divisors(world_size) if experts % d == 0 and d <= p.ep]
    if p.efsdp > 1:
        both = [d for d in possible if 1 < d < world_size]
        possible = both or possible
    ep = max(possible)
    return Parallelism(fsdp=world_size, ep=ep, efsdp=world_size // ep)


def _node_size(plan: Plan, ep: int) -> int | None:
    """The plan's, where several nodes are left; otherwise two halves of the ranks stand for nodes,
    or each rank does, so that the same exchange is proved."""
    size = plan.node_size
    if plan.dispatcher != "hierarchical" or size is None or (ep > size and not ep % size):
        return size
    return 1 if ep % 2 else ep // 2


def _expert_format(plan: Plan, backend: Backend) -> str | None:
    if plan.expert_weight_format is None:
        return None
    if backend.training_dtype == "float32":
        return "fp32"
    return "bf16" if plan.expert_weight_format == "fp32" else plan.expert_weight_format


def _compare(plan: Plan, small: Plan) -> tuple[list[str], list[str]]:
    """What is kept and what is not: one line for each property, in one of the two lists."""
    kept: list[str] = []
    not_kept: list[str] = []
    p, q = plan.parallelism, small.parallelism
    if plan.has_experts:
        _compare_experts(p, q, kept, not_kept)
    if (p.fsdp > 1) == (q.fsdp > 1):
        kept.append("other weights are sharded over all ranks")
    else:
        not_kept.append(f"weights are on {q.fsdp} shard instead of {p.fsdp}")
    if p.dp_replicate > 1 and q.dp_replicate == 1:
        not_kept.append(f"one replica instead of {p.dp_replicate}")
    for name, title in TITLES.items():
        before, after = getattr(plan, name), getattr(small, name)
        if name in OF_EXPERTS and not plan.has_experts:
            continue
        if before == after:
            kept.append(f"{title}: {after}")
        else:
            not_kept.append(f"{title}: {after} instead of {before}")
    return kept, not_kept


def _compare_experts(p: Parallelism, q: Parallelism, kept: list[str], not_kept: list[str]) -> None:
    if p.ep == q.ep:
        kept.append(f"expert parallelism of {p.ep}")
    elif q.ep > 1:
        kept.append("experts are spread over ranks and tokens are exchanged")
        not_kept.append(f"expert parallelism of {q.ep} instead of {p.ep}")
    else:
        not_kept.append(f"no expert parallelism; the plan has {p.ep}")
    if (p.efsdp > 1) == (q.efsdp > 1):
        state = "sharded" if q.efsdp > 1 else "whole"
        kept.append(f"experts are {state} within an expert-parallel rank")
    else:
        not_kept.append(f"experts are split over {q.efsdp} shards instead of {p.efsdp}")
