"""Loss and perplexity on examples that are not learned from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from analyzers.errors import InputError
from runtime.build import Documents, build_tokenizer
from runtime.packing import Dataset, Row, load_dataset, micro_batches
from runtime.schema import Evaluated
from runtime.step import labelled, loss_sum

if TYPE_CHECKING:
    from torch import nn


def set_apart(documents: Documents, dataset: Dataset) -> tuple[Dataset, Dataset | None]:
    """What is learned, and what is evaluated on. Raises InputError for a split that cannot be."""
    job, asked = documents.job, documents.job.evaluation
    where = documents.run_dir / "job.json"
    if asked.data is not None and asked.fraction:
        fault = "both data and fraction are given"
        raise InputError(where, field="evaluation", fault=fault, fix="give one of them")
    if asked.data is not None:
        tokenizer = build_tokenizer(job.model, trust_remote_code=job.trust_remote_code)
        length, cache = documents.plan.sequence_length, documents.run_dir / "data"
        return dataset, load_dataset(asked.data, tokenizer, length, cache=cache)
    if not asked.fraction:
        return dataset, None
    if not 0 < asked.fraction < 1 or len(dataset.examples) < 2:
        fault = f"{asked.fraction} of {len(dataset.examples)} examples leaves nothing to learn"
        raise InputError(where, field="evaluation.fraction", fault=fault, fix="between 0 and 1")
    return dataset.split(asked.fraction, job.seed)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    documents: Documents,
    device: torch.device,
    *,
    step: int,
    pad: int,
    flat: bool,
) -> Evaluated:
    """The loss of every example, once. All ranks call it together."""
    rank, ranks, plan = dist.get_rank(), dist.get_world_size(), documents.plan
    share = ranks * plan.micro_batch_size
    rows: list[Row] = dataset.rows(range(len(dataset.examples)))
    rows += [Row([], (), 0)] * (-len(rows) % share)  # every rank joins every forward
    model.eval()
    try:
        total, tokens = torch.zeros((), device=device), 0
        for start in range(0, len(rows), share):
            part = rows[start : start + share]
            length, micro = plan.sequence_length, plan.micro_batch_size
            for batch in micro_batches(part, rank, ranks, micro, length, pad, flat=flat):
                total += loss_sum(model, batch, device)
                tokens += labelled([batch])
        count = torch.tensor(tokens, device=device)
        dist.all_reduce(total)
        dist.all_reduce(count)
    finally:
        model.train()
    mean = float(total) / int(count)
    ppl = math.exp(min(mean, 700.0))  # where a float ends
    return Evaluated(step=step, loss=mean, perplexity=ppl, tokens=int(count))
