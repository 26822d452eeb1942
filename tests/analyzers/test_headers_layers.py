"""Which layers have which mixer and feed-forward, as configs without a class say it."""

import pytest

from analyzers.headers.keys import GenericConfig, feed_forwards, mixers

LETTERS = {"full": "F", "sliding": "S", "chunked": "C", "linear": "L", "mamba": "M", "none": "-"}
FEED = {"dense": "d", "moe": "E", "none": "-"}


def config(**data) -> GenericConfig:
    return GenericConfig(data, "m", "no class")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # Ring-linear: the last of each group of five, and all of a group that is not full
        ({"layer_group_size": 5}, "LLLLFLLLLFFF"),
        ({"full_attention_interval": 4}, "LLLFLLLFLLLF"),  # Qwen3-Next
        ({"linear_attn_config": {"kda_layers": [1, 2, 4]}}, "LLFLFFFFFFFF"),  # Kimi: from one
        ({"attn_type_list": [0, 0, 1] * 4}, "LLFLLFLLFLLF"),  # MiniMax-01
        ({"layer_types": ["linear_attention", "full_attention"] * 6}, "LFLFLFLFLFLF"),
        ({"layer_types": ["sliding_attention", "chunked_attention"] * 6}, "SCSCSCSCSCSC"),
        ({"layers_block_type": ["mamba", "attention", "moe"] * 4}, "MF-MF-MF-MF-"),
        ({"hybrid_override_pattern": "MEM*E-MEM*E-"}, "M-MF--M-MF--"),  # Nemotron-H
        ({"attn_layer_period": 4, "attn_layer_offset": 2}, "MMFMMMFMMMFM"),  # Jamba
        ({"sliding_window": 64}, "SSSSSSSSSSSS"),
        ({"sliding_window": 64, "sliding_window_pattern": 3}, "SSFSSFSSFSSF"),  # Gemma
        ({"sliding_window": 64, "use_sliding_window": False}, "FFFFFFFFFFFF"),  # Qwen
        ({"attention_chunk_size": 64, "no_rope_layers": [1, 1, 0] * 4}, "CCFCCFCCFCCF"),  # Llama-4
        ({"layer_types": ["linear_attention"]}, "FFFFFFFFFFFF"),  # too short to be of the layers
        ({}, "FFFFFFFFFFFF"),
    ],
)
def test_mixers(data, expected):
    assert "".join(LETTERS[m] for m in mixers(config(**data), 12)) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, "EEEEEEEE"),
        ({"first_k_dense_replace": 3}, "dddEEEEE"),  # DeepSeek
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, "ddEdEdEd"),
        ({"moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1]}, "dEEEEEEE"),  # MiMo
        ({"decoder_sparse_step": 2}, "dEdEdEdE"),  # Qwen3-MoE: the last of each two
        ({"mlp_only_layers": [0, 5]}, "dEEEEdEE"),
        ({"interleave_moe_layer_step": 4}, "dddEdddE"),  # Llama-4
        ({"moe_layers": [1, 2]}, "dEEddddd"),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 7}, "dEEEEEEE"),
        ({"hybrid_override_pattern": "MEM*E-ME"}, "-E--Ed-E"),
        ({"num_experts": None}, "dddddddd"),
    ],
)
def test_feed_forwards(data, expected):
    found = feed_forwards(config(**{"num_experts": 8, **data}), 8)
    assert "".join(FEED[f] for f in found) == expected


def test_sizes_go_by_their_usual_names_also_in_a_nested_text_part():
    made = config(
        model_type="m",
        vision_config={"hidden_size": 3},
        text_config={"n_embd": 64, "n_layer": 2, "num_experts_per_token": 4, "dtype": "bfloat16"},
        vocab_size=100,
    )
    assert (made.hidden_size, made.num_hidden_layers, made.vocab_size) == (64, 2, 100)
    assert (made.num_experts_per_tok, made.num_experts, made.dtype) == (4, None, "bfloat16")


@pytest.mark.parametrize("value", ["64", 0, -1, 2**40, True, 1.5, None, [64]])
def test_what_is_no_size_is_not_taken_for_one(value):
    assert config(hidden_size=value, d_model=32).hidden_size == 32
