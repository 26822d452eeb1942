"""The command line: `adapt MODEL --cluster TOPO.yaml`, and one command for each of its stages.

Everything heavy is imported inside the commands, so that help and mistakes answer at once.
"""

from __future__ import annotations

import atexit
import difflib
import gc
import io
import os
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from adapter_agent.cluster_commands import cluster_app
from adapter_agent.options import (
    BatchOpt,
    ClusterOpt,
    FixOpt,
    JsonOpt,
    ModelArg,
    QuietOpt,
    RankOpt,
    RunDirArg,
    SequenceOpt,
    SetOpt,
    TrustOpt,
)
from adapter_agent.output import examples as _examples
from adapter_agent.output import print_json as _print_json
from adapter_agent.output import print_json_of as _print_json_of
from adapter_agent.plan_command import plan
from analyzers.errors import AdaptError

if TYPE_CHECKING:
    from adapter_agent.stages import Context

StageName = Literal["analyze", "map", "generate", "plan", "review", "validate", "train", "report"]

Prefer = Literal["generated", "existing"]

ExportFormat = Literal["transformers", "torchtitan", "automodel", "torchrun", "slurm", "all"]

WAITING = 5
"""Exit status of a run that stopped for a reviewer."""
INTERRUPTED = 130


class _DefaultGroup(TyperGroup):
    """A group whose first word may be a model folder: then the command `run` is meant."""

    own = frozenset({"--help", "-h", "--version", "--install-completion", "--show-completion"})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in self.own:
            word = args[0]
            if not word.startswith("-") and not os.path.exists(word) and word.isalnum():
                near = difflib.get_close_matches(word, self.commands, n=1, cutoff=0.6)
                if near:
                    ctx.fail(f"no model folder or command '{word}'. Did you mean '{near[0]}'?")
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as e:  # typer would end without a word
            typer.echo("error: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from e

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["MODEL --cluster TOPO.yaml [OPTIONS]", "|", "COMMAND [ARGS]..."]


_TINY = "examples/models/tiny-kimi-k3"
_TWO_RANKS = "examples/clusters/two-ranks.yaml"
_DATA = "examples/data/classes-train.jsonl"
_K3 = "examples/models/kimi-k3"
_SUPERNODE = "examples/clusters/supernode-128.yaml"

app = typer.Typer(
    cls=_DefaultGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_examples(
        f"adapt {_TINY} --cluster {_TWO_RANKS} --data {_DATA}",
        f"adapt plan {_K3} --cluster {_SUPERNODE}",
        "adapt doctor",
    )
    + "\n\nExit status: 0 done, 1 a bug, 2 bad input, 3 no feasible plan, 4 a proof failed, "
    "5 waiting for review, 130 interrupted.",
)
app.add_typer(cluster_app, name="cluster")


def _version(wanted: bool) -> None:
    if wanted:
        from adapter_agent import __version__

        typer.echo(f"adapt {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and leave.")
    ] = False,
) -> None:
    """Adapt a mixture-of-experts model to a cluster: analysis, kernels, plan, proof, LoRA training.

    `adapt MODEL --cluster TOPO.yaml` does everything; the commands do one stage each.
    """


