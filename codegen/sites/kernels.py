"""The kernels of one site: a set holds one for each shape that the model has there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from codegen.load import LoadedKernel


class Kernels:
    def __init__(self, loaded: Sequence[LoadedKernel]):
        self.loaded = loaded

    def of(self, **shape: int) -> Callable[..., Any]:
        """The kernel for a call's shape, in the words of its attributes. A kernel that is alone is
        the answer for all of them: it refuses what does not fit itself."""
        if len(self.loaded) == 1:
            return self.loaded[0].function
        for one in self.loaded:
            if all(one.kernel.attributes.get(name, size) == size for name, size in shape.items()):
                return one.function
        raise ValueError(f"none of the {len(self.loaded)} kernels of this site is for {shape}")
