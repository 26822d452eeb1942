"""Plan + KernelSet + data -> trained adapter, ValidationReport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.launch import train, validate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from strategies.schema import Plan

__all__ = ["parallelize", "train", "validate"]


def parallelize(model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
    """See `runtime.sharding.parallelize`."""
    from runtime.sharding import parallelize as apply

    return apply(model, plan)
