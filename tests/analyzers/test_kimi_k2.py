"""Kimi-K2 is DeepSeek-V3 by another name: same weights, same names of weights, same logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from analyzers.models import load_config, register_own_models

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


@pytest.fixture(scope="module")
def deepseek():
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_mtp_layers=0,
    )
    return DeepseekV3ForCausalLM(config).eval()


def test_checkpoint_in_the_released_names_gives_deepseeks_logits(deepseek, tmp_path):
    register_own_models()
    deepseek.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert "model.layers.1.mlp.experts.3.down_proj.weight" in stored.keys()  # noqa: SIM118
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "KimiK2ForCausalLM"
    ids = torch.arange(12)[None]
    torch.testing.assert_close(model(ids).logits, deepseek(ids).logits)

    model.save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as stored:
        assert "model.layers.1.mlp.experts.3.down_proj.weight" in stored.keys()  # noqa: SIM118


def test_released_config_states_the_defaults(tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "kimi-k2-instruct.json").read_text())
    released = load_config(tmp_path)
    default = type(released)()
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "n_routed_experts",
        "first_k_dense_replace",
        "n_group",
        "routed_scaling_factor",
        "num_mtp_layers",
        "max_position_embeddings",
    ):
        assert getattr(released, name) == getattr(default, name), name
