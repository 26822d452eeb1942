"""Python's garbage collector, run between steps: inside one, its pauses hold up every rank."""

from __future__ import annotations

import gc

STEPS = 50
"""Between collections."""


def collect_between_steps() -> None:
    """Takes the collector into one's own hands, once everything long-lived exists."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_if_due(step: int) -> None:
    if step % STEPS == STEPS - 1:
        gc.collect(1)
