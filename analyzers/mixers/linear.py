"""Mixers whose state has one size however long the sequence is, and short convolutions."""

from __future__ import annotations

from typing import Any

from torch import nn

from analyzers.mixers.mixer import (
    Attributes,
    Mixer,
    convolution,
    first_of,
    has,
    names_in,
    owns,
    parameter,
    site,
    whole,
    width,
)


def is_delta_rule(module: Any) -> bool:
    return owns(module, "A_log", "dt_bias") and has(module, "conv1d")


def delta_rule(module: Any, config: Any) -> Mixer:
    """Kimi delta attention (a decay per channel) or Gated DeltaNet (a decay per head)."""
    key_dim = first_of(module, "head_k_dim", "head_dim")
    value_dim = first_of(module, "head_v_dim", "head_dim")
    value_heads = first_of(module, "num_v_heads", "num_heads")
    heads = first_of(module, "num_k_heads", "num_heads")
    dt_bias = parameter(module, "dt_bias")
    per_channel = dt_bias is not None and dt_bias.numel() == value_heads * key_dim
    attributes: Attributes = {
        "heads": heads,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "gate": "per_channel" if per_channel else "per_head",
        # transformers' delta-rule modules ask the function to normalise queries and keys.
        "qk_l2norm": "use_qk_l2norm_in_kernel" in names_in(type(module).forward),
        "conv_kernel_size": convolution(module),
    }
    if (bound := decay_bound(getattr(module, "forget_gate", None))) is not None:
        attributes["gate_lower_bound"] = bound
    name = "kda" if per_channel else "gated_delta_net"
    operator = "kda" if per_channel else "gated_delta_rule"
    return Mixer(name, operator, attributes, site(module, "chunk_"))


def decay_bound(gate: Any) -> float | None:
    """Lower bound of the log decay that a forget gate computes; None for none."""
    bound = first_of(gate, "lower_bound", "safe_gate_lower_bound")
    return float(bound) if bound is not None and getattr(gate, "safe_gate", True) else None


def is_mamba2(module: Any) -> bool:
    return has(module, "ssm_state_size", "n_groups", "conv1d") and owns(module, "A_log", "D")


def mamba2(module: Any, config: Any) -> Mixer:
    """State-space duality: a decay per head (Dao & Gu 2024, arXiv 2405.21060).

    In the words of linear attention C is the query and B the key, of `n_groups` heads, and x the
    value.
    """
    attributes: Attributes = {
        "heads": module.n_groups,
        "value_heads": module.num_heads,
        "key_dim": module.ssm_state_size,
        "value_dim": module.head_dim,
        "gate": "per_head",
        "chunk_size": module.chunk_size,
        "conv_kernel_size": convolution(module),
    }
    return Mixer("mamba2", "mamba2", attributes, site(module, "chunk_scan"))


def is_mamba1(module: Any) -> bool:
    return has(module, "ssm_state_size", "time_step_rank", "conv1d") and owns(module, "A_log", "D")


def mamba1(module: Any, config: Any) -> Mixer:
    """Selective scan: a decay per channel and state (Gu & Dao 2023, arXiv 2312.00752).

    Element by element, `channels * key_dim` a token: no matrix product in it.
    """
    attributes: Attributes = {
        "channels": module.intermediate_size,
        "key_dim": module.ssm_state_size,
        "time_step_rank": module.time_step_rank,
        "conv_kernel_size": convolution(module),
    }
    return Mixer("mamba1", "selective_scan", attributes)


def is_gla(module: Any) -> bool:
    return has(module, "q_proj", "k_proj", "v_proj") and (
        has(module, "gk_proj") or has(module, "gk_b_proj")
    )


def gla(module: Any, config: Any) -> Mixer:
    """Gated linear attention: a decay per key channel from a low-rank projection of the token
    (Yang et al. 2023, arXiv 2312.06635); names as in flash-linear-attention."""
    heads = module.num_heads
    attributes: Attributes = {
        "heads": heads,
        "key_dim": module.k_proj.out_features // heads,
        "value_dim": module.v_proj.out_features // heads,
        "gate": "per_channel",
        "output_gate": has(module, "g_proj"),
    }
    return Mixer("gla", "gla", attributes, site(module, "chunk_"))


def is_lightning(module: Any) -> bool:
    return has(module, "slope_rate", "head_dim")


def lightning(module: Any, config: Any) -> Mixer:
    """Linear attention with a constant decay per head (MiniMax 2025, arXiv 2501.08313)."""
    heads = first_of(module, "num_attention_heads", "num_heads")
    attributes: Attributes = {
        "heads": heads,
        "key_dim": module.head_dim,
        "value_dim": module.head_dim,
        "gate": "constant",
        "chunk_size": module.block_size,
    }
    return Mixer("lightning", "lightning", attributes, whole(module))


def is_mlstm(module: Any) -> bool:
    return has(module, "mlstm_backend", "qk_dim", "v_dim")


def mlstm(module: Any, config: Any) -> Mixer:
    """Matrix memory with exponential gates and a normaliser (Beck et al. 2024, arXiv 2405.04517);
    in chunks it does the products of linear attention."""
    heads = config.num_heads
    attributes: Attributes = {
        "heads": heads,
        "key_dim": module.qk_dim // heads,
        "value_dim": module.v_dim // heads,
        "output_gate": True,
    }
    return Mixer("mlstm", "mlstm", attributes)


def is_rg_lru(module: Any) -> bool:
    return has(module, "rg_lru", "lru_width")


def rg_lru(module: Any, config: Any) -> Mixer:
    """Real-gated linear recurrent unit: a state per channel (De et al. 2024, arXiv 2402.19427)."""
    attributes: Attributes = {
        "channels": module.lru_width,
        "heads": module.rg_lru.num_attention_heads,  # blocks of its gates' matrices
        "conv_kernel_size": convolution(module),
    }
    return Mixer("rg_lru", "rg_lru", attributes)


def is_rwkv(module: Any) -> bool:
    return has(module, "time_decay", "time_first", "receptance")


def rwkv(module: Any, config: Any) -> Mixer:
    """RWKV-4: a weighted mean of past values per channel (Peng et al. 2023, arXiv 2305.13048)."""
    return Mixer("rwkv", "wkv", {"channels": module.attention_hidden_size})


def is_short_convolution(module: Any) -> bool:
    taps = getattr(module, "conv", None)
    return isinstance(taps, nn.Conv1d) and has(module, "in_proj", "out_proj")


def short_convolution(module: Any, config: Any) -> Mixer:
    """A gated depthwise convolution over a few tokens as the whole mixer (LFM2)."""
    attributes: Attributes = {
        "channels": module.conv.in_channels,
        "conv_kernel_size": convolution(module),
        "output_gate": width(module, "in_proj") == 3 * module.conv.in_channels,
    }
    return Mixer("short_convolution", "short_convolution", attributes)
