"""Cases of the rows of experts: any number of items a row, items of no row, widths, dtypes; those
of the family's other operators are `routing`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from codegen.verify.cases import Case, Kind, Shape, scaled
from codegen.verify.families import routing

IDS: Mapping[str, Kind] = {"source": "whole", "by_source": "whole", "offsets": "whole"}


@dataclass(frozen=True, kw_only=True)
class RouteCase(Case):
    """Rows with `counts` items each, and `nothing` items of no row, all in a random order.

    `lengths` counts the items. Rows and items are judged as sequences are, one by one.
    """

    counts: tuple[int, ...]
    nothing: int = 0
    width: int = 40
    scale: float = 1.0
    ids: torch.dtype = torch.int64
    apart: bool = False
    """The rows lie in a wider array."""

    def plan(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        rows = len(self.counts)
        counts = torch.tensor([*self.counts, self.nothing])
        source = torch.repeat_interleave(torch.arange(rows + 1), counts)
        source = source[torch.randperm(len(source), generator=generator)]
        # What is of no row may have any number: that behind the last row, or none at all.
        by_source = torch.argsort(source, stable=True)
        source[by_source[len(source) - self.nothing // 2 :]] = -1
        offsets = torch.cat([counts.new_zeros(1), counts[:-1].cumsum(0)])
        ids = {"source": source, "by_source": by_source, "offsets": offsets}
        return {name: x.to(self.ids) for name, x in ids.items()}

    def rows(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        wide = self.width + 3 * self.apart
        return (torch.randn(count, wide, generator=generator) * self.scale).to(dtype)

    def narrow(self, x: torch.Tensor | None) -> torch.Tensor:
        assert x is not None
        return x[:, : self.width]


@dataclass(frozen=True, kw_only=True)
class SpreadCase(RouteCase):
    INPUTS: ClassVar = {"x": "sequence", **IDS}
    OUTPUTS: ClassVar = {"y": "sequence"}
    GRADIENTS: ClassVar = ("x",)
    LINEAR_IN: ClassVar = ("x",)

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)
        above = torch.randn(self.tokens, self.width, generator=generator)
        x = self.rows(len(self.counts), generator, dtype)
        return {"x": x, "dy": above.to(dtype), **self.plan(generator)}

    def call(self, function, x, kernel):
        return {"y": function(self.narrow(x["x"]), *(x[name] for name in IDS))}


@dataclass(frozen=True, kw_only=True)
class CombineCase(RouteCase):
    INPUTS: ClassVar = {"y": "sequence", "weights": "sequence", **IDS}
    OUTPUTS: ClassVar = {"o": "sequence"}
    GRADIENTS: ClassVar = ("y", "weights")
    LINEAR_IN: ClassVar = ("y",)

    weights: Literal["float32", "inputs", "frozen"] | None = "float32"
    """Their dtype; frozen ones take no gradient, None are not given."""
    out: torch.dtype | None = None

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)
        weights = torch.rand(self.tokens, generator=generator)
        weights = weights.to(dtype) if self.weights == "inputs" else weights
        above = torch.randn(len(self.counts), self.width, generator=generator)
        return {
            "y": self.rows(self.tokens, generator, dtype),
            "weights": None if self.weights is None else weights,
            "do": above.to(self.out or dtype),
            **self.plan(generator),
        }

    def call(self, function, x, kernel):
        weights = x["weights"]
        if weights is not None and self.weights == "frozen":
            weights = weights.detach()
        ids = (x[name] for name in IDS)
        return {"o": function(self.narrow(x["y"]), weights, *ids, dtype=self.out)}


def cases(shape: Shape) -> list[Case]:
    if shape.operator not in ("moe_spread", "moe_combine"):
        return routing.cases(shape)
    counts = (3, 0, 8, 1, 2, 0, 5, 4, 9)  # more and less than a kernel loads at a time
    given = {"counts": counts, "lengths": (sum(counts),)}
    if shape.operator == "moe_spread":
        usual = SpreadCase(name="usual", compiled=True, **given)
        own = []
    else:
        usual = CombineCase(name="usual", compiled=True, **given)
        own = [
            replace(usual, name="weights in the dtype of the inputs", weights="inputs"),
            replace(usual, name="no weights", weights=None),
            replace(usual, name="weights without a gradient", weights="frozen"),
            replace(usual, name="a float32 result", out=torch.float32),
        ]
    plain = replace(usual, compiled=False)
    padded = {"nothing": 5, "lengths": (sum(counts) + 5,)}
    many = tuple(n % 4 for n in range(70))
    return [
        usual,
        *own,
        replace(usual, name="items of no row", **padded),
        replace(usual, name="a width of 100", width=100),
        replace(
            plain, name="a width of 8 and many rows", width=8, counts=many, lengths=(sum(many),)
        ),
        replace(plain, name="a width of 1", width=1),
        replace(usual, name="a width of 2304", width=2304, counts=(2, 3), lengths=(5,)),
        replace(plain, name="int32 ids", ids=torch.int32),
        replace(plain, name="one item", counts=(1,), lengths=(1,)),
        replace(plain, name="all items of one row", counts=(0, 21, 0), lengths=(21,)),
        replace(plain, name="no items", counts=(0, 0, 0), lengths=(0,)),
        replace(plain, name="no rows", counts=(), nothing=4, lengths=(4,)),
        replace(plain, name="neither", counts=(), lengths=(0,)),
        replace(plain, name="inputs of 1e-3", scale=1e-3),
        replace(plain, name="inputs of 30", scale=30.0),
        replace(plain, name="rows of a wider array", apart=True, **padded),
        scaled(usual),
    ]
