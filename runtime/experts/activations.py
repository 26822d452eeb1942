"""What stands between the two banks of an expert, in the words of the generated kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

NAMES = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
"""By class of the activation, in transformers or torch."""


@dataclass(frozen=True)
class Activation:
    function: Callable[[Tensor], Tensor]
    """Of the first bank's output, gate and up together where it has both."""
    name: str | None = None
    """What generated kernels call it; None where they do not have it."""
    gated: bool = False
    """Whether that is the name of the gate's activation, which up is multiplied by."""
    betas: tuple[float, float] | None = None
    """Bounds of gate and up, in SiTU."""


NOTHING = Activation(lambda x: x)


def activation_of(experts: Any) -> Activation:
    """Of a module that transformers' decorator made an experts module.

    Another gate of a model's own code (clamped, interleaved, shifted) has no name.
    """
    if any(base.__name__ == "KimiK3Experts" for base in type(experts).__mro__):
        return Activation(experts._apply_gate, "situ", gated=True, betas=experts.betas)
    name = NAMES.get(type(getattr(experts, "act_fn", None)).__name__)
    if not experts.has_gate:
        return Activation(experts.act_fn, name)
    usual = experts.is_concatenated and type(experts)._apply_gate.__name__ == "_default_apply_gate"
    if name is None or not usual:
        return Activation(experts._apply_gate)
    return Activation(experts._apply_gate, name, gated=True)
