"""The fastest plan that fits, found by trying every one.

The space (fsdp x ep x efsdp x replicas, micro-batch, recomputation, resharding, dispatcher, expert
format) has a few thousand points on 128 devices, so exhaustive search is exact and takes less than
a second: no heuristic and no randomness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

from analyzers.errors import InfeasibleError, InputError
from analyzers.schema import ModelAnalysis
from strategies import cost
from strategies.cluster import Cluster
from strategies.memory import (
    EXPERT_BYTES,
    STATE_DEVIATION,
    TRANSIENT_DEVIATION,
    Candidate,
    memory,
    oom_probability,
)
from strategies.schema import Alternative, Job, Memory, Parallelism, Plan
from strategies.workload import PART_OF_TARGET, Workload, packed_experts, workload

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Tried where the global batch does not decide."""
MAX_MICRO_BATCH = 64
MAX_OOM_PROBABILITY = 0.05
MAX_ALTERNATIVES = 6


@dataclass(frozen=True)
class Point:
    """A candidate that fits, with what decides about it."""

    candidate: Candidate
    seconds_per_token: float
    """Of the whole cluster: step seconds over the tokens of the step."""
    peak_gib: float
    simplicity: int
    """Mechanisms switched on; fewer is simpler."""

    @property
    def order(self) -> tuple:
        """Fastest first; equals: simpler, leaner, then a fixed order of the settings."""
        c = self.candidate
        p = c.parallelism
        settings = (p.ep, p.dp_replicate, c.micro_batch_size, c.dispatcher, c.expert_weight_format)
        return (self.seconds_per_token, self.simplicity, self.peak_gib, *settings)


class Space(NamedTuple):
    candidates: list[Candidate]
    rejected: Counter[str]


def search(
    analysis: ModelAnalysis,
    cluster: Cluster,
    job: Job,
    *,
    fixed: Mapping[str, int] | None = None,
    expert_formats: Collection[str] = tuple(EXPERT_BYTES),
) -> Plan:
    """The plan with the fewest seconds per token among all that fit.

    `fixed` forces values of the parallelism or of `micro_batch_size`, e.g. `{"ep": 2}`, on top of
    those of the job.
    `expert_formats` limits how experts may be held: MXFP4 experts stay packed only if it is there.
    Raises InputError for a job or a forced value that cannot be, InfeasibleError when nothing fits.
    """
    fixed = {**job.fixed, **(fixed or {})}
    work = workload(analysis, job.lora)
    _check(analysis, work, cluster, job, fixed)
    space = candidates(analysis, cluster, job, fixed, expert_formats)
    if not space.candidates:
        raise InfeasibleError(_no_layout(analysis, cluster, job, fixed))

    known = cost.rates(cluster.device, cluster.device.training_dtype)
    points: list[Point] = []
    leanest: tuple[float, Candidate, Memory] | None = None
    rejected = space.rejected
    for c in space.candidates:
        held = memory(work, c, cluster.device)
        if leanest is None or held.peak < leanest[0]:
            leanest = (held.peak, c, held)
        if held.peak > held.capacity:
            rejected["needs more memory than the device has"] += 1
        elif oom_probability(held, cluster.device) > MAX_OOM_PROBABILITY:
            rejected[f"more than {MAX_OOM_PROBABILITY:.0%} likely to run out of memory"] += 1
        else:
            points.append(point(work, c, cluster, known, held.peak))
    if not points:
        assert leanest is not None
        raise InfeasibleError(_nothing_fits(leanest[1], leanest[2], len(space.candidates)))

    points.sort(key=lambda p: p.order)
    best = points[0]
    predicted = cost.predict(work, best.candidate, cluster)
    plan = Plan(
        cluster=cluster.name,
        world_size=cluster.world_size,
        predicted=predicted,
        alternatives=_alternatives(points),
        rejected=dict(sorted(rejected.items())),
        origins=cost.origins(work, best.candidate, cluster),
        backend=cluster.device.name,
        lora=job.lora,
        **vars(best.candidate),
    )
    return replace(plan, explanation=_explain(plan, work, points, len(space.candidates)))


def point(
    work: Workload, c: Candidate, cluster: Cluster, known: cost.Rates, peak_gib: float
) -> Point:
    seconds = cost.total(cost.step_time(work, c, cluster, known))
    tokens = c.tokens * c.gradient_accumulation * c.data_ranks * c.parallelism.cp
    return Point(c, seconds / tokens, peak_gib, _simplicity(c))


