"""`report.html` (self-contained, opens from disk) and `report.md` (fits a pull-request comment)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from adapter_agent import anatomy, figures, plan_figures
from adapter_agent.block_figure import block_figure
from adapter_agent.run_directory import RunDirectory
from adapter_agent.words import (
    around_experts,
    count,
    details,
    layer_legend,
    layer_pattern,
    memory_by_part,
    packed_of,
    parameters_by_part,
    shape,
    size,
)
from analyzers.documents import read_document, write_document, write_text

if TYPE_CHECKING:
    import jinja2

    from analyzers.schema import Block, ModelAnalysis
    from codegen.schema import OperatorChoice, OperatorMap
    from runtime.schema import StepMetrics
    from strategies.schema import Plan, Predicted, StepTime

COMMENT_LIMIT = 65_536
"""Characters that a comment on a pull request may have."""

DIFFERENCES = 20
"""Tensors that are named when they are not as the config says."""

T = TypeVar("T")


def write_report(run: RunDirectory) -> Path:
    """Writes both reports from the documents that the run directory holds; returns the page."""
    environment = _environment()
    facts = gather(run)
    page = environment.get_template("report.html.j2").render(facts)
    comment = environment.get_template("report.md.j2").render(facts)
    if len(comment) > COMMENT_LIMIT:
        cut = "\n\n(cut here: the rest is in report.html)\n"
        comment = comment[: COMMENT_LIMIT - len(cut)] + cut
    write_text(run / "report.md", comment)
    return write_text(run / "report.html", page)


def write_analysis_page(analysis: ModelAnalysis, name: str, path: Path) -> Path:
    """The report's section on the model as a page of its own."""
    facts = {"name": name, **_model(analysis), "figures": _figures(analysis, None, [])}
    return write_text(path, render("analysis.html.j2", facts))


def render(template: str, facts: dict[str, Any]) -> str:
    """A page of `adapter_agent/templates`."""
    return _environment().get_template(template).render(facts)


def write_plan_figures(plan: Plan, name: str, folder: Path) -> list[Path]:
    """`plan.json`, `plan.html`, and each figure as SVG, and as PNG where resvg-py is installed.

    `name` is the model's.
    """
    drawn = plan_figures.plan_figures(plan)
    facts = {"name": name, "plan": plan, "figures": drawn}
    written = [
        write_document(plan, folder / "plan.json"),
        write_text(folder / "plan.html", render("plan.html.j2", facts)),
    ]
    style = render("style.css.j2", {})
    for key, figure in drawn.items():
        alone = figures.standalone(figure, style)
        written.append(write_text(folder / f"{key}.svg", alone))
        if image := figures.png(alone):
            written.append(folder / f"{key}.png")
            written[-1].write_bytes(image)
    return written


def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("adapter_agent"),
        undefined=jinja2.StrictUndefined,
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=count,
        number=figures.number,
        shape=shape,
        details=details,
        cell=_cell,
        around_experts=around_experts,
        by_part=_by_part,
        memory_by_part=memory_by_part,
        packed_of=packed_of,
        interval=_interval,
        speeds=_speeds,
        size=size,
    )
    return environment


def gather(run: RunDirectory) -> dict[str, Any]:
    """Everything that the templates name; a document that was not written is None."""
    from adapter_agent.review import Decision
    from analyzers.schema import ModelAnalysis
    from codegen.schema import KernelSet, OperatorMap
    from runtime.schema import ValidationReport
    from strategies.schema import Job, Plan

    analysis = _document(ModelAnalysis, run / "analysis.json")
    operators = _document(OperatorMap, run / "operators.json")
    plan = _document(Plan, run / "plan.json")
    steps = run.metrics()
    record = run.record
    job = read_document(Job, run / "job.json")
    return {
        "name": Path(str(record.inputs["model"])).name,
        "record": record,
        # The report stage is being done while it writes this.
        "stages": {k: v for k, v in record.stages.items() if k != "report"},
        "job": job,
        **(_model(analysis) if analysis else {"analysis": None}),
        "operators": operators,
        "choices": _choices(operators) if operators else [],
        "kernels": _document(KernelSet, run / "kernels/manifest.json"),
        "plan": plan,
        "decision": _document(Decision, run / "review.json"),
        "validation": _document(ValidationReport, run / "validation.json"),
        "steps": steps,
        "evaluations": run.evaluations(),
        "step_seconds": median(s.step_seconds for s in steps) if steps else None,
        "speed": median(s.tokens_per_second_per_device for s in steps) if steps else None,
        "launch": sorted(f"{p.parent.name}/{p.name}" for p in _files(run, "launch", "exports")),
        "figures": _figures(analysis, plan, steps),
    }


