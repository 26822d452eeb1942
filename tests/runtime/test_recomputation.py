"""Selective recomputation: the gradients of none, no core made twice, and half of the products."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from analyzers import analyze
from runtime import sharding
from runtime.adapters import adapter_parameters
from runtime.build import Documents, build_model
from runtime.experts.replay import replaying
from runtime.recomputation import (
    ATTENTION,
    Both,
    EverySecond,
    generated,
    selective,
    weight_of_product,
)
from strategies.schema import Lora
from tests.runtime.runs import job_for, plan_for, save_qwen, write_kernels

CPU = torch.device("cpu")
RANK = 3
THIN = 8
"""Rank, padded."""


class Counted(TorchDispatchMode):
    """Calls of attention cores, of generated operators, and of products that are not thin."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        weight = weight_of_product(op, args)
        if weight is not None:
            self.calls["product"] += min(weight.shape[-2:]) > THIN
        else:
            self.calls["attention" if op in ATTENTION else generated(op) or str(op)] += 1
        return op(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["generated kernels", "attention of torch"])
def run(request, small_model, small_analysis, tmp_path_factory):
    """Documents, the core of its layers and how many of them have it."""
    folder = tmp_path_factory.mktemp("run")
    model, analysis, core, layers = small_model, small_analysis, "kda", 3
    targets = ["attention", "shared_experts", "routed_experts"]
    if request.param == "generated kernels":
        write_kernels(folder, analysis, prefer="generated")
    else:
        model = save_qwen(folder / "model", experts=4)
        analysis, core, layers = analyze(model), "attention", 2
        targets.remove("shared_experts")
    job = job_for(model, lora=Lora(targets=targets, rank=RANK))
    return Documents(folder, job, plan_for(1), analysis), core, layers


def step(documents, recomputation, monkeypatch):
    """Loss, gradients, and calls of the layers' forwards and repetitions."""
    forward, again = Counted(), Counted()

    def counting(contexts):
        return lambda: tuple(map(Both, (forward, again), contexts()))

    monkeypatch.setattr(sharding, "replaying", counting(replaying))
    monkeypatch.setattr(sharding, "selective", lambda model: counting(selective(model)))
    plan = replace(documents.plan, activation_checkpointing=recomputation)
    model = build_model(replace(documents, plan=plan), CPU, dtype=torch.float32)
    monkeypatch.undo()
    for name, factor in adapter_parameters(model).items():
        if name.endswith("_B"):
            factor.data.fill_(0.01)
    ids = torch.arange(64).view(2, 32) * 3 % 250
    loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    loss.backward()
    gradients = {n: p.grad for n, p in adapter_parameters(model).items()}
    return loss.detach(), gradients, forward.calls, again.calls


@pytest.mark.usefixtures("alone")
def test_gradients_are_those_of_none_and_what_is_kept_is_not_made_twice(run, monkeypatch):
    documents, core, layers = run
    loss, gradients, *_ = step(documents, "none", monkeypatch)
    calls = {}
    for kind in ("full", "selective"):
        found, others, *calls[kind] = step(documents, kind, monkeypatch)
        assert torch.equal(found, loss)
        assert gradients.keys() == others.keys()
        assert all(torch.equal(others[name], g) for name, g in gradients.items())
    forward, again = calls["full"]
    assert again[core] == forward[core] == layers
    forward, again = calls["selective"]
    assert forward[core] == layers
    assert again[core] == 0
    # A layer with an odd number makes fewer; the last products of a layer may not be asked for.
    half = forward["product"] // 2
    assert half - 2 * len(documents.analysis.layers) <= again["product"] <= half
    assert again["aten.topk.default"] == 0


class Mixer(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.into, self.dropout = torch.nn.Linear(16, 48), dropout

    def forward(self, x_BTD):
        q, k, v = self.into(x_BTD).view(1, 8, 2, 24).transpose(1, 2).chunk(3, -1)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return torch.nn.functional.dropout(y, 0.5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_is_drawn_at_random_is_drawn_alike_again(dropout):
    mixer, x = Mixer(dropout), torch.randn(1, 8, 16)
    results = []
    for context in (replaying, selective(mixer)):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        checkpoint(mixer, leaf, use_reentrant=False, context_fn=context).square().sum().backward()
        results.append(leaf.grad)
    assert torch.equal(*results)


def test_a_core_that_draws_is_not_kept():
    attention, q = torch.ops.aten._scaled_dot_product_flash_attention.default, torch.empty(1)
    keeps = EverySecond(frozenset(), 0)
    assert keeps(attention, (q, q, q, 0.0), {})
    assert not keeps(attention, (q, q, q, 0.1), {})


def test_what_is_kept_and_then_changed_is_found():
    w = torch.randn(16, 16)
    x = torch.randn(4, 16).requires_grad_()
    y = checkpoint(
        lambda x: (x @ w).mul_(2).sin(),
        x,
        use_reentrant=False,
        context_fn=selective(torch.nn.Module()),
    )
    with pytest.raises(RuntimeError, match=r"mm.default is changed in place.*full"):
        y.sum().backward()
