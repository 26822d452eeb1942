"""ValidationReport (`validation.json`), and one line of `train/metrics.jsonl` and of
`train/evaluation.jsonl`."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from analyzers.documents import document


@document
class Check:
    """One proof: what was measured, what was expected, and how far apart they may be."""

    name: str
    passed: bool
    measured: Any
    expected: Any
    tolerance: float | None
    detail: str


@document
class ValidationReport:
    version: Literal[1] = 1
    passed: bool
    device: str
    world_size: int
    kept: list[str] = field(default_factory=list)
    not_kept: list[str] = field(default_factory=list)
    checks: list[Check]


@document
class StepMetrics:
    step: int
    loss: float
    """Mean over the tokens of the global batch that carry a label."""
    grad_norm: float
    learning_rate: float
    tokens: int
    """Tokens with a label, over all ranks."""
    step_seconds: float
    tokens_per_second_per_device: float
    """All positions of the batch, padding too, as a plan counts them."""
    peak_memory_gib: float
    """Allocated, so far; of the whole process on a CPU."""
    tokens_per_expert: list[list[int]]
    """One row a layer with experts, summed over ranks."""
    overflow: list[int] = field(default_factory=list)
    """Choices of its tokens, by layer, that no expert had room for: a token has `top_k`."""
    mfu: float | None = None
    """Model FLOPs by the analysis, without recomputation, over what the devices can do by their
    backend; None where the devices are not those of the plan."""
    padding: float = 0.0
    """Share of the positions that hold no token."""
    peak_reserved_gib: float | None = None
    """By the allocator, so far; None on a CPU."""


@document
class Evaluated:
    """Of examples that are not learned from."""

    step: int
    """Steps that were done."""
    loss: float
    """Mean over their tokens that carry a label."""
    perplexity: float
    tokens: int
