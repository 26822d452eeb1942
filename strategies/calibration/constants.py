"""`constants.yaml`: the free constants, what was known of each, what was fitted, and how far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from importlib import resources
from pathlib import Path

import yaml

from analyzers.documents import write_text
from strategies.calibration.fit import Range
from strategies.cost.constants import Constants, Deviations

HEADER = """\
# The free constants of the cost model. `expected` and `range` are what was known of each before any
# published run was seen, from measurements of kernels and collectives; `value` is fitted to the
# published runs (python benchmarks/planner_backtest.py --write-constants), `interval` is between
# the least and the largest value when each source is left out in turn.
# `deviations`: of a normal error (of the logarithm of the step time; of the peak memory, relative),
# so that it holds four of five errors of rows whose source was not in the fit.
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
