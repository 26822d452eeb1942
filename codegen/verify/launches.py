"""The rows of a module's launch table, each of which must be proved.

`LAUNCHES[dtype][kernel]` lists (most programs, ...) by rising bound; the small inputs of the proofs
would only ever meet the first row.
"""

from __future__ import annotations

import contextlib


def count(module) -> int:
    """Rows of the kernel that has most."""
    table = getattr(module, "LAUNCHES", {})
    return max((len(rows) for kernels in table.values() for rows in kernels.values()), default=1)


@contextlib.contextmanager
def only(module, number: int):
    """The module with row `number` of each kernel, or its last, for any number of programs."""
    if not hasattr(module, "LAUNCHES"):
        yield
        return
    saved = module.LAUNCHES
    module.LAUNCHES = {
        dtype: {
            kernel: [(None, *rows[min(number, len(rows) - 1)][1:])]
            for kernel, rows in kernels.items()
        }
        for dtype, kernels in saved.items()
    }
    try:
        yield
    finally:
        module.LAUNCHES = saved
