"""A model, a cluster and a job, checked: what every question to the planner starts from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace

from analyzers.errors import InputError
from analyzers.schema import ModelAnalysis
from strategies.cluster import Cluster
from strategies.cost import Constants
from strategies.cost.routing import Routing
from strategies.pricing import CostModel
from strategies.schema import Job, Parallelism
from strategies.space import FEATURES, Model, Space, divisors, make_space, model_of
from strategies.workload import PART_OF_TARGET, Workload, runtime_workload

SKEW = ("capacity", "copies")
"""Features that change nothing while routing is even: they are searched where it is not."""
MOST_RANK = 1 << 16
MOST_SEQUENCES = 1 << 20
"""Of a step, and of any forced value: beyond all use, and exact in the columns' 64 bits."""
LONGEST = 1 << 24
"""Tokens of a sequence, where the model does not say what it takes."""


@dataclass(frozen=True)
class Problem:
    model: Model
    cluster: Cluster
    job: Job
    work: Workload
    fixed: Mapping[str, int]
    allow: frozenset[str]
    longest: int | None
    """Tokens that the model takes at most, where it says."""
    constants: Constants | None = None
    """Of the cost model; None for those that published runs fitted."""
    pace: float = 1.0
    """Times as long as the cost model says that everything takes here: `Refit.unexplained`."""

    @property
    def pricing(self) -> CostModel:
        return CostModel(self.work, self.cluster, self.constants, self.pace)

    @property
    def features(self) -> tuple[str, ...]:
        """Those that can matter to this model and job."""
        even = not self.job.routing.exponent and not self.job.routing.loads
        absent = {
            # Weights that are trained are not held packed.
            "packed_experts": self.job.training == "full"
            or not self.model.packed_format
            or self.cluster.device.training_dtype == "float32",
            "mapping": len(self.cluster.tiers) == 1 or not self.model.experts,
            "hierarchical": len(self.cluster.tiers) == 1 or not self.model.experts,
            **dict.fromkeys(SKEW, even or not self.model.experts),
            "offload": self.cluster.host is None,
        }
        return tuple(f for f in FEATURES if not absent.get(f, False))

    def space(self, allow: Collection[str] = (), require: str | None = None) -> Space:
        useful = [f for f in allow if f in self.features]
        return make_space(
            self.model, self.cluster, self.job, fixed=self.fixed, allow=useful, require=require
        )

    def on(self, cluster: Cluster) -> Problem:
        return replace(self, cluster=cluster)


def make_problem(
    analysis: ModelAnalysis,
    cluster: Cluster,
    job: Job,
    fixed: Mapping[str, int] | None = None,
    allow: Collection[str] = (),
    constants: Constants | None = None,
    pace: float = 1.0,
) -> Problem:
    """`fixed` comes on top of what the job fixes. Raises InputError for what cannot be."""
    fixed = {**job.fixed, **(fixed or {})}
    _check_job(analysis, job)
    routing = Routing(job.routing.exponent, tuple(job.routing.loads))
    work = runtime_workload(analysis, job.lora, training=job.training, routing=routing)
    check_features(allow)
    _check_adapters(work, job)
    model = model_of(analysis)
    _check_fixed(model, cluster, fixed, allow)
    for target, rank in job.lora.ranks.items():
        if target not in job.lora.targets or not 1 <= rank <= MOST_RANK:
            fault = f"{rank}: 1 to {MOST_RANK:,}, of a target of lora.targets"
            raise InputError("job", field=f"lora.ranks.{target}", fault=fault)
    longest = analysis.max_sequence_length
    return Problem(model, cluster, job, work, fixed, frozenset(allow), longest, constants, pace)


def check_features(allow: Collection[str]) -> None:
    """Raises InputError for a name that is none of FEATURES."""
    if unknown := set(allow) - FEATURES.keys():
        fault = f"{', '.join(sorted(unknown))}: nothing of that name is priced"
        raise InputError("--allow", fault=fault, fix=f"one of: {', '.join(FEATURES)}, all")


def _check_job(analysis: ModelAnalysis, job: Job) -> None:
    if not 1 <= job.lora.rank <= MOST_RANK:
        fault = f"must be 1 to {MOST_RANK:,}, found {job.lora.rank}"
        raise InputError("job", field="lora.rank", fault=fault, fix="--lora-rank N")
    for target, rank in job.lora.ranks.items():
        if target not in job.lora.targets or not 1 <= rank <= MOST_RANK:
            fault = f"{rank}: 1 to {MOST_RANK:,}, of a target of lora.targets"
            raise InputError("job", field=f"lora.ranks.{target}", fault=fault)
    longest = analysis.max_sequence_length
    if not 1 <= job.sequence_length <= (longest or LONGEST):
        fault = f"{job.sequence_length} tokens; the model takes 1 to {longest or LONGEST}"
        raise InputError("job", field="sequence_length", fault=fault, fix="--sequence-length N")
    if job.global_batch_size is not None and not 1 <= job.global_batch_size <= MOST_SEQUENCES:
        fault = f"must be 1 to {MOST_SEQUENCES:,}, found {job.global_batch_size}"
        raise InputError("job", field="global_batch_size", fault=fault, fix="--global-batch-size N")


def _check_adapters(work: Workload, job: Job) -> None:
    if job.training == "lora" and not work.dense_adapters + work.expert_adapters:
        fault = f"{', '.join(job.lora.targets) or 'nothing'}: the model has no such layer to adapt"
        fix = f"choose among {', '.join(PART_OF_TARGET)}"
        raise InputError("job", field="lora.targets", fault=fault, fix=fix)


def _check_fixed(
    model: Model, cluster: Cluster, fixed: Mapping[str, int], allow: Collection[str]
) -> None:
    known = [f.name for f in fields(Parallelism)] + ["micro_batch_size"]
    for key, value in fixed.items():
        if key not in known:
            fix = f"known: {', '.join(known)}"
            raise InputError("--fix", field=key, fault="cannot be forced", fix=fix)
        if not 1 <= value <= MOST_SEQUENCES:
            fault = f"must be 1 to {MOST_SEQUENCES:,}, found {value}"
            raise InputError("--fix", field=key, fault=fault)
        if key in FEATURES and value != 1 and key not in allow:
            fault = f"the runtime cannot run {FEATURES[key]} yet"
            fix = f"leave it at 1, or plan it all the same with --allow {key}"
            raise InputError("--fix", field=key, fault=fault, fix=fix)
    ep, experts = fixed.get("ep", 1), model.experts
    if ep > 1 and not experts:
        raise InputError("--fix", field="ep", fault="the model has no experts", fix="leave it at 1")
    if experts % ep or cluster.world_size % ep:
        possible = [d for d in divisors(cluster.world_size) if experts % d == 0]
        fault = f"{ep} must divide {experts} experts and {cluster.world_size} devices"
        fix = f"one of: {', '.join(map(str, possible))}"
        raise InputError("--fix", field="ep", fault=fault, fix=fix)