def candidates(
    analysis: ModelAnalysis,
    cluster: Cluster,
    job: Job,
    fixed: Mapping[str, int],
    expert_formats: Collection[str],
) -> Space:
    """Every point of the space, and why layouts were left out."""
    rejected: Counter[str] = Counter()
    dtype = cluster.device.training_dtype
    formats = ["fp32" if dtype == "float32" else "bf16"]
    if dtype == "bfloat16" and "mxfp4" in expert_formats and packed_experts(analysis):
        formats.append("mxfp4")
    found: list[Candidate] = []
    for p in _layouts(analysis, cluster, rejected):
        if not _is_asked_for(p, fixed):
            rejected["not the parallelism asked for"] += 1
            continue
        batches = _batches(p, job, fixed)
        if not batches:
            ranks = p.dp_replicate * p.fsdp
            rejected[
                f"global batch of {job.global_batch_size} sequences does not split "
                f"over {ranks} data-parallel ranks"
            ] += 1
        for micro_batch, accumulation in batches:
            base = Candidate(
                parallelism=p,
                micro_batch_size=micro_batch,
                sequence_length=job.sequence_length,
                gradient_accumulation=accumulation,
                compute_dtype=dtype,
            )
            for dispatcher in ("all_to_all", "all_gather") if p.ep > 1 else ("none",):
                for checkpointing in ("none", "full"):
                    for reshard in (True, False) if p.fsdp > 1 else (True,):
                        found += [
                            replace(
                                base,
                                dispatcher=dispatcher,
                                activation_checkpointing=checkpointing,
                                reshard_after_forward=reshard,
                                expert_weight_format=form,
                            )
                            for form in formats
                        ]
    return Space(found, rejected)


def _is_asked_for(p: Parallelism, fixed: Mapping[str, int]) -> bool:
    return all(getattr(p, key, value) == value for key, value in fixed.items())


