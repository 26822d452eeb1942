"""The planner's cost model against published training runs, each organisation held out in turn.

    python benchmarks/planner_backtest.py [--rows FILE.csv] [--json] [--output DIR]
                                          [--expected] [--write-constants]

Without `--rows` the rows that come with the project are predicted, those of each organisation with
constants fitted to all others. With it the rows of FILE.csv (the same columns, in any order) are,
with constants fitted to the project's rows of other organisations; with `--expected` nothing is
fitted, and the constants are what was known of them before any row was seen. `--output` writes
backtest.json, rows.csv and a scatter figure (with plotly). `--write-constants` fits the constants
to all rows of the project and writes them, with intervals and the deviations that the held-out
rows show, to strategies/calibration/constants.yaml.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from analyzers.errors import AdaptError
from strategies.calibration import backtest
from strategies.calibration.backtest import VIEWS, Backtest, Score
from strategies.calibration.cases import cases
from strategies.calibration.constants import ranges, write
from strategies.calibration.fit import Table, fit
from strategies.calibration.published import published_runs, read_runs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rows", type=Path, metavar="FILE.csv")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output", type=Path, metavar="DIR")
    parser.add_argument("--write-constants", action="store_true")
    parser.add_argument("--expected", action="store_true", help="do not fit: constants as expected")
    options = parser.parse_args(arguments)
    if options.write_constants and (options.rows or options.expected):
        parser.error("--write-constants is for the rows of the project alone")
    if options.output:
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            parser.error(f"--output {options.output}: cannot be written: {e.strerror}")
    try:
        known, known_left = cases(published_runs())
        found, left = cases(read_runs(options.rows)) if options.rows else (known, known_left)
        training = [] if options.expected else known if options.rows else None
        predictions, constants = backtest.leave_one_out(found, ranges(), training=training)
        if options.write_constants:
            fitted = fit(Table(known), ranges())
            write(fitted, constants.values(), backtest.deviations(predictions))
    except AdaptError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_status
    result = Backtest(
        predictions=predictions,
        constants=constants,
        skipped=backtest.counted(row.reason for row in left),
    )
    data = backtest.as_data(result)
    if options.output:
        (options.output / "backtest.json").write_text(json.dumps(data, indent=2) + "\n")
        _write_rows(options.output / "rows.csv", data["predictions"])
        _draw(result, options.output / "backtest.html")
    if options.json:
        print(json.dumps(data, indent=2))
    else:
        _print(result)
    return 0


def _print(result: Backtest) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console(width=160)
    groups = {
        "source (held out)": backtest.by_source(result.predictions),
        "rows": {
            name: [p for p in result.predictions if keep(p.case)] for name, keep in VIEWS.items()
        },
    }
    for title, rows in groups.items():
        grid = Grid(title=None)
        grid.add_column(title)
        for name in COLUMNS:
            grid.add_column(name, justify="right")
        for name, predictions in rows.items():
            grid.add_row(name, *_cells(backtest.score(predictions)))
        console.print(grid)
    console.print(f"{sum(result.skipped.values())} rows left out:", highlight=False)
    for reason, count in result.skipped.items():
        console.print(f"  {count:4d}  {reason}", highlight=False)


COLUMNS = (
    *("rows", "step time\nmedian |e|", "90th", "bias", "inside", "rank"),
    *("rows", "peak memory\nmedian |e|", "90th", "bias", "inside", "OOM right", "ran right"),
)


def _cells(s: Score) -> list[str]:
    def percent(value: float | None, sign: str = "") -> str:
        return "-" if value is None else f"{value:{sign}.1%}"

    return [
        str(s.step_time_rows),
        percent(s.step_time_median_error),
        percent(s.step_time_p90_error),
        percent(s.step_time_bias, "+"),
        "-" if s.step_time_inside is None else f"{s.step_time_inside:.0%}",
        "-" if s.rank_correlation is None else f"{s.rank_correlation:.2f}",
        str(s.peak_memory_rows),
        percent(s.peak_memory_median_error),
        percent(s.peak_memory_p90_error),
        percent(s.peak_memory_bias, "+"),
        "-" if s.peak_memory_inside is None else f"{s.peak_memory_inside:.0%}",
        f"{s.oom_right}/{s.oom_rows}",
        f"{s.ran_right}/{s.ran_rows}",
    ]


def _write_rows(path: Path, rows: list[dict]) -> None:
    if not rows:
        return
    with path.open("w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _draw(result: Backtest, target: Path) -> None:
    """Predicted over measured on logarithmic axes, one colour a source; the line is equality."""
    try:
        from plotly.graph_objects import Scatter
        from plotly.subplots import make_subplots
    except ImportError:
        print(f"no figure: {target} needs plotly (pip install plotly)", file=sys.stderr)
        return
    titles = ("step time, s", "peak memory, GiB")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles)
    for column, (measured, predicted) in enumerate((MEASURED["seconds"], MEASURED["peak"]), 1):
        values: list[float] = []
        for name, rows in backtest.by_source(result.predictions).items():
            shown = [p for p in rows if measured(p) is not None]
            x, y = [measured(p) for p in shown], [predicted(p) for p in shown]
            text = [f"{p.case.run.id} {p.case.run.model}, {p.case.run.gpu}" for p in shown]
            figure.add_trace(
                Scatter(x=x, y=y, text=text, name=name, mode="markers", legendgroup=name,
                        showlegend=column == 1),
                row=1, col=column,
            )  # fmt: skip
            values += [v for v in x + y if v]
        if values:
            ends = [min(values), max(values)]
            figure.add_trace(
                Scatter(x=ends, y=ends, mode="lines", showlegend=False, line={"color": "grey"}),
                row=1, col=column,
            )  # fmt: skip
        figure.update_xaxes(type="log", title_text="measured", row=1, col=column)
        figure.update_yaxes(type="log", title_text="predicted, source held out", row=1, col=column)
    figure.write_html(target)


MEASURED = {
    "seconds": (lambda p: p.case.seconds, lambda p: p.seconds),
    "peak": (lambda p: p.case.peak_gib, lambda p: p.peak_gib),
}


if __name__ == "__main__":
    sys.exit(main())
