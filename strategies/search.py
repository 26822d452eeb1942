"""The fastest plan that fits, found by trying every one.

The space (fsdp x ep x efsdp x replicas, micro-batch, recomputation, resharding, dispatcher, expert
format) has a few thousand points on 128 devices, so exhaustive search is exact and takes less than
a second: no heuristic and no randomness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from analyzers.errors import InfeasibleError, InputError
from analyzers.schema import ModelAnalysis
from strategies import cost
from strategies.cluster import Cluster
from strategies.explain import (
    MAX_OOM_PROBABILITY,
    Point,
    alternatives,
    explain,
    no_layout,
    nothing_fits,
    point,
)
from strategies.memory import Candidate, memory, oom_probability
from strategies.schema import Job, Memory, Parallelism, Plan
from strategies.space import candidates, divisors, packed_experts_of
from strategies.workload import PART_OF_TARGET, Workload, workload


def search(
    analysis: ModelAnalysis,
    cluster: Cluster,
    job: Job,
    *,
    fixed: Mapping[str, int] | None = None,
    packed_experts: bool = False,
) -> Plan:
    """The plan with the fewest seconds per token among all that fit.

    `fixed` forces values of the parallelism or of `micro_batch_size`, e.g. `{"ep": 2}`, on top of
    those of the job.
    `packed_experts` also offers experts held as the checkpoint packs them (MXFP4), which the
    runtime cannot train yet.
    Raises InputError for a job or a forced value that cannot be, InfeasibleError when nothing fits.
    """
    fixed = {**job.fixed, **(fixed or {})}
    work = workload(analysis, job.lora)
    _check(analysis, work, cluster, job, fixed)
    space = candidates(analysis, cluster, job, fixed, packed_experts)
    if not space.candidates:
        raise InfeasibleError(no_layout(analysis, cluster, job, fixed))

    known = cost.rates(cluster.device, cluster.device.training_dtype)
    points: list[Point] = []
    leanest: tuple[Candidate, Memory] | None = None
    rejected = space.rejected
    for c in space.candidates:
        held = memory(work, c, cluster.device)
        if leanest is None or held.peak < leanest[1].peak:
            leanest = (c, held)
        if held.peak > held.capacity:
            rejected["needs more memory than the device has"] += 1
        elif oom_probability(held, cluster.device) > MAX_OOM_PROBABILITY:
            rejected[f"more than {MAX_OOM_PROBABILITY:.0%} likely to run out of memory"] += 1
        else:
            points.append(point(work, c, cluster, known, held.peak))
    if not points:
        assert leanest is not None
        raise InfeasibleError(nothing_fits(*leanest, len(space.candidates)))

    points.sort(key=lambda p: p.order)
    best = points[0]
    predicted = cost.predict(work, best.candidate, cluster)
    plan = Plan(
        cluster=cluster.name,
        world_size=cluster.world_size,
        predicted=predicted,
        alternatives=alternatives(points),
        rejected=dict(sorted(rejected.items())),
        origins=cost.origins(work, best.candidate, cluster),
        backend=cluster.device.name,
        lora=job.lora,
        **vars(best.candidate),
    )
    said = explain(plan, work, points, len(space.candidates))
    if packed_experts_of(analysis) and not packed_experts:
        said.append(
            "The checkpoint packs its experts (MXFP4). They are planned unpacked: nothing here "
            "trains packed ones yet. `adapt plan --packed-experts` prices them too."
        )
    return replace(plan, explanation=said)


def _check(
    analysis: ModelAnalysis,
    work: Workload,
    cluster: Cluster,
    job: Job,
    fixed: Mapping[str, int],
) -> None:
    if job.lora.rank < 1:
        fault = f"must be > 0, found {job.lora.rank}"
        raise InputError("job", field="lora.rank", fault=fault, fix="--lora-rank N")
    if not work.dense_adapters + work.expert_adapters:
        fault = f"{', '.join(job.lora.targets) or 'nothing'}: the model has no such layer to adapt"
        fix = f"choose among {', '.join(PART_OF_TARGET)}"
        raise InputError("job", field="lora.targets", fault=fault, fix=fix)
    longest = analysis.max_sequence_length
    if job.sequence_length < 1 or (longest and job.sequence_length > longest):
        fault = f"{job.sequence_length} tokens; the model takes 1 to {longest or 'any number'}"
        raise InputError("job", field="sequence_length", fault=fault, fix="--sequence-length N")
    if job.global_batch_size is not None and job.global_batch_size < 1:
        fault = f"must be > 0, found {job.global_batch_size}"
        raise InputError("job", field="global_batch_size", fault=fault, fix="--global-batch-size N")
    known = [f.name for f in fields(Parallelism)] + ["micro_batch_size"]
    for key, value in fixed.items():
        if key not in known:
            fix = f"known: {', '.join(known)}"
            raise InputError("--fix", field=key, fault="cannot be forced", fix=fix)
        if value < 1:
            raise InputError("--fix", field=key, fault=f"must be > 0, found {value}")
        if key in ("pp", "tp", "cp") and value != 1:
            raise InputError("--fix", field=key, fault="is not searched yet", fix="leave it at 1")
    ep = fixed.get("ep", 1)
    experts = analysis.experts.count if analysis.experts else 1
    if experts % ep or cluster.world_size % ep:
        possible = [d for d in divisors(cluster.world_size) if experts % d == 0]
        fault = f"{ep} must divide {experts} experts and {cluster.world_size} devices"
        fix = f"one of: {', '.join(map(str, possible))}"
        raise InputError("--fix", field="ep", fault=fault, fix=fix)
