"""Routed experts: where their tokens go, what is computed there, and how the load is spread."""

from analyzers.experts import experts_of
from runtime.experts.stacked import Recorder, recorder, run_experts, use_own_experts

__all__ = ["Recorder", "experts_of", "recorder", "run_experts", "use_own_experts"]
