"""What a config says under its usual key names, when no class is there to read it.

Families name the same size differently. `GenericConfig` holds the text part of a raw config as
attributes, and besides the sizes in the table below under one name each, None where no key says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analyzers.errors import InputError

TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal configs keep the decoder's part."""

MAX_SIZE = 2**31

SIZES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "model_dim", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "num_query_groups",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "d_head"),
    "intermediate_size": (
        "intermediate_size",
        "ffn_hidden_size",
        "n_inner",
        "d_ff",
        "ffn_dim",
        "inter_dim",
    ),
    "max_position_embeddings": (
        "max_position_embeddings",
        "model_max_length",
        "max_seq_len",
        "seq_length",
        "n_positions",
        "n_ctx",
    ),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "index_topk": ("index_topk",),
    "index_n_heads": ("index_n_heads",),
    "index_head_dim": ("index_head_dim",),
    "sliding_window": ("sliding_window", "sliding_window_size"),
    "attention_chunk_size": ("attention_chunk_size",),
    "linear_num_key_heads": ("linear_num_key_heads", "linear_num_heads"),
    "linear_num_value_heads": ("linear_num_value_heads", "linear_num_heads"),
    "linear_key_head_dim": ("linear_key_head_dim", "linear_head_dim"),
    "linear_value_head_dim": ("linear_value_head_dim", "linear_head_dim"),
    "conv_kernel": (
        "linear_conv_kernel_dim",
        "short_conv_kernel_size",
        "conv_kernel",
        "mamba_d_conv",
        "conv_kernel_size",
    ),
    "mamba_num_heads": ("mamba_num_heads", "mamba_n_heads"),
    "mamba_head_dim": ("mamba_head_dim", "mamba_d_head"),
    "ssm_state_size": ("ssm_state_size", "mamba_d_state", "mamba_state_dim"),
    "mamba_chunk_size": ("chunk_size", "mamba_chunk_size"),
    "mamba_n_groups": ("n_groups", "mamba_n_groups", "mamba_ngroups"),
    "num_experts": (
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
        "num_routed_experts",
        "moe_num_experts",
    ),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "num_selected_experts",
        "num_experts_per_topk",
        "top_k_experts",
    ),
    "num_shared_experts": (
        "n_shared_experts",
        "num_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
    ),
    "moe_intermediate_size": (
        "moe_intermediate_size",
        "expert_intermediate_size",
        "moe_ffn_hidden_size",
        "expert_ffn_hidden_size",
        "moe_inter_dim",
        "ffn_dim_expert",
    ),
    "shared_intermediate_size": (
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "moe_latent_size": ("moe_latent_size", "routed_expert_hidden_size"),
}


REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers")
LARGEST = {
    "num_hidden_layers": 10_000,  # are built one by one
    "num_experts": 10**6,
    "max_position_embeddings": math.inf,  # huge stands for no limit
    "sliding_window": math.inf,
}


def as_size(value: Any) -> int | None:
    """The value when it can be a size."""
    return value if type(value) is int and 0 < value < MAX_SIZE else None


def check_sizes(data: dict[str, Any], path: Path) -> None:
    """Raises InputError for a whole number in a config, at `path`, that cannot be the size that
    its key names: a class would build for hours, or a model that nobody can have."""
    for part in (data, _text_part(data)):
        for name, keys in SIZES.items():
            # Minus one and zero stand for none in what a model may lack.
            least = 1 if name in REQUIRED else -1
            most = LARGEST.get(name, MAX_SIZE)
            for key in keys:
                value = part.get(key)
                if type(value) is int and not least <= value <= most:
                    fix = f"a whole number from {max(least, 0)} to {most:.0f}"
                    raise InputError(path, field=key, fault=f"is {str(value)[:24]}", fix=fix)
        _check_top_k(part, path)


def _check_top_k(part: dict[str, Any], path: Path) -> None:
    counts = [part[k] for k in SIZES["num_experts"] if type(part.get(k)) is int]
    chosen = [k for k in SIZES["num_experts_per_tok"] if type(part.get(k)) is int]
    if not counts or not chosen or max(counts) < 2:
        return
    experts = max(counts) + (as_size(part.get("zero_expert_num")) or 0)
    for key in chosen:
        if not 1 <= part[key] <= experts:
            fault = f"a token cannot visit {str(part[key])[:24]} of {experts} experts"
            raise InputError(path, field=key, fault=fault, fix=f"from 1 to {experts}")


class GenericConfig:
    """A raw config without a class; it answers as a `PreTrainedConfig` does where it is read.

    `where` is the folder, `reason` why no class reads it.
    """

    sub_configs: tuple = ()
    hidden_size: Any
    vocab_size: Any
    num_hidden_layers: Any

    def __init__(self, data: dict[str, Any], where: str, reason: str) -> None:
        text, outer = _text_part(data), data
        for key, value in {**outer, **text}.items():
            if key.isidentifier() and not hasattr(GenericConfig, key):
                self.__dict__[key] = value
        for name, keys in SIZES.items():
            values = (as_size(part.get(key)) for part in (text, outer) for key in keys)
            self.__dict__[name] = next((v for v in values if v is not None), None)
        model_type = outer.get("model_type")
        self.model_type = model_type if isinstance(model_type, str) and model_type else "unknown"
        named = [*_strings(outer.get("architectures")), *_strings(text.get("architectures"))]
        self.architectures = named
        dtypes = (part.get(key) for part in (text, outer) for key in ("dtype", "torch_dtype"))
        self.dtype = next((d for d in dtypes if isinstance(d, str)), None)
        self.tie_word_embeddings = outer.get("tie_word_embeddings", text.get("tie_word_embeddings"))
        self.name_or_path, self.reason = where, reason
        self.text, self.data = text, outer

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there; typed, since any key may be.
        raise AttributeError(f"the config has no '{name}'")

    def get_text_config(self, **_: Any) -> GenericConfig:
        return self

    def section(self, name: str) -> dict[str, Any]:
        """A nested part of the config, empty where there is none."""
        value = self.text.get(name)
        return value if isinstance(value, dict) else {}


