"""Softmax attention over all keys, a window or a chunk of them, with plain or latent keys."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from analyzers.mixers.mixer import Attributes, Mixer, first_of, has, layer_type, names_in, width

QUERIES = ("q_proj", "query", "q", "q_b_proj", "query_proj")
KEYS = ("k_proj", "key", "k", "key_proj")
FUSED = ("qkv_proj", "Wqkv", "query_key_value", "c_attn", "kv_proj")
# Of encoders that do not attend to every pair: hashes, landmarks, low-rank and random blocks.
APPROXIMATE = (
    "chunk_length",
    "num_landmarks",
    "hash_code_len",
    "approx_mode",
    "num_random_blocks",
)
GATES = ("gate_proj", "g_proj", "q_gate_proj", "output_gate", "gate_per_head")
SINKS = ("sinks", "attention_sink_bias", "sink", "sink_proj")
OPERATOR = "scaled_dot_product_attention"


def is_attention(module: Any) -> bool:
    """With separate projections, or a fused one of known heads."""
    if any(hasattr(module, name) for name in APPROXIMATE):
        return False
    if _child(module, QUERIES) and _child(module, KEYS):
        return True
    return has(module, "head_dim") and _child(module, FUSED)


def _child(module: Any, names: tuple[str, ...]) -> bool:
    return any(isinstance(getattr(module, name, None), nn.Module) for name in names)


def attention(module: Any, config: Any) -> Mixer:
    """Separate or fused q, k, v projections; grouped keys; maybe a window or chunk; maybe the
    difference of two maps (Ye et al. 2024, arXiv 2410.05258)."""
    attributes = heads(module, config) | variant(module, config)
    if has(module, "lambda_q1", "lambda_k1"):  # every map weighs the values of two heads
        attributes["value_dim"] = 2 * int(attributes["value_dim"])
        return Mixer("differential_attention", OPERATOR, attributes)
    return reach(module, config, attributes)


def reach(module: Any, config: Any, attributes: Attributes) -> Mixer:
    """Attention over as many keys as the module or its layer's type says."""
    kind = layer_type(module, config)
    window = first_of(module, "sliding_window")
    if sides := first_of(module, "one_sided_attn_window_size"):
        window = 2 * sides + 1
    if window is None and (kind == "sliding_attention" or _masks_windows(module, config)):
        window = first_of(config, "sliding_window", "sliding_window_size")
    if isinstance(window, int) and window > 0:
        return Mixer("sliding_attention", OPERATOR, attributes | {"window": window})
    chunk = first_of(config, "attention_chunk_size")
    if kind == "chunked_attention" and chunk:
        return Mixer("chunked_attention", OPERATOR, attributes | {"chunk": int(chunk)})
    name = "mla" if "latent_dim" in attributes else "full_attention"
    return Mixer(name, OPERATOR, attributes)


def _masks_windows(module: Any, config: Any) -> bool:
    """Whether the model masks a window in every layer, as Mixtral does: its code can, and its
    config names no types of layers."""
    code = inspect.unwrap(type(module).forward).__globals__
    return "create_sliding_window_causal_mask" in code and not first_of(config, "layer_types")


def heads(module: Any, config: Any) -> Attributes:
    """Heads and their widths, from the module, else the config, else the projections."""
    count = first_of(module, "num_heads", "num_attention_heads", "n_heads", "num_q_heads")
    count = count or first_of(config, "num_attention_heads", "num_heads", "n_heads")
    dim = first_of(module, "head_dim", "attention_head_dim", "attention_head_size")
    dim = dim or first_of(module, "key_value_proj_dim")
    if dim is None:
        dim = (width(module, *KEYS) or config.hidden_size) // count
    kv_heads = first_of(module, "num_key_value_heads", "num_kv_heads", "n_kv_heads")
    key = width(module, *KEYS)
    if kv_heads is None and key is not None:
        kv_heads = key // dim
    if kv_heads is None:
        groups = first_of(module, "num_key_value_groups")
        kv_heads = count // groups if isinstance(groups, int) and groups else count
    return {"heads": count, "kv_heads": kv_heads, "key_dim": dim, "value_dim": dim}


def variant(module: Any, config: Any) -> Attributes:
    """What surrounds the softmax: rotary positions, an output gate, sinks."""
    attributes: Attributes = {"rope": _rotates(module, config)}
    if attributes["rope"] and (part := _rotated_width(module, config)):
        attributes["rope_dim"] = part
    gated = "Gated" in type(getattr(module, "o_proj", None)).__name__
    if gated or any(has(module, n) for n in GATES) or _gate_in_query(module, config):
        attributes["output_gate"] = True
    if any(has(module, name) for name in SINKS):
        attributes["sinks"] = True
    return attributes


def _rotates(module: Any, config: Any) -> bool:
    if first_of(module, "use_rope") in (False, 0):
        return False
    thetas, index = first_of(config, "layer_rope_theta"), first_of(module, "layer_idx")
    if isinstance(thetas, list) and isinstance(index, int) and not thetas[index]:
        return False
    return any("rotary" in name for name in names_in(type(module).forward))


def _rotated_width(module: Any, config: Any) -> int | None:
    """Of the head, where only a part is rotated."""
    latent = first_of(module, "qk_rope_head_dim")
    if latent is not None:
        return int(latent)
    if (part := first_of(config, "rotary_dim")) is not None:
        return int(part)
    rope = first_of(config, "rope_parameters") or {}
    rope = rope.get(layer_type(module, config), rope) if isinstance(rope, dict) else {}
    share = (rope or {}).get("partial_rotary_factor")
    share = share or first_of(config, "partial_rotary_factor")
    if share and share < 1:
        return int(heads(module, config)["key_dim"] * share)
    return None


def _gate_in_query(module: Any, config: Any) -> bool:
    """Whether the query projection is twice as wide as the queries: its other half is a gate."""
    query = width(module, "q_proj")
    if query is None or has(module, "kv_b_proj"):
        return False
    sizes = heads(module, config)
    return query == 2 * int(sizes["heads"]) * int(sizes["key_dim"])


def is_latent_attention(module: Any) -> bool:
    return has(module, "kv_lora_rank", "kv_b_proj", "v_head_dim")


def latent_attention(module: Any, config: Any) -> Mixer:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434)."""
    return reach(module, config, latent_heads(module, config))


def latent_heads(module: Any, config: Any) -> Attributes:
    count = first_of(module, "num_heads") or config.num_attention_heads
    attributes: Attributes = {
        "heads": count,
        "kv_heads": count,
        "key_dim": module.qk_head_dim,
        "value_dim": module.v_head_dim,
        "latent_dim": module.kv_lora_rank,
    }
    return attributes | variant(module, config)
