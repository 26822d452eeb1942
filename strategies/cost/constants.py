"""The free constants of the cost model: a dozen, each physical, fitted to published runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from importlib import resources

FILE = "strategies/calibration/constants.yaml"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Values of the constants; units and meaning stand with each and in `constants.yaml`.

    A fit may give columns, one value a row of the candidates, instead of numbers.
    """

    matmul_share: float = 0.92
    """Of the achievable matmul rate, reached by a large product of a layer."""
    grouped_matmul_share: float = 0.75
    """Of `matmul_share`'s rate, reached by the grouped product of many experts."""
    attention_share: float = 0.5
    """Of the achievable matmul rate, reached by attention and linear-attention cores."""
    memory_share: float = 0.6
    """Of the memory rate, reached by operators that multiply nothing."""
    host_calls: float = 35.0
    """Kernel launches that the host spends on one operator call of the analysis."""
    shard_overlap: float = 0.7
    """Of a layer's time, behind which gathers of sharded weights and reductions of gradients
    hide."""
    tensor_overlap: float = 0.3
    """Of the exchanges of tensor parallelism, hidden behind the products."""
    exchange_overlap: float = 0.1
    """Of the token exchange, hidden behind other work."""
    exchange_share: float = 0.7
    """Of the rate that other collectives reach on a link, reached by the token exchange."""
    dispatch_seconds: float = 120e-6
    """Fixed cost of one dispatch or combine: counts, layout, synchronisation."""
    saved_share: float = 1.0
    """Activations that a framework keeps, relative to those that the analysis counts."""
    communicator_gib: float = 0.6
    """Buffers outside the allocator for each group of ranks that a device communicates in."""


@dataclass(frozen=True, kw_only=True)
class Deviations:
    """Relative errors (one standard deviation) that the back-test found."""

    seconds: float = 0.25
    state: float = 0.02
    transient: float = 0.25


@functools.cache
def load_constants() -> Constants:
    """Those of `strategies/calibration/constants.yaml`; this file's own where there is none."""
    found = _file()
    names = {f.name for f in fields(Constants)}
    return Constants(**{n: float(v["value"]) for n, v in found.items() if n in names})


@functools.cache
def load_deviations() -> Deviations:
    found = _file().get("deviations", {})
    return Deviations(**{n: float(v) for n, v in found.items()})


def _file() -> dict:
    import yaml

    try:
        text = (resources.files("strategies.calibration") / "constants.yaml").read_text("utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        return {}
    return yaml.safe_load(text)
