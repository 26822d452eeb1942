"""From the command line's options to a checked Job and the record of what the run is made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapter_agent.run_directory import (
    RunDirectory,
    existing_run,
    model_sha256,
    open_run,
    sha256_file,
)
from adapter_agent.stages import Context, ReviewMode
from adapter_agent.terminal import Terminal
from analyzers.documents import from_data, read_document, to_data, write_document
from analyzers.errors import AdaptError, InputError

if TYPE_CHECKING:
    from strategies.schema import Job

LONGEST_DEFAULT_SEQUENCE = 4096
OPTIONS_OF_THEIR_OWN = {
    "model": "MODEL",
    "trust_remote_code": "--trust-remote-code",
    "cluster": "--cluster",
    "backend": "--backend",
    "data": "--data",
    "evaluation.data": "--eval-data",
    "evaluation.fraction": "--eval-fraction",
    "steps": "--steps",
    "sequence_length": "--sequence-length",
    "global_batch_size": "--global-batch-size",
    "fixed": "--fix",
}
"""Fields of a job, and what sets them after its checks."""


class InterruptedRunError(AdaptError):
    """Ctrl-C. Exit status 130, as a shell gives it."""

    exit_status = 130


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decides the result of a run. None leaves the default of Job."""

    model: Path
    cluster: Path
    backend: str | None = None
    data: Path | None = None
    eval_data: Path | None = None
    eval_fraction: float | None = None
    steps: int | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    lora_rank: int | None = None
    fixed: tuple[str, ...] = ()
    """Forced parts of the plan as `ep=2`."""
    settings: tuple[str, ...] = ()
    """Other fields of the job as `lora.dropout=0.05`."""
    trust_remote_code: bool = False


def make_job(options: Options) -> Job:
    """Checks every input but the weights and writes the Job out in full. Raises InputError."""
    from analyzers.backends import load_backend
    from analyzers.models import find_config
    from strategies import load_cluster
    from strategies.schema import Evaluation, Job, Lora

    config = find_config(options.model, trust_remote_code=options.trust_remote_code)
    cluster = load_cluster(options.cluster)
    backend = load_backend(options.backend) if options.backend else cluster.device
    if options.eval_data is not None and options.eval_fraction:
        fault = "is given with --eval-data"
        raise InputError("--eval-fraction", fault=fault, fix="give one of them")
    for file in filter(None, (options.data, options.eval_data)):
        from runtime.data import check_data

        check_data(file)
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or LONGEST_DEFAULT_SEQUENCE
    job = Job(
        model=str(options.model.resolve()),
        trust_remote_code=options.trust_remote_code,
        cluster=str(options.cluster.resolve()),
        backend=backend.name,
        data=str(options.data.resolve()) if options.data else None,
        evaluation=Evaluation(
            data=str(options.eval_data.resolve()) if options.eval_data else None,
            fraction=options.eval_fraction or 0.0,
        ),
        sequence_length=options.sequence_length or min(LONGEST_DEFAULT_SEQUENCE, longest),
        global_batch_size=options.global_batch_size,
        fixed=_fixed(options.fixed),
    )
    if options.steps is not None:
        job = replace(job, steps=options.steps)
    if options.lora_rank is not None:
        # The usual alpha = 2 * rank keeps the scale of the update when the rank changes.
        job = replace(job, lora=Lora(rank=options.lora_rank, alpha=2.0 * options.lora_rank))
    job = with_settings(job, options.settings)
    if (adapter := job.lora.init_from) is not None:
        job = replace(job, lora=replace(job.lora, init_from=str(Path(adapter).resolve())))
    return job


def with_settings(job: Job, settings: Sequence[str]) -> Job:
    """The job with fields set by `("lora.dropout=0.05",)`; values are YAML.

    Raises InputError for a field that there is not, or that has an option of its own, and for a
    value that it cannot take.
    """
    import yaml

    data = to_data(job)
    for setting in settings:
        key, equals, text = setting.partition("=")
        *parents, last = key.split(".")
        if not equals or not last:
            fault = f"'{setting}' is not KEY=VALUE"
            raise InputError("--set", fault=fault, fix="for example: --set lora.dropout=0.05")
        if key in OPTIONS_OF_THEIR_OWN:
            fix = f"give {OPTIONS_OF_THEIR_OWN[key]}"
            raise InputError("--set", field=key, fault="has an option of its own", fix=fix)
        place = data
        for n, parent in enumerate(parents, 1):
            place = place.get(parent)
            if not isinstance(place, dict):
                field = ".".join(parents[:n])
                raise InputError("--set", field=field, fault="has no fields of its own")
        if last not in place and parents != ["lora", "ranks"]:
            fix = f"one of: {', '.join(place)}"
            raise InputError("--set", field=key, fault="there is no such field", fix=fix)
        try:
            place[last] = yaml.safe_load(text)
        except yaml.YAMLError as e:
            raise InputError("--set", field=key, fault=f"'{text}' is not YAML") from e
    return from_data(type(job), data, "--set")


