"""The training loop that every rank runs."""

from __future__ import annotations

import hashlib
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from analyzers.errors import AdaptError
from runtime.adapters import adapter_parameters
from runtime.boundaries import Form, packed_form
from runtime.build import Documents, build_dataset, build_model, dtype_of, say
from runtime.checkpoints import Checkpoints, Run
from runtime.evaluation import evaluate, set_apart
from runtime.experts.copies import Balancer
from runtime.flops import ModelFlops, peak_flops
from runtime.garbage import collect_between_steps, collect_if_due
from runtime.loss import fuse_head
from runtime.metrics import MetricsLog, check_tensorboard, peak_memory_gib, peak_reserved_gib
from runtime.optim import build_optimizer, clip_gradients, learning_rate
from runtime.packing import Batch, Dataset, micro_batches
from runtime.peft_format import save_adapter
from runtime.profiling import StepProfile
from runtime.schema import StepMetrics
from runtime.step import forward_backward

PROFILE_AFTER = 2
"""Steps of a run before its profile begins: the first ones allocate and compile."""


class StoppedError(AdaptError):
    """The run was asked to stop and can go on from its last step. Exit status as a shell gives it
    for SIGTERM."""

    exit_status = 128 + signal.SIGTERM


@dataclass
class Training:
    """One rank's part of a training run."""

    documents: Documents
    device: torch.device
    model: Any
    dataset: Dataset
    apart: Dataset | None
    pad: int
    flat: bool
    """Whether packed rows are laid end to end."""
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints
    balancer: Balancer
    first: int = 0
    """Steps that were done before this run."""
    log: MetricsLog | None = None
    """On rank 0 alone."""
    asked_to_stop: bool = False
    _ready: tuple[int, list[Batch]] | None = field(default=None, init=False)
    """Micro-batches that were made ahead, and their step."""
    flops: ModelFlops = field(init=False)
    peak: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.flops = ModelFlops.of(self.documents.analysis, self.documents.job)
        self.peak = peak_flops(self.documents.plan, self.device.type)

    def step(self, step: int) -> StepMetrics:
        """Step `step` (from 0): forward, backward, update. One wait for the device, at its end."""
        began = time.perf_counter()
        job, rank, ranks = self.documents.job, dist.get_rank(), dist.get_world_size()
        # What is drawn depends on the step, not on what was drawn before: a resumed run draws what
        # the first one would have. Each rank has tokens of its own, so it has draws of its own.
        torch.manual_seed(_seed(job.seed, step, rank))
        rate = learning_rate(job.optimizer, step, job.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = self._batches(step)
        result = forward_backward(self.model, batches, self.device)
        parameters = adapter_parameters(self.model).values()
        norm = clip_gradients(parameters, job.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.balancer.after_step(result.tokens_per_expert)
        if step + 1 < job.steps:
            self._ready = step + 1, self._batches(step + 1)  # while the device still computes
        positions = ranks * sum(b.input_ids_BT.numel() for b in batches)
        held, flops = self._counted(batches)
        flops += self.flops.over([], result.tokens)
        seconds = time.perf_counter() - began
        return StepMetrics(
            step=step + 1,
            loss=result.loss,
            grad_norm=float(norm),
            learning_rate=rate,
            tokens=result.tokens,
            step_seconds=seconds,
            tokens_per_second_per_device=positions / seconds / ranks,
            peak_memory_gib=peak_memory_gib(self.device),
            peak_reserved_gib=peak_reserved_gib(self.device),
            padding=1 - held / positions,
            tokens_per_expert=result.tokens_per_expert,
            overflow=result.overflow,
            mfu=None if self.peak is None else flops / seconds / ranks / self.peak,
        )

    def _batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step."""
        if self._ready is not None and self._ready[0] == step:
            return self._ready[1]
        plan, job = self.documents.plan, self.documents.job
        rows = self.dataset.batch(step, self.documents.global_batch_size, job.seed)
        return list(
            micro_batches(
                rows,
                dist.get_rank(),
                dist.get_world_size(),
                plan.micro_batch_size,
                plan.sequence_length,
                self.pad,
                flat=self.flat,
            )
        )

    def _counted(self, batches: list[Batch]) -> tuple[float, float]:
        """Tokens of the global batch, and its model FLOPs without the head."""
        lengths = [n for b in batches for n in b.lengths]
        counts = [float(sum(lengths)), self.flops.over(lengths, labelled=0)]
        everywhere = torch.tensor(counts, device=self.device)
        dist.all_reduce(everywhere)
        tokens, flops = everywhere.tolist()
        return tokens, flops

    def evaluate_if_due(self, step: int) -> None:
        """After `step` steps: before the first, after the last, and as the job asks between."""
        job = self.documents.job
        every = job.evaluation.every
        if self.apart is None or not (step in (0, job.steps) or (every and step % every == 0)):
            return
        result = evaluate(
            self.model,
            self.apart,
            self.documents,
            self.device,
            step=step,
            pad=self.pad,
            flat=self.flat,
        )
        if self.log is not None:
            self.log.evaluated(result)
        say(f"evaluation after step {step}: loss {result.loss:.4f}, {result.perplexity:.2f} ppl")

    def stop_together(self) -> bool:
        """Whether any rank was asked to stop: all of them do, after the same step."""
        asked = torch.tensor(int(self.asked_to_stop), device=self.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)


def train_rank(documents: Documents, device: torch.device, *, profile_steps: int = 0) -> None:
    """Trains from the last complete checkpoint to `job.steps`, then writes `adapter/`.

    SIGTERM ends it after the step that is running, with a checkpoint; raises StoppedError then.
    """
    run_dir, job = documents.run_dir, documents.job
    training = prepare(documents, device)
    signal.signal(signal.SIGTERM, lambda *_: setattr(training, "asked_to_stop", True))
    begin = training.first + PROFILE_AFTER
    traced = range(begin, begin + profile_steps if dist.get_rank() == 0 else begin)
    profile = StepProfile(run_dir / "train" / "profile", traced, device)
    training.evaluate_if_due(training.first)
    collect_between_steps()
    for step in range(training.first, job.steps):
        profile.begin(step)
        metrics = training.step(step)
        for line in profile.end(step):
            say(line)
        if training.log is not None:
            training.log.step(metrics)
        say(f"step {step + 1}/{job.steps} loss {metrics.loss:.4f} {metrics.step_seconds:.2f} s")
        training.checkpoints.poll()
        stop = training.stop_together()
        last = step + 1 == job.steps
        if stop or last or (step + 1) % job.checkpoint_every == 0:
            training.checkpoints.start(step + 1)
        if stop and not last:
            training.checkpoints.finish()
            dist.barrier()  # no rank ends, and takes the others with it, before all is written
            raise StoppedError(f"stopped after step {step + 1} of {job.steps}, which is saved")
        training.evaluate_if_due(step + 1)
        collect_if_due(step)
    training.checkpoints.finish()
    if training.log is not None:
        training.log.close()
    save_adapter(training.model, job, run_dir / "adapter")
    say(f"adapter written to {run_dir / 'adapter'}")


def prepare(documents: Documents, device: torch.device) -> Training:
    """Data, model, optimizer and the last checkpoint. All ranks call it together."""
    run_dir, job, plan = documents.run_dir, documents.job, documents.plan
    if job.tensorboard:
        check_tensorboard(run_dir / "job.json")
    dataset, pad = build_dataset(documents)
    dataset, apart = set_apart(documents, dataset)
    say(f"{len(dataset.examples)} examples, {documents.global_batch_size} rows a step")
    model = build_model(documents, device, dtype=dtype_of(plan))
    form = _agreed(packed_form(model, device)) if job.packing else None
    if form is not None:
        dataset = dataset.packed(plan.sequence_length)
        apart = apart.packed(plan.sequence_length) if apart is not None else None
    elif job.packing:
        say("not packed: this model lets documents of one row reach one another")
    refused = fuse_head(model, device)
    if refused is not None:
        say(f"all logits of a micro-batch are kept: {refused}")
    adapters = adapter_parameters(model)
    optimizer = build_optimizer(adapters.values(), job.optimizer)
    trained = sum(p.numel() for p in adapters.values())
    total, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    say(f"{trained:,} trainable of {total:,} parameters on {ranks} ranks")
    if (ep := plan.parallelism.ep) > 1:
        how = f"{plan.dispatcher} over {dist.get_backend()}'s collectives, not symmetric memory"
        say(f"experts on {ep} ranks; tokens by {how}")
    run = Run(
        seed=job.seed,
        global_batch_size=documents.global_batch_size,
        data=dataset.fingerprint,
        sequence_length=plan.sequence_length,
        packing=form is not None,
        evaluation_fraction=job.evaluation.fraction,
        lora=asdict(job.lora),
    )
    balancer = Balancer(model, plan)
    checkpoints = Checkpoints(run_dir / "train" / "checkpoints", model, optimizer, run, balancer)
    first = checkpoints.resume()
    if first:
        say(f"resumed after step {first}")
    log = None
    if dist.get_rank() == 0:
        log = MetricsLog(run_dir / "train", first, tensorboard=job.tensorboard)
    return Training(
        documents=documents,
        device=device,
        model=model,
        dataset=dataset,
        apart=apart,
        pad=pad,
        flat=form == "flat",
        optimizer=optimizer,
        checkpoints=checkpoints,
        balancer=balancer,
        first=first,
        log=log,
    )


def _agreed(form: Form | None) -> Form | None:
    """What every rank measured; None where one of them measured something else: all ranks must lay
    the same rows."""
    forms: list[Form | None] = [None] * dist.get_world_size()
    dist.all_gather_object(forms, form)
    return form if len(set(forms)) == 1 else None


def _seed(seed: int, step: int, rank: int) -> int:
    digest = hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
