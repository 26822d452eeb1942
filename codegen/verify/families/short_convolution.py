"""Cases of the short convolution: one array or several, states, documents, norms of heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from codegen.verify.cases import Case, Shape, future, other_order, row_alone


@dataclass(frozen=True, kw_only=True)
class ConvolutionCase(Case):
    INPUTS: ClassVar = {
        "x": "token",
        "x1": "token",
        "x2": "token",
        "weight": "whole",
        "bias": "whole",
        "h0": "sequence",
    }
    OUTPUTS: ClassVar = {"y": "token", "y1": "token", "y2": "token", "state": "sequence"}
    GRADIENTS: ClassVar = ("x", "x1", "x2", "weight", "bias", "h0")
    STATE: ClassVar = ("h0", "state")

    widths: tuple[int, ...] = (40,)
    """Channels of each array."""
    activation: str | None = "silu"
    bias: bool = True
    head: int | None = None
    """Width of the heads that are normalised, of the first `normalized` arrays."""
    normalized: int | None = None
    scale: float = 1.0
    initial: bool = True
    last: Literal["gradient", "value", "none"] = "gradient"
    """Of the last state: asked for with a gradient from above, without one, not asked for."""

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)

        def normal(*size):
            return torch.randn(*size, generator=generator)

        taps, B, T, D = shape.attributes["kernel_size"], self.batch, self.tokens, sum(self.widths)
        given, made = len(self.widths), {}
        for n, name in enumerate(("x", "x1", "x2")):
            width = self.widths[n] if n < given else 0
            made[name] = (normal(B, T, width) * self.scale).to(dtype) if width else None
            made[f"d{name.replace('x', 'y')}"] = normal(B, T, width).to(dtype) if width else None
        state = (self.sequences, D, taps - 1)
        return made | {
            "weight": normal(D, taps).to(dtype),
            "bias": normal(D).to(dtype) if self.bias else None,
            "h0": normal(*state) * self.scale if self.initial else None,
            "dstate": normal(*state) if self.last == "gradient" else None,
        }

    def call(self, function, x, kernel):
        arrays = [x[n] for n in ("x", "x1", "x2") if x.get(n) is not None]
        state = self.last != "none" or self.split_at is not None
        y, last = function(
            arrays[0] if len(arrays) == 1 else arrays,
            x["weight"],
            x["bias"],
            activation=self.activation,
            initial_state=x["h0"],
            output_final_state=state,
            cu_seqlens=x["cu_seqlens"],
            l2norm_head_dim=self.head,
            l2norm_arrays=self.normalized,
        )
        found = dict(zip(("y", "y1", "y2"), [y] if len(arrays) == 1 else y, strict=False))
        return found | ({"state": last} if state else {})


def cases(shape: Shape) -> list[Case]:
    taps, C = shape.attributes["kernel_size"], shape.chunk
    odd = (C + 3,)
    usual = ConvolutionCase(name="usual", lengths=odd, compiled=True)
    # Documents shorter than the window, without a token, and around a program's tokens.
    lengths = (0, 1, taps - 1, 2, 0, C - 1, C, C + 1, 1, 1, 1, 0)
    packed = ConvolutionCase(name="packed with empty and one-token documents", lengths=lengths)
    three = ConvolutionCase(
        name="q, k and v in one launch, q and k normalised",
        lengths=(C // 2 + 1,),
        widths=(24, 24, 36),
        head=12,
        normalized=2,
        bias=False,
        batch=2,
        compiled=True,
    )
    past = replace(usual, name="no states", initial=False, last="none", compiled=False)
    return [
        usual,
        three,
        packed,
        replace(packed, name="packed, no states", initial=False, last="none", compiled=True),
        replace(three, name="packed q, k and v", lengths=(3, 0, 1, C), batch=1, compiled=False),
        replace(three, name="one token of q, k and v", lengths=(1,), batch=1, compiled=False),
        # fla#1140: the gradient of the state was wrong in a chunk shorter than the window.
        *(
            ConvolutionCase(name=f"{n} token{'s' * (n > 1)} and a last state", lengths=(n,))
            for n in range(1, taps)
        ),
        replace(past, name="inputs of 1e-3", scale=1e-3),
        replace(past, name="inputs of 30", scale=30.0),
        replace(past, name="no activation, no bias", activation=None, bias=False),
        replace(usual, name="state carried over a split", split_at=C // 2, compiled=False),
        replace(usual, name="state carried after one token", split_at=1, compiled=False),
        replace(past, name="last state without a gradient", last="value"),
        replace(past, name="strided inputs", lengths=(17,), batch=2, strided=True),
        replace(past, name="more channels than a program holds", lengths=(5,), widths=(333,)),
        *future(past, C // 2 + 2),
        row_alone(three),
        other_order(packed),
    ]
