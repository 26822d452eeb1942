"""Generated kernels in the place of the torch form of adapted experts: the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from analyzers import analyze
from analyzers.backends import load_backend
from codegen import LoadedKernel, bind, map_operators
from codegen.build import kernel_of, render_choice
from codegen.load import import_file
from runtime.adapters import adapter_parameters, initialise_adapters, insert_adapters
from runtime.experts import experts_of, use_own_experts
from strategies.schema import Lora
from tests.runtime.test_experts import IDS, config_of

KINDS = ["qwen3_moe", "nemotron_h", "gpt_oss"]


@pytest.fixture(scope="module", params=KINDS)
def adapted(request, tmp_path_factory):
    """A model with random adapters on its experts, and the kernel of its experts."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    config = config_of(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    backend = load_backend("cpu")
    choices = map_operators(analyze(folder), backend, prefer="generated").operators
    (choice,) = (c for c in choices if c.operator == "experts")
    rendered = render_choice(choice, [choice], backend, [])
    for name, text in rendered.files.items():
        (folder / name).write_text(text, "utf-8")
    kernel = kernel_of(choice, rendered, gates=[])
    function = getattr(import_file(folder / rendered.module, request.param), kernel.function)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    use_own_experts(model)
    return model, LoadedKernel(kernel=kernel, function=function), folder


def outcome(model):
    loss = model(IDS, labels=IDS).loss
    factors = adapter_parameters(model)
    gradients = torch.autograd.grad(loss, list(factors.values()))
    return loss.detach(), dict(zip(factors, gradients, strict=True))


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared A"])
def test_losses_and_gradients_are_those_of_the_torch_form(adapted, shared):
    model, loaded, _ = adapted
    lora = Lora(rank=3, alpha=6.0, targets=["routed_experts"], shared_a=shared)
    own = {name: set(module._parameters) for name, module in model.named_modules()}
    insert_adapters(model, lora, analysis=None)  # type: ignore[arg-type]
    try:
        initialise_adapters(model, seed=0)
        for name, parameter in model.named_parameters():
            if name.endswith("_B"):
                torch.nn.init.normal_(parameter, std=0.5)
        calls = []

        def counted(*args, **kwargs):
            calls.append(kwargs["activation"])
            return loaded.function(*args, **kwargs)

        loss, gradients = outcome(model)
        with bind(model, [LoadedKernel(kernel=loaded.kernel, function=counted)]):
            assert all("adapted_linear" in vars(m) for m in experts_of(model).values())
            again, others = outcome(model)
        torch.testing.assert_close(again, loss, atol=1e-6, rtol=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
        # The gate of GPT-OSS is of its own kind.
        fused = {"qwen3_moe": "silu", "nemotron_h": "relu2", "gpt_oss": None}
        assert calls == [fused[model.config.model_type], None] * len(experts_of(model))
        assert not any("adapted_linear" in vars(m) for m in experts_of(model).values())
    finally:
        for name, module in model.named_modules():
            for key in set(module._parameters) - own[name]:
                delattr(module, key)
            if hasattr(module, "lora_shared"):
                del module.lora_shared


def test_the_kernel_is_checked_on_a_plain_model(adapted, monkeypatch):
    from runtime.operators import operators_vs_reference

    model, loaded, folder = adapted
    kinds = [m.config._experts_implementation for m in experts_of(model).values()]
    monkeypatch.setattr("codegen.load_kernels", lambda folder: [loaded])
    logits = torch.no_grad()(lambda model, batch, device: model(IDS))
    monkeypatch.setattr("runtime.operators.logits_of", logits)
    model.requires_grad_(True)  # as a plain model is
    cpu = torch.device("cpu")
    (check,) = operators_vs_reference(model, folder, None, cpu, torch.float32)  # type: ignore
    assert check.passed, check
    assert [m.config._experts_implementation for m in experts_of(model).values()] == kinds
    assert not any("lora_" in key for m in model.modules() for key in vars(m))


@pytest.mark.parametrize("packed", [False, True], ids=["", "mxfp4"])
def test_the_gate_of_kimi_k3_is_in_the_kernel(tmp_path, packed):
    from analyzers.models import load_config
    from analyzers.models.kimi_k3.modeling_kimi_k3 import KimiK3Experts
    from analyzers.schema import BANKS
    from codegen.members import load_members
    from codegen.render import render
    from runtime.experts.activations import activation_of
    from runtime.experts.fan import Pairs
    from runtime.experts.stacked import adapted_linear
    from runtime.packed import keep_packed

    torch.manual_seed(0)
    config = load_config("examples/models/tiny-kimi-k3").get_text_config(decoder=True)
    experts: Any = KimiK3Experts(config).requires_grad_(False)
    count, outs, ins = experts.gate_up_proj.shape
    experts.gate_up_proj.data = torch.randn(count, outs, ins)
    experts.lora_gate_up_proj_A = torch.nn.Parameter(torch.randn(count, 3, ins))
    experts.lora_gate_up_proj_B = torch.nn.Parameter(torch.randn(count, outs, 3))
    experts.lora_scale, experts.lora_dropout = 0.5, 0.0
    if packed:
        keep_packed(torch.nn.ModuleDict({"experts": experts}))
        experts.gate_up_proj_codes.data.random_(256)
        experts.gate_up_proj_scales.data.random_(120, 127)
    pairs = Pairs.of(torch.randint(count, (40, 1)), count, 40)
    x, activation = torch.randn(40, ins), activation_of(experts)
    assert activation.name == "situ"
    want = adapted_linear(experts, "gate_up_proj", x, pairs, activation)
    made = render(load_members()["grouped_lora"], load_backend("cpu"), {})
    (tmp_path / made.module).write_text(made.files[made.module], "utf-8")
    kernel = import_file(tmp_path / made.module, f"kernel_of_kimi_k3_{packed}").grouped_lora
    setattr(experts, BANKS, kernel)
    found = adapted_linear(experts, "gate_up_proj", x, pairs, activation)
    assert found.shape == (40, outs // 2)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
