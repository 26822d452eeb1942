"""`adapt validate` as every rank runs it: the plan's twin for a few steps, with proofs."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from analyzers.documents import read_document, write_document
from analyzers.models import load_config, model_class
from codegen.schema import KernelSet
from runtime import checks
from runtime.adapters import adapter_parameters
from runtime.build import Documents, build_dataset, build_model, dtype_of, say
from runtime.checkpoints import load_checkpoint, save_checkpoint
from runtime.checks import FLOAT32_TOLERANCE, Worst, check, distance
from runtime.experts.copies import Balancer
from runtime.operators import operators_vs_reference
from runtime.optim import build_optimizer, clip_gradients
from runtime.packing import Batch, Dataset, Row, micro_batches
from runtime.peft_format import save_adapter
from runtime.schema import Check, ValidationReport
from runtime.sharding import apply_capacity
from runtime.shards import whole
from runtime.step import StepResult, forward_backward
from runtime.tokens import Example
from runtime.weights import Reader, digest, stored_digest
from strategies.schema import Capacity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEPS = 3
MICRO_BATCH = 4
FLOAT32 = torch.float32
INVARIANT = ("loss", "gradients", "norm", "update")
"""What is compared with one process."""


@dataclass
class Proof:
    """One run of the twin, in float32 whatever the plan computes in, beside a reference."""

    documents: Documents
    device: torch.device
    dataset: Dataset
    pad: int
    model: PreTrainedModel
    reference: PreTrainedModel | None
    """The same model whole in one process; on rank 0 alone, None where it does not fit."""
    checks: list[Check] = field(default_factory=list)
    not_kept: list[str] = field(default_factory=list)
    capacity: Capacity = field(default_factory=Capacity)
    """Of the plan; what `documents` say has none."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def examples(self, step: int) -> list[Row]:
        return self.dataset.batch(step, self.documents.global_batch_size, self.documents.job.seed)

    def batches(self, step: int, rank: int) -> list[Batch]:
        plan = self.documents.plan
        return list(
            micro_batches(
                self.examples(step),
                rank,
                dist.get_world_size(),
                plan.micro_batch_size,
                plan.sequence_length,
                self.pad,
            )
        )

    def step(self, step: int) -> StepResult:
        return forward_backward(self.model, self.batches(step, self.rank), self.device)

    def reference_step(self, step: int) -> StepResult | None:
        """The same global batch in one process, its micro-batches one after another."""
        if self.reference is None:
            return None
        batches = [b for r in range(dist.get_world_size()) for b in self.batches(step, r)]
        return forward_backward(self.reference, batches, self.device, alone=True)


def validate_rank(documents: Documents, device: torch.device) -> None:
    """Runs all proofs and writes `validation.json` from rank 0."""
    torch.manual_seed(documents.job.seed)
    capacity = documents.plan.capacity
    documents, not_kept = _shortened(documents)
    dataset, pad = _dataset(documents)
    model = build_model(documents, device, dtype=FLOAT32)
    fits = _reference_fits(documents, device)
    reference = None
    if fits and dist.get_rank() == 0:
        reference = build_model(documents, device, dtype=FLOAT32, sharded=False)
    proof = Proof(documents, device, dataset, pad, model, reference, not_kept=not_kept)
    proof.capacity = capacity
    if not fits:
        proof.not_kept += _need_the_whole_model(documents)
    stock = _weights(proof, fits)
    optimizer = _ep_invariance(proof)
    _operators(proof, stock)
    _peft(proof, stock)
    _zero_token_expert(proof)
    say("memory")
    proof.checks.append(checks.state_memory(model, optimizer, documents.plan, FLOAT32))
    _capacity(proof)  # last: from here on both models have the limit
    if dist.get_rank() == 0:
        _write(proof)
    dist.barrier()


