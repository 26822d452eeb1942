"""Kimi-K3 of other shapes against a plain forward pass, token by token, in float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.analyzers import kimi_k3_reference as reference
from tests.analyzers.kimi_k3_samples import FIXTURE, random_model, released, text_config, tiny

T = 21
VARIANTS = {
    "released": {},
    "four layers": {
        "num_hidden_layers": 4,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
    },
    "blocks of one": {"attn_res_block_size": 1},
    "blocks that do not divide the layers": {"attn_res_block_size": 4},
    "one block": {"attn_res_block_size": 12},
    "low-rank gate": {"linear_attn_config": {"use_full_rank_gate": False}},
    "unbounded gate": {"linear_attn_config": {"gate_lower_bound": None}},
    "other bound, other taps": {
        "linear_attn_config": {"gate_lower_bound": -2.5, "short_conv_kernel_size": 2}
    },
    "heads of 64": {"linear_attn_config": {"head_dim": 64, "num_heads": 3}},
    "latent attention of other widths": {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "v_head_dim": 12,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 4,
    },
    "full-rank queries, no output gate": {"q_lora_rank": None, "mla_use_output_gate": False},
    "scaled experts": {"routed_scaling_factor": 2.5, "latent_moe_use_norm": False},
    "weights as scored": {"moe_renormalize": False, "latent_moe_use_norm": False},
    "groups of experts": {"num_experts": 16, "num_expert_group": 4, "topk_group": 2},
    "no latent space": {"routed_expert_hidden_size": None},
    "other latent width, one shared": {"routed_expert_hidden_size": 48, "num_shared_experts": 1},
    "other activation bounds": {
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 2.0,
    },
    "more dense layers": {"first_k_dense_replace": 3, "moe_layer_freq": 2},
    "tied embeddings": {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 128, (2, T), generator=torch.Generator().manual_seed(1))


def test_the_reference_itself_gives_another_implementations_logits():
    from safetensors.torch import load_file

    expected = load_file(FIXTURE / "expected.safetensors")
    weights = load_file(FIXTURE / "model.safetensors")
    logits = reference.logits(weights, text_config(), expected["input_ids"])
    torch.testing.assert_close(logits.float(), expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_computes_what_its_config_says(name, ids, tmp_path):
    model = random_model(tiny(**VARIANTS[name])).train()
    weights = released(model, tmp_path)
    table = weights["language_model.model.embed_tokens.weight"].requires_grad_()
    expected = reference.logits(weights, text_config(**VARIANTS[name]), ids)
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    torch.testing.assert_close(out.logits.double(), expected, atol=1e-4, rtol=0)
    gradients = {key: p.grad for key, p in model.named_parameters()}
    # The gradient of the embeddings has gone through every layer.
    found = gradients["model.embed_tokens.weight"]
    torch.testing.assert_close(found, table.grad, atol=1e-4, rtol=0)
    for key, gradient in gradients.items():
        assert gradient is not None, key
        assert gradient.isfinite().all(), key
        # The first site mixes a single value.
        assert gradient.any() or key.startswith("model.layers.0.self_attention_res."), key

    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
