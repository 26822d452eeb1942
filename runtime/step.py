"""One training step: forward, backward, and what is measured on the way.

Legend of shapes: B rows, T tokens a row, N tokens with a label, V vocabulary, E experts, L layers
that have some.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from runtime.experts import recorder
from runtime.loss import METHOD
from runtime.packing import Batch, on_device
from runtime.tokens import IGNORED


@dataclass(frozen=True)
class StepResult:
    """On the device until it is asked for."""

    mean: Tensor
    count: Tensor
    counts_LE: Tensor
    """Of E experts, and in the last column of choices that found no room."""

    @property
    def loss(self) -> float:
        """Mean over the labelled tokens of the global batch."""
        return float(self.mean)

    @property
    def tokens(self) -> int:
        """Labelled tokens of the global batch."""
        return int(self.count)

    @property
    def tokens_per_expert(self) -> list[list[int]]:
        """One row a layer with experts."""
        return self.counts_LE[:, :-1].tolist()

    @property
    def overflow(self) -> list[int]:
        """Choices of a layer with experts that no expert had room for."""
        return self.counts_LE[:, -1].tolist()


def loss_sum(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """Sum of the cross entropy over the labelled tokens of one micro-batch, in float32.

    Only they reach the head. Where `fuse_head` was refused, their logits exist all at once.
    """
    labels = batch.labels_BT.flatten()
    place = (labels != IGNORED).nonzero().squeeze(1)  # on the host: no device is waited for
    index_N, target_N = on_device(place, device), on_device(labels[place], device)
    arguments = batch.arguments(device)
    with recorder.recording(on_device(batch.valid_BT, device)):
        if hasattr(model, METHOD):
            return getattr(model, METHOD)(index_N, target_N, **arguments)
        logits_BTV = model(**arguments).logits
    logits_NV = logits_BTV.flatten(0, 1).index_select(0, index_N)
    return F.cross_entropy(logits_NV.float(), target_N, reduction="sum")


def labelled(batches: Iterable[Batch]) -> int:
    return sum(int((b.labels_BT != IGNORED).sum()) for b in batches)


def forward_backward(
    model: Any, batches: Iterable[Batch], device: torch.device, *, alone: bool = False
) -> StepResult:
    """Leaves in every adapter the gradient of the loss of the global batch.

    Each rank brings its own micro-batches; the loss is divided by the labelled tokens of all of
    them, so that summed gradients are right without further scaling. With `alone`, the batches are
    the global batch and no other rank takes part. Nothing here waits for the device.
    """
    recorder.take()
    batches = list(batches)
    tokens = torch.tensor(labelled(batches), device=device)
    if not alone:
        dist.all_reduce(tokens)
    total = torch.zeros((), device=device)
    for batch in batches:
        loss = loss_sum(model, batch, device) / tokens
        loss.backward()
        total += loss.detach()
    counts = recorder.take()
    counts_LE = torch.stack(counts) if counts else torch.zeros(0, 1, dtype=torch.long)
    if not alone:
        dist.all_reduce(total)
        if counts:
            dist.all_reduce(counts_LE)
    return StepResult(total, tokens, counts_LE)
