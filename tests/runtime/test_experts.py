"""Experts and their adapters against transformers' own forward and PEFT's own wrapper."""

import pytest
import torch

from runtime.adapters import banks, initialise_adapters, insert_adapters
from runtime.experts import Recorder, experts_of, recorder, use_own_experts
from runtime.peft_format import peft_config, peft_tensors
from strategies.schema import Job, Lora

KINDS = ["qwen3_moe", "gpt_oss", "nemotron_h"]


def config_of(kind):
    from transformers import AutoConfig

    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts_per_tok": 2,
    }
    more = {
        "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 6, "decoder_sparse_step": 1},
        "gpt_oss": {"num_local_experts": 6, "layer_types": ["full_attention"] * 2},
        "nemotron_h": {
            "layers_block_type": ["attention", "moe"],
            "n_routed_experts": 6,
            "moe_intermediate_size": 24,
            "moe_latent_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
        },
    }
    return AutoConfig.for_model(kind, **(small | more[kind]))


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A stock model and ours with the same weights, ours with random expert adapters."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config_of(request.param), dtype=torch.float32)
    for parameter in stock.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    stock.save_pretrained(folder, save_original_format=False)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    use_own_experts(own)
    # Rank differs from the number of experts, so a wrong packing cannot look right.
    lora = Lora(rank=3, alpha=6.0, targets=["routed_experts"])
    insert_adapters(own, lora, analysis=None)
    initialise_adapters(own, seed=0)
    for name, parameter in own.named_parameters():
        if name.endswith("_B"):
            torch.nn.init.normal_(parameter, std=0.5)
    return stock, own, lora, folder


IDS = torch.arange(40).view(2, 20) % 64


def job(folder, lora):
    return Job(model=str(folder), cluster="", backend="cpu", lora=lora)


def save(own, lora, folder):
    from runtime.peft_format import save_adapter

    save_adapter(own, job(folder, lora), folder / "adapter")
    return folder / "adapter"


def test_without_adapters_the_logits_are_transformers_own(pair):
    stock, own, _, _ = pair
    scales = [(m, m.lora_scale) for m in experts_of(own).values()]
    for module, _ in scales:
        module.lora_scale = 0.0
    with torch.no_grad():
        torch.testing.assert_close(own(IDS).logits, stock(IDS).logits, atol=1e-5, rtol=1e-5)
    for module, scale in scales:
        module.lora_scale = scale


def test_adapters_give_the_logits_of_stock_peft(pair):
    # Automodel#3626: a round trip through one's own converter cannot see a transpose.
    # unsloth#6930, unsloth-zoo#1269: lora_B read with the expert slowest. vllm#52194: delta turned.
    # unsloth-zoo#779: layout guessed from the shape.
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, own, lora, folder = pair
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        base = stock(IDS).logits
        adapted = PeftModel.from_pretrained(stock, str(save(own, lora, folder)))(IDS).logits
        mine = own(IDS).logits
    assert float((adapted - base).abs().max()) > 1e-2
    torch.testing.assert_close(mine, adapted, atol=1e-4, rtol=0)


def test_gradients_reach_every_expert_factor(pair):
    # unsloth-zoo#606, #1242: adapters on experts without gradient, silently. unsloth#11014: only
    # the down projection is adapted.
    _, own, _, _ = pair
    own(IDS, labels=IDS).loss.backward()
    factors = {n: p for n, p in own.named_parameters() if "lora_" in n}
    modules = experts_of(own)
    assert len(factors) == 4 * len(modules)
    for name, parameter in factors.items():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().sum()) > 0, name
    assert all(p.grad is None for n, p in own.named_parameters() if n not in factors)


def test_wrapped_names_are_those_of_the_first_and_last_bank(pair):
    # Square experts without a gate would load swapped names without an error.
    _, own, lora, folder = pair
    names = peft_tensors(own)
    for module, experts in experts_of(own).items():
        first, last = banks(experts)
        inner = names[f"base_model.model.{module}.base_layer.lora_A.weight"]
        outer = names[f"base_model.model.{module}.lora_A.weight"]
        factor = getattr(experts, f"lora_{first}_A")
        assert torch.equal(inner, factor.reshape(-1, factor.shape[-1]))
        factor = getattr(experts, f"lora_{last}_A")
        assert torch.equal(outer, factor.reshape(-1, factor.shape[-1]))
    config = peft_config(own, job(folder, lora))
    assert len(config["target_parameters"]) == 2 * len(experts_of(own))


def test_an_expert_without_tokens_has_a_zero_gradient(pair):
    # torchtitan#1237, MSLK#158, pytorch#193633: NaN or uninitialised where no row goes.
    from runtime.checks import first_experts_only

    _, own, _, _ = pair
    own.zero_grad()
    with first_experts_only(own):
        own(IDS, labels=IDS).loss.backward()
    for module in experts_of(own).values():
        for name, parameter in module.named_parameters(recurse=False):
            if name.startswith("lora_"):
                assert torch.equal(parameter.grad[2:], torch.zeros_like(parameter.grad[2:])), name
                assert torch.isfinite(parameter.grad).all()


def test_gradients_that_a_grouped_gemm_leaves_unwritten_are_zero(pair, monkeypatch):
    # pytorch#172439: on Blackwell the weight gradients of groups without rows are garbage.
    from runtime.checks import first_experts_only
    from runtime.experts import stacked

    class Dirty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, offsets):
            ctx.save_for_backward(offsets)
            return weight.clone()

        @staticmethod
        def backward(ctx, grad):
            (offsets,) = ctx.saved_tensors
            empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
            return torch.where(empty.view(-1, 1, 1), float("nan"), grad), None

    plain = stacked.F.grouped_mm
    monkeypatch.setattr(
        stacked.F, "grouped_mm", lambda x, w, offs: plain(x, Dirty.apply(w, offs), offs=offs)
    )
    _, own, _, _ = pair
    own.zero_grad()
    with first_experts_only(own):
        own(IDS, labels=IDS).loss.backward()
    for name, parameter in own.named_parameters():
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), name


def test_padding_is_not_counted_as_load(pair):
    _, own, _, _ = pair
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[:, 15:] = False
    recorder.take()
    with torch.no_grad(), recorder.recording(valid):
        own(IDS)
    with torch.no_grad():
        own(IDS)  # outside: a recomputed forward
    counts = recorder.take()
    assert len(counts) == len(experts_of(own))
    assert all(int(c.sum()) == 30 * 2 and int(c[-1]) == 0 for c in counts)
    assert Recorder().take() == []
