"""How layers lie on pipeline stages, and what the schedule costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strategies.candidates import Candidates, Column

if TYPE_CHECKING:
    from strategies.workload import Workload


DEVICE_DEVIATION = 0.02
"""Standard deviation of the speed of devices of one kind (clocks under a power limit). Two draws of
devices for one run differed by a tenth (marin-community/marin, 18.38 and 20.33 % MFU)."""


def straggler(devices: Column) -> Column:
    """Time of the slowest of so many devices over the mean: all wait for it in every step. Expected
    largest of n normal values, `sqrt(2 ln n)` deviations above the mean."""
    return 1 + DEVICE_DEVIATION * np.sqrt(2 * np.log(devices))


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Columns; everything is 1 without a pipeline."""

    share: Column
    """Of all layers, those of the fullest stage."""
    last_share: Column
    """Of all layers, those of the last stage, which also has the head."""
    outer_share: Column
    """Of embedding and head, what one stage holds."""
    in_flight: Column
    """Micro-batches whose activations the first stage keeps, in stages' worth."""
    bubble: Column
    """Idle share: seconds a step of the schedule over those of one micro-batch of a stage."""


def stages(work: Workload, c: Candidates) -> Stages:
    """1F1B, interleaved where a stage holds several chunks (arXiv 2104.04473).

    Layers that do not divide leave the fullest stage `ceil(layers / chunks)` a chunk; the slots
    that stay empty are taken from the first and last stage, which have embedding and head besides.
    Bubble: `(pp - 1) / virtual_stages` micro-batches. In flight on the first stage: `min(pp,
    micro-batches)`, and `1 + (pp - 1) / (pp * virtual_stages)` times as much interleaved.
    """
    layers, v = work.layers, c.virtual_stages
    piped = c.pp > 1
    full = np.ceil(layers / (c.pp * v)) * v
    spare = full * c.pp - layers
    last = np.maximum(full - np.ceil(spare / 2), 0)
    more = np.where(v > 1, 1 + (c.pp - 1) / (c.pp * v), 1.0)
    flight = np.minimum(c.pp * more, np.maximum(c.gradient_accumulation, 1))
    return Stages(
        share=np.where(piped, np.minimum(full / layers, 1.0), 1.0),
        last_share=np.where(piped, np.minimum(last / layers, 1.0), 1.0),
        outer_share=np.where(piped, 0.5, 1.0),
        in_flight=np.where(piped, flight, 1.0),
        bubble=np.where(piped, (c.pp - 1) / v, 0.0),
    )
