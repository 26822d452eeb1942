"""What an export is made from and what it comes to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from analyzers.schema import ModelAnalysis
from strategies.cluster import Cluster
from strategies.launch import RefusedError
from strategies.schema import Job, Plan
from strategies.workload import PART_OF_TARGET


@dataclass(frozen=True, kw_only=True)
class Source:
    """A plan with what it was made for."""

    plan: Plan
    cluster: Cluster
    analysis: ModelAnalysis
    job: Job


@dataclass(frozen=True, kw_only=True)
class Export:
    """One file for one target, without its header."""

    body: str
    usage: list[str]
    """How to start it, one line each."""
    lost: list[str] = field(default_factory=list)
    """What the plan sets and the target has no setting for, and what it does instead."""


def adapted_linears(source: Source) -> list[str]:
    """Paths inside a block, e.g. `self_attn.q_proj`, of the linear layers that get adapters."""
    if source.plan.training == "full":
        return []
    parts = {PART_OF_TARGET[t] for t in source.plan.lora.targets if t != "routed_experts"}
    names = [x.name for b in source.analysis.blocks for x in b.linears if x.part in parts]
    return list(dict.fromkeys(names))


def adapted_banks(source: Source) -> list[str]:
    """Paths inside a block, e.g. `mlp.experts`, of the modules whose experts get adapters."""
    if source.plan.training == "full" or "routed_experts" not in source.plan.lora.targets:
        return []
    banks = [bank.name.rpartition(".")[0] for b in source.analysis.blocks for bank in b.banks]
    return list(dict.fromkeys(banks))


def common_losses(source: Source) -> list[str]:
    """What none of the targets can say."""
    plan, lost = source.plan, []
    if plan.mapping.shards_inside:
        lost.append("shards of an expert on neighbouring devices: expert parallelism lies there")
    if plan.mapping.replicas_outside:
        lost.append("replicas around the stages of the pipeline: stages lie around replicas")
    if plan.capacity.factor is not None:
        lost.append(f"capacity factor {plan.capacity.factor:g}: no token is dropped")
    if plan.expert_copies:
        lost.append(f"{plan.expert_copies} copies of loaded experts a rank: there are none")
    if plan.offload_optimizer:
        lost.append("optimizer states in host memory: they stay on the device")
    lora = source.plan.lora
    own = [n for n in ("ranks", "rslora", "dropout", "shared_a", "init_from") if getattr(lora, n)]
    if own and source.plan.training == "lora":
        lost.append(f"of the adapters: {', '.join(own)}")
    return lost


def layers_per_chunk(source: Source) -> int | None:
    """Layers of one chunk of a pipeline stage; None where equal chunks come to another number."""
    layers = len(source.analysis.layers)
    chunks = source.plan.parallelism.pp * source.plan.virtual_stages
    each = math.ceil(layers / chunks)
    return each if math.ceil(layers / each) == chunks else None


def refuse(target: str, field: str, fault: str) -> RefusedError:
    """The plan's layout itself cannot be said to the target."""
    fix = "export it for another target, or force another layout with --fix"
    return RefusedError("plan.json", field=field, fault=f"{target} {fault}", fix=fix)
