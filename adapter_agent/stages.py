"""The stages of the main job: each is one call into a package, from documents to documents."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from adapter_agent.run_directory import RunDirectory, StageState
from adapter_agent.terminal import Terminal
from adapter_agent.words import count, shape
from analyzers.documents import read_document, write_document
from analyzers.errors import InputError, ProofError
from analyzers.numbers import number
from strategies.schema import Plan

if TYPE_CHECKING:
    from analyzers.schema import ModelAnalysis
    from codegen.schema import KernelSet, OperatorMap
    from strategies.cluster import Cluster
    from strategies.schema import Job

Progress = Callable[[str], None]
ReviewMode = Literal["auto", "ask", "require"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every stage is given."""

    run: RunDirectory
    job: Job
    trust_remote_code: bool
    review: ReviewMode
    terminal: Terminal
    progress: Progress

    @property
    def analysis(self) -> ModelAnalysis:
        from analyzers.schema import ModelAnalysis

        return read_document(ModelAnalysis, self.run / "analysis.json")

    @property
    def operators(self) -> OperatorMap:
        from codegen.schema import OperatorMap

        return read_document(OperatorMap, self.run / "operators.json")

    @property
    def plan(self) -> Plan:
        return read_document(Plan, self.run / "plan.json")

    @property
    def cluster(self) -> Cluster:
        from strategies import load_cluster

        return load_cluster(self.run / "cluster.yaml")


@dataclass(frozen=True)
class Outcome:
    note: str
    """One line for people."""
    state: StageState = "done"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage, with what it reads and writes so that finished work is recognised."""

    work: Callable[[Context], Outcome]
    reads: tuple[str, ...]
    """Files and folders of the run directory."""
    inputs: tuple[str, ...] = ()
    """Keys of the run's inputs."""
    writes: tuple[str, ...]
    resumes: tuple[str, ...] = ()
    """Folders with unfinished work, of no use to other inputs."""


def analyze(context: Context) -> Outcome:
    from analyzers import analyze as analyze_model

    analysis = analyze_model(
        context.job.model,
        trust_remote_code=context.trust_remote_code,
        progress=context.progress,
    )
    write_document(analysis, context.run / "analysis.json")
    p = analysis.parameters
    return Outcome(
        f"{analysis.architecture}: {count(p.total)} parameters, {count(p.active)} active, "
        f"{len(analysis.layers)} layers ({analysis.fidelity})"
    )


def map_operators(context: Context) -> Outcome:
    from analyzers.backends import load_backend
    from codegen import map_operators as map_to

    operators = map_to(context.analysis, load_backend(context.job.backend))
    write_document(operators, context.run / "operators.json")
    decided = [o.decision for o in operators.operators]
    kinds = [f"{decided.count(d)} {d}" for d in dict.fromkeys(decided)]
    return Outcome(f"{len(decided)} operators on {operators.backend}: {', '.join(kinds)}")


def generate(context: Context) -> Outcome:
    from analyzers.backends import load_backend
    from codegen import generate as generate_kernels

    kernels: KernelSet = generate_kernels(
        context.analysis,
        context.operators,
        load_backend(context.job.backend),
        context.run / "kernels",
        progress=context.progress,
    )
    gates = sum(len(k.gates) for k in kernels.kernels)
    names = ", ".join(k.operator for k in kernels.kernels) or "none needed"
    made = "1 kernel" if len(kernels.kernels) == 1 else f"{len(kernels.kernels)} kernels"
    return Outcome(f"{made} ({names}), {gates} gates passed")


def plan(context: Context) -> Outcome:
    from strategies import search

    found = search(context.analysis, context.cluster, context.job)
    write_document(found, context.run / "plan.json")
    held = found.predicted.memory_gib
    return Outcome(
        f"{shape(found)} on {found.world_size} devices: "
        f"{number(found.predicted.step_seconds, 3)} s a step, {number(held.peak, 3)} of "
        f"{number(held.capacity, 3)} GiB"
    )


def review(context: Context) -> Outcome:
    from adapter_agent.review import decide

    with context.terminal.paused():
        return Outcome(decide(context.run, context.review))


def _require_class(context: Context) -> None:
    """Raises InputError when the analysis had to do without a class: there is nothing to run."""
    if context.analysis.fidelity == "headers":
        reason = context.analysis.fidelity_reason
        fault = "is planned, but without a class it can neither be validated nor trained"
        raise InputError(context.job.model, fault=fault, fix=reason)


def validate(context: Context) -> Outcome:
    import runtime

    if context.analysis.checkpoint is None:
        return Outcome("the model folder has no weights: planned, not proved", "skipped")
    _require_class(context)
    try:
        report = runtime.validate(context.run.path, progress=context.progress)
    except ProofError as e:
        return Outcome(str(e), "failed")
    return Outcome(
        f"{len(report.checks)} checks passed on {report.world_size} ranks of {report.device}"
    )


