"""What a finished run of this product says of its cluster: its documents -> constants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from analyzers.documents import read_document
from analyzers.errors import InputError

if TYPE_CHECKING:
    from strategies.cluster import Cluster
    from strategies.cost import Constants
    from strategies.schema import Plan, Refit


NEEDED = ("analysis.json", "plan.json", "validation.json", "train/metrics.jsonl")


def check_finished(run_dir: Path, *more: str) -> None:
    """Raises InputError for what is no run directory with all that a refit reads, and `more`."""
    needed = (*NEEDED, *more)
    missing = [name for name in needed if not (run_dir / name).is_file()]
    if not run_dir.is_dir():
        fault = f"{run_dir} is no folder"
    elif len(missing) == len(needed):
        fault = f"{run_dir} is no run directory"
    else:
        fault = f"the run in {run_dir} is not finished: it has no {', '.join(missing)}"
    if missing:
        fix = "give the --run-dir of a run that was validated and trained"
        raise InputError("--measured", fault=fault, fix=fix)


def constants_of(run_dir: Path, cluster: Cluster) -> tuple[Constants, Refit]:
    """Refits the cost model's constants from `analysis.json`, `plan.json`, `validation.json` and
    `train/metrics.jsonl` of a run directory.

    Raises InputError when the run was not validated or too short.
    """
    from adapter_agent.run_directory import RunDirectory
    from analyzers.schema import ModelAnalysis
    from runtime.schema import ValidationReport
    from strategies.calibration.measured import Step, refit
    from strategies.schema import Plan

    analysis = read_document(ModelAnalysis, run_dir / "analysis.json")
    plan = read_document(Plan, run_dir / "plan.json")
    if not read_document(ValidationReport, run_dir / "validation.json").passed:
        fault, fix = "the run failed its validation", "the times of a wrong run say nothing"
        raise InputError(run_dir / "validation.json", field="passed", fault=fault, fix=fix)
    steps = [
        Step(
            seconds=m.step_seconds,
            peak_gib=m.peak_memory_gib,
            tokens_per_expert=m.tokens_per_expert,
        )
        for m in RunDirectory(run_dir).metrics()
    ]
    return refit(analysis, cluster, plan, steps)


def with_refit(plan: Plan, found: Refit) -> Plan:
    """The plan made with refitted constants, which says so first."""
    return replace(plan, measured=found, explanation=[*found.said, *plan.explanation])