def _text_part(data: dict[str, Any]) -> dict[str, Any]:
    for key in TEXT:
        if isinstance(inner := data.get(key), dict):
            return _text_part(inner)
    return data


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        yield from (v for v in value if isinstance(v, str))


# ------------------------------------------------------------------------------------ the layers

WORDS = {  # parts of a layer type's name -> what mixes tokens there; the first that fits
    "mixer": (
        (("chunked",), "chunked"),
        (("sliding", "local", "swa"), "sliding"),
        (("mamba", "ssm", "ssd"), "mamba"),
        (("linear", "lightning", "delta", "kda", "gla", "recurrent", "retention"), "linear"),
        (("attention", "full", "global", "softmax", "mla"), "full"),
        (("moe", "mlp", "expert", "ffn", "dense"), "none"),
    ),
    "feed_forward": (
        (("moe", "sparse", "expert"), "moe"),
        (("dense", "mlp", "ffn"), "dense"),
    ),
}
PATTERN = {"M": ("mamba", "none"), "*": ("full", "none"), "E": ("none", "moe")}
PATTERN |= {"-": ("none", "dense"), "G": ("linear", "none")}
"""Letters of a `hybrid_override_pattern` (Nemotron-H): mixer and feed-forward of a layer."""


def _word(value: Any, kind: str) -> str | None:
    if isinstance(value, str):
        return next((w for parts, w in WORDS[kind] if any(p in value for p in parts)), None)
    return None


def _listed(config: GenericConfig, length: int, *names: str) -> list[Any] | None:
    for name in names:
        value = config.text.get(name)
        if isinstance(value, list) and len(value) >= length:
            return value[:length]
    return None


def mixers(config: GenericConfig, length: int) -> list[str]:
    """`full`, `sliding`, `chunked`, `linear`, `mamba` or `none` for each layer, as far as keys say
    it."""
    if pattern := _pattern(config, length):
        return [mixer for mixer, _ in pattern]
    types = _listed(config, length, "layer_types", "layers_block_type", "attn_type_list")
    if types is not None and all(type(t) is int for t in types):
        return ["full" if t else "linear" for t in types]  # MiniMax: 1 softmax, 0 lightning
    if types is not None:
        return [_word(t, "mixer") or "full" for t in types]
    linear = config.section("linear_attn_config").get("kda_layers")
    if isinstance(linear, list):  # counted from one
        return ["linear" if i + 1 in linear else "full" for i in range(length)]
    for name in ("full_attention_interval", "full_attn_interval", "layer_group_size"):
        if every := as_size(config.text.get(name)):
            # A last group that is not full has softmax attention throughout (Ring-linear).
            rest = length // every * every if name == "layer_group_size" else length
            return [
                "full" if (i + 1) % every == 0 or i >= rest else "linear" for i in range(length)
            ]
    if period := as_size(config.text.get("attn_layer_period")):
        offset = config.text.get("attn_layer_offset")
        return ["full" if i % period == offset else "mamba" for i in range(length)]
    if config.mamba_num_heads and not config.num_attention_heads:
        return ["mamba"] * length
    return _windows(config, length)


def _windows(config: GenericConfig, length: int) -> list[str]:
    if config.attention_chunk_size:
        rotated = _listed(config, length, "no_rope_layers") or [1] * length
        return ["chunked" if r else "full" for r in rotated]
    if not config.sliding_window or config.text.get("use_sliding_window") is False:
        return ["full"] * length
    every = as_size(config.text.get("sliding_window_pattern"))
    return ["full" if every and (i + 1) % every == 0 else "sliding" for i in range(length)]


def feed_forwards(config: GenericConfig, length: int) -> list[str]:
    """`dense`, `moe` or `none` for each layer, as far as keys say it."""
    if pattern := _pattern(config, length):
        return [feed_forward for _, feed_forward in pattern]
    if not config.num_experts:
        return ["dense"] * length
    types = _listed(config, length, "mlp_layer_types", "ffn_layer_types")
    if types is not None:
        return [_word(t, "feed_forward") or "moe" for t in types]
    get = config.text.get
    frequencies = _listed(config, length, "moe_layer_freq")
    if frequencies is not None:
        return ["moe" if f else "dense" for f in frequencies]
    sparse = get("moe_layers")
    dense = get("mlp_only_layers")
    first = get("first_k_dense_replace") or get("num_dense_layers") or get("moe_layer_start_index")
    first = first if type(first) is int else 0
    every = as_size(get("moe_layer_freq")) or 1
    step = as_size(get("decoder_sparse_step")) or as_size(get("interleave_moe_layer_step")) or 1
    found = []
    for i in range(length):
        is_moe = i >= first and i % every == 0 and (i + 1) % step == 0
        if isinstance(sparse, list) and sparse:
            is_moe = i in sparse
        if isinstance(dense, list) and i in dense:
            is_moe = False
        found.append("moe" if is_moe else "dense")
    return found


def _pattern(config: GenericConfig, length: int) -> list[tuple[str, str]]:
    pattern = config.text.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) >= length:
        return [PATTERN.get(letter, ("full", "none")) for letter in pattern[:length]]
    return []
