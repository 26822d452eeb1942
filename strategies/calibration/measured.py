"""A finished run of this product refits the constants: what the cluster really did with a plan.

One run says one step time and one peak, so the constants move together, each as far as it was
uncertain and as the time depends on it, and none beyond what is physical. What they cannot explain
is a factor on all times: then a fact of the devices or links is wrong, which a probe would show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analyzers.errors import InputError
from analyzers.schema import ModelAnalysis
from strategies.calibration.constants import ranges
from strategies.calibration.fit import Row, Table, fit
from strategies.cluster import Cluster
from strategies.cost.constants import Constants, load_constants
from strategies.cost.routing import Routing, device_overload
from strategies.pricing import row_of
from strategies.schema import Change, Plan, Refit
from strategies.workload import runtime_workload

WARM_UP = 2
"""First steps, in which kernels compile and buffers grow."""
FEWEST = 3
"""Steps after them from which a median says something."""
CERTAIN = 100.0
"""Weight of the run over what was known of the constants before it."""
CHANGED = 0.02
"""Share of its range by which a constant must move to be told."""
TOLD = 1.1
"""Factor that the constants leave unexplained from which it is told."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a finished run."""

    seconds: float
    peak_gib: float
    tokens_per_expert: Sequence[Sequence[int]] = ()
    """One row a layer with experts."""


def refit(
    analysis: ModelAnalysis, cluster: Cluster, plan: Plan, steps: Sequence[Step]
) -> tuple[Constants, Refit]:
    """The constants after a run of `plan`, and what changed.

    Raises InputError when the run has too few steps, some without a time, or a plan for other
    devices.
    """
    _check(cluster, plan, steps)
    counted = steps[WARM_UP:]
    seconds = float(np.median([s.seconds for s in counted]))
    on_cpu = cluster.device.device_type == "cpu"
    peak = None if on_cpu else max(s.peak_gib for s in counted)
    planned = Routing(plan.routing.exponent, tuple(plan.routing.loads))
    loads = _loads(counted)
    run = Row(
        source="this cluster",
        work=runtime_workload(
            analysis,
            plan.lora,
            training=plan.training,
            routing=Routing(loads=loads) if loads else planned,
        ),
        cluster=cluster,
        plan=row_of(plan),
        seconds=seconds,
        peak_gib=peak,
    )
    before = load_constants()
    known = {
        name: dataclasses.replace(r, expected=getattr(before, name)) for name, r in ranges().items()
    }
    table = Table([run])
    after = fit(table, known, weight=np.array([CERTAIN]), spread=0.0)
    old, new = table.costs([before, after])
    moved = {
        name: Change(before=getattr(before, name), after=getattr(after, name))
        for name, r in known.items()
        if abs(getattr(after, name) - getattr(before, name)) > CHANGED * (r.high - r.low)
    }
    experts, ep = run.work.experts, plan.parallelism.ep
    found = Refit(
        steps=len(counted),
        step_seconds=seconds,
        step_seconds_before=float(old.seconds[0]),
        step_seconds_after=float(new.seconds[0]),
        peak_gib=peak,
        peak_gib_before=float(old.peak_gib[0]),
        peak_gib_after=float(new.peak_gib[0]),
        overload=device_overload(Routing(loads=loads), experts, ep) if loads and ep > 1 else None,
        overload_planned=device_overload(planned, experts, ep) if loads and ep > 1 else None,
        unexplained=seconds / float(new.seconds[0]),
        constants=moved,
    )
    return after, dataclasses.replace(found, said=_sentences(found))


def _check(cluster: Cluster, plan: Plan, steps: Sequence[Step]) -> None:
    if plan.backend not in (None, cluster.device.name):
        fault = f"its plan is for {plan.backend}, the cluster has {cluster.device.name}"
        raise InputError("--measured", fault=fault, fix="give a run on devices of this kind")
    if plan.world_size > cluster.world_size:
        fault = f"its plan is for {plan.world_size} devices, the cluster has {cluster.world_size}"
        raise InputError("--measured", fault=fault, fix="give the cluster that it ran on")
    if len(steps) < WARM_UP + FEWEST:
        fault = f"has {len(steps)} steps; {WARM_UP} warm up and {FEWEST} more are needed"
        raise InputError("--measured", fault=fault, fix="train longer")
    for i, step in enumerate(steps, 1):
        if not 0 < step.seconds < np.inf or not 0 <= step.peak_gib < np.inf:
            fault = f"step {i} took {step.seconds} s and {step.peak_gib} GiB"
            raise InputError("--measured", fault=fault, fix="give a run with measured steps")


def _loads(steps: Sequence[Step]) -> tuple[float, ...]:
    """Tokens by expert, heaviest first, of a typical layer: each quantile is the layers' mean."""
    layers = [sorted(row, reverse=True) for s in steps for row in s.tokens_per_expert if sum(row)]
    if not layers:
        return ()
    return tuple(np.mean(np.array(layers, dtype=float), axis=0).tolist())


def _sentences(found: Refit) -> list[str]:
    said = [
        f"{found.steps} steps took {found.step_seconds:.4g} s each (median); published runs' "
        f"constants said {found.step_seconds_before:.4g} s "
        f"({found.step_seconds_before / found.step_seconds - 1:+.0%}), refitted ones say "
        f"{found.step_seconds_after:.4g} s."
    ]
    for name, change in found.constants.items():
        said.append(f"{name} moved from {change.before:.3g} to {change.after:.3g}.")
    if not found.constants:
        said.append("No constant had to move.")
    rest = found.unexplained
    if max(rest, 1 / rest) > TOLD:
        said.append(
            f"A factor of {rest:.2f} is left that no physical value explains: a rate of the device "
            "or of a link differs from its file (adapt cluster probe measures them). All times "
            "here are multiplied by it."
        )
    if found.peak_gib is not None:
        said.append(
            f"The peak was {found.peak_gib:.1f} GiB, {found.peak_gib_before:.1f} was predicted and "
            f"{found.peak_gib_after:.1f} is now."
        )
    if found.overload is not None and found.overload_planned is not None:
        said.append(
            f"The fullest expert-parallel rank got {found.overload:.2f} times the mean of tokens; "
            f"the plan counted with {found.overload_planned:.2f}."
        )
    return said
