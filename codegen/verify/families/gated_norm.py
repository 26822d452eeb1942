"""Cases of the gated norm: both orders, both gates, heads and groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from codegen.verify.cases import Case, Shape, future, row_alone


@dataclass(frozen=True, kw_only=True)
class NormCase(Case):
    INPUTS: ClassVar = {"x": "token", "gate": "token", "weight": "whole"}
    OUTPUTS: ClassVar = {"y": "token"}
    GRADIENTS: ClassVar = ("x", "gate", "weight")

    size: tuple[int, ...] = (3, 40)
    """Of a token: its heads and their width, or the width alone."""
    activation: str = "silu"
    norm_before_gate: bool = True
    group: int | None = None
    gated: bool = True
    scale: float = 1.0
    float_weight: bool = False
    """The weight is in float32 whatever the inputs are in."""

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)

        def normal(*size):
            return torch.randn(*size, generator=generator)

        size = (self.batch, self.tokens, *self.size)
        x, gate, dy = normal(*size) * self.scale, normal(*size) * 3, normal(*size)
        weight = 1 + 0.3 * normal(self.size[-1])
        return {
            "x": x.to(dtype),
            "gate": gate.to(dtype) if self.gated else None,
            "weight": weight if self.float_weight else weight.to(dtype),
            "dy": dy.to(dtype),
        }

    def call(self, function, x, kernel):
        y = function(
            x["x"],
            x["weight"],
            x["gate"],
            eps=1e-5,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group,
        )
        return {"y": y}


def cases(shape: Shape) -> list[Case]:
    usual = NormCase(name="heads, silu", lengths=(37,), compiled=True)
    groups = NormCase(
        name="groups, gate before norm",
        lengths=(19,),
        size=(120,),
        group=24,
        norm_before_gate=False,
        batch=2,
        compiled=True,
    )
    plain = replace(usual, compiled=False)
    return [
        usual,
        groups,
        replace(
            usual, name="heads, sigmoid, float32 weight", activation="sigmoid", float_weight=True
        ),
        replace(groups, name="groups, norm before gate", norm_before_gate=True, compiled=False),
        replace(plain, name="heads, gate before norm", norm_before_gate=False),
        replace(plain, name="no gate", gated=False),
        replace(plain, name="one token", lengths=(1,)),
        replace(plain, name="one channel", size=(2, 1)),
        replace(plain, name="a row wider than a tile", lengths=(3,), size=(1100,)),
        replace(plain, name="inputs of 1e-3", scale=1e-3),
        replace(plain, name="inputs of 30", scale=30.0),
        replace(plain, name="strided inputs", batch=2, strided=True),
        *future(replace(plain, name="tokens apart"), 20),
        row_alone(groups),
    ]
