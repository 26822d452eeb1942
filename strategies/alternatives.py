"""What else there is beside a plan: the Pareto front, families that lost, EP by micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from analyzers.numbers import number
from strategies.candidates import RECOMPUTATION, Candidates, Column
from strategies.pricing import GIB, oom_probability, plan_fields
from strategies.problem import Problem
from strategies.schema import Alternative, Cell, Predicted
from strategies.solver import QUANTILE, Points
from strategies.space import FEATURES, RUN, features_of

MAX_ALTERNATIVES = 6
"""Of those that can be run."""
SAME = 0.0005
"""Share of the time that no table shows."""
SHOWN = ("parallelism", "micro_batch_size", "activation_checkpointing")
"""Fields of a plan that an alternative names by themselves."""


def missing(problem: Problem, c: Candidates) -> list[str]:
    """What the runtime lacks to run one row."""
    used = [name for name, rows in features_of(c).items() if rows[0]]
    found = [FEATURES[name] for name in used if name not in RUN]
    if {"capacity", "copies"} <= set(used):
        found.append("a limit on experts that have copies")
    if "hierarchical" in used and c.ep[0] % problem.cluster.devices_per_node:
        found.append("hierarchical dispatch over parts of nodes")
    return found + (["full fine-tuning"] if problem.job.training == "full" else [])


def settings(problem: Problem, c: Candidates) -> str:
    """One row in words; of experts only where the model has some."""
    experts = problem.model.experts
    row = plan_fields(c, "", experts=experts)
    p = row["parallelism"]
    said = []
    if p.pp > 1:
        chunks = row["virtual_stages"]
        said.append(f"PP {p.pp}" + (f" x {chunks} chunks" if chunks > 1 else ""))
    said += [f"TP {p.tp}"] * (p.tp > 1) + [f"CP {p.cp}"] * (p.cp > 1)
    said.append((f"{p.dp_replicate} replicas of " if p.dp_replicate > 1 else "") + f"FSDP {p.fsdp}")
    said += [f"EP {p.ep} x {p.efsdp}"] * bool(experts)
    batch = f"micro-batch {row['micro_batch_size']}"
    steps = row["gradient_accumulation"]
    said.append(batch + (f" x {steps}" if steps > 1 else ""))
    recomputation = row["activation_checkpointing"]
    said.append(f"{'no' if recomputation == 'none' else recomputation} recomputation")
    if not row["reshard_after_forward"]:
        said.append("weights kept gathered")
    said += [f"{row['expert_weight_format']} experts"] * bool(experts)
    if row["capacity"].factor is not None:
        said.append(f"capacity {row['capacity'].factor:g} with rerouting")
    if row["expert_copies"]:
        said.append(f"{row['expert_copies']} expert copies a device")
    if row["offload_optimizer"]:
        said.append("optimizer on the host")
    if row["mapping"].shards_inside:
        said.append("shards of experts inside EP")
    if row["mapping"].replicas_outside:
        said.append("replicas outside stages")
    return ", ".join(said)


def alternative(
    problem: Problem, point: Points, best: Points, why: str, bound: float
) -> Alternative:
    pricing = problem.pricing
    dtype = problem.cluster.device.training_dtype
    experts = problem.model.experts
    fields, chosen = (plan_fields(p.plans, dtype, experts=experts) for p in (point, best))
    lacks = missing(problem, point.plans)
    return Alternative(
        why=f"{why}: {compared(point, best)}, {settings(problem, point.plans)}",
        **{name: fields[name] for name in SHOWN},
        step_seconds=float(point.seconds[0]),
        memory_gib=float(point.peak[0]) / GIB,
        settings=_differing(fields, chosen),
        predicted=pricing.predicted(point, bound),
        runnable=not lacks,
        missing=lacks,
    )


def _differing(fields: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: v for k, v in fields.items() if k not in SHOWN and v != chosen[k]}
    capacity, mapping = found.pop("capacity", None), found.pop("mapping", None)
    if capacity is not None:
        found["capacity"] = str(capacity.factor)
    return found | (asdict(mapping) if mapping else {})


def compared(p: Points, best: Points) -> str:
    """`3.1% more time a token, 2.0 GiB less memory`."""
    ratio = float(p.per_token[0] / best.per_token[0])
    time = f"{ratio - 1:.1%} more" if ratio >= 1 else f"{1 - ratio:.1%} less"
    saved = float(best.peak[0] - p.peak[0]) / GIB
    memory = f"{saved:.1f} GiB less" if saved >= 0 else f"{-saved:.1f} GiB more"
    return f"{time} time a token, {memory} memory"


def pareto(points: Points) -> Points:
    """Those that no other beats in time, memory and simplicity at once; fastest first."""
    ordered = points.sorted()
    leanest: dict[int, float] = {}
    front: list[int] = []
    for i, (simplicity, peak) in enumerate(
        zip(ordered.simplicity.tolist(), ordered.peak.tolist(), strict=True)
    ):
        if all(peak < known for s, known in leanest.items() if s <= simplicity):
            front.append(i)
            leanest[simplicity] = min(peak, leanest.get(simplicity, peak))
    return ordered.take(np.array(front, int))


def pareto_alternatives(
    problem: Problem, fitting: Points, best: Points, bound: float
) -> list[Alternative]:
    """The ends of the front and its fastest point of every other EP; fastest first."""
    front = pareto(fitting)
    front = front.take((front.per_token != best.per_token) | (front.peak != best.peak))
    if not len(front):
        return []
    chosen: dict[int, str] = {}
    leanest = int(np.argmin(front.peak))
    simplest = int(np.argmin(front.simplicity))
    if front.peak[leanest] < best.peak[0]:
        chosen.setdefault(leanest, "least memory")
    if front.simplicity[simplest] < best.simplicity[0]:
        chosen.setdefault(simplest, "simplest")
    seen = {int(best.plans.ep[0])}
    for i, ep in enumerate(front.plans.ep.tolist()):
        if ep not in seen:
            seen.add(ep)
            chosen.setdefault(i, f"fastest with EP {ep}")
    listed = sorted(list(chosen.items())[:MAX_ALTERNATIVES])
    return [
        alternative(problem, front.take(slice(i, i + 1)), best, why, bound) for i, why in listed
    ]


def families(problem: Problem, table: Points, best: Points, predicted: Predicted) -> dict[str, str]:
    """Families of runnable plans that were not chosen, and the limit that binds each."""
    c, chosen = table.plans, best.plans.row(0)
    masks: dict[str, Column] = {}
    for ep in np.unique(c.ep).tolist():
        if ep != chosen["ep"]:
            masks[f"EP {ep}"] = c.ep == ep
    if chosen["recomputation"]:
        masks["no recomputation"] = c.recomputation == RECOMPUTATION.index("none")
    larger = c.micro_batch_size[c.micro_batch_size > chosen["micro_batch_size"]]
    if len(larger):
        masks[f"micro-batch {larger.min()}"] = c.micro_batch_size == larger.min()
    if chosen["reshard_after_forward"]:
        masks["weights kept gathered"] = ~c.reshard_after_forward
    if chosen["dp_replicate"] == 1:
        masks["replicas"] = c.dp_replicate > 1
    return {
        name: _limit(problem, table.take(mask), best, predicted)
        for name, mask in masks.items()
        if mask.any()
    }


def _limit(problem: Problem, family: Points, best: Points, predicted: Predicted) -> str:
    pricing = problem.pricing
    if family.fits.any():
        fastest = family.take(family.fits).best
        ratio = float(fastest.per_token[0] / best.per_token[0])
        theirs = asdict(pricing.predicted(fastest, 0.0).step)
        ours = asdict(predicted.step)
        scale = predicted.step_seconds / float(fastest.seconds[0]) * ratio
        # Seconds for the tokens of the plan's step, so that batches of any size compare.
        growth = {name: theirs[name] * scale - ours[name] for name in theirs}
        if ratio - 1 < SAME:
            return f"time: no less a token; {compared(fastest, best).split(', ')[1]}"
        part = max(growth, key=lambda name: growth[name])
        return (
            f"time: {ratio - 1:.1%} more a token; {part.replace('_', ' ')} "
            f"{number(theirs[part] * scale, 3)} s "
            f"against {number(ours[part], 3)} s"
        )
    margin = family.peak + QUANTILE * family.deviation
    leanest = family.take(slice(int(np.argmin(margin)), int(np.argmin(margin)) + 1))
    held = asdict(pricing.predicted(leanest, 0.0).memory_gib)
    peak, capacity = held.pop("peak"), held.pop("capacity")
    part = max(held, key=lambda name: held[name])
    if peak > capacity:
        said = f"memory: at least {peak:.1f} of {capacity:.1f} GiB"
    else:
        chance = oom_probability(leanest, pricing.capacity)
        said = f"memory: {chance:.0%} likely to run out at {peak:.1f} of {capacity:.1f} GiB"
    return f"{said}; {part.replace('_', ' ')} {held[part]:.1f}"


def cells(problem: Problem, table: Points) -> list[Cell]:
    """The best plan of every EP and micro-batch; where none fits, the leanest."""
    capacity = problem.pricing.capacity
    found: list[Cell] = []
    pairs = np.stack([table.plans.ep, table.plans.micro_batch_size], axis=1)
    for ep, micro_batch in np.unique(pairs, axis=0).tolist():
        cell = table.take((pairs == (ep, micro_batch)).all(axis=1))
        fits = bool(cell.fits.any())
        margin = cell.peak + QUANTILE * cell.deviation
        lean = int(np.argmin(margin))
        point = cell.take(cell.fits).best if fits else cell.take(slice(lean, lean + 1))
        found.append(
            Cell(
                ep=ep,
                micro_batch_size=micro_batch,
                fits=fits,
                step_seconds=float(point.seconds[0]),
                tokens_per_second_per_device=1
                / float(point.per_token[0])
                / int(point.plans.devices[0]),
                memory_gib=float(point.peak[0]) / GIB,
                oom_probability=oom_probability(point, capacity),
            )
        )
    return found
