"""What the ranks of `test_parity.py` run: five steps of each arrangement beside one process.

`torchrun ... parity_ranks.py RUN_DIR CASES.json RESULTS.json`; a case is a plan. Every step is
another kind of batch; one process takes all ranks' batches, one after another.
"""

import json
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from analyzers.documents import from_data
from runtime import checks
from runtime.__main__ import leave
from runtime.adapters import adapter_parameters
from runtime.build import Documents, build_model, process_group
from runtime.checks import Worst, distance
from runtime.experts import experts_of
from runtime.experts.capacity import limit_experts
from runtime.experts.copies import Balancer
from runtime.experts.dispatch import Limit, Local
from runtime.optim import build_optimizer, clip_gradients
from runtime.packing import Row, collate
from runtime.shards import whole
from runtime.step import forward_backward
from runtime.tokens import Example
from strategies.schema import Plan

MAX_NORM = 0.1
TOKENS = 24

# Lengths of each rank's two documents, and how tokens are routed.
STEPS = {
    "equal": ([(TOKENS, TOKENS)] * 4, None),
    "skewed": ([(TOKENS, TOKENS)] * 4, "skewed"),
    "starved": ([(TOKENS, TOKENS)] * 4, "starved"),
    "unequal": ([(24, 5), (17, 3), (8, 8), (2, 11)], None),
    "short": ([(24, 2), (2, 2), (0, 0), (9, 1)], None),  # nothing to learn from on rank 2
}


def batches(step, rank):
    """One micro-batch of two documents, only as long as the longer one."""
    lengths = list(STEPS.values())[step][0][rank]
    draw = torch.Generator().manual_seed(100 * step + rank)
    documents = [torch.randint(0, 64, (n,), generator=draw).tolist() for n in lengths]
    return [collate([Row([Example(d, d)], (0,), len(d)) for d in documents], max(*lengths, 1), 0)]


@contextmanager
def half_to_the_first(model):
    """Every second token goes to experts 0 .. K-1, the others where the router sends them."""

    def skew(module, args, kwargs):
        x, index, weights = args
        first = torch.arange(index.shape[1]).expand_as(index)
        even = torch.arange(index.shape[0]).unsqueeze(1) % 2 == 0
        return (x, torch.where(even, first, index), weights), kwargs

    hooks = [
        m.register_forward_pre_hook(skew, with_kwargs=True) for m in experts_of(model).values()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def routing(model, kind):
    kinds = {"starved": checks.first_experts_only, "skewed": half_to_the_first}
    return kinds[kind](model) if kind else nullcontext()


def trained(model, mine, config, device, *, alone=False, new_balancer=None):
    """Of each step: loss, gradients, norm and loads; at the end the factors."""
    for name, parameter in adapter_parameters(model).items():
        if name.endswith("_B"):  # so that gradients reach every A too
            torch.nn.init.constant_(checks._local(parameter), 0.01)
    adapters = adapter_parameters(model)
    optimizer = build_optimizer(adapters.values(), config)
    state = None
    steps, now = [], {n: whole(p) for n, p in adapters.items()}
    for step, (_, kind) in enumerate(STEPS.values()):
        with routing(model, kind):
            result = forward_backward(model, mine(step), device, alone=alone)
        gradients = {n: whole(p.grad) for n, p in adapters.items() if p.grad is not None}
        norm = float(clip_gradients(adapters.values(), MAX_NORM))
        optimizer.step()
        before, now = now, {n: whole(p) for n, p in adapters.items()}
        updates = {n: now[n] - before[n] for n in now}
        optimizer.zero_grad()
        if new_balancer is not None:
            balancer = new_balancer()
            if state is not None:
                balancer.restore(state)
            balancer.after_step(result.tokens_per_expert)
            state = json.loads(json.dumps(balancer.state()))  # as after a resume
        steps.append((result.loss, gradients, norm, updates, result.tokens_per_expert))
    return steps, now


def alone(documents, plan, device):
    """One process on all ranks' micro-batches: each is a group of its own for a limit on experts,
    as it is on its rank."""
    model = build_model(documents, device, dtype=torch.float32, sharded=False)
    if plan.capacity.factor is not None:
        for name, limiter in limit_experts(model, plan).items():
            limit = Limit(plan.micro_batch_size * plan.sequence_length, limiter.capacity)
            model.get_submodule(name).dispatcher = Local(limit)
    ranks = dist.get_world_size()

    def everyone(step):
        return [b for rank in range(ranks) for b in batches(step, rank)]

    return trained(model, everyone, documents.job.optimizer, device, alone=True)


def apart(found, expected, kind):
    worst = Worst()
    for name, tensor in expected.items():
        worst.add(f"{name}, {kind}", distance(found[name], tensor) if name in found else 1e9)
    return {"worst": worst.value, "where": worst.where, "compared": worst.count}


def main():
    run_dir, cases_file, results_file = map(Path, sys.argv[1:])
    documents, results = Documents.read(run_dir), {}
    with process_group() as device:
        rank, references = dist.get_rank(), {}
        config = documents.job.optimizer
        for name, case in json.loads(cases_file.read_text()).items():
            plan = from_data(Plan, case, cases_file)
            documents = Documents(run_dir, documents.job, plan, documents.analysis)
            model = build_model(documents, device, dtype=torch.float32)
            found, moved = trained(
                model,
                lambda step: batches(step, rank),
                config,
                device,
                new_balancer=partial(Balancer, model, plan, interval=1),
            )
            slots = [m.copies for m in experts_of(model).values() if hasattr(m, "copies")]
            replicas = checks.replicas_equal(model)
            if rank == 0:
                if plan.capacity not in references:
                    references[plan.capacity] = alone(documents, plan, device)
                steps, factors = references[plan.capacity]
                compared = {}
                for kind, (loss, grads, norm, updates, counts), expected in zip(
                    STEPS, found, steps, strict=True
                ):
                    compared[kind] = {
                        "loss": abs(loss - expected[0]) / expected[0],
                        "gradients": apart(grads, expected[1], kind),
                        "norm": abs(norm - expected[2]) / expected[2],
                        "clipped": norm > MAX_NORM,
                        "updates": apart(updates, expected[3], kind),
                        "counts": counts == expected[4],
                    }
                parameters = apart(moved, factors, "after 5 steps")
                results[name] = {
                    "steps": compared,
                    "parameters": parameters,
                    "copied": [s.placement is not None for s in slots],
                    "replicas": [replicas.passed, replicas.detail],
                }
            dist.barrier()
        if rank == 0:
            results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave(0)
