"""The fastest plan that fits, proven, with what else there is and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from analyzers.schema import ModelAnalysis
from strategies.alternatives import (
    alternative,
    cells,
    families,
    missing,
    pareto_alternatives,
)
from strategies.answers import ep_curve
from strategies.cluster import Cluster
from strategies.cost import Constants
from strategies.explain import explain
from strategies.infeasible import no_layout, nothing_fits
from strategies.parts import fastest_part
from strategies.pricing import plan_fields
from strategies.problem import Problem, make_problem
from strategies.schema import Alternative, EpCurve, Job, Plan, Searched
from strategies.solver import Points, Solution, price_all, solve, step_tokens
from strategies.space import FEATURES

WORTH = 0.005
"""Share of the time that a plan which cannot be run must save to be told."""


def search(
    analysis: ModelAnalysis,
    cluster: Cluster,
    job: Job,
    *,
    fixed: Mapping[str, int] | None = None,
    allow: Collection[str] = (),
    allow_idle: bool = False,
    constants: Constants | None = None,
    pace: float = 1.0,
) -> Plan:
    """The plan with the fewest seconds per token among all that fit.

    `fixed` forces values of the parallelism or of `micro_batch_size`, e.g. `{"ep": 2}`, on top of
    those of the job. `allow` names FEATURES that the runtime cannot run and the plan may use all
    the same; what the others would gain is told as alternatives. `allow_idle` also tries fewer
    devices. `constants` replaces those that published runs fitted, e.g. by a finished run's, and
    every time is multiplied by `pace`, which such a run leaves unexplained.
    Raises InputError for a job or a forced value that cannot be, InfeasibleError when nothing fits.
    """
    problem = make_problem(analysis, cluster, job, fixed, allow, constants, pace)
    if allow_idle:
        problem = fastest_part(problem)
    best, bound, searched, table = _fastest(problem)
    fitting = table.take(table.fits)
    predicted = problem.pricing.predicted(best, bound)
    lacks = missing(problem, best.plans)
    if problem.allow and len(fitting) and lacks:
        why = "fastest that can be run" if job.training == "lora" else "fastest without --allow"
        told = [alternative(problem, fitting.best, best, why, bound)]
    else:
        told = pareto_alternatives(problem, fitting, best, bound)
    gains, beyond = _gains(problem, best)
    used = problem.cluster
    plan = Plan(
        cluster=used.name,
        world_size=used.world_size,
        predicted=predicted,
        alternatives=[*told, *gains.values()],
        rejected=_rejected(problem, table, searched),
        families=families(problem, table, best, predicted) if len(table) else {},
        survey=cells(problem, table),
        ep_curve=_ep_curve(problem, best),
        searched=searched,
        searched_beyond=beyond,
        origins=problem.pricing.origins(best.plans),
        backend=used.device.name,
        lora=job.lora,
        training=job.training,
        routing=job.routing,
        runnable=not lacks,
        missing=lacks,
        idle_devices=cluster.world_size - used.world_size,
        node_size=used.devices_per_node,
        **plan_fields(best.plans, used.device.training_dtype, experts=problem.model.experts),
    )
    return replace(
        plan, explanation=explain(plan, problem, best, fitting, gains, allow_idle=allow_idle)
    )


def _fastest(problem: Problem) -> tuple[Points, float, Searched, Points]:
    """The best plan, the bound in seconds a token, how it was found, and all runnable plans."""
    pricing, space = problem.pricing, problem.space()
    table = price_all(space, pricing)
    fitting = table.take(table.fits)
    best = fitting.best if len(fitting) else None
    if problem.allow:
        space = problem.space(problem.allow)
        to_beat = float(best.per_token[0]) if best else np.inf
        found = solve(space, pricing, to_beat=to_beat)
        if not found.plans:
            raise no_layout(problem)
        best, bound = found.best or best, found.bound
        searched = _searched(found)
    elif len(table):
        bounds = pricing.time_bound(table.plans) / step_tokens(table.plans)
        small = pricing.memory_bound(table.plans) <= pricing.capacity
        bound = float(bounds[small].min(initial=np.inf))
        searched = Searched(plans=len(table), priced=len(table), too_large=0, too_slow=0)
    else:
        raise no_layout(problem)
    if best is None:
        raise nothing_fits(problem, table)
    return best, bound, searched, table


def _ep_curve(problem: Problem, best: Points) -> EpCurve | None:
    """None where every plan like the best has the same EP."""
    shards = int(best.plans.fsdp[0] * best.plans.tp[0])
    several = math.gcd(shards, problem.model.experts) > 1
    return ep_curve(problem, like=best.plans) if several and problem.model.experts else None


def _searched(found: Solution) -> Searched:
    return Searched(
        plans=found.plans,
        priced=found.priced,
        too_large=found.too_large,
        too_slow=found.too_slow,
    )


def _gains(problem: Problem, best: Points) -> tuple[dict[str, Alternative], Searched | None]:
    """What each feature that is not allowed would gain, by its name, and `all` of them together,
    and how the space with all of them was searched.

    Packed experts are told even where they gain nothing: they decide how much memory is left.
    """
    pricing, fastest = problem.pricing, float(best.per_token[0])
    others = [f for f in problem.features if f not in problem.allow]
    found: dict[str, Alternative] = {}
    known = fastest
    beyond: Searched | None = None

    def tell(name: str, why: str, solution: Solution) -> None:
        nonlocal known
        if solution.best:
            found[name] = alternative(problem, solution.best, best, why, solution.bound)
            known = min(known, float(solution.best.per_token[0]))

    for name in others:
        to_beat = np.inf if name == "packed_experts" else fastest * (1 - WORTH)
        space = problem.space(problem.allow, require=name)
        tell(name, f"with {FEATURES[name]}", solve(space, pricing, to_beat=to_beat))
    if len(others) > 1:
        space = problem.space({*problem.allow, *others})
        solution = solve(space, pricing, to_beat=known * (1 - WORTH))
        tell("all", "with all of these", solution)
        beyond = _searched(solution)
    return found, beyond


def _rejected(problem: Problem, table: Points, searched: Searched) -> dict[str, int]:
    """Reason -> layouts left out of the space, and plans of it that do not fit."""
    counts = dict(problem.space(problem.allow).rejected)
    over = table.peak > problem.pricing.capacity
    counts["needs more memory than the device has"] = int(over.sum()) + searched.too_large
    unsafe = ~table.fits & ~over
    counts["likely to run out of memory"] = int(unsafe.sum())
    counts["cannot be faster, by a lower bound"] = searched.too_slow
    return {reason: count for reason, count in sorted(counts.items()) if count}