def _layouts(
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


def _simplicity(c: Candidate) -> int:
    p = c.parallelism
    return sum(
        (
            p.dp_replicate > 1,
            p.ep > 1,
            p.ep > 1 and p.efsdp > 1,
            c.gradient_accumulation > 1,
            c.activation_checkpointing == "full",
            not c.reshard_after_forward,
            c.expert_weight_format == "mxfp4",
        )
    )


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
            raise InputError("fixed", field=key, fault="cannot be forced", fix=fix)
        if value < 1:
            raise InputError("fixed", field=key, fault=f"must be > 0, found {value}")
        if key in ("pp", "tp", "cp") and value != 1:
            raise InputError("fixed", field=key, fault="is not searched yet", fix="leave it at 1")
    ep = fixed.get("ep", 1)
    experts = analysis.experts.count if analysis.experts else 1
    if experts % ep or cluster.world_size % ep:
        possible = [d for d in divisors(cluster.world_size) if experts % d == 0]
        fault = f"{ep} must divide {experts} experts and {cluster.world_size} devices"
        fix = f"one of: {', '.join(map(str, possible))}"
        raise InputError("fixed", field="ep", fault=fault, fix=fix)


def _no_layout(
    analysis: ModelAnalysis, cluster: Cluster, job: Job, fixed: Mapping[str, int]
) -> str:
    layouts = list(_layouts(analysis, cluster, Counter()))
    asked = {k: v for k, v in fixed.items() if hasattr(Parallelism(), k)}
    if not any(_is_asked_for(p, asked) for p in layouts):
        wanted = ", ".join(f"{k}={v}" for k, v in asked.items())
        offered = ", ".join(f"{p.dp_replicate}x{p.fsdp}x{p.ep}" for p in layouts)
        return (
            f"no layout of the {cluster.world_size} devices of {cluster.name} has {wanted} "
            f"(dp_replicate x fsdp x ep on offer: {offered})"
        )
    step = job.global_batch_size
    ranks = cluster.world_size
    micro = fixed.get("micro_batch_size", 1)
    return (
        f"a global batch of {step} sequences does not split into micro-batches of {micro} over "
        f"{ranks} data-parallel ranks (give a multiple of {ranks * micro}, e.g. "
        f"--global-batch-size {max(round((step or 0) / ranks / micro), 1) * ranks * micro})"
    )


def _nothing_fits(c: Candidate, held: Memory, tried: int) -> str:
    """Which limit binds, and by how much."""
    parts = {k: v for k, v in asdict(held).items() if k not in ("peak", "capacity") and v >= 0.05}
    shown = ", ".join(
        f"{k.replace('_', ' ')} {v:.1f}" for k, v in sorted(parts.items(), key=lambda kv: -kv[1])
    )
    over = held.peak - held.capacity
    verdict = (
        f"{over:.1f} GiB too much"
        if over > 0
        else f"more than {MAX_OOM_PROBABILITY:.0%} likely to overflow"
    )
    return (
        f"no plan fits in device memory: the leanest of {tried} ({_settings(c)}) needs "
        f"{held.peak:.1f} of {held.capacity:.1f} GiB a device, {verdict}; GiB by part: {shown} "
        "(use more devices, a shorter sequence or a lower LoRA rank)"
    )


def _settings(c: Candidate) -> str:
    p = c.parallelism
    replicas = f"{p.dp_replicate} replicas of " if p.dp_replicate > 1 else ""
    recomputation = "full" if c.activation_checkpointing == "full" else "no"
    return (
        f"{replicas}FSDP {p.fsdp}, EP {p.ep} x {p.efsdp}, micro-batch {c.micro_batch_size}, "
        f"{recomputation} recomputation, {c.expert_weight_format} experts"
    )


def pareto(points: list[Point]) -> list[Point]:
    """Points that no other beats in time, memory and simplicity at once; fastest first."""
    leanest: dict[int, float] = {}
    front: list[Point] = []
    for p in sorted(points, key=lambda p: p.order):
        if all(p.peak_gib < peak for s, peak in leanest.items() if s <= p.simplicity):
            front.append(p)
            leanest[p.simplicity] = min(p.peak_gib, leanest.get(p.simplicity, p.peak_gib))
    return front


def _alternatives(points: list[Point]) -> list[Alternative]:
    """The ends of the Pareto front and its fastest point of every other EP."""
    best, front = points[0], pareto(points)[1:]
    if not front:
        return []
    chosen: dict[int, tuple[str, Point]] = {}

    def choose(why: str, p: Point) -> None:
        chosen.setdefault(id(p), (why, p))

    leanest = min(front, key=lambda p: p.peak_gib)
    simplest = min(front, key=lambda p: (p.simplicity, *p.order))
    if leanest.peak_gib < best.peak_gib:
        choose("least memory", leanest)
    if simplest.simplicity < best.simplicity:
        choose("simplest", simplest)
    seen = {best.candidate.parallelism.ep}
    for p in front:
        ep = p.candidate.parallelism.ep
        if ep not in seen:
            seen.add(ep)
            choose(f"fastest with EP {ep}", p)
    listed = list(chosen.values())[:MAX_ALTERNATIVES]
    return [
        Alternative(
            why=f"{why}: {_compared(p, best)}",
            parallelism=p.candidate.parallelism,
            micro_batch_size=p.candidate.micro_batch_size,
            activation_checkpointing=p.candidate.activation_checkpointing,
            step_seconds=p.seconds_per_token * _tokens(p.candidate),
            memory_gib=p.peak_gib,
        )
        for why, p in sorted(listed, key=lambda item: item[1].order)
    ]


def _tokens(c: Candidate) -> int:
    return c.tokens * c.gradient_accumulation * c.data_ranks * c.parallelism.cp


def _compared(p: Point, best: Point) -> str:
    slower = p.seconds_per_token / best.seconds_per_token - 1
    saved = best.peak_gib - p.peak_gib
    kept = f"{saved:.1f} GiB less" if saved >= 0 else f"{-saved:.1f} GiB more"
    return f"{slower:.1%} more time a token, {kept} memory, {_settings(p.candidate)}"


def _explain(plan: Plan, work: Workload, points: list[Point], tried: int) -> list[str]:
    """Why this plan, in sentences with numbers."""
    predicted, shards = plan.predicted, plan.parallelism.fsdp * plan.parallelism.tp
    step, held, seconds = predicted.step, predicted.memory_gib, predicted.step_seconds
    chosen = points[0].candidate
    said = [
        f"Of {tried} combinations {len(points)} fit; all were priced, so by this cost model none "
        "takes less time a token.",
        f"{_settings(chosen)}: {seconds:.3g} s a step of {_tokens(chosen):,} tokens, "
        f"{predicted.tokens_per_second_per_device:,.0f} tokens/s a device.",
        f"Of the step, compute is {step.compute / seconds:.0%}, token exchange "
        f"{step.all_to_all / seconds:.0%}, weight gathers not hidden by compute "
        f"{step.all_gather / seconds:.0%}, gradient reduction {step.reduce_scatter / seconds:.0%}, "
        f"launches {step.overhead / seconds:.0%}.",
        f"Arithmetic alone would take {predicted.lower_bound_seconds:.3g} s, so nothing can win "
        f"more than {predicted.optimality_gap:.0%} of the step on these devices.",
        f"Peak memory is {held.peak:.1f} of {held.capacity:.1f} GiB, {held.frozen_weights:.1f} of "
        f"it frozen weights over {shards} shards; the chance of running out is "
        f"{predicted.oom_probability:.1%}, for a normal error of {STATE_DEVIATION:.0%} on resident "
        f"and {TRANSIENT_DEVIATION:.0%} on transient memory.",
    ]
    if work.experts:
        speeds: dict[int, float] = {}
        for p in points:
            speeds.setdefault(p.candidate.parallelism.ep, 1 / p.seconds_per_token / plan.world_size)
        curve = ", ".join(f"EP {ep} {speeds[ep]:,.0f}" for ep in sorted(speeds))
        said.append(
            f"Tokens are exchanged at the experts' width of {work.expert_width}; best tokens/s a "
            f"device by EP (a divisor of {work.experts} experts): {curve}."
        )
    said.append(
        "Assumed: balanced routing; a token travels once to each rank that holds some of its "
        "experts; gathers overlap with compute but not with the token exchange; adapter gradients "
        "are reduced without overlap."
    )
    return said
