"""The free constants of the cost model: a dozen, each physical, fitted to published runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Values of the constants; units and meaning stand with each and in `constants.yaml`.

    A fit may give columns, one value a row of the candidates, instead of numbers.
    """

    matmul_share: float
    """Of the achievable matmul rate, reached by a large product, its last wave apart."""
    grouped_matmul_share: float
    """Of `matmul_share`'s rate, reached by the grouped product of many experts."""
    attention_share: float
    """Of the achievable matmul rate, reached by attention cores over pairs of tokens."""
    memory_share: float
    """Of the memory rate, reached by operators that multiply nothing."""
    host_calls: float
    """Kernel launches that the host spends on one operator call of the analysis."""
    shard_overlap: float
    """Of a layer's time, behind which gathers of sharded weights and reductions of gradients
    hide."""
    tensor_overlap: float
    """Of the exchanges of tensor parallelism, hidden behind the products."""
    exchange_overlap: float
    """Of the token exchange, hidden behind other work."""
    exchange_share: float
    """Of the rate that other collectives reach on a link, reached by the token exchange."""
    dispatch_seconds: float
    """Fixed cost of one dispatch or combine: counts, layout, synchronisation."""
    saved_share: float
    """Activations that a framework keeps without recomputation, relative to those that the analysis
    counts for the reference code."""
    communicator_gib: float
    """Buffers outside the allocator for each group of ranks that a device communicates in."""


@dataclass(frozen=True, kw_only=True)
class Deviations:
    """Errors that the back-test found, as standard deviations."""

    seconds: float = 0.25
    """Of the logarithm of the step time."""
    peak: float = 0.12
    """Of the peak memory, relative to the predicted one."""


@functools.cache
def load_constants() -> Constants:
    """The fitted values of `strategies/calibration/constants.yaml`."""
    found = _file()
    return Constants(**{f.name: float(found[f.name]["value"]) for f in fields(Constants)})


@functools.cache
def load_deviations() -> Deviations:
    found = _file().get("deviations", {})
    return Deviations(**{n: float(v) for n, v in found.items()})


def _file() -> dict:
    import yaml

    where = resources.files("strategies.calibration") / "constants.yaml"
    return yaml.safe_load(where.read_text("utf-8"))
