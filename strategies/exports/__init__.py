"""Exports of a plan: configs for other trainers, and launch scripts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from textwrap import wrap

from analyzers.documents import write_text
from strategies.exports.source import Export, Source
from strategies.launch import RefusedError, headline, write_launch, write_torchrun
from strategies.schema import Plan

CONFIGS = ("transformers", "torchtitan", "automodel")
"""Each is a module of this package with the `NAME` of its file, the `TARGET` and its version that
the file is for, and `export(source) -> Export`."""
FORMATS = (*CONFIGS, "torchrun", "slurm")

__all__ = ["CONFIGS", "FORMATS", "Export", "Source", "Written", "write_exports"]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of one format."""

    format: str
    paths: list[Path] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """What the plan sets and these files do not say."""
    refused: str | None = None
    """Why the target cannot run the plan's layout at all; then nothing was written."""


def write_exports(
    source: Source, run_dir: str | Path, formats: Iterable[str] | None = None
) -> list[Written]:
    """Writes `exports/` (configs) and `launch/` (scripts) in the run directory.

    Without `formats` every one is written, and a target that cannot run the plan's layout is
    reported as refused. Raises RefusedError when one that was asked for by name is refused, and
    InputError when the directory cannot be written.
    """
    if formats is not None:
        return [_write(source, Path(run_dir), name) for name in formats]
    written = []
    for name in FORMATS:
        try:
            written.append(_write(source, Path(run_dir), name))
        except RefusedError as e:
            written.append(Written(format=name, refused=str(e)))
    return written


def _write(source: Source, run_dir: Path, name: str) -> Written:
    plan, cluster = source.plan, source.cluster
    if name in ("torchrun", "slurm"):
        scripts = write_launch if name == "slurm" else write_torchrun
        lost = [
            f"{what}: the runtime here lacks it, start another trainer" for what in plan.missing
        ]
        return Written(format=name, paths=scripts(plan, cluster, run_dir), lost=lost)
    target = import_module(f"{__name__}.{name}")
    path = run_dir / "exports" / target.NAME
    try:
        made: Export = target.export(source)
    except RefusedError:
        if path.is_file():  # of an earlier plan
            path.unlink()
        raise
    write_text(path, _header(made, plan, target.TARGET) + made.body)
    return Written(format=name, paths=[path], lost=made.lost)


def _header(made: Export, plan: Plan, target: str) -> str:
    """Comment lines, which Python and YAML share, and a blank one."""
    lines = [f"{headline(plan)}, as {target} says it.", "", *made.usage]
    if made.lost:
        lines += [
            "",
            f"Of the plan this file does not say, for want of a setting in {target}:",
        ]
        for line in made.lost:
            lines += wrap(line, 96, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(f"# {line}".rstrip() for line in lines) + "\n\n"