def _fixed(settings: tuple[str, ...]) -> dict[str, int]:
    """`("ep=2",)` -> `{"ep": 2}`; which keys there are is the planner's to say."""
    fixed: dict[str, int] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if not key or not value.isdecimal():
            fault = f"'{setting}' is not KEY=NUMBER"
            raise InputError("--fix", fault=fault, fix="for example: --fix ep=2")
        if fixed.get(key, int(value)) != int(value):
            fault = f"is {fixed[key]} and {int(value)}"
            raise InputError("--fix", field=key, fault=fault, fix="give it once")
        fixed[key] = int(value)
    return fixed


def run_inputs(options: Options, job: Job) -> dict[str, Any]:
    """What two runs must share to be the same run."""
    return {
        "model": job.model,
        "model_sha256": model_sha256(options.model),
        "cluster": job.cluster,
        "cluster_sha256": sha256_file(options.cluster),
        "backend": job.backend,
        "data": job.data,
        "data_sha256": sha256_file(options.data) if options.data else None,
        "eval_data": job.evaluation.data,
        "eval_data_sha256": sha256_file(options.eval_data) if options.eval_data else None,
        "eval_fraction": job.evaluation.fraction,
        "steps": job.steps,
        "sequence_length": job.sequence_length,
        "global_batch_size": job.global_batch_size,
        "lora_rank": job.lora.rank,
        "settings": " ".join(options.settings),
        "fixed": " ".join(f"{key}={n}" for key, n in sorted(job.fixed.items())),
        "trust_remote_code": options.trust_remote_code,
    }


def default_run_directory(options: Options) -> Path:
    return Path("runs") / f"{options.model.resolve().name}-{options.cluster.stem}"


@contextmanager
def _interruptible(run: RunDirectory, how: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as e:
        raise InterruptedRunError(f"{run.path}: interrupted (go on with {how})") from e


@contextmanager
def new_run(
    options: Options, path: Path, *, resume: bool, review: ReviewMode, terminal: Terminal
) -> Iterator[Context]:
    """Checks the inputs, opens the run directory and writes `job.json` and `cluster.yaml` there."""
    from analyzers.checkpoint import open_checkpoint
    from strategies.cluster import copy_topology

    job = make_job(options)
    open_checkpoint(options.model)
    with open_run(path, run_inputs(options, job), resume=resume) as run:
        if not (run / "job.json").exists():
            copy_topology(options.cluster, run / "cluster.yaml")
            write_document(job, run / "job.json")
        with _interruptible(run, "the same command and --resume"):
            yield Context(
                run=run,
                job=job,
                trust_remote_code=options.trust_remote_code,
                review=review,
                terminal=terminal,
                progress=terminal,
            )


@contextmanager
def past_run(path: Path, *, terminal: Terminal) -> Iterator[Context]:
    """Opens a run directory that `new_run` made, for one stage of it."""
    from strategies.schema import Job

    with existing_run(path) as run, _interruptible(run, "the same command"):
        yield Context(
            run=run,
            job=read_document(Job, run / "job.json"),
            trust_remote_code=bool(run.record.inputs["trust_remote_code"]),
            review="require",
            terminal=terminal,
            progress=terminal,
        )


def check_unchanged(context: Context) -> None:
    """Raises InputError when the model or the data of a past run is gone or not what it was."""
    from analyzers.checkpoint import open_checkpoint
    from analyzers.models import find_config

    past, job = context.run.record.inputs, context.job
    find_config(Path(job.model), trust_remote_code=context.trust_remote_code)
    open_checkpoint(job.model)
    data = {"data_sha256": job.data, "eval_data_sha256": job.evaluation.data}
    files = {name: Path(file) for name, file in data.items() if file}
    for file in files.values():
        if not file.is_file():
            raise InputError(file, fault="does not exist", fix="put it back, or make a new run")
    changed = []
    if past["model_sha256"] != model_sha256(Path(job.model)):
        changed.append(Path(job.model))
    changed += [file for name, file in files.items() if past[name] != sha256_file(file)]
    for where in changed:
        fault = f"has changed since the run in {context.run.path} was made"
        raise InputError(where, fault=fault, fix="put it back, or make a new run")


def require_documents(run: RunDirectory, *names: str) -> None:
    """Raises InputError when an earlier stage has not written what this one reads."""
    for name in names:
        if not (run / name).exists():
            fault = "does not exist yet"
            raise InputError(run / name, fault=fault, fix="go on with: adapt ... --resume")
