"""What the ranks of `test_sharding.py` run: one step of each case beside one process.

`torchrun ... ranks.py RUN_DIR CASES.json RESULTS.json`; a case is a plan and an optional fault.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from analyzers.documents import from_data
from runtime import checks, experts
from runtime.__main__ import leave
from runtime.adapters import adapter_parameters
from runtime.boundaries import packed_form
from runtime.build import Documents, build_dataset, build_model, process_group
from runtime.checkpoints import load_checkpoint, save_checkpoint
from runtime.checks import Worst, distance
from runtime.loss import fuse_head
from runtime.optim import build_optimizer, clip_gradients
from runtime.packing import micro_batches
from runtime.shards import tensor_digest, whole
from runtime.step import forward_backward
from runtime.weights import digest
from strategies.schema import Plan

STATE = ("exp_avg", "exp_avg_sq")


def batches(documents, dataset, pad, rank, *, ranks=None, step=0, flat=False):
    examples = dataset.batch(step, documents.global_batch_size, documents.job.seed)
    plan = documents.plan
    ranks = ranks or dist.get_world_size()
    length = plan.sequence_length
    micro = plan.micro_batch_size
    return list(micro_batches(examples, rank, ranks, micro, length, pad, flat=flat))


def moved(model):
    """Gives every B a value, so that gradients reach every A too."""
    for name, parameter in adapter_parameters(model).items():
        if name.endswith("_B"):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.data.fill_(0.01)


def joined(tensors):
    return torch.cat([t.flatten() for t in tensors.values()])


def resume(documents, case, model):
    """One update, saved or replaced by the one saved; digests of factors and optimizer state."""
    if "checkpoint" not in case:
        return None
    adapters = adapter_parameters(model)
    optimizer = build_optimizer(adapters.values(), documents.job.optimizer)
    folder = documents.run_dir / "checkpoints"
    if case["checkpoint"] == "save":
        optimizer.step()
        save_checkpoint(folder, 1, model, optimizer)
    else:
        load_checkpoint(folder, 1, model, optimizer)
    state = {f"{n}.{k}": optimizer.state[p][k] for n, p in adapters.items() for k in STATE}
    return {n: tensor_digest(whole(t)) for n, t in {**adapters, **state}.items()}


def alone(documents, case, everyone, device, dtype):
    """The whole model and its step on the global batch, in one process."""
    model = build_model(documents, device, dtype=dtype, sharded=False)
    moved(model)
    with checks.first_experts_only(model) if case.get("skew") else nullcontext():
        return model, forward_backward(model, everyone, device, alone=True)


def run(documents, case, dataset, pad, device):
    dtype = getattr(torch, documents.plan.compute_dtype)
    model = build_model(documents, device, dtype=dtype)
    adapters = digest(model, adapters=True)
    moved(model)
    if case.get("fault") == "scaled":
        for module in experts.experts_of(model).values():
            module.register_forward_hook(lambda m, a, out: out * 1.01)
    flat = False
    if case.get("packed"):  # with the head in chunks; the reference has all logits at once
        assert fuse_head(model, device) is None
        flat = packed_form(model, device) == "flat"
        assert flat
        dataset = dataset.packed(documents.plan.sequence_length)
    mine = batches(documents, dataset, pad, dist.get_rank(), flat=flat)
    with checks.first_experts_only(model) if case.get("skew") else nullcontext():
        result = forward_backward(model, mine, device)
    full = {n: whole(p.grad) for n, p in adapter_parameters(model).items() if p.grad is not None}
    norm = float(clip_gradients(adapter_parameters(model).values(), 0.1))
    clipped = float(clip_gradients(adapter_parameters(model).values(), float("inf")))
    starved = None
    if case.get("skew"):
        starved = checks.zero_token_expert(model, 1.0, None, top_k=4).passed
    resumed = resume(documents, case, model)
    weights = digest(model)
    plain = [n for n, p in model.named_parameters() if not hasattr(p, "device_mesh")]
    if dist.get_rank() != 0:
        return None
    everyone = [
        b
        for r in range(dist.get_world_size())
        for b in batches(documents, dataset, pad, r, flat=flat)
    ]
    reference, expected = alone(documents, case, everyone, device, dtype)
    worst = Worst()
    twins = adapter_parameters(reference)
    for name, twin in twins.items():
        worst.add(name, distance(full[name], whole(twin.grad)) if name in full else float("inf"))
    together = joined({n: whole(twins[n].grad) for n in full})
    first = build_model(documents, device, dtype=dtype, sharded=False)
    adapters_equal = adapters == digest(first, adapters=True)
    rounding = None
    if dtype != torch.float32:
        exact, _ = alone(documents, case, everyone, device, torch.float32)
        factors = adapter_parameters(exact)
        rounding = distance(together, joined({n: whole(factors[n].grad) for n in full}))
    return {
        "loss": abs(result.loss - expected.loss) / expected.loss,
        "gradients": worst.value,
        "where": worst.where,
        "all_gradients": distance(joined(full), together),
        "rounding": rounding,
        "compared": worst.count,
        "norm": norm,
        "reference_norm": float(clip_gradients(twins.values(), float("inf"))),
        "clipped_norm": clipped,
        "counts_equal": result.tokens_per_expert == expected.tokens_per_expert,
        "adapters_equal": adapters_equal,
        "weights_equal": weights == digest(reference),
        "starved_zero": starved,
        "plain": plain,
        "resumed": resumed,
    }


def main():
    run_dir, cases_file, results_file = map(Path, sys.argv[1:])
    results = {}
    with process_group() as device:
        for name, case in json.loads(cases_file.read_text()).items():
            documents = Documents.read(run_dir / case.get("model", "kimi-linear"))
            plan = from_data(Plan, case["plan"], cases_file)
            documents = Documents(documents.run_dir, documents.job, plan, documents.analysis)
            dataset, pad = build_dataset(documents)
            results[name] = run(documents, case, dataset, pad, device)
            dist.barrier()
        if dist.get_rank() == 0:
            results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave(0)
