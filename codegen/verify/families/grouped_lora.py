"""Cases of grouped linear layers with adapters: a sequence is the rows of one expert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from codegen.verify.cases import Case, Shape, future, limits, other_order, scaled


@dataclass(frozen=True, kw_only=True)
class GroupedCase(Case):
    INPUTS: ClassVar = {
        "x": "token",
        "a": "sequence",
        "shared_a": "whole",
        "b": "sequence",
        "base": "sequence",
        "base_scales": "sequence",
        "base_bias": "sequence",
    }
    OUTPUTS: ClassVar = {"y": "token"}
    GRADIENTS: ClassVar = ("x", "a", "shared_a", "b")
    LINEAR_IN: ClassVar = ("x",)

    features: tuple[int, int] = (40, 56)
    """Of the input and of the output, gate and up together."""
    rank: int = 5
    activation: str | None = None
    gated: bool = False
    shared: bool = False
    """One first factor for all experts."""
    turned: bool = False
    """The base weight is stored as [E, F, O]."""
    packed: bool = False
    """The base weight is MXFP4."""
    bias: bool = False
    typed_factors: bool = False
    """The factors have the dtype of x; otherwise they are in float32."""
    scale: float = 1.0
    """Of x."""

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)

        def normal(*size):
            return torch.randn(*size, generator=generator)

        (F, O), E, r, P = self.features, len(self.lengths), self.rank, self.tokens
        factors = dtype if self.typed_factors else torch.float32
        a = (normal(E, r, F) / F**0.5).to(factors)
        base = (normal(E, O, F) / F**0.5).to(dtype)
        codes = torch.randint(0, 256, (E, O, F // 2), generator=generator, dtype=torch.uint8)
        powers = torch.randint(120, 127, (E, O, F // 32), generator=generator, dtype=torch.uint8)
        return {
            "x": (normal(1, P, F) * self.scale).to(dtype),
            "a": None if self.shared else a,
            "shared_a": a[0] if self.shared else None,
            "b": (normal(E, O, r) / r**0.5).to(factors),
            "base": codes if self.packed else base,
            "base_scales": powers if self.packed else None,
            "base_bias": normal(E, O).to(dtype) if self.bias else None,
            "dy": normal(1, P, O // 2 if self.gated else O).to(dtype),
        }

    def call(self, function, x, kernel):
        rows = x["x"]
        assert rows is not None
        assert x["base"] is not None
        ends = limits(self.lengths) if x["cu_seqlens"] is None else x["cu_seqlens"]
        base = x["base"].mT.contiguous().mT if self.turned else x["base"]
        y = function(
            rows[0],
            x["shared_a"] if self.shared else x["a"],
            x["b"],
            base=base,
            base_scales=x["base_scales"],
            base_bias=x["base_bias"],
            offsets=ends[1:].to(rows.device, torch.int32),
            scale=1.5,
            activation=self.activation,
            gated=self.gated,
            betas=(2.0, 3.0) if self.activation == "situ" else None,
        )
        return {"y": y[None]}


def cases(shape: Shape) -> list[Case]:
    C = shape.chunk
    # Several experts in a program's rows, one in several programs, and experts without rows.
    uneven = (0, 3, C, 1, 0, 0, 2 * C + 1, 1, 5, 0)
    usual = GroupedCase(name="usual", lengths=uneven, compiled=True)
    silu = GroupedCase(
        name="gated, silu",
        lengths=(C + 3, 0, 7),
        features=(48, 80),
        rank=16,
        activation="silu",
        gated=True,
        compiled=True,
    )
    plain, gated = replace(usual, compiled=False), replace(silu, compiled=False)
    kinds = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    return [
        usual,
        silu,
        replace(silu, name="shared first factor", shared=True, activation="gelu_tanh", bias=True),
        replace(plain, name="bias", bias=True),
        replace(silu, name="packed base weight", features=(64, 80), packed=True),
        *(replace(plain, name=f"without a gate, {kind}", activation=kind) for kind in kinds),
        *(replace(gated, name=f"gated, {kind}", activation=kind) for kind in (*kinds[1:], "situ")),
        replace(gated, name="factors in the inputs' dtype", typed_factors=True),
        replace(plain, name="base weight turned", turned=True),
        replace(plain, name="widths that no vector divides", features=(37, 51), rank=7),
        replace(gated, name="gated widths that no vector divides", features=(37, 54), rank=1),
        replace(plain, name="rank of 33", rank=33),
        replace(plain, name="rank of 256", lengths=(3, 0, 2), rank=256),
        replace(plain, name="shared, without an activation", shared=True),
        # More than one partial sum of the factor's gradient.
        replace(plain, name="shared, many rows", lengths=(700, 400), shared=True),
        replace(plain, name="one expert", lengths=(C + 1,)),
        # Gradients of one row are few numbers, of which the rounding of factors is the whole error:
        # in half precision a few of them say nothing.
        replace(plain, name="one row", lengths=(0, 1, 0), rank=33, features=(96, 128)),
        replace(plain, name="no rows", lengths=(0, 0)),
        replace(gated, name="no rows, gated", lengths=(0, 0)),
        replace(plain, name="no rows, shared", lengths=(0, 0), shared=True),
        replace(plain, name="every row another expert", lengths=(1,) * 19),
        replace(gated, name="inputs of 1e-3", scale=1e-3),
        replace(gated, name="inputs of 30", scale=30.0),
        replace(gated, name="situ, inputs of 1e-3", activation="situ", scale=1e-3),
        replace(gated, name="situ, inputs of 30", activation="situ", scale=30.0),
        replace(gated, name="strided inputs", strided=True),
        *future(gated, C // 2),
        other_order(plain),
        replace(other_order(gated), name="gated, the other way round"),
        scaled(plain),
    ]
