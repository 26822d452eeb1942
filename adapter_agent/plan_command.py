"""`adapt plan`: the fastest plan, or the answer to one question about it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from adapter_agent.options import (
    BatchOpt,
    FixOpt,
    JsonOpt,
    QuietOpt,
    RankOpt,
    SequenceOpt,
    SetOpt,
    TrustOpt,
)
from adapter_agent.output import print_json_of
from analyzers.errors import InputError

if TYPE_CHECKING:
    from adapter_agent.job import Options
    from strategies.exports import Source, Written
    from strategies.problem import Problem
    from strategies.schema import Routing

Question = Literal[
    "fewest-devices", "longest-sequence", "largest-micro-batch", "ep-curve", "degraded-links"
]


def plan(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder with config.json and safetensors; that of the run with --measured.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="TOPO.yaml",
            help="Description of the cluster; that of the run with --measured.",
        ),
    ] = None,
    ask: Annotated[
        Question | None, typer.Option(help="Answer this instead of printing the plan.")
    ] = None,
    sequence_length: SequenceOpt = None,
    global_batch_size: BatchOpt = None,
    lora_rank: RankOpt = None,
    training: Annotated[
        Literal["lora", "full"], typer.Option(help="`full` is planned only, not run.")
    ] = "lora",
    routing: Annotated[
        str,
        typer.Option(
            metavar="even|power:A|FILE",
            help="Load of the experts: even, by a power law of exponent A, or tokens by expert as "
            "a JSON list.",
        ),
    ] = "even",
    fix: FixOpt = None,
    settings: SetOpt = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FEATURE",
            help="Let the plan use hierarchical, capacity, copies or selective, or what the "
            "runtime cannot run: pp, tp, cp, mapping, packed_experts, offload; or all. "
            "Repeatable. Without it they are shown as alternatives.",
        ),
    ] = None,
    allow_idle: Annotated[
        bool, typer.Option("--allow-idle", help="Leave devices idle where fewer are faster.")
    ] = False,
    link_scale: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="With --ask degraded-links: rate of the slow links, of sound; 0.5 by default.",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write plan.json here, with a page and figures."),
    ] = None,
    exports: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="DIR",
            help="Write plan.json here, with configs of other trainers and launch scripts.",
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Refit the cost model's constants from a finished run on this cluster, plan with "
            "them and say what changed.",
        ),
    ] = None,
    trust_remote_code: TrustOpt = False,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """The fastest plan that fits, proven within the cost model.

    With memory and time by part and their intervals, alternatives, what the runtime lacks and
    would gain, and why. Or, with --ask, one question: the fewest devices, the longest sequence,
    the largest micro-batch, the best EP over tokens a rank, the cost of slow links.
    """
    from adapter_agent import plan_picture
    from adapter_agent import terminal as t
    from adapter_agent.job import make_job
    from adapter_agent.measured import constants_of, with_refit
    from analyzers import analyze as analyze_model
    from strategies import load_cluster, search
    from strategies.exports import Source
    from strategies.problem import check_features, make_problem
    from strategies.space import FEATURES

    if ask and (figures or exports or allow_idle):
        raise typer.BadParameter(
            "--figures, --export and --allow-idle are for a plan, --ask does not make one"
        )
    if link_scale is not None and ask != "degraded-links":
        raise typer.BadParameter("--link-scale is for --ask degraded-links")
    options = _options(
        model,
        cluster,
        measured,
        sequence_length=sequence_length,
        global_batch_size=global_batch_size,
        lora_rank=lora_rank,
        fixed=tuple(fix or ()),
        settings=tuple(settings or ()),
        trust_remote_code=trust_remote_code,
    )
    features = set(allow or ())
    if "all" in features:
        features = features - {"all"} | FEATURES.keys()
    check_features(features)
    terminal = t.Terminal(quiet=quiet)
    written: list[Written] = []
    with t.stdout_kept_clean(), terminal.live():
        job = replace(make_job(options), training=training, routing=routing_of(routing))
        devices = load_cluster(options.cluster)
        constants, refit = constants_of(measured, devices) if measured else (None, None)
        refitted = {"constants": constants, "pace": refit.unexplained if refit else 1.0}
        found = analyze_model(
            options.model, trust_remote_code=options.trust_remote_code, progress=terminal
        )
        terminal("searching plans")
        if ask and refit:
            for line in refit.said:
                terminal.settle(line)
        if ask:
            problem = make_problem(found, devices, job, allow=features, **refitted)
            said = _answer(ask, problem, link_scale or 0.5)
        else:
            said = search(found, devices, job, allow=features, allow_idle=allow_idle, **refitted)
            said = with_refit(said, refit) if refit else said
            if figures:
                from adapter_agent.report import write_plan_figures

                for path in write_plan_figures(said, Path(job.model).name, figures):
                    terminal.settle(f"wrote {path}")
            if exports:
                written = _export(
                    Source(plan=said, cluster=devices, analysis=found, job=job), exports
                )
    pictures = [plan_picture.picture(said), *([t.picture_of_exports(written)] if written else [])]
    print_json_of(said) if as_json else t.show(*pictures)


def _options(
    model: Path | None, cluster: Path | None, measured: Path | None, **given: Any
) -> Options:
    """What to plan. Without a model, the job of the finished run, but for what is given."""
    from adapter_agent.job import Options
    from adapter_agent.measured import check_finished
    from analyzers.documents import read_document, to_json
    from strategies.schema import Job

    if measured is not None:
        asked = {"job.json": model, "cluster.yaml": cluster}
        check_finished(measured, *(name for name, given in asked.items() if given is None))
    if model is None and measured is not None:
        job = read_document(Job, measured / "job.json")
        past = {
            "sequence_length": job.sequence_length,
            "global_batch_size": job.global_batch_size,
            "lora_rank": job.lora.rank,
            "fixed": tuple(f"{key}={n}" for key, n in job.fixed.items()),
            "trust_remote_code": job.trust_remote_code,
        }
        if given["lora_rank"] is None:  # or it would be that of the run
            past["settings"] = (f"lora={to_json(job.lora)}",)
        given = {key: value or past.get(key, value) for key, value in given.items()}
        model = Path(job.model)
    if cluster is None and measured is not None:
        cluster = measured / "cluster.yaml"
    if model is None:
        raise typer.BadParameter("give the folder of a model", param_hint="MODEL")
    if cluster is None:
        raise typer.BadParameter("give a topology file", param_hint="--cluster")
    return Options(model=model, cluster=cluster, **given)


def _export(source: Source, folder: Path) -> list[Written]:
    from analyzers.documents import write_document
    from strategies.exports import write_exports

    write_document(source.plan, folder / "plan.json")
    return write_exports(source, folder)


def _answer(ask: Question, problem: Problem, link_scale: float) -> Any:
    from strategies import answers

    if ask == "degraded-links":
        return answers.degraded_links(problem, link_scale)
    return {
        "fewest-devices": answers.fewest_devices,
        "longest-sequence": answers.longest_sequence,
        "largest-micro-batch": answers.largest_micro_batch,
        "ep-curve": answers.ep_curve,
    }[ask](problem)


MOST_TOKENS = 1e18
"""Of an expert, in a file of --routing."""


def routing_of(text: str) -> Routing:
    """`even`, `power:0.3`, or a JSON file with one number of tokens an expert.

    Raises InputError.
    """
    from strategies.schema import Routing

    fix = "even, power:0.3, or a file with a JSON list of tokens by expert"
    if text == "even":
        return Routing()
    if text.startswith("power:"):
        try:
            exponent = float(text.removeprefix("power:"))
        except ValueError:
            exponent = math.nan
        if not 0 <= exponent <= 4:
            fault = f"'{text}' has no exponent between 0 and 4"
            raise InputError("--routing", fault=fault, fix=fix)
        return Routing(exponent=exponent)
    path = Path(text)
    try:
        loads = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise InputError("--routing", fault=f"'{text}' cannot be read: {e}", fix=fix) from e
    if not isinstance(loads, list) or not loads:
        raise InputError(path, fault="is no list of tokens by expert", fix=fix)
    for i, n in enumerate(loads):
        if not isinstance(n, int | float) or isinstance(n, bool) or not 0 <= n <= MOST_TOKENS:
            fault = f"{repr(n)[:40]} is no number of tokens"
            raise InputError(path, field=f"[{i}]", fault=fault, fix=fix)
    if not sum(loads):
        raise InputError(path, fault="gives no expert any token", fix=fix)
    return Routing(loads=[float(n) for n in loads])