def train(context: Context) -> Outcome:
    import runtime
    from strategies import write_launch

    run, job = context.run, context.job
    if context.analysis.checkpoint is None:
        return Outcome("the model folder has no weights: nothing to train", "skipped")
    if job.data is None:
        return Outcome("no --data FILE.jsonl was given", "skipped")
    _require_class(context)
    cluster = context.cluster
    if not devices_are_here(cluster):
        files = write_launch(context.plan, cluster, run.path)
        return Outcome(
            f"the {cluster.world_size} devices of {cluster.name} are not here; "
            f"{len(files)} launch files are ready in {run / 'launch'}"
        )
    runtime.train(run.path, progress=context.progress)
    steps = run.metrics()
    return Outcome(
        f"loss {steps[0].loss:.3f} -> {steps[-1].loss:.3f} in {len(steps)} steps; "
        f"adapter in {run / 'adapter'}"
    )


def train_twin(context: Context) -> Outcome:
    """Trains the plan's twin on the devices that are here, in `twin/`.

    In a directory of its own: its checkpoints must never be taken for those of the full plan.
    """
    import runtime
    from runtime.launch import write_twin

    run, job = context.run, context.job
    if context.analysis.checkpoint is None:
        fix = "add the safetensors to the folder and run again"
        raise InputError(job.model, fault="has no weights to train", fix=fix)
    if job.data is None:
        fix = "make the run with --data FILE.jsonl"
        raise InputError(run / "job.json", field="data", fault="none was given", fix=fix)
    _require_class(context)
    made = read_document(Plan, write_twin(run.path))
    twin = RunDirectory(run / "twin")
    names = ["job.json", "analysis.json", "operators.json"]
    same = twin.hashes([*names, "kernels"]) == run.hashes([*names, "kernels"])
    if not (
        same and (twin / "plan.json").is_file() and read_document(Plan, twin / "plan.json") == made
    ):
        # What was trained there before was trained from something else.
        shutil.rmtree(twin.path, ignore_errors=True)
        write_document(made, twin / "plan.json")
        for name in names:
            shutil.copyfile(run / name, twin / name)
        shutil.copytree(run / "kernels", twin / "kernels")
    runtime.train(twin.path, progress=context.progress)
    steps = twin.metrics()
    return Outcome(
        f"loss {steps[0].loss:.3f} -> {steps[-1].loss:.3f} in {len(steps)} steps of the twin "
        f"({shape(made)} on {made.world_size} devices); adapter in {twin / 'adapter'}"
    )


def report(context: Context) -> Outcome:
    from adapter_agent.report import write_report

    return Outcome(str(write_report(context.run)))


WORK: dict[str, Stage] = {
    "analyze": Stage(
        work=analyze,
        reads=(),
        inputs=("model", "model_sha256", "trust_remote_code"),
        writes=("analysis.json",),
    ),
    "map": Stage(
        work=map_operators,
        reads=("analysis.json",),
        inputs=("backend",),
        writes=("operators.json",),
    ),
    "generate": Stage(
        work=generate, reads=("analysis.json", "operators.json"), writes=("kernels",)
    ),
    "plan": Stage(
        work=plan, reads=("analysis.json", "job.json", "cluster.yaml"), writes=("plan.json",)
    ),
    "review": Stage(
        work=review, reads=("kernels", "plan.json"), writes=("review.patch", "review.json")
    ),
    "validate": Stage(
        work=validate, reads=("job.json", "plan.json", "kernels"), writes=("validation.json",)
    ),
    "train": Stage(
        work=train,
        reads=("job.json", "plan.json", "kernels"),
        inputs=("data_sha256", "eval_data_sha256"),
        writes=("train/metrics.jsonl", "train/evaluation.jsonl", "adapter", "launch"),
        resumes=("train",),
    ),
    "report": Stage(
        work=report,
        reads=(
            "analysis.json",
            "operators.json",
            "kernels",
            "plan.json",
            "validation.json",
            "review.json",
            "train/metrics.jsonl",
            "train/evaluation.jsonl",
            "launch",
            "exports",
        ),
        writes=("report.html", "report.md"),
    ),
}


def devices_are_here(cluster: Cluster) -> bool:
    """Whether this machine holds the devices of the cluster; CPU ranks can always be started."""
    if cluster.device.device_type == "cpu":
        return True
    import torch

    here = torch.accelerator.current_accelerator()
    if here is None or here.type != cluster.device.device_type:
        return False
    return torch.accelerator.device_count() >= cluster.world_size
