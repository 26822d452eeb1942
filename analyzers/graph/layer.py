"""The graph of one layer, and what its nodes carry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from analyzers.structure import Kind

Dimension = Literal["batch", "sequence"]


@dataclass
class LayerGraph:
    """The calls of one layer, `module`, whose nodes carry this in `meta`:

    call_function: `val` (fake tensor, or what it returns), `operator` (normalised name), `path` of
    the calling module in the layer, `part`, `whole` (path of the module whose calls count as one:
    a norm, a router; else None), `grad` (whether gradients are recorded).
    placeholder: `val`, `role` ("parameter", "buffer" or "input"), `path` of a weight in the layer
    or in the decoder, `grad` (whether it depends on the layer's input).
    """

    kind: Kind
    module: fx.GraphModule
    batch: int
    tokens: int
    """Batch and length of the export."""
    dynamic: list[Dimension]
    symbols: dict[Any, Dimension] = field(default_factory=dict)
    starts: float = 1
    """Block starts that attention residuals hand to a layer, the mean over the layers of the kind;
    the cut-down decoder has one."""

    def calls(self) -> Iterator[fx.Node]:
        return (n for n in self.module.graph.nodes if n.op == "call_function")

    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    def arguments(self, batch: int, tokens: int, starts: int = 1) -> list[Any]:
        """What the placeholders take, on the meta device, for `starts` block starts."""
        values = [self._concrete(n.meta["val"], batch, tokens) for n in self.placeholders()]
        if starts == 1 or self.starts == 1:
            return values
        bank = next(
            i for i, v in enumerate(values) if getattr(v, "ndim", 0) == 4 and v.shape[2] == 1
        )
        values[bank] = values[bank].repeat(1, 1, starts, 1)
        return values

    def _concrete(self, value: Any, batch: int, tokens: int) -> Any:
        """A value at this batch and length: a meta tensor, a number."""
        if not isinstance(value, torch.Tensor):
            return self.number(value, batch, tokens)
        sizes = [self.number(size, batch, tokens) for size in value.shape]
        return torch.empty(sizes, dtype=value.dtype, device="meta")

    def number(self, size: Any, batch: int, tokens: int) -> Any:
        """A size at this batch and length."""
        if not isinstance(size, torch.SymInt):
            return size
        numbers = {"batch": batch, "sequence": tokens}
        expression = size.node.expr.subs({s: numbers[d] for s, d in self.symbols.items()})
        return int(expression)
