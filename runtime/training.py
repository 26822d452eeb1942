"""The training loop that every rank runs."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist

from analyzers.documents import to_data, write_text
from runtime.adapters import adapter_parameters
from runtime.build import Documents, build_dataset, build_model, dtype_of, say
from runtime.checkpoints import last_checkpoint, load_checkpoint, save_checkpoint
from runtime.data import micro_batches
from runtime.experts.copies import Balancer
from runtime.optim import build_optimizer, clip_gradients, learning_rate
from runtime.peft_format import save_adapter
from runtime.schema import StepMetrics
from runtime.step import forward_backward


def train_rank(documents: Documents, device: torch.device) -> None:
    """Trains from the last complete checkpoint to `job.steps`, then writes `adapter/`."""
    run_dir, job, plan = documents.run_dir, documents.job, documents.plan
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dataset, pad = build_dataset(documents)
    say(f"{len(dataset.examples)} examples, {documents.global_batch_size} a step")
    model = build_model(documents, device, dtype=dtype_of(plan))
    adapters = adapter_parameters(model)
    optimizer = build_optimizer(adapters.values(), job.optimizer)
    say(
        f"{sum(p.numel() for p in adapters.values()):,} trainable of "
        f"{sum(p.numel() for p in model.parameters()):,} parameters on {ranks} ranks"
    )

    folder, metrics_file = run_dir / "train" / "checkpoints", run_dir / "train" / "metrics.jsonl"
    balancer = Balancer(model, plan)
    first = last_checkpoint(folder) or 0
    if first:
        load_checkpoint(folder, first, model, optimizer)
        say(f"resumed after step {first}")
    if rank == 0:
        _truncate(metrics_file, first)
    positions = documents.global_batch_size * plan.sequence_length
    for step in range(first, job.steps):
        began = time.perf_counter()
        torch.manual_seed(job.seed + step)  # a resumed run draws what the first one would have
        rate = learning_rate(job.optimizer, step, job.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        examples = dataset.batch(step, documents.global_batch_size, job.seed)
        batches = micro_batches(
            examples, rank, ranks, plan.micro_batch_size, plan.sequence_length, pad
        )
        result = forward_backward(model, batches, device)
        norm = clip_gradients(adapters.values(), job.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balancer.after_step(result.tokens_per_expert)
        seconds = time.perf_counter() - began
        metrics = StepMetrics(
            step=step + 1,
            loss=result.loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=result.tokens,
            step_seconds=seconds,
            tokens_per_second_per_device=positions / seconds / ranks,
            peak_memory_gib=peak_memory_gib(device),
            tokens_per_expert=result.tokens_per_expert,
        )
        if rank == 0:
            with metrics_file.open("a", encoding="utf-8") as f:
                f.write(json.dumps(to_data(metrics)) + "\n")
        say(f"step {step + 1}/{job.steps} loss {result.loss:.4f} {seconds:.2f} s")
        if (step + 1) % job.checkpoint_every == 0 or step + 1 == job.steps:
            save_checkpoint(folder, step + 1, model, optimizer)
    save_adapter(model, job, run_dir / "adapter")
    say(f"adapter written to {run_dir / 'adapter'}")


def _truncate(metrics_file: Path, steps: int) -> None:
    """Drops the lines of steps after the checkpoint that the run resumes from."""
    lines: list[str] = []
    if steps:
        for line in metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                kept = json.loads(line)["step"] <= steps
            except json.JSONDecodeError:
                break  # the line that was being written when the run was killed
            if kept:
                lines.append(line + "\n")
    write_text(metrics_file, "".join(lines))


def peak_memory_gib(device: torch.device) -> float:
    """Peak of the allocator on an accelerator, of the whole process on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes on Linux
    return torch.accelerator.max_memory_allocated(device) / 2**30
