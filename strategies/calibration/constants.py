"""`constants.yaml`: the free constants, what was known of each, what was fitted, and how far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from importlib import resources
from pathlib import Path

import numpy as np
import yaml

from analyzers.documents import write_text
from strategies.calibration.backtest import Prediction
from strategies.calibration.fit import Range
from strategies.cost.constants import Constants, Deviations

HEADER = """\
# The free constants of the cost model. `expected` and `range` are what was known of each before any
# published run was seen, from measurements of kernels and collectives; `value` is fitted to the
# published runs (python benchmarks/planner_backtest.py --write-constants), `interval` is between
# the least and the largest value when each source is left out in turn.
# `deviations`: relative errors (one standard deviation) of rows whose source was not in the fit.
"""


def ranges() -> dict[str, Range]:
    """Of every constant, in the order of `Constants`."""
    data = yaml.safe_load(_path().read_text(encoding="utf-8"))
    return {
        f.name: Range(
            low=float(data[f.name]["range"][0]),
            high=float(data[f.name]["range"][1]),
            expected=float(data[f.name]["expected"]),
        )
        for f in fields(Constants)
    }


def deviations(predictions: Sequence[Prediction]) -> Deviations:
    """From the 68th percentile of the errors of held-out rows, which for normal errors is their
    standard deviation and for others is not ruled by a few. Memory: of the part of the peak that is
    no weight, gradient or optimizer state, whose own deviation stays as assumed."""
    time = [abs(np.log1p(p.step_time_error)) for p in predictions if p.step_time_error is not None]
    known = Deviations()
    transient = [
        abs(p.peak_gib - p.case.peak_gib) / max(p.peak_gib - p.state_gib, 1e-9)
        for p in predictions
        if p.case.peak_gib
    ]
    return Deviations(
        seconds=_percentile(time, known.seconds),
        state=known.state,
        transient=_percentile(transient, known.transient),
    )


def _percentile(errors: list[float], otherwise: float) -> float:
    return float(np.quantile(errors, 0.68)) if errors else otherwise


def write(fitted: Constants, left_out: Iterable[Constants], found: Deviations) -> Path:
    """Writes the values, and as intervals their spread over the fits without one source each."""
    data = yaml.safe_load(_path().read_text(encoding="utf-8"))
    others = [asdict(k) for k in left_out]
    for name, value in asdict(fitted).items():
        spread = [value, *(k[name] for k in others)]
        data[name]["value"] = _short(value)
        data[name]["interval"] = [_short(min(spread)), _short(max(spread))]
    data["deviations"] = {name: _short(value) for name, value in asdict(found).items()}
    text = yaml.safe_dump(data, sort_keys=False, width=110, default_flow_style=None)
    return write_text(_path(), HEADER + text)


def _path() -> Path:
    return Path(str(resources.files("strategies.calibration") / "constants.yaml"))


def _short(value: float) -> float:
    return float(f"{value:.4g}")
