"""Why nothing fits: the forced value, the global batch, or the part of memory that binds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace

import numpy as np

from analyzers.errors import InfeasibleError
from strategies.alternatives import settings
from strategies.problem import Problem
from strategies.solver import MAX_OOM_PROBABILITY, QUANTILE, Points, solve
from strategies.space import FEATURES, divisors, make_space

STATES = ("frozen_weights", "trained_weights", "adapters", "gradients", "optimizer")
"""Parts of memory that shards divide, whatever the sequence."""
MAX_LISTED = 12
"""Layouts that a message names."""


def no_layout(problem: Problem) -> InfeasibleError:
    """Which forced value or which global batch leaves nothing to search."""
    cluster, job = problem.cluster, problem.job
    axes = {k: v for k, v in problem.fixed.items() if k != "micro_batch_size"}
    unsplit = replace(job, global_batch_size=None)
    free = make_space(problem.model, cluster, unsplit, allow=problem.allow).layouts
    asked = np.ones(len(free), bool)
    for key, value in axes.items():
        asked &= getattr(free, key) == value
    if axes and not asked.any():
        wanted = ", ".join(f"{k}={v}" for k, v in axes.items())
        where = f"no layout of the {cluster.world_size} devices of {cluster.name} has {wanted}"
        for key, value in axes.items():
            possible = np.unique(getattr(free, key)).tolist()
            if value not in possible:
                return InfeasibleError(f"{where} ({key} may be {', '.join(map(str, possible))})")
        rows = zip(free.dp_replicate.tolist(), free.fsdp.tolist(), free.ep.tolist(), strict=True)
        offered = [f"{a}x{b}x{c}" for a, b, c in rows]
        more = f", and {len(offered) - MAX_LISTED} more" if len(offered) > MAX_LISTED else ""
        return InfeasibleError(
            f"{where} (dp_replicate x fsdp x ep on offer: {', '.join(offered[:MAX_LISTED])}{more})"
        )
    step, ranks = job.global_batch_size or 0, int(free.data_ranks[asked].min())
    micro = problem.fixed.get("micro_batch_size", 1)
    return InfeasibleError(
        f"a global batch of {step} sequences does not split into micro-batches of {micro} over "
        f"{ranks} data-parallel ranks (give a multiple of {ranks * micro}, e.g. "
        f"--global-batch-size {max(round(step / ranks / micro), 1) * ranks * micro})"
    )


def nothing_fits(problem: Problem, table: Points) -> InfeasibleError:
    """Which limit binds and by how much, and what the runtime lacks would change it."""
    pricing = problem.pricing
    if not len(table):
        return InfeasibleError(
            "no plan with what --fix and --allow ask for fits in device memory "
            f"({_advice(problem)})"
        )
    lean = int(np.argmin(table.peak + QUANTILE * table.deviation))
    point = table.take(slice(lean, lean + 1))
    held = asdict(pricing.predicted(point, 0.0).memory_gib)
    peak, capacity = held.pop("peak"), held.pop("capacity")
    shown = ", ".join(
        f"{k.replace('_', ' ')} {v:.1f}"
        for k, v in sorted(held.items(), key=lambda kv: -kv[1])
        if v >= 0.05
    )
    over = peak - capacity
    verdict = (
        f"{over:.1f} GiB too much"
        if over > 0
        else f"more than {MAX_OOM_PROBABILITY:.0%} likely to overflow"
    )
    helps = [
        f"{FEATURES[name]} (--allow {name})"
        for name in problem.features
        if name not in problem.allow and solve(problem.space(require=name), pricing).best
    ]
    allowed, without = (", with --allow or not", " without it") if problem.allow else ("", "")
    advice = _advice(problem, _least_devices(point, held, capacity))
    if helps:
        advice += f"; it would fit with what the runtime cannot run yet: {', '.join(helps)}"
    return InfeasibleError(
        f"no plan fits in device memory{allowed}: the leanest of {len(table)}{without} "
        f"({settings(problem, point.plans)}) needs {peak:.1f} of {capacity:.1f} GiB a device, "
        f"{verdict}; GiB by part: {shown} "
        f"({advice})"
    )


def _least_devices(point: Points, held: Mapping[str, float], capacity: float) -> int:
    """Devices over which the weights and the states of the leanest plan would have to be spread to
    fit by themselves."""
    p = point.plans
    states = sum(held[name] for name in STATES) * float((p.fsdp * p.tp * p.pp)[0])
    return math.ceil(states / (capacity - held["reserved"]))


def _advice(problem: Problem, least: int = 0) -> str:
    world = problem.cluster.world_size
    less = "a lower LoRA rank" if problem.job.training == "lora" else "LoRA (--training lora)"
    if least > world:
        what = "and adapters" if problem.job.training == "lora" else "in training"
        said = f"use more devices: weights {what} alone fill {least:,}"
    else:
        said = f"use more devices, a shorter sequence or {less}"
    experts = problem.model.experts
    eps = [n for n in divisors(experts) if n <= world] if experts else [1]
    if world % eps[-1]:
        said += f"; EP {eps[-1]} does not divide {world} devices: --allow-idle tries fewer"
    return said