@app.command(
    epilog=_examples(
        f"adapt {_TINY} --cluster {_TWO_RANKS} --data {_DATA} --run-dir runs/first",
        f"adapt {_TINY} --cluster {_TWO_RANKS} --fix ep=2 --until plan",
        f"adapt {_TINY} --cluster {_TWO_RANKS} --data {_DATA} --run-dir runs/first --resume",
    )
)
def run(
    model: ModelArg,
    cluster: ClusterOpt,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to write; runs/<model>-<cluster> by default.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Make kernels for this backend, not the cluster's.")
    ] = None,
    until: Annotated[StageName | None, typer.Option(help="Stop after this stage.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last finished stage.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="JSONL to train on; without it nothing is trained.")
    ] = None,
    eval_data: Annotated[
        Path | None, typer.Option(help="JSONL whose loss is measured before and after.")
    ] = None,
    eval_fraction: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.5, help="Share of the data to set apart for that instead."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; 60 by default.")
    ] = None,
    sequence_length: SequenceOpt = None,
    global_batch_size: BatchOpt = None,
    lora_rank: RankOpt = None,
    fix: FixOpt = None,
    settings: SetOpt = None,
    review: Annotated[
        Literal["auto", "ask", "require"],
        typer.Option(help="Who approves the generated kernels: nobody, you now, or later."),
    ] = "auto",
    trust_remote_code: TrustOpt = False,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """The whole job, from model folder to report.

    In order: analyze, map, generate, plan, review, validate, train, report.

    Every document lands in the run directory. A killed run goes on with the same command and
    --resume; finished stages are not done twice.
    """
    from adapter_agent.job import Options, default_run_directory, new_run
    from adapter_agent.pipeline import run_pipeline
    from adapter_agent.terminal import Terminal, stdout_kept_clean

    options = Options(
        model=model,
        cluster=cluster,
        backend=backend,
        data=data,
        eval_data=eval_data,
        eval_fraction=eval_fraction,
        steps=steps,
        sequence_length=sequence_length,
        global_batch_size=global_batch_size,
        lora_rank=lora_rank,
        fixed=tuple(fix or ()),
        settings=tuple(settings or ()),
        trust_remote_code=trust_remote_code,
    )
    terminal = Terminal(quiet=quiet)
    where = run_dir or default_run_directory(options)
    with (
        stdout_kept_clean(),
        terminal.live(),
        new_run(options, where, resume=resume, review=review, terminal=terminal) as context,
    ):
        ending = run_pipeline(context, until=until)
        result = _result(context, ending)
    if as_json:
        _print_json(result)
    else:
        for name, stage in result["stages"].items():
            if stage["state"] != "pending":
                typer.echo(f"{name:<9} {stage['state']:<8} {stage['note']}")
        if ending == "waiting":
            typer.echo(f"waiting for review: adapt review {where} --approve (or --reject)")
        typer.echo(f"report    {result['report']}" if result["report"] else f"run       {where}")
    if ending == "waiting":
        raise typer.Exit(WAITING)