def _shortened(documents: Documents) -> tuple[Documents, list[str]]:
    """The documents with a batch that a proof needs and no larger, and what that changes."""
    plan = documents.plan
    micro, accumulation = (
        min(plan.micro_batch_size, MICRO_BATCH),
        min(plan.gradient_accumulation, 2),
    )
    changed = []
    if micro != plan.micro_batch_size:
        changed.append(f"micro-batch: {micro} sequences instead of {plan.micro_batch_size}")
    if accumulation != plan.gradient_accumulation:
        wanted = plan.gradient_accumulation
        changed.append(f"gradient accumulation: {accumulation} instead of {wanted}")
    if plan.compute_dtype != "float32":
        changed.append(f"dtype: proved in float32, trained in {plan.compute_dtype}")
    if plan.capacity.factor is not None:
        # It makes a token depend on those beside it: only one check can have it.
        changed.append("capacity: no limit on experts but in the check of that name")
    lora = documents.job.lora
    if lora.dropout:
        changed.append(f"dropout: proved without, trained with {lora.dropout}")
    plan = replace(
        plan,
        micro_batch_size=micro,
        gradient_accumulation=accumulation,
        capacity=Capacity(),
    )
    job = replace(documents.job, lora=replace(lora, dropout=0.0))
    return replace(documents, job=job, plan=plan), changed


def _dataset(documents: Documents) -> tuple[Dataset, int]:
    """The job's data; without any, random tokens: the proofs compare, they do not learn."""
    if documents.job.data is not None:
        return build_dataset(documents)
    draw = random.Random(documents.job.seed)
    length = min(documents.plan.sequence_length, 128)
    examples = []
    for _ in range(documents.global_batch_size * STEPS):
        ids = [draw.randrange(documents.analysis.vocab_size) for _ in range(length)]
        examples.append(Example(ids, ids))
    return Dataset(examples, truncated=0), 0


def _reference_fits(documents: Documents, device: torch.device) -> bool:
    """Whether rank 0 can hold three whole float32 copies beside its shard: the reference, stock
    transformers' model, and room to compute."""
    need = 3 * 4 * documents.analysis.parameters.total
    if device.type == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        free = torch.accelerator.get_memory_info(device)[0]
    answer = [need < free]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _need_the_whole_model(documents: Documents) -> list[str]:
    """What is not proved where the whole model does not fit: each check by name."""
    lost = [f"ep_invariance_{what}" for what in INVARIANT] + ["peft_round_trip"]
    if documents.analysis.experts is not None:
        lost.append("zero_token_expert (its loss)")
    if _has_kernels(documents):
        lost.append("operators_vs_reference")
    return [f"{name}: the whole model does not fit in one process here" for name in lost]


def _has_kernels(documents: Documents) -> bool:
    return (documents.run_dir / "kernels" / "manifest.json").is_file()


def _weights(proof: Proof, fits: bool) -> PreTrainedModel | None:
    """Returns stock transformers' model on rank 0, where it fits."""
    say("weights against a load in one process")
    job = proof.documents.job
    sharded = digest(proof.model)
    if proof.rank != 0:
        return None
    if not fits:
        expected = stored_digest(proof.model, Reader(job.model))
        source = "the checkpoint converted in one process, tensor by tensor"
        proof.checks.append(checks.weights_equal(sharded, expected, source))
        return None
    config = load_config(job.model, trust_remote_code=job.trust_remote_code)
    cls: Any = model_class(config)
    stock = cls.from_pretrained(job.model, dtype=FLOAT32, local_files_only=True)
    stock = stock.to(proof.device)
    source = "transformers' from_pretrained"
    proof.checks.append(checks.weights_equal(sharded, digest(stock), source))
    return stock


