"""The generic shrinker, on hand-written levels and on configs of transformers."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from analyzers.models import build_on_meta
from analyzers.tiny import HEAD_DIM, HIDDEN, shrink, tiny_config


def test_heads_times_their_width_stays_the_hidden_width_and_groups_stay():
    level = shrink(
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128_256,
        }
    )
    assert level["num_attention_heads"] * level["head_dim"] == level["hidden_size"]
    assert level["num_attention_heads"] % level["num_key_value_heads"] == 0
    assert 1 < level["num_key_value_heads"] < level["num_attention_heads"]


def test_token_ids_lie_in_the_shrunk_vocabulary():
    level = shrink({"vocab_size": 151_936, "image_token_id": 151_655, "eos_token_id": [1, 151_645]})
    ids = [level["image_token_id"], *level["eos_token_id"]]
    assert all(i < level["vocab_size"] for i in ids)
    assert level["eos_token_id"][0] == 1


def test_one_layer_of_every_kind_stays_in_order():
    level = shrink(
        {
            "num_hidden_layers": 8,
            "layer_types": ["linear", "linear", "linear", "full"] * 2,
            "mlp_layer_types": ["dense"] + ["sparse"] * 7,
        }
    )
    assert level["num_hidden_layers"] == 3
    assert level["layer_types"] == ["linear", "linear", "full"]
    assert level["mlp_layer_types"] == ["dense", "sparse", "sparse"]


def test_lists_of_layer_numbers_follow_the_layers_that_stay():
    level = shrink({"num_hidden_layers": 6, "global_attn_indexes": [2, 5]})
    assert level["num_hidden_layers"] == 2
    assert level["global_attn_indexes"] == [1]


def test_fields_that_single_layers_have_otherwise_follow_them():
    level = shrink(
        {"num_hidden_layers": 4, "head_dim": 256, "per_layer_config": {"03": {"head_dim": 512}}}
    )
    assert level["per_layer_config"] == {"01": {"head_dim": 2 * HEAD_DIM}}


def test_rotary_sections_sum_to_half_of_the_rotated_width():
    rope = {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    level = shrink({"head_dim": 256, "rope_parameters": rope})
    assert sum(level["rope_parameters"]["mrope_section"]) == HEAD_DIM * 0.25 / 2


def test_top_k_fits_the_experts_of_the_groups_that_are_left():
    level = shrink(
        {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
    )
    in_groups = level["n_routed_experts"] // level["n_group"] * level["topk_group"]
    assert level["num_experts_per_tok"] <= in_groups


def test_towers_are_shrunk_by_themselves_and_meet_the_text_model():
    level = shrink(
        {
            "text_config": {"hidden_size": 2048, "num_hidden_layers": 48},
            "vision_config": {"hidden_size": 1152, "out_hidden_size": 2048, "depth": 27},
        }
    )
    assert level["vision_config"]["out_hidden_size"] == level["text_config"]["hidden_size"]
    assert level["vision_config"]["depth"] == 1
    assert level["text_config"]["num_hidden_layers"] == 2


@pytest.mark.parametrize("model_type", ["deepseek_v4", "qwen3_5_moe", "jamba", "gemma4_text"])
def test_a_tiny_config_builds_a_small_model_of_every_kind_of_layer(model_type):
    config = tiny_config(model_type)
    model = build_on_meta(config)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000
    text, whole = config.get_text_config(), CONFIG_MAPPING[model_type]().get_text_config()
    assert text.hidden_size == HIDDEN
    assert set(text.layer_types) >= set(whole.layer_types)
