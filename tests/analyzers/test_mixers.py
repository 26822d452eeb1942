"""Mixers read from tiny models of transformers; the expected sizes are those of their configs."""

import pytest
from torch import nn

from analyzers.mixers import is_mixer, recognise
from analyzers.models import build_on_meta
from analyzers.structure import kinds
from analyzers.tiny import tiny_config


def mixers(model_type: str) -> list:
    return [m for kind in kinds(build_on_meta(tiny_config(model_type))) for m in kind.mixers]


def one(model_type: str, name: str):
    return next(m for m in mixers(model_type) if m.name == name)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("bailing_hybrid", {"kda", "mla"}),
        ("dots3_note_text", {"sparse_topk", "sliding_attention"}),
        ("glm5_next", {"kda", "sparse_topk"}),
        ("minimax_m3_vl_text", {"full_attention", "block_sparse"}),
        ("deepseek_v4", {"compressed_attention", "compressed_sparse", "sliding_attention"}),
        ("qwen4_exp_text", {"gated_delta_net", "sparse_topk"}),
        ("nemotron_h", {"mamba2", "full_attention"}),
        ("zamba", {"mamba1", "full_attention"}),
        ("xlstm", {"mlstm"}),
        ("rwkv", {"rwkv"}),
        ("doge", {"sparse_topk"}),
        ("diffllama", {"differential_attention"}),
    ],
)
def test_mixers_of_each_family(model_type, names):
    assert {m.name for m in mixers(model_type)} == names


def test_rotary_positions_are_told_from_none():
    assert one("kimi_linear", "mla").attributes["rope"] is False
    assert one("deepseek_v3", "mla").attributes["rope"] is True
    llama4 = {m.name: m.attributes for m in mixers("llama4_text")}
    assert llama4["chunked_attention"]["rope"] is True
    assert llama4["chunked_attention"]["chunk"] == tiny_config("llama4_text").attention_chunk_size
    assert llama4["full_attention"]["rope"] is False
    assert one("nemotron_h", "full_attention").attributes["rope"] is False


def test_partial_rotation_gates_and_sinks():
    config = tiny_config("qwen3_next")
    attention = one("qwen3_next", "full_attention").attributes
    assert attention["rope_dim"] == config.head_dim // 4
    assert attention["output_gate"] is True
    assert one("gpt_oss", "sliding_attention").attributes["sinks"] is True
    plain = one("mixtral", "full_attention").attributes
    assert not {"rope_dim", "output_gate", "sinks", "window"} & set(plain)


def test_indexers_give_their_heads_width_and_pooling():
    config = tiny_config("glm5_next").get_text_config()
    glm = one("glm5_next", "sparse_topk").attributes
    assert glm["top_k"] == config.index_topk
    assert (glm["index_heads"], glm["index_dim"]) == (config.index_n_heads, config.index_head_dim)
    assert glm["index_pool"] == config.index_kpool
    blocks = one("minimax_m3_vl_text", "block_sparse").attributes
    config = tiny_config("minimax_m3_vl_text")
    assert blocks["top_k"] == config.index_topk_blocks * config.index_block_size


def test_a_layer_that_shares_the_selection_of_another_has_no_indexer_and_is_sparse():
    shared = [m for m in mixers("hy_v4") if "index_heads" not in m.attributes]
    assert [m.name for m in shared] == ["sparse_topk"]
    assert shared[0].attributes["top_k"] == tiny_config("hy_v4").index_topk


def test_compressed_attention_has_one_key_head_a_window_and_its_rates():
    config = tiny_config("deepseek_v4")
    heavy = one("deepseek_v4", "compressed_attention").attributes
    assert heavy["compress_rate"] == config.compress_rates["heavily_compressed_attention"]
    assert (heavy["kv_heads"], heavy["window"]) == (1, config.sliding_window)
    assert "top_k" not in heavy
    sparse = one("deepseek_v4", "compressed_sparse").attributes
    assert sparse["compress_rate"] == config.compress_rates["compressed_sparse_attention"]
    assert sparse["top_k"] == config.index_topk


def test_the_maps_of_differential_attention_weigh_the_values_of_two_heads():
    attributes = one("diffllama", "differential_attention").attributes
    assert attributes["value_dim"] == 2 * attributes["key_dim"]


def test_state_space_sizes():
    config = tiny_config("jamba")
    mamba = one("jamba", "mamba1").attributes
    assert mamba["channels"] == config.mamba_expand * config.hidden_size
    assert mamba["key_dim"] == config.mamba_d_state
    assert mamba["conv_kernel_size"] == config.mamba_d_conv
    lru = one("recurrent_gemma", "rg_lru").attributes
    assert lru["channels"] == tiny_config("recurrent_gemma").lru_width


def test_attention_that_approximates_stays_unnamed():
    assert {m.name for m in mixers("nystromformer")} == {"other"}


def test_what_has_no_queries_and_keys_is_no_mixer():
    feed_forward = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    assert not is_mixer(feed_forward)
    assert recognise(feed_forward, None) is None


@pytest.mark.parametrize("model_type", ["mixtral", "mistral", "qwen3_moe", "phimoe"])
def test_a_window_in_the_config_alone_is_one_of_every_layer(model_type):
    # transformers masks so wherever the config names no types of layers (modeling_mixtral.py).
    config = tiny_config(model_type)
    config.sliding_window = 6
    found = [m for kind in kinds(build_on_meta(config)) for m in kind.mixers]
    assert {(m.name, m.attributes["window"]) for m in found} == {("sliding_attention", 6)}


def test_a_window_that_no_layer_has_masks_nothing():
    config = tiny_config("gpt_oss")
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    found = [m for kind in kinds(build_on_meta(config)) for m in kind.mixers]
    assert {m.name for m in found} == {"full_attention"}
