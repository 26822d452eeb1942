"""One training step: forward, backward, and what is measured on the way.

Legend of shapes: B sequences, T tokens a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.data import IGNORED, Batch
from runtime.experts import recorder


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean over the labelled tokens of the global batch."""
    tokens: int
    """Labelled tokens of the global batch."""
    tokens_per_expert: list[list[int]]


def loss_sum(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Sum of the cross entropy over the labelled tokens of one micro-batch, in float32."""
    input_ids_BT, labels_BT = batch.input_ids_BT.to(device), batch.labels_BT.to(device)
    with recorder.recording(batch.valid_BT.to(device)):
        logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        labels_BT.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def forward_backward(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, *, alone: bool = False
) -> StepResult:
    """Leaves in every adapter the gradient of the loss of the global batch.

    Each rank brings its own micro-batches; the loss is divided by the labelled tokens of all of
    them, so that summed gradients are right without further scaling. With `alone`, the batches are
    the global batch and no other rank takes part.
    """
    recorder.take()
    batches = list(batches)
    count = torch.tensor(sum(int((b.labels_BT != IGNORED).sum()) for b in batches), device=device)
    if not alone:
        dist.all_reduce(count)
    tokens = int(count)
    total = torch.zeros((), device=device)
    for batch in batches:
        loss = loss_sum(model, batch, device) / tokens
        loss.backward()
        total += loss.detach()
    counts = recorder.take()
    counts_LE = torch.stack(counts) if counts else torch.zeros(0, 0, dtype=torch.long)
    if not alone:
        dist.all_reduce(total)
        if counts:
            dist.all_reduce(counts_LE)
    return StepResult(float(total), tokens, counts_LE.tolist())
