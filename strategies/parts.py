"""Parts of a cluster: what there is to plan for when devices may stay idle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from strategies.cluster import Cluster, compress_hostlist
from strategies.problem import Problem
from strategies.solver import Points, Solution, solve


def parts(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster and its even parts, largest first.

    A part is the first n domains of one tier: nodes of the cluster, or devices of one node. What
    is a part of a cluster is a part of a larger one, so more devices never lose a plan.
    """
    tiers = cluster.tiers
    for i in reversed(range(len(tiers))):
        below = tiers[i - 1].devices if i else 1
        for size in range(tiers[i].size, 0 if i == 0 else 1, -1):
            last = replace(tiers[i], size=size, devices=size * below)
            yield _with_tiers(cluster, (*tiers[:i], last))


def _with_tiers(cluster: Cluster, tiers: tuple) -> Cluster:
    nodes = max(tiers[-1].devices // cluster.devices_per_node, 1)
    names = cluster.node_names[:nodes]
    return replace(cluster, tiers=tiers, node_names=names, hostlist=tuple(compress_hostlist(names)))


def fastest_part(problem: Problem) -> Problem:
    """The problem on the part with the fastest plan; the largest among equals, the whole cluster
    where nothing fits."""
    best, to_beat = problem, np.inf
    for part in parts(problem.cluster):
        found = _solved(problem.on(part), to_beat)
        if found and found.best and float(found.best.per_token[0]) < to_beat:
            best, to_beat = problem.on(part), float(found.best.per_token[0])
    return best


def smallest_part(problem: Problem) -> tuple[Problem, Points, bool] | None:
    """The problem on the fewest devices that some plan fits, its fastest plan, and whether there
    were plans for fewer that do not fit."""
    tried = False
    for part in reversed(list(parts(problem.cluster))):
        found = _solved(problem.on(part), np.inf)
        if found and found.best:
            return problem.on(part), found.best, tried
        tried |= found is not None
    return None


def _solved(problem: Problem, to_beat: float) -> Solution | None:
    space = problem.space(problem.allow)
    return solve(space, problem.pricing, to_beat=to_beat) if len(space.layouts) else None
