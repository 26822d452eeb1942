"""The price of one operator call."""

from __future__ import annotations

from dataclasses import dataclass, field

from analyzers.mixers import Attributes
from analyzers.schema import AdapterWork, PartName, Pass, Site, Work

ACTIVATION = 2  # bytes of an activation element (bfloat16)
FLOAT32 = 4
INDEX = 4  # bytes of a chosen key or expert


@dataclass(frozen=True)
class Call:
    """One call of an operator in one block."""

    operator: str
    part: PartName
    forward: Pass
    backward: Pass = field(default_factory=Pass)
    """With frozen weights: gradients of the inputs alone."""
    saved: Work = field(default_factory=Work)
    """What a fused kernel of the operator keeps for that backward pass."""
    adapter: AdapterWork | None = None
    parameters: int = 0
    attributes: Attributes = field(default_factory=dict)
    site: Site | None = None


def a_token(quantity: float) -> Work:
    return Work(per_token=quantity)


def one_way(flops: Work, *, read: float, written: float) -> Pass:
    """One direction of an operator that moves these bytes a token."""
    return Pass(flops=flops, bytes=a_token(read + written), bytes_written=a_token(written))
