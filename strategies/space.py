"""Every plan that could be: layouts of the devices times the settings that are not layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from analyzers.schema import ModelAnalysis
from strategies.cluster import Cluster
from strategies.memory import Candidate
from strategies.schema import Job, Parallelism
from strategies.workload import packed_experts_of

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Tried where the global batch does not decide."""
MAX_MICRO_BATCH = 64
"""Of those that divide the global batch."""


class Space(NamedTuple):
    candidates: list[Candidate]
    rejected: Counter[str]


def candidates(
    analysis: ModelAnalysis,
    cluster: Cluster,
    job: Job,
    fixed: Mapping[str, int],
    packed: bool,
) -> Space:
    """Every point of the space, and why layouts were left out."""
    rejected: Counter[str] = Counter()
    dtype = cluster.device.training_dtype
    formats = ["fp32" if dtype == "float32" else "bf16"]
    if dtype == "bfloat16" and packed and packed_experts_of(analysis):
        formats.append("mxfp4")
    found: list[Candidate] = []
    for p in layouts(analysis, cluster, rejected):
        if not is_asked_for(p, fixed):
            rejected["not the parallelism asked for"] += 1
            continue
        batches = _batches(p, job, fixed)
        if not batches:
            ranks = p.dp_replicate * p.fsdp
            rejected[
                f"global batch of {job.global_batch_size} sequences does not split "
                f"over {ranks} data-parallel ranks"
            ] += 1
        dispatchers = ("all_to_all", "all_gather") if p.ep > 1 else ("none",)
        resharding = (True, False) if p.fsdp > 1 else (True,)
        found += [
            Candidate(
                parallelism=p,
                micro_batch_size=micro_batch,
                sequence_length=job.sequence_length,
                gradient_accumulation=accumulation,
                activation_checkpointing=checkpointing,
                reshard_after_forward=reshard,
                expert_weight_format=form,
                compute_dtype=dtype,
                dispatcher=dispatcher,
            )
            for (micro_batch, accumulation), dispatcher, checkpointing, reshard, form in product(
                batches, dispatchers, ("none", "full"), resharding, formats
            )
        ]
    return Space(found, rejected)


def is_asked_for(p: Parallelism, fixed: Mapping[str, int]) -> bool:
    return all(getattr(p, key, value) == value for key, value in fixed.items())


def layouts(
    analysis: ModelAnalysis, cluster: Cluster, rejected: Counter[str]
) -> Iterator[Parallelism]:
    """Replicas split the world along tiers; EP divides the shards of a replica and the experts."""
    experts = analysis.experts.count if analysis.experts else 0
    world = cluster.world_size
    for fsdp in sorted({tier.devices for tier in cluster.tiers}, reverse=True):
        for ep in divisors(fsdp):
            if ep > 1 and not experts:
                rejected["expert parallelism without experts"] += 1
            elif ep > 1 and experts % ep:
                rejected[f"expert parallelism does not divide {experts} experts"] += 1
            else:
                yield Parallelism(dp_replicate=world // fsdp, fsdp=fsdp, ep=ep, efsdp=fsdp // ep)


def _batches(p: Parallelism, job: Job, fixed: Mapping[str, int]) -> list[tuple[int, int]]:
    """Micro-batch sizes with the gradient accumulation that makes up the global batch."""
    ranks = p.dp_replicate * p.fsdp
    if job.global_batch_size is None:
        sizes = [(n, 1) for n in MICRO_BATCHES]
        if "micro_batch_size" in fixed:
            sizes = [(fixed["micro_batch_size"], 1)]
        return sizes
    if job.global_batch_size % ranks:
        return []
    share = job.global_batch_size // ranks
    return [
        (n, share // n)
        for n in divisors(share)
        if n <= MAX_MICRO_BATCH and n == fixed.get("micro_batch_size", n)
    ]


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