def _files(run: RunDirectory, *folders: str) -> list[Path]:
    return [p for folder in folders for p in (run / folder).glob("*") if p.is_file()]


def _document(cls: type[T], path: Path) -> T | None:
    return read_document(cls, path) if path.is_file() else None


def _model(analysis: ModelAnalysis) -> dict[str, Any]:
    """What the section on the model names, figures apart."""
    return {
        "analysis": analysis,
        "pattern": layer_pattern(analysis),
        "legend": layer_legend(analysis),
        "facts": anatomy.facts(analysis),
        "differences": anatomy.differences(analysis, DIFFERENCES),
        "shares": anatomy.shares(analysis),
        "fusable": anatomy.fusable(analysis),
        "length": anatomy.length_of(analysis),
        "blocks": _blocks(analysis),
    }


def _blocks(analysis: ModelAnalysis) -> list[tuple[Block, str]]:
    """The kinds of layers with the figure of each graph."""
    return [
        (block, block_figure(block.graph, label=f"Graph of {block.kind}"))
        for block in analysis.blocks
        if block.graph and block.graph.nodes
    ]


def _choices(operators: OperatorMap) -> list[tuple[OperatorChoice, int]]:
    """The decisions, with how many shapes of the same operator each was made for."""
    first: dict[tuple[str, ...], OperatorChoice] = {}
    times: Counter[tuple[str, ...]] = Counter()
    for o in operators.operators:
        key = (o.operator, o.decision, o.provider, o.reason, o.evidence)
        first.setdefault(key, o)
        times[key] += 1
    return [(o, times[key]) for key, o in first.items()]


def _figures(
    analysis: ModelAnalysis | None,
    plan: Plan | None,
    steps: list[StepMetrics],
) -> dict[str, str]:
    made = {}
    if analysis:
        layers = [(layer.mixer, layer.feed_forward) for layer in analysis.layers]
        made["layers"] = figures.layer_strip(layers, label="Layers by mixer and feed-forward")
        scale, unit = (1e9, "B") if analysis.parameters.total >= 1e10 else (1e6, "M")
        sizes = {name: n / scale for name, n in parameters_by_part(analysis).items()}
        made["parameters"] = figures.stacked_bar(
            _spaced(sizes), unit=unit, label="Parameters by part"
        )
    if plan:
        made |= plan_figures.plan_figures(plan)
    if steps:
        made["loss"] = figures.line_chart(
            [s.step for s in steps],
            [s.loss for s in steps],
            x_label="step",
            y_label="loss (nats a token)",
            label="Training loss by step",
        )
        totals = _tokens_per_expert(steps)
        if totals:
            made["experts"] = figures.heat_map(
                {f"moe {i}": row for i, row in enumerate(totals)},
                column="expert",
                label="Tokens per expert, one row a layer with experts",
            )
    return made


def _tokens_per_expert(steps: list[StepMetrics]) -> list[list[int]]:
    """Summed over all steps, one row a layer with experts."""
    layers = zip(*(s.tokens_per_expert for s in steps), strict=True)
    return [[sum(column) for column in zip(*rows, strict=True)] for rows in layers]


def _spaced(parts: dict[str, float]) -> dict[str, float]:
    return {name.replace("_", " "): value for name, value in parts.items()}


def _by_part(parts: StepTime) -> str:
    """What is more than a hundredth of all, largest first: `compute 84%, all to all 16%`."""
    whole = sum(vars(parts).values()) or 1
    shown = sorted(_spaced(vars(parts)).items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / whole:.0%}" for name, size in shown if size >= 0.01 * whole)


def _interval(ends: tuple[float, float] | None, unit: str = "") -> str:
    return f"{figures.number(ends[0])} to {figures.number(ends[1])} {unit}".strip() if ends else ""


def _speeds(predicted: Predicted) -> tuple[float, float] | None:
    """Tokens/s a device at the ends of the step's interval, slowest first."""
    if predicted.step_seconds_interval is None:
        return None
    fastest, slowest = predicted.step_seconds_interval
    tokens = predicted.tokens_per_second_per_device * predicted.step_seconds
    return tokens / slowest, tokens / fastest


def _cell(value: object) -> str:
    """A measured or expected value in a table cell."""
    if isinstance(value, float):
        return figures.number(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(v)}" for key, v in value.items()).replace("_", " ")
    text = "" if value is None else str(value)
    return text if len(text) <= 120 else text[:117] + "..."
