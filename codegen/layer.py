"""Families of operators over rows: the short convolution before a recurrence and the norm after it,
the tokens that experts get and what they return.

All are bound by memory: a program works on a tile of rows, and what is tuned is the tile.
"""

from __future__ import annotations

from dataclasses import field

from analyzers.backends import Backend
from analyzers.documents import document
from codegen.family import Member

ARRAYS = 3  # q, k and v


@document
class RowTile:
    """How a kernel over rows is launched."""

    elements: int
    """Of a program's tile: as many rows as fit, at least one."""
    block: int
    """Channels of a row at most; a row that is normalised is always whole."""
    steps: int = 1
    """Tokens, or tiles, that a program walks; items that it loads at a time."""
    num_warps: int
    num_stages: int


@document
class LayerSpec(Member):
    """An operator over rows of channels."""

    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Smallest and largest value by attribute of the operator; the kernel is rendered for it."""
    tiles: dict[str, dict[str, RowTile]]
    """By processor or Triton target (`none` where there is no compiler, `default` for the others)
    and kernel."""

    def tile(self, backend: Backend) -> dict[str, RowTile]:
        triton = backend.triton
        names = (triton.arch_name, triton.backend, "default") if triton else ("none",)
        return next(self.tiles[name] for name in names if name in self.tiles)

    @property
    def rendered_for(self) -> list[str]:
        return list(self.limits)

    def attributes(self, given: dict) -> dict[str, int]:
        return {name: int(given[name]) for name in self.limits}

    def chunk(self, tiles: dict[str, RowTile]) -> int:
        """Tokens of a program where rows have `block` channels."""
        return max(max(1, t.elements // t.block) * t.steps for t in tiles.values())

    def values(self, tiles: dict[str, RowTile]) -> dict:
        """What the templates read besides the attributes and what those of every family do."""
        dtypes = ", ".join(f"torch.{name}" for name in self.dtypes)
        return {"arrays": ARRAYS, "tiles": tiles, "dtypes": dtypes}

    def refusal(self, attributes: dict, backend: Backend) -> str | None:
        for name, (low, high) in self.limits.items():
            if name not in attributes:
                return f"the analysis gives no {name}"
            if not low <= int(attributes[name]) <= high:
                return f"{name} {attributes[name]} is outside {low}..{high}"
        return self.refused_target(backend)


FAMILIES = {
    "short_convolution": LayerSpec,
    "gated_norm": LayerSpec,
    "moe_route": LayerSpec,
    "grouped_lora": LayerSpec,
    "sparse_topk": LayerSpec,
}
