"""Whether a model keeps packed documents apart: measured on the model itself.

Attention can be masked, but a short convolution or a recurrent state that is not told where a
document begins reads on from the one before. What reaches a document has a gradient by it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from runtime.packing import Batch, Dataset, collate
from runtime.tokens import Example

Form = Literal["rows", "flat"]
"""How packed documents are given: a batch of rows with positions alone, or one long row with the
limits of its documents, which kernels for recurrent state need."""
LENGTHS = (150, 201, 161)
"""Long enough that windows and pools of tokens reach over a boundary."""


def packed_form(model: Any, device: torch.device) -> Form | None:
    """The first form in which no document reaches another, None where each lets one.

    Runs the model forward and backward on a few hundred tokens; all ranks call it together.
    """
    if keeps_apart(model, device, "rows"):
        return "rows"
    return "flat" if keeps_apart(model, device, "flat") else None


def keeps_apart(model: Any, device: torch.device, form: Form) -> bool:
    """Whether the output for a document has no gradient by the documents before it, and has one by
    itself. Exact: what is masked has a gradient of zero, however small the weights are."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    batch = _batch(vocabulary, flat=form == "flat")
    try:
        gradient_BT = _gradient(model, batch, device)
    except (TypeError, ValueError, NotImplementedError):  # a forward that takes no limits
        return False
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    own = slice(sum(LENGTHS[:-1]), sum(LENGTHS))
    document, rest_BT = gradient_BT[0, own].clone(), gradient_BT.clone()
    rest_BT[0, own] = 0
    return bool((rest_BT == 0).all()) and bool((document > 0).all())


def _batch(vocabulary: int, *, flat: bool) -> Batch:
    """Two rows of documents; the second lies behind the one that is looked at."""
    documents = [
        [(7 * i + 13 * d) % vocabulary for i in range(length)] for d, length in enumerate(LENGTHS)
    ]
    dataset = Dataset(
        [Example(ids, ids) for ids in documents], truncated=0, row_length=sum(LENGTHS)
    )
    row = dataset.rows(range(len(LENGTHS)))
    assert len(row) == 1
    return collate([*row, *row], sum(LENGTHS), 0, flat=flat)


def _gradient(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """Size of the gradient of the last document of the first row by each token's embedding."""
    seen: list[Tensor] = []

    def cut(module: Any, arguments: Any, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    hook = model.get_input_embeddings().register_forward_hook(cut)
    try:
        logits_BTV = model(**batch.arguments(device)).logits
    finally:
        hook.remove()
    own = logits_BTV[0, sum(LENGTHS[:-1]) : sum(LENGTHS)].float()
    uneven = torch.arange(own.numel(), device=own.device).view(own.shape).cos()
    (gradient_BTD,) = torch.autograd.grad((own * uneven).sum(), seen[0])
    return gradient_BTD.float().abs().sum(-1)
