"""What the names of fields do not say, by model type."""

from __future__ import annotations

from typing import Any

from analyzers.tiny.sizes import EXPERTS, HEAD_DIM, HEADS, HIDDEN, ROPE_DIM, TOP_K, WINDOW

OVERRIDES: dict[str, dict[str, Any]] = {
    # Hybrids that have one kind of layer by default.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": {"text_config.layer_types": ["conv", "full_attention"]},
    # Read by its code, not in its defaults.
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": TOP_K,
    },
    "deepseek_v2": {"num_experts_per_tok": TOP_K, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates.heavily_compressed_attention": 16,
    },
    "diffusion_gemma": {
        "text_config.num_experts": EXPERTS,
        "text_config.top_k_experts": TOP_K,
        "text_config.moe_intermediate_size": 64,
    },
    "doge": {"is_moe": True},
    "dots1": {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "dots3_note": {"text_config.head_dim": HEAD_DIM + ROPE_DIM},
    "dots3_note_text": {"head_dim": HEAD_DIM + ROPE_DIM},
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [6, 6, 4]},
    "gemma4": {
        "text_config.enable_moe_block": True,
        "text_config.num_experts": EXPERTS,
        "text_config.top_k_experts": TOP_K,
        "text_config.moe_intermediate_size": 64,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": EXPERTS,
        "top_k_experts": TOP_K,
        "moe_intermediate_size": 64,
    },
    "glm4v_moe": {"text_config.rope_parameters.mrope_section": [2, 3, 3]},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": EXPERTS, "moe_topk": TOP_K},
    "inkling2_loop": {
        "text_config.num_hidden_layers": 6,
        "text_config.layer_types": ["hybrid_sliding", "hybrid"] * 3,
        "text_config.mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "text_config.n_layers_per_attn_res_block": 2,
        "text_config.loop_layer_index_start": 2,
        "text_config.loop_layer_index_end": 4,
    },
    "inkling2_loop_text": {
        "num_hidden_layers": 6,
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    # With fewer layers than scales, its plan of scales needs scipy.
    "inkling_mm_model": {"vision_config.n_layers": 4, "vision_config.patch_size": 4},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 2 * HIDDEN // HEAD_DIM},
    "minimax_m3_vl": {
        "text_config.num_hidden_layers": 3,
        "text_config.layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "text_config.mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "mistral4": {"rope_parameters.partial_rotary_factor": ROPE_DIM / (HEAD_DIM + ROPE_DIM)},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "qwen3_omni_moe": {
        "talker_config.text_config.shared_expert_intermediate_size": 64,
        "talker_config.spatial_merge_size": 2,
    },
    "qwen4_exp": {
        "text_config.indexer_n_heads": 2,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": HEAD_DIM,
        "text_config.indexer_budget": 16,
        "text_config.indexer_compress_ratio": 4,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},  # its pattern of three
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [HIDDEN // 4, 3 * HIDDEN // 4]},
    "step3p7": {"text_config.sliding_window": WINDOW},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "unlimited_ocr": {"text_config.num_experts_per_tok": TOP_K},
    "xlstm": {"num_blocks": 2, "embedding_dim": HIDDEN},
    # The weights of later hybrid layers are tied to the first.
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HIDDEN // HEADS,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HIDDEN // HEADS,
    },
}
"""By model type: values that the rules below do not find, at dotted paths of the config."""
