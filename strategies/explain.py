"""A search's outcome in words and numbers: why this plan, what else there is, why none fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from analyzers.schema import ModelAnalysis
from strategies import cost
from strategies.cluster import Cluster
from strategies.memory import STATE_DEVIATION, TRANSIENT_DEVIATION, Candidate
from strategies.schema import Alternative, Job, Memory, Parallelism, Plan
from strategies.space import is_asked_for, layouts
from strategies.workload import Workload

MAX_OOM_PROBABILITY = 0.05
"""A plan that is likelier to run out of memory is not offered."""
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


def point(
    work: Workload, c: Candidate, cluster: Cluster, known: cost.Rates, peak_gib: float
) -> Point:
    seconds = cost.total(cost.step_time(work, c, cluster, known))
    return Point(c, seconds / step_tokens(c), peak_gib, _simplicity(c))


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


def no_layout(analysis: ModelAnalysis, cluster: Cluster, job: Job, fixed: Mapping[str, int]) -> str:
    """Which forced value or which global batch leaves nothing to search."""
    offered = list(layouts(analysis, cluster, Counter()))
    asked = {k: v for k, v in fixed.items() if hasattr(Parallelism(), k)}
    if not any(is_asked_for(p, asked) for p in offered):
        wanted = ", ".join(f"{k}={v}" for k, v in asked.items())
        listed = ", ".join(f"{p.dp_replicate}x{p.fsdp}x{p.ep}" for p in offered)
        return (
            f"no layout of the {cluster.world_size} devices of {cluster.name} has {wanted} "
            f"(dp_replicate x fsdp x ep on offer: {listed})"
        )
    step = job.global_batch_size
    ranks = cluster.world_size
    micro = fixed.get("micro_batch_size", 1)
    return (
        f"a global batch of {step} sequences does not split into micro-batches of {micro} over "
        f"{ranks} data-parallel ranks (give a multiple of {ranks * micro}, e.g. "
        f"--global-batch-size {max(round((step or 0) / ranks / micro), 1) * ranks * micro})"
    )


def nothing_fits(c: Candidate, held: Memory, tried: int) -> str:
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


def alternatives(points: list[Point]) -> list[Alternative]:
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
            step_seconds=p.seconds_per_token * step_tokens(p.candidate),
            memory_gib=p.peak_gib,
        )
        for why, p in sorted(listed, key=lambda item: item[1].order)
    ]


def step_tokens(c: Candidate) -> int:
    """Tokens of one optimizer step over all devices."""
    return c.tokens * c.gradient_accumulation * c.data_ranks * c.parallelism.cp


def _compared(p: Point, best: Point) -> str:
    slower = p.seconds_per_token / best.seconds_per_token - 1
    saved = best.peak_gib - p.peak_gib
    kept = f"{saved:.1f} GiB less" if saved >= 0 else f"{-saved:.1f} GiB more"
    return f"{slower:.1%} more time a token, {kept} memory, {_settings(p.candidate)}"


def explain(plan: Plan, work: Workload, points: list[Point], tried: int) -> list[str]:
    """Why this plan, in sentences with numbers."""
    predicted, shards = plan.predicted, plan.parallelism.fsdp * plan.parallelism.tp
    step, held, seconds = predicted.step, predicted.memory_gib, predicted.step_seconds
    chosen = points[0].candidate
    said = [
        f"Of {tried} combinations {len(points)} fit; all were priced, so by this cost model none "
        "takes less time a token.",
        f"{_settings(chosen)}: {seconds:.3g} s a step of {step_tokens(chosen):,} tokens, "
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
            f"A token is exchanged at the experts' own width, {work.expert_width}; best tokens/s a "
            f"device by EP (a divisor of {work.experts} experts): {curve}."
        )
    said.append(
        "Assumed: balanced routing; a token travels once to each rank that holds some of its "
        "experts; gathers overlap with compute but not with the token exchange; adapter gradients "
        "are reduced without overlap."
    )
    return said
