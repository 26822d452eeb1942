"""Generated kernels around the experts of whole models: bound, called, right, taken out again."""

from dataclasses import replace

import pytest
import torch

from analyzers import analyze
from analyzers.errors import InputError
from codegen import bind, load_kernels
from runtime.adapters import adapter_parameters, initialise_adapters, insert_adapters
from runtime.experts import experts_of, use_own_experts
from runtime.experts.lists import stack_expert_lists
from runtime.experts.replay import replaying
from runtime.experts.stacked import IMPLEMENTATION
from runtime.operators import operators_vs_reference
from runtime.packing import Dataset, collate
from runtime.step import loss_sum
from runtime.tokens import Example
from strategies.schema import Lora
from tests.runtime.runs import save_qwen, write_kernels

CPU = torch.device("cpu")
NAMES = ["moe_combine", "moe_order", "moe_reroute", "moe_spread"]
CALLED = ["moe_combine", "moe_order", "moe_spread"]
"""Without a capacity."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A small mixture of experts with adapters, its kernels, their folder and a batch."""
    from transformers import AutoModelForCausalLM

    folder = save_qwen(tmp_path_factory.mktemp("rows") / "model", experts=8)
    analysis = analyze(folder)
    kernels = write_kernels(folder.parent, analysis, prefer="generated")
    assert [k.operator for k in kernels if k.operator in NAMES] == NAMES
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    insert_adapters(model, Lora(rank=4, targets=["attention", "routed_experts"]), analysis)
    initialise_adapters(model, 0)
    for key, parameter in adapter_parameters(model).items():
        if key.endswith("_B"):
            torch.nn.init.normal_(parameter, std=0.05)
    use_own_experts(model)
    ids = torch.randint(3, 200, (2, 19), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Dataset([Example(row, row) for row in ids], truncated=0).rows([0, 1])
    return model.train(), folder.parent / "kernels", collate(rows, 19, 0)


def row_kernels(folder):
    return [loaded for loaded in load_kernels(folder) if loaded.kernel.operator in NAMES]


def outcome(model, batch):
    loss = loss_sum(model, batch, CPU)
    return [loss, *torch.autograd.grad(loss, list(adapter_parameters(model).values()))]


def test_a_model_with_the_kernels_has_the_same_loss_and_gradients(built):
    model, folder, batch = built
    plain = outcome(model, batch)
    calls = []

    def counted(loaded):
        def function(*args, **kwargs):
            calls.append(loaded.kernel.operator)
            return loaded.function(*args, **kwargs)

        return replace(loaded, function=function)

    with bind(model, map(counted, row_kernels(folder))):
        bound = outcome(model, batch)
    assert calls == ["moe_order", "moe_spread", "moe_combine"] * len(experts_of(model))
    for one, two in zip(bound, plain, strict=True):
        torch.testing.assert_close(one, two)
    outcome(model, batch)
    assert len(calls) == 3 * len(experts_of(model)), "called after it was taken out"


def test_a_recomputed_layer_calls_them_again(built):
    model, folder, batch = built
    plain = outcome(model, batch)
    kwargs = {"use_reentrant": False, "context_fn": replaying}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    try:
        with bind(model, row_kernels(folder)):
            recomputed = outcome(model, batch)
    finally:
        model.gradient_checkpointing_disable()
    for one, two in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(one, two)


def test_experts_get_a_kernel_once(built):
    model, folder, _ = built
    with bind(model, row_kernels(folder)), pytest.raises(InputError, match="moe_combine"):
        bind(model, row_kernels(folder))
    assert not any(name in module.__dict__ for module in model.modules() for name in NAMES)


def test_a_model_without_experts_cannot_take_them(built):
    _, folder, _ = built
    with pytest.raises(InputError, match="no experts"):
        bind(torch.nn.Linear(2, 2), row_kernels(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrong", [None, *CALLED])
def test_each_kernel_is_compared_on_values_of_the_model(built, monkeypatch, wrong, dtype):
    model, folder, batch = built
    kernels = row_kernels(folder)

    def spoiled(loaded):
        def function(*args, **kwargs):
            out = loaded.function(*args, **kwargs)
            return (out[0].flip(0), *out[1:]) if isinstance(out, tuple) else out * 1.1

        return replace(loaded, function=function) if loaded.kernel.operator == wrong else loaded

    monkeypatch.setattr("codegen.load_kernels", lambda _: [spoiled(loaded) for loaded in kernels])
    checks = operators_vs_reference(model, folder, batch, CPU, dtype)
    assert [c.name.removeprefix("operators_vs_reference_") for c in checks] == CALLED
    assert [c.passed for c in checks] == [name != wrong for name in CALLED], checks


def test_a_stock_model_is_left_as_it_was(built):
    from transformers import AutoModelForCausalLM

    _, folder, batch = built
    stock = AutoModelForCausalLM.from_pretrained(folder.parent / "model", dtype=torch.float32)
    before = stock.config._experts_implementation
    assert before != IMPLEMENTATION
    checks = operators_vs_reference(stock, folder, batch, CPU, torch.float32)
    assert all(c.passed for c in checks), checks
    assert stock.config._experts_implementation == before


def test_experts_in_a_list_get_them_too(built):
    class Expert(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 12)
            self.down = torch.nn.Linear(12, 8)

        def forward(self, x):
            return self.down(self.up(x).relu())

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(Expert() for _ in range(3))

        def forward(self, x):
            return sum(self.experts[e](x[e::3]).sum() for e in range(3))

    _, folder, _ = built
    torch.manual_seed(0)
    block, x = Block(), torch.randn(7, 8)
    want = block(x)
    stack_expert_lists(block, 3)
    with bind(block, row_kernels(folder)) as binding:
        assert len(binding.given) == len(NAMES)
        torch.testing.assert_close(block(x), want)