def _ep_invariance(proof: Proof) -> Any:
    """Three steps beside one process: loss, every gradient, norm, clipped update; on the way, the
    proofs that belong after step 2 and 3. Returns the optimizer.

    After each comparison both sides go on from the sharded one's values, gradients too: AdamW
    divides a gradient by its own size, so rounding alone turns entries near zero over, and two
    right runs drift apart by 1e-3 in three steps.
    """
    documents, config = proof.documents, proof.documents.job.optimizer
    adapters = adapter_parameters(proof.model)
    optimizer = build_optimizer(adapters.values(), config)
    before = checks.snapshot(proof.model)
    twins = adapter_parameters(proof.reference) if proof.reference is not None else {}
    twin_optimizer = build_optimizer(twins.values(), config) if twins else None
    losses, gradients, norms, updates = Worst(), Worst(), Worst(), Worst()
    start = {n: whole(p) for n, p in adapters.items()}
    folder = documents.run_dir / "validate" / "checkpoints"
    result, limit = None, 0.0
    balancer = Balancer(proof.model, documents.plan, interval=1)
    for step in range(STEPS):
        result = proof.step(step)
        expected = proof.reference_step(step)
        full = {n: whole(p.grad) for n, p in adapters.items() if p.grad is not None}
        norm = float(clip_gradients(adapters.values(), float("inf")))
        # Clip at half of the first norm, so that clipping is always part of what is proved.
        if step == 0:
            limit = norm / 2
        clip_gradients(adapters.values(), limit)
        optimizer.step()
        if expected is not None and twin_optimizer is not None:
            losses.add(f"step {step + 1}", abs(result.loss - expected.loss) / abs(expected.loss))
            for name, twin in twins.items():
                missing = (name in full) != (twin.grad is not None)
                apart = float("inf") if missing else 0.0
                if twin.grad is not None and not missing:
                    apart = distance(full[name], twin.grad.cpu())
                gradients.add(f"{name} in step {step + 1}", apart)
            twin_norm = float(clip_gradients(twins.values(), float("inf")))
            norms.add(f"step {step + 1}", abs(norm - twin_norm) / twin_norm)
            for name, gradient in full.items():
                twins[name].grad = gradient.to(proof.device)
            clip_gradients(twins.values(), limit)
            twin_optimizer.step()
            twin_optimizer.zero_grad()
        optimizer.zero_grad()
        moved = {n: whole(p) for n, p in adapters.items()}
        for name, twin in twins.items():
            apart = distance(moved[name] - start[name], twin.detach().cpu() - start[name])
            updates.add(f"{name} in step {step + 1}", apart)
            twin.data.copy_(moved[name])
        start = moved
        if step < STEPS - 1:  # the last step is repeated, with the copies that it had
            balancer.after_step(result.tokens_per_expert)
        say(f"step {step + 1}/{STEPS} loss {result.loss:.6f} norm {norm:.6f}")
        if step == STEPS - 2:
            if dist.get_world_size() > 1:
                proof.checks.append(checks.replicas_equal(proof.model))
            else:
                proof.not_kept.append("replicas_equal: one rank has nothing twice")
            save_checkpoint(folder, step + 1, proof.model, optimizer)
    assert result is not None
    if proof.reference is not None:
        for what, worst in zip(INVARIANT, (losses, gradients, norms, updates), strict=True):
            proof.checks.append(_invariance(what, worst))
    proof.checks.append(checks.adapters_moved(proof.model, before, STEPS))
    if documents.plan.expert_copies and not any(m.copies.placement for m in balancer.layers):
        proof.not_kept.append("copies of experts: so even a load places none")
    _resume(proof, adapters, config, limit)
    _balance(proof, result)
    return optimizer


def _invariance(what: str, worst: Worst) -> Check:
    return check(
        f"ep_invariance_{what}",
        worst.within(FLOAT32_TOLERANCE),
        worst.value,
        0.0,
        tolerance=FLOAT32_TOLERANCE,
        detail=f"{worst.count} compared with one process over {STEPS} steps, worst {worst.where}",
    )


def _resume(proof: Proof, adapters: dict[str, Any], config: Any, limit: float) -> None:
    """The last step again from the checkpoint before it: the same bits."""
    say("resume from a checkpoint")
    reached = digest(proof.model, adapters=True)
    optimizer = build_optimizer(adapters.values(), config)
    folder = proof.documents.run_dir / "validate" / "checkpoints"
    load_checkpoint(folder, STEPS - 1, proof.model, optimizer)
    proof.step(STEPS - 1)
    clip_gradients(adapters.values(), limit)
    optimizer.step()
    optimizer.zero_grad()
    again = digest(proof.model, adapters=True)
    different = sorted(n for n in reached if reached[n] != again[n])
    proof.checks.append(
        check(
            "checkpoint_resume",
            not different,
            len(reached) - len(different),
            len(reached),
            detail="factors bit-equal after a step repeated from a checkpoint"
            + (f"; different: {', '.join(different[:4])}" if different else ""),
        )
    )


def _balance(proof: Proof, result: StepResult) -> None:
    experts = proof.documents.analysis.experts
    if experts is None:
        proof.not_kept.append("routing_balance and zero_token_expert: the model has no experts")
        return
    ep, ranks = proof.documents.plan.parallelism.ep, proof.documents.plan.world_size
    valid = [b.valid_BT for rank in range(ranks) for b in proof.batches(STEPS - 1, rank)]
    # Experts in a list see padding like any token.
    listed = experts.layout == "module_list"
    tokens = sum(v.numel() if listed else int(v.sum()) for v in valid)
    counts = result.tokens_per_expert
    proof.checks.append(checks.routing_balance(counts, tokens, experts.top_k, ep))


