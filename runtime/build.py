"""From the documents of a run directory to a model on its devices, ready to train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from analyzers.documents import read_document
from analyzers.schema import ModelAnalysis
from runtime.adapters import initialise_adapters, insert_adapters
from runtime.experts import use_own_experts
from runtime.experts.lists import stack_expert_lists
from runtime.norms import use_fused_norms
from runtime.packed import keep_packed
from runtime.packing import Dataset, load_dataset
from runtime.peft_format import load_adapter
from runtime.sharding import device_type, keep_float32, parallelize
from runtime.weights import load_weights
from strategies.schema import Job, Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Documents:
    """What a run directory says."""

    run_dir: Path
    job: Job
    plan: Plan
    analysis: ModelAnalysis

    @classmethod
    def read(cls, run_dir: str | Path, plan: Path | None = None) -> Documents:
        run_dir = Path(run_dir)
        return cls(
            run_dir,
            read_document(Job, run_dir / "job.json"),
            read_document(Plan, plan or run_dir / "plan.json"),
            read_document(ModelAnalysis, run_dir / "analysis.json"),
        )

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        p = self.plan.parallelism
        ranks = p.dp_replicate * p.fsdp
        return ranks * self.plan.micro_batch_size * self.plan.gradient_accumulation


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Joins the ranks that torchrun started; gives this rank's device."""
    kind = device_type()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(local_rank)
    backend = dist.get_default_backend_for_device(kind)
    dist.init_process_group(backend, device_id=None if kind == "cpu" else device)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def say(line: str) -> None:
    """One progress line, from rank 0 alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def dtype_of(plan: Plan) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[plan.compute_dtype]


def build_model(
    documents: Documents, device: torch.device, *, dtype: torch.dtype, sharded: bool = True
) -> PreTrainedModel:
    """The job's model with its adapters, weights loaded, frozen base, in training mode.

    Without `sharded` it is a plain model of one process, with the same values: the reference that
    the sharded one is compared with.
    """
    job = documents.job
    model = build_adapted(documents, dtype=dtype)
    if documents.plan.expert_weight_format == "mxfp4":
        keep_packed(model)
    if sharded:
        use_fused_norms(model)
        parallelize(model, documents.plan)
    else:
        keep_float32(model)
        use_own_experts(model)
    model.to_empty(device=device)
    model.tie_weights()  # to_empty gave each name a tensor of its own
    unused = load_weights(model, job.model)
    if unused:
        say(f"{len(unused)} checkpoint tensors are not used, e.g. {unused[0]}")
    if job.lora.init_from is None:
        initialise_adapters(model, job.seed)
    else:
        load_adapter(model, job.lora)
    bind_kernels(model, documents.run_dir / "kernels")
    return model.train()


def build_adapted(documents: Documents, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The job's model with its adapters on the meta device, base frozen."""
    from analyzers.models import build_on_meta, load_config

    job = documents.job
    config = load_config(job.model, trust_remote_code=job.trust_remote_code)
    config.use_cache = False
    model = build_on_meta(config, dtype=dtype)
    model.tie_weights()
    if documents.analysis.experts:
        stack_expert_lists(model, documents.analysis.experts.count)
    insert_adapters(model, job.lora, documents.analysis)
    return model


def bind_kernels(model: PreTrainedModel, folder: Path) -> list[Any]:
    """Puts the generated kernels in the place of the model's own functions; returns them."""
    if not (folder / "manifest.json").is_file():
        return []
    from codegen import bind, load_kernels

    kernels = load_kernels(folder)
    bind(model, kernels)
    return kernels


def build_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model, local_files_only=True, trust_remote_code=trust_remote_code
    )


def build_dataset(documents: Documents) -> tuple[Dataset, int]:
    """The job's examples and the id to pad with."""
    from analyzers.errors import InputError

    job = documents.job
    if job.data is None:
        raise InputError(
            documents.run_dir / "job.json",
            field="data",
            fault="names no training data",
            fix="give --data FILE.jsonl",
        )
    tokenizer = build_tokenizer(job.model, trust_remote_code=job.trust_remote_code)
    length = documents.plan.sequence_length
    dataset = load_dataset(job.data, tokenizer, length, cache=documents.run_dir / "data")
    if dataset.truncated:
        say(f"{dataset.truncated} examples cut at {documents.plan.sequence_length} tokens")
    pad = tokenizer.pad_token_id
    return dataset, pad if pad is not None else (tokenizer.eos_token_id or 0)
