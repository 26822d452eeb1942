"""Documents that are packed into one sequence, in the words of the models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def document_limits(kwargs: dict[str, Any]) -> Tensor | None:
    """Takes what tells the documents apart out of a model's arguments: their limits [N + 1] in the
    tokens, or None where nothing is packed.

    Read are `cu_seqlens` (flash-linear-attention), `cu_seq_lens_q` (transformers) and `seq_idx`
    [1, T] (mamba-ssm, causal-conv1d), the document of each token. Raises ValueError for `seq_idx`
    of several sequences, whose documents have no common limits.
    """
    names = ("cu_seqlens", "cu_seq_lens_q")
    limits = [x for name in names if (x := kwargs.pop(name, None)) is not None]
    documents = kwargs.pop("seq_idx", None)
    if limits:
        return limits[0]
    if documents is None:
        return None
    if documents.ndim != 2 or documents.shape[0] != 1:
        raise ValueError(f"seq_idx must be [1, T], got {list(documents.shape)}")
    ends = torch.ones_like(documents[0], dtype=torch.bool)
    ends[:-1] = documents[0].diff() != 0
    return torch.nn.functional.pad(ends.nonzero().squeeze(1) + 1, (1, 0))


def convolve_apart(convolution: Callable[[Tensor], Tensor], taps: int, x: Tensor, limits: Tensor):
    """A causal convolution of x [1, D, T] that knows no documents, kept from reading across them.

    Each document is moved `taps - 1` zeros away from the one before.
    """
    token = torch.arange(x.shape[-1], device=x.device)
    document = torch.searchsorted(limits[1:].contiguous(), token, right=True)
    place = token + (taps - 1) * document
    spread = x.new_zeros(*x.shape[:-1], x.shape[-1] + (taps - 1) * (len(limits) - 1))
    return convolution(spread.index_copy(-1, place, x))[..., place]