def _operators(proof: Proof, stock: PreTrainedModel | None) -> None:
    if not _has_kernels(proof.documents):
        proof.not_kept.append("kernels: the run has none")
    elif stock is not None:
        say("kernels against their references")
        folder = proof.documents.run_dir / "kernels"
        batch, dtype = proof.batches(0, 0)[0], dtype_of(proof.documents.plan)
        found = operators_vs_reference(stock, folder, batch, proof.device, dtype)
        proof.checks += found
        told = {c.name for c in found}
        for kernel in read_document(KernelSet, folder / "manifest.json").kernels:
            name = f"operators_vs_reference_{kernel.operator}"
            if name not in told:
                proof.not_kept.append(f"{name}: transformers' own model has no place for it")


def _peft(proof: Proof, stock: PreTrainedModel | None) -> None:
    say("adapter in stock PEFT")
    folder = proof.documents.run_dir / "validate" / "adapter"
    save_adapter(proof.model, proof.documents.job, folder)
    batch = proof.batches(0, 0)[0]
    own = checks.logits_of(proof.model, batch, proof.device)
    if stock is not None:
        proof.checks.append(checks.peft_round_trip(folder, stock, own, batch, proof.device))


def _zero_token_expert(proof: Proof) -> None:
    experts = proof.documents.analysis.experts
    if experts is None:
        return
    say("experts and ranks without tokens")
    with checks.first_experts_only(proof.model):
        result = proof.step(0)
    loss = None
    if proof.reference is not None:
        # The reference follows the trained model, resumed step included, bit for bit or nearly.
        with checks.first_experts_only(proof.reference):
            expected = proof.reference_step(0)
        loss = expected.loss if expected is not None else None
    proof.checks.append(checks.zero_token_expert(proof.model, result.loss, loss, experts.top_k))
    for model in (proof.model, proof.reference):
        for parameter in adapter_parameters(model).values() if model is not None else ():
            parameter.grad = None


def _capacity(proof: Proof) -> None:
    """One step with the plan's limit on experts beside one process that takes each rank's tokens as
    a group of its own, as they are there."""
    if proof.capacity.factor is None:
        return
    say("the limit on experts")
    plan = replace(proof.documents.plan, capacity=proof.capacity)
    apply_capacity(proof.model, plan)
    result = proof.step(0)
    adapters = adapter_parameters(proof.model)
    full = {n: whole(p.grad) for n, p in adapters.items() if p.grad is not None}
    if proof.reference is None:
        if proof.rank == 0:
            proof.not_kept.append("capacity: the whole model does not fit in one process here")
        return
    apply_capacity(proof.reference, plan, alone=True)
    expected = proof.reference_step(0)
    assert expected is not None
    worst = Worst()
    worst.add("loss", abs(result.loss - expected.loss) / abs(expected.loss))
    for name, twin in adapter_parameters(proof.reference).items():
        if twin.grad is not None:
            found = full.get(name)
            worst.add(name, math.inf if found is None else distance(found, twin.grad.cpu()))
    alike = result.tokens_per_expert == expected.tokens_per_expert
    overflow, routed = sum(result.overflow), sum(map(sum, result.tokens_per_expert))
    proof.checks.append(
        check(
            "capacity",
            alike and worst.within(FLOAT32_TOLERANCE),
            worst.value,
            0.0,
            tolerance=FLOAT32_TOLERANCE,
            detail=f"{plan.capacity.factor:g}, {plan.capacity.overflow}: loss and "
            f"{worst.count - 1} gradients beside one process that has each rank's tokens as a "
            f"group, worst {worst.where}; tokens of every expert "
            f"{'alike' if alike else 'differ'}; {overflow:,} of {overflow + routed:,} choices "
            "found no room",
        )
    )


def _write(proof: Proof) -> None:
    plan = proof.documents.plan
    report = ValidationReport(
        passed=all(c.passed for c in proof.checks),
        device=proof.device.type,
        world_size=plan.world_size,
        kept=plan.twin.kept if plan.twin else ["the plan itself"],
        not_kept=(plan.twin.not_kept if plan.twin else []) + proof.not_kept,
        checks=proof.checks,
    )
    write_document(report, proof.documents.run_dir / "validation.json")