@app.command(
    epilog=_examples(
        f"adapt analyze {_TINY} --backend h200", "adapt analyze MODEL --json > analysis.json"
    )
)
def analyze(
    model: ModelArg,
    backend: Annotated[
        str | None, typer.Option(help="Say too what this device serves of it, e.g. h200.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with the graphs of its blocks too."),
    ] = None,
    trust_remote_code: TrustOpt = False,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """What a model is made of, and what it costs.

    Layers, structure, parameters and costs by part, operators, what one kernel could do together.
    """
    from adapter_agent import terminal as t
    from adapter_agent.analysis_picture import picture_of_analysis
    from analyzers import analyze as analyze_model
    from analyzers.backends import load_backend

    target = load_backend(backend) if backend else None
    terminal = t.Terminal(quiet=quiet)
    with t.stdout_kept_clean(), terminal.live():
        found = analyze_model(model, trust_remote_code=trust_remote_code, progress=terminal)
    if html is not None:
        from adapter_agent.report import write_analysis_page

        write_analysis_page(found, model.resolve().name, html)
    _print_json_of(found) if as_json else t.show(picture_of_analysis(found, target))


@app.command(
    epilog=_examples(
        f"adapt kernels {_TINY} --backend cpu",
        f"adapt kernels {_TINY} --backend h200 --output kernels-h200 --json",
        f"adapt kernels {_TINY} --backend h200 --tune",
    )
)
def kernels(
    model: ModelArg,
    backend: Annotated[str, typer.Option(help="Device to make kernels for, e.g. cpu, h200.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder of the package; kernels-<backend> by default.")
    ] = None,
    prefer: Annotated[
        Prefer | None,
        typer.Option(
            help="Where a generated kernel and an existing one (torch, an installed package) would "
            "both serve. By default generated where it was measured to be faster on that device."
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Search the fastest launches on the device here; kept for later runs. Without it "
            "the nearest known tuning is used.",
        ),
    ] = False,
    tune_minutes: Annotated[
        float, typer.Option(min=0.1, help="Longest search for each operator, with --tune.")
    ] = 10.0,
    trust_remote_code: TrustOpt = False,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Generate and prove the kernels a device lacks.

    Maps each operator of the model first: native, existing, generated or unsupported.
    """
    from adapter_agent import terminal as t
    from analyzers import analyze as analyze_model
    from analyzers.backends import load_backend
    from codegen import generate, map_operators
    from codegen.tuning.tune import device_here, summary, tune_operators

    terminal = t.Terminal(quiet=quiet)
    target = load_backend(backend)
    if tune:
        device_here(target)  # before the analysis takes its time
    folder = output or Path(f"kernels-{backend}")
    with t.stdout_kept_clean(), terminal.live():
        found = analyze_model(model, trust_remote_code=trust_remote_code, progress=terminal)
        operators = map_operators(found, target, prefer=prefer)
        tuned = []
        if tune:
            tuned = tune_operators(operators, target, minutes=tune_minutes, progress=terminal)
            for line in (line for each in tuned for line in summary(each)):
                terminal.settle(line)
        made = generate(found, operators, target, folder, progress=terminal)
    if as_json:
        _print_json_of(made)
    else:
        parts = [t.picture_of_operators(operators), t.picture_of_kernels(made), f"in {folder}"]
        t.show(*([t.picture_of_tuning(tuned)] if tuned else []), *parts)


app.command(
    epilog=_examples(
        f"adapt plan {_TINY} --cluster {_TWO_RANKS}",
        f"adapt plan {_K3} --cluster {_SUPERNODE} --json",
        f"adapt plan {_K3} --cluster {_SUPERNODE} --allow all",
        f"adapt plan {_K3} --cluster {_SUPERNODE} --ask ep-curve",
    )
)(plan)


@app.command(
    epilog=_examples("adapt export runs/first", "adapt export runs/first --format torchtitan")
)
def export(
    run_dir: RunDirArg,
    format: Annotated[ExportFormat, typer.Option(help="For which trainer or launcher.")] = "all",
    as_json: JsonOpt = False,
) -> None:
    """Say the plan in other trainers' words.

    Configs in RUN_DIR/exports and launch scripts in RUN_DIR/launch, each with what it cannot say.
    """
    from adapter_agent import terminal as t
    from adapter_agent.job import past_run, require_documents
    from strategies.exports import Source, write_exports

    with past_run(run_dir, terminal=t.Terminal(quiet=True)) as context, t.stdout_kept_clean():
        require_documents(context.run, "analysis.json", "plan.json")
        source = Source(
            plan=context.plan,
            cluster=context.cluster,
            analysis=context.analysis,
            job=context.job,
        )
        wanted = None if format == "all" else [format]
        written = write_exports(source, context.run.path, wanted)
    if as_json:
        _print_json([asdict(w) | {"paths": [str(path) for path in w.paths]} for w in written])
    else:
        t.show(t.picture_of_exports(written))


@app.command(epilog=_examples("adapt validate runs/first", "adapt validate runs/first --json"))
def validate(run_dir: RunDirArg, as_json: JsonOpt = False, quiet: QuietOpt = False) -> None:
    """Prove the plan on the devices that are here.

    Its twin runs a few steps on them, and each check compares.
    """
    from adapter_agent import terminal as t
    from analyzers.documents import read_document
    from runtime.schema import ValidationReport

    needs = ("analysis.json", "plan.json", "kernels/manifest.json")
    outcome = _stage(run_dir, "validate", needs, quiet)
    if outcome.state == "skipped":
        _print_json({"state": "skipped", "note": outcome.note}) if as_json else typer.echo(
            f"skipped: {outcome.note}"
        )
        return
    found = read_document(ValidationReport, run_dir / "validation.json")
    _print_json_of(found) if as_json else t.show(t.picture_of_validation(found))
    if not found.passed:
        raise typer.Exit(4)


@app.command(epilog=_examples("adapt train runs/first", "adapt train runs/first --twin"))
def train(
    run_dir: RunDirArg,
    twin: Annotated[
        bool,
        typer.Option("--twin", help="Train the plan scaled down to the devices here, in twin/."),
    ] = False,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """LoRA-train by the plan, or write launch scripts.

    It trains where the cluster's devices are here; `--twin` trains the plan's twin instead.
    """
    needs = ("analysis.json", "plan.json", "kernels/manifest.json")
    outcome = _stage(run_dir, "train", needs, quiet, twin=twin)
    result = {"state": outcome.state, "note": outcome.note, "run_dir": str(run_dir)}
    _print_json(result) if as_json else typer.echo(f"{outcome.state}: {outcome.note}")


@app.command(
    epilog=_examples(
        "adapt review runs/first",
        "adapt review runs/first --approve --by ada --why 'read every kernel'",
        "adapt review runs/first --check",
    )
)
def review(
    run_dir: RunDirArg,
    approve: Annotated[bool, typer.Option("--approve", help="Record a yes.")] = False,
    reject: Annotated[bool, typer.Option("--reject", help="Record a no.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Prove that the kernels are as generated.")
    ] = False,
    by: Annotated[str | None, typer.Option(help="Who decides; your login name by default.")] = None,
    why: Annotated[str, typer.Option(help="The reason, for the record.")] = "",
) -> None:
    """Decide about the generated kernels, or check them.

    `--check` tells whether anybody has changed them since they were proved.
    """
    from adapter_agent import review as r
    from adapter_agent.job import past_run, require_documents
    from adapter_agent.terminal import Terminal, stdout_kept_clean

    if approve + reject + check > 1:
        raise typer.BadParameter("choose one of --approve, --reject and --check")
    with past_run(run_dir, terminal=Terminal(quiet=True)) as context:
        require_documents(context.run, "kernels/manifest.json", "plan.json")
        with stdout_kept_clean():
            if check:
                text = r.check(context.run)
            else:
                r.write_patch(context.run)
                if approve or reject:
                    r.write_decision(context.run, approve=approve, by=by, why=why)
                text = r.summary(context.run)
    typer.echo(text)


@app.command(epilog=_examples("adapt report runs/first"))
def report(run_dir: RunDirArg) -> None:
    """Write the report of a run again.

    Makes report.html and report.md from the documents that are there.
    """
    _stage(run_dir, "report", (), True)
    typer.echo(run_dir / "report.html")


@app.command(epilog=_examples("adapt doctor", "adapt doctor --json"))
def doctor(as_json: JsonOpt = False) -> None:
    """Versions, devices, compilers, and what is missing.

    Says what a lack of any of them means. Always ends with status 0.
    """
    from adapter_agent.doctor import examine, picture
    from adapter_agent.terminal import show, stdout_kept_clean

    with stdout_kept_clean():
        found = examine()
    _print_json(found) if as_json else show(picture(found))


def _stage(
    run_dir: Path, name: str, needs: tuple[str, ...], quiet: bool, *, twin: bool = False
) -> Any:
    """Runs one stage of a run directory now, whether or not it was done before; with `twin`, the
    training of the plan's twin, which is no stage of the run."""
    from adapter_agent.job import check_unchanged, past_run, require_documents
    from adapter_agent.pipeline import run_stage
    from adapter_agent.review import require_not_refused
    from adapter_agent.stages import train_twin
    from adapter_agent.terminal import Terminal, stdout_kept_clean

    terminal = Terminal(quiet=quiet)
    with stdout_kept_clean(), terminal.live(), past_run(run_dir, terminal=terminal) as context:
        require_documents(context.run, *needs)
        if name != "report":
            require_not_refused(context.run)
            check_unchanged(context)
        return train_twin(context) if twin else run_stage(context, name)


def _result(context: Context, ending: str) -> dict[str, Any]:
    """What `adapt MODEL --json` prints."""
    from analyzers.documents import to_data

    record = to_data(context.run.record)
    page = context.run / "report.html"
    return {
        "ending": ending,
        "run_dir": str(context.run.path),
        "report": str(page) if page.is_file() else None,
        "inputs": record["inputs"],
        "stages": record["stages"],
    }


def main() -> None:
    """Runs `adapt`; turns what a user can cause into one line and its exit status."""
    # Hundreds of thousands of objects of imported modules stay to the end: by default the collector
    # walks them again and again, and once more at the exit, for a fifth of a command's time.
    gc.set_threshold(50_000, 20, 100)
    atexit.register(gc.freeze)
    if not sys.warnoptions:
        # Deprecations inside libraries: nothing that a user can act on. `python -W` shows them.
        warnings.simplefilter("ignore")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # bars and lines that a terminal cannot write: `?`
            stream.reconfigure(errors="replace")
    try:
        app()
    except AdaptError as e:
        typer.echo(f"error: {e}", err=True)
        sys.exit(e.exit_status)
    except Exception as e:
        traceback.print_exc()
        typer.echo(f"error: a bug in adapt: {type(e).__name__}: {e}", err=True)
        sys.exit(1)
