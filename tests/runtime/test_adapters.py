import pytest
import torch

from analyzers.errors import InputError
from analyzers.models import build_on_meta, load_config
from runtime.adapters import LoraLinear, adapter_parameters, initialise_adapters, insert_adapters
from runtime.sharding import keep_float32
from strategies.schema import Lora


def built(folder, analysis, lora=None, device="cpu"):
    model = build_on_meta(load_config(folder), dtype=torch.float32)
    insert_adapters(model, lora or Lora(), analysis)
    return model.to_empty(device=device) if device != "meta" else model


def test_only_adapters_are_trainable_and_base_names_stay(small_model, small_analysis):
    plain = build_on_meta(load_config(small_model), dtype=torch.float32)
    model = built(small_model, small_analysis, device="meta")
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == set(adapter_parameters(model))
    assert set(plain.state_dict()) == set(model.state_dict()) - trainable
    assert {p.dtype for p in adapter_parameters(model).values()} == {torch.float32}


def test_routed_experts_means_the_bank_and_not_the_shared_expert(small_model, small_analysis):
    # vllm#47088: targets that hit the shared experts instead of the routed ones.
    # unsloth#6936: experts left frozen although the log says otherwise.
    lora = Lora(targets=["routed_experts"])
    names = set(adapter_parameters(built(small_model, small_analysis, lora, "meta")))
    assert names
    assert all(".mlp.experts.lora_" in n for n in names)
    shared = Lora(targets=["shared_experts"])
    names = set(adapter_parameters(built(small_model, small_analysis, shared, "meta")))
    assert names
    assert all(".shared_experts." in n for n in names)


def test_every_attention_linear_is_adapted(small_model, small_analysis):
    model = built(small_model, small_analysis, Lora(targets=["attention"]), "meta")
    left = [
        name
        for name, module in model.named_modules()
        if "self_attn" in name and type(module) is torch.nn.Linear
    ]
    assert left == []
    assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj"), LoraLinear)


def test_experts_start_different_and_the_same_every_time(small_model, small_analysis):
    # One seed for all ranks gives experts 0, 2, 4, ... the same factor when DTensors are drawn.
    model, again = (built(small_model, small_analysis) for _ in range(2))
    for made in (model, again):
        initialise_adapters(made, seed=3)
    other = built(small_model, small_analysis)
    initialise_adapters(other, seed=4)
    for (name, a), b, c in zip(
        adapter_parameters(model).items(),
        adapter_parameters(again).values(),
        adapter_parameters(other).values(),
        strict=True,
    ):
        assert torch.equal(a, b), name
        if name.endswith("_B"):
            assert not a.any(), name
        else:
            assert not torch.equal(a, c), name
            assert len({tuple(row.flatten().tolist()) for row in a}) == a.shape[0], name
            bound = a.shape[-1] ** -0.5
            assert bound * 0.8 < float(a.abs().max()) <= bound


def test_a_target_that_names_nothing_is_refused(small_model, small_analysis):
    from dataclasses import replace

    empty = replace(small_analysis, blocks=[])
    with pytest.raises(InputError, match=r"lora.targets: 'attention' names nothing"):
        built(small_model, empty, device="meta")


def test_router_and_decay_rates_stay_float32_in_a_bfloat16_model(small_model):
    # prime-rl#3411, TensorRT-LLM#13328: a correction bias in bfloat16 changes the chosen experts.
    model = build_on_meta(load_config(small_model), dtype=torch.bfloat16)
    keep_float32(model)
    state = model.state_dict()
    islands = ("A_log", "dt_bias", "mlp.gate.weight", "e_score_correction_bias")
    for island in islands:
        found = [t.dtype for n, t in state.items() if n.endswith(island)]
        assert found, island
        assert set(found) == {torch.float32}, island
    assert state["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
