"""What people see: progress on stderr, documents as tables on stdout."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from codegen.schema import KernelSet, OperatorMap
    from codegen.tuning.tune import Tuned
    from runtime.schema import ValidationReport
    from strategies.exports import Written


class Terminal:
    """Progress on stderr: a live line on a terminal, plain lines elsewhere, nothing when quiet."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False)
        self._live: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, line: str) -> None:
        """A passing line."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=line)
        else:
            self.settle(line)

    def settle(self, line: str) -> None:
        """A line that stays."""
        if not self.quiet:
            # Not cut or wrapped: a log line is one line.
            self.console.print(line, soft_wrap=True, markup=False)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Keeps the live line up meanwhile."""
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        if self.quiet or not self.console.is_terminal:
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True) as live:
            self._live, self._task = live, live.add_task("", total=None)
            try:
                yield
            finally:
                self._live = self._task = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Takes the live line down meanwhile, so that a person can be asked."""
        if self._live is None:
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Sends what libraries and child processes print to stderr: stdout carries the result alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def show(*parts: RenderableType) -> None:
    """Prints the result on stdout."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Group(*parts))
        return
    console = Console(highlight=False, width=110)
    with console.capture() as captured:
        console.print(Group(*parts))
    for line in captured.get().splitlines():
        print(line.rstrip())


def new_table(title: str, *columns: str) -> Table:
    """A table whose columns that start with `>` are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left")
    return table


def bar(value: float, largest: float, width: int = 32) -> str:
    return "█" * max(1, round(width * value / largest)) if value > 0 and largest > 0 else ""


def picture_of_operators(operators: OperatorMap) -> RenderableType:
    table = new_table(f"Operators on {operators.backend}", "operator", "decision", "by", "reason")
    for o in operators.operators:
        table.add_row(o.operator, o.decision, o.provider, o.reason)
    return table


def picture_of_kernels(kernels: KernelSet) -> RenderableType:
    table = new_table(
        f"Generated kernels for {kernels.backend}", "kernel", "gate", "ran on", "result"
    )
    for k in kernels.kernels:
        for i, gate in enumerate(k.gates):
            result = "passed" if gate.passed else "FAILED"
            if gate.measured is not None and gate.tolerance is not None:
                result += f", {gate.measured:.2g} of {gate.tolerance:.2g}"
            table.add_row("" if i else k.module, gate.name, gate.ran_on, result)
    return table


def picture_of_tuning(tuned: list[Tuned]) -> RenderableType:
    from codegen.tuning.space import describe_launches

    columns = ("kernel", ">heads x tokens", ">tuned ms", ">before", ">times", "launches")
    table = new_table("Tuning, milliseconds of a training step", *columns)
    for record in (each.record for each in tuned):
        for i, c in enumerate(record.classes):
            was, now = c.default_milliseconds["step"], c.milliseconds["step"]
            launches = describe_launches(c.launches)
            table.add_row(
                "" if i else f"{record.operator} {record.key_dim}x{record.value_dim}",
                f"{c.programs} x {c.tokens}",
                f"{now:.3g}",
                f"{was:.3g}",
                f"{was / now:.2f}",
                f"chunk {record.chunk} {record.strategy}, {launches}",
            )
    return table


def picture_of_exports(written: list[Written]) -> RenderableType:
    table = new_table("Exports", "format", "files", "what they do not say of the plan")
    for w in written:
        files = "\n".join(map(str, w.paths)) or "not written"
        said = w.refused or "\n".join(w.lost) or "-"
        table.add_row(w.format, files, said)
    return table


def picture_of_validation(report: ValidationReport) -> RenderableType:
    verdict = "passed" if report.passed else "FAILED"
    title = f"Validation {verdict} on {report.world_size} ranks of {report.device}"
    table = new_table(title, "check", "result", "measured", "expected", "detail")
    for c in report.checks:
        result = "passed" if c.passed else "FAILED"
        table.add_row(c.name, result, _short(c.measured), _short(c.expected), c.detail)
    kept = [f"kept: {', '.join(report.kept)}"] if report.kept else []
    lost = [f"not kept: {', '.join(report.not_kept)}"] if report.not_kept else []
    return Group(table, *(Text(line) for line in kept + lost))


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
