"""Model FLOPs of a step, by the analysis: what must be computed.

Recomputed layers are not counted; scores that a fused attention kernel makes again in its backward
pass are, as in the costs that plans are made with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analyzers.schema import Part, Work

if TYPE_CHECKING:
    from analyzers.schema import ModelAnalysis
    from strategies.schema import Job, Plan

ADAPTER_PASSES = 6
"""FLOPs of a factor's parameter for a token: two forward, two for each of the two gradients."""


@dataclass(frozen=True)
class ModelFlops:
    body: Work
    """Forward and backward of everything but the head, with frozen weights and their adapters."""
    head: Work
    """Of a token that carries a label: no other needs logits."""

    @classmethod
    def of(cls, analysis: ModelAnalysis, job: Job) -> ModelFlops:
        from strategies.workload import workload

        body = Work()
        for block in analysis.blocks:
            body = body + _both(block.parts) * len(block.layers)
        outer = [p for p in analysis.outer if p.name not in ("head", "vision")]
        body = body + _both(outer)
        planned = workload(analysis, job.lora)
        visited = sum(kind.layers * kind.visited_adapter for kind in planned.kinds)
        body = body + Work(per_token=float(ADAPTER_PASSES * visited))
        return cls(body, _both([p for p in analysis.outer if p.name == "head"]))

    def over(self, lengths: Iterable[int], labelled: int) -> float:
        """Of documents of these lengths; a token of attention meets those before it alone."""
        return sum(self.body.causal(n) for n in lengths) + self.head.per_token * labelled


def _both(parts: Iterable[Part]) -> Work:
    total = Work()
    for part in parts:
        total = total + part.flops + part.backward.flops
    return total


def peak_flops(plan: Plan, device_type: str) -> float | None:
    """Matrix products a second that the plan's device can do in its compute dtype, by its backend;
    None where this device is another kind."""
    from analyzers.backends import load_backend

    if plan.backend is None:
        return None
    backend = load_backend(plan.backend)
    rate = backend.matmul_tflops.get(plan.compute_dtype)
    if backend.device_type != device_type or rate is None:
        return None
    return rate.value * 1e12
