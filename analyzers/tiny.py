"""A tiny config of any architecture, derived from the defaults of its config class.

Fields are shrunk by what their names mean, each level of a composite config (text model, vision
tower) by itself, so that what must fit together still does: heads times their width, groups and
experts, rotary sections. Layers are thinned so that one of every kind stays. What names do not say
is in `OVERRIDES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HIDDEN = 128
HEADS = 4
HEAD_DIM = 32
ROPE_DIM = 16  # of the rotary part of latent attention
EXPERTS = 8
GROUPED_EXPERTS = 16  # so that two groups of eight can each give top k
TOP_K = 2
VOCABULARY = 256
WINDOW = 32
LAYERS = 2  # of a stack whose layers are alike

Level = dict[str, Any]

OVERRIDES: dict[str, Level] = {
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
    "inkling_mm_model": {"vision_config.n_layers": 12},
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

# Names of the number of layers of a stack, of widths that all equal the hidden width here, ...
_LAYERS = re.compile(r"(num_hidden|num|n|encoder|decoder|num_decoder|num_encoder)_layers|depth")
_HIDDEN = re.compile(
    r"(text_|audio_|vision_|thinker_|out_|projector_|attention_)?hidden_size|d_model|n_embd"
    r"|hidden_dim|embed_dim|decoder_dim|output_dim|vision_output_dim|projector_(in|out)put_dim"
    r"|projection_dim|adapter_(in|out|input)_(dim|size)|lru_width"
)
_INNER = re.compile(
    r"\w*intermediate_size\w*|\w*ffn_(dim|hidden_size)|d_ff|mlp_dim|share_expert_dim"
    r"|moe_(hidden|latent)_size|merged_hidden_size|hidden_size_per_layer_input|ple_embed_dim"
    r"|downsample_hidden_size|projection_hidden_dim"
)
_EXPERTS = re.compile(r"(num|n|moe_num)(_local|_routed)?_experts")
_TOP_K = re.compile(r"num_experts_per_tok(en)?|moe_(top_?)?k|num_selected_experts|top_k_experts")
_TOKEN = re.compile(r"\w*(token|_bos|_pad|think|nothink|codec\w*)_(id|index)")
_WINDOW = re.compile(r"\w*sliding_window(_size)?|attention_(chunk|window)_size|keep_window_size")
_RANK = re.compile(r"\w*_(rank|lowrank)|d_rel")
_INDEX_LIST = re.compile(r"\w*(_layers|_idxs|_ids|_indexes)")
_TOWER = re.compile(r"vision|audio|visual|sam|encoder|asr|diarization|code2wav")
_DROPPED = ("id2label", "label2id", "transformers_version", "_name_or_path", "architectures")


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default config of a transformers model type, shrunk. Raises what its class raises."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    level = shrink(cls().to_dict())
    for path, value in OVERRIDES.get(model_type, {}).items():
        *way, last = path.split(".")
        inner = level
        for name in way:
            inner = inner[name]
        inner[last] = value
    return cls.from_dict(level)


def shrink(level: Level, least: int = LAYERS) -> Level:
    """One config, and those nested in it, as plain data; stacks keep `least` layers at least."""
    small: Level = {}
    for name, value in level.items():
        if name in _DROPPED:
            continue
        if _numbered(value):  # what single layers have otherwise
            usual = {"head_dim": level.get("head_dim")}  # what a width of one layer is measured by
            small[name] = {k: _fields(v, {**level, **v, **usual}) for k, v in value.items()}
        elif isinstance(value, dict) and name.endswith("config") and value:
            small[name] = shrink(value, 1 if _TOWER.match(name) else least)
        else:
            small |= _fields({name: value}, level)
    for name in [n for n in small if _LAYERS.fullmatch(n)]:
        _thin(small, name, small[name], least)
    if not any(_LAYERS.fullmatch(n) for n in small) and "layers_block_type" in small:
        _thin(small, None, len(small["layers_block_type"]), least)
    if "rope_parameters" in small:
        small["rope_parameters"] = _rope(small["rope_parameters"], small)
    return small


def _fields(fields: Level, level: Level) -> Level:
    return {n: _each(v, lambda v, n=n: _field(n, v, level)) for n, v in fields.items()}


def _each(value: Any, change: Callable[[int], int]) -> Any:
    """`change` of every integer of a value; lists are taken element by element."""
    if isinstance(value, list):
        return [_each(v, change) for v in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return change(value)


def _field(name: str, value: int, level: Level) -> int:
    """What an integer becomes, by its name and its neighbours'."""
    if value <= 0:
        return value
    if "vocab_size" in name or name == "codebook_size":
        return min(value, VOCABULARY)
    if _TOKEN.fullmatch(name):
        return value if value < VOCABULARY // 2 else VOCABULARY // 2 + value % (VOCABULARY // 2)
    if _HIDDEN.fullmatch(name):
        return HIDDEN
    if _INNER.fullmatch(name):
        return _scaled(value, _hidden(level), HIDDEN, 32)
    if _EXPERTS.fullmatch(name):
        grouped = any((level.get(n) or 1) > 1 for n in ("n_group", "num_expert_group"))
        return min(value, GROUPED_EXPERTS if grouped else EXPERTS)
    if _TOP_K.fullmatch(name):
        return min(value, TOP_K)
    if _WINDOW.fullmatch(name):
        return min(value, WINDOW)
    for known, size in _SIZES:
        if known.fullmatch(name):
            return size(value, level)
    return value


def _hidden(level: Level) -> int:
    for name in ("hidden_size", "d_model", "n_embd", "hidden_dim", "embed_dim"):
        if isinstance(level.get(name), int) and level[name] > 0:
            return level[name]
    text = level.get("text_config") or level.get("llm_config")
    return _hidden(text) if isinstance(text, dict) else 4096


def _scaled(value: int, whole: int, small: int, least: int) -> int:
    """`value` as it is to `whole`, to `small`; a multiple of `least`."""
    return max(least, round(value * small / whole / least) * least)


def _number(level: Level, name: str) -> int | None:
    value = level.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _heads(value: int, level: Level) -> int:
    whole = _number(level, "num_attention_heads")
    return max(HEADS, value * HEADS // whole) if whole and value > whole else HEADS


def _kv_heads(value: int, level: Level) -> int:
    whole = _number(level, "num_attention_heads") or _number(level, "n_heads") or value
    return 1 if value == 1 else HEADS if value >= whole else HEADS // 2


def _key_heads(value: int, level: Level) -> int:
    return max(1, HEADS * value // level["linear_num_value_heads"])


def _value_width(value: int, level: Level) -> int:
    return HEAD_DIM * value // level["linear_key_head_dim"]


def _head_width(value: int, level: Level) -> int:
    if value in (level.get("qk_rope_head_dim"), level.get("index_rope_head_dim")):
        return ROPE_DIM
    if value == level.get("qk_head_dim") != level.get("qk_nope_head_dim"):
        return HEAD_DIM + ROPE_DIM
    usual = _number(level, "head_dim")
    return HEAD_DIM * value // usual if usual and value > usual else HEAD_DIM


def _latent_head_width(value: int, level: Level) -> int:
    rope = ROPE_DIM if level.get("qk_rope_head_dim") else 0
    return HEAD_DIM + rope


def _at_most(limit: int) -> Callable[[int, Level], int]:
    return lambda value, level: min(value, limit)


_SIZES: list[tuple[re.Pattern[str], Callable[[int, Level], int]]] = [
    (re.compile(name), size)
    for name, size in {
        r"mamba_(n|num)_heads|n_mamba_heads": lambda v, s: 2 * HIDDEN // HEAD_DIM,
        r"mamba_d_ssm": lambda v, s: 2 * HIDDEN,
        r"linear_num_key_heads": _key_heads,
        r"linear_value_head_dim": _value_width,
        r"\w*(key_value_heads\w*|kv_n_heads)": _kv_heads,
        r"index_n_heads|o_groups|heads_per_ngram": _at_most(2),
        r"\w*heads(_per_layer)?": _heads,
        r"qk_rope_head_dim|\w*rotary_dim": lambda v, s: ROPE_DIM,
        r"qk_head_dim": _latent_head_width,
        r"qk_nope_head_dim|v_head_dim|index_head_dim|mamba_head_?dim": lambda v, s: HEAD_DIM,
        r"hidden_sizes": _at_most(32),
        r"(output|downsample)_channels": _at_most(HIDDEN),
        r"depths|num_sparse_\w*_layers": _at_most(1),
        r"\w*head_k?v?_?dim|d_kv|kv_channels|mamba_d_head": _head_width,
        r"\w*state_size|mamba_d_state": _at_most(16),
        r"time_step_rank|mamba_dt_rank": _at_most(8),
        r"(mamba_)?n_groups": _at_most(2),
        r"n_group|num_expert_group": _at_most(2),
        r"topk_group": lambda v, s: 1,
        r"index_topk": _at_most(8),
        r"index_topk_blocks": _at_most(2),
        r"index_block_size": _at_most(16),
        r"index_kpool": _at_most(4),
        r"zero_expert_num": _at_most(4),
        r"q_lora_rank": _at_most(64),
        _RANK.pattern: _at_most(32),
        r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": _at_most(1),
        r"ngram_vocab_size_base": _at_most(VOCABULARY),
    }.items()
]


# --------------------------------------------------------------------------------------- layers


def _thin(level: Level, name: str | None, count: int, least: int) -> None:
    """Keeps the first of `count` layers of every kind, in every field that speaks of layers."""
    if not isinstance(count, int) or count <= 0:
        return
    per_layer = {
        n: v
        for n, v in level.items()
        if isinstance(v, list) and len(v) == count and not _indices(n, v, count)
    }
    members = {n: v for n, v in level.items() if _indices(n, v, count)}
    numbered = {n: v for n, v in level.items() if _numbered(v)}

    def kind(index: int) -> str:
        own = [v[index] for v in per_layer.values()]
        own += [index in v for v in members.values()]
        own += [next((o for k, o in v.items() if int(k) == index), None) for v in numbered.values()]
        return repr(own)

    first: dict[str, int] = {}
    for index in range(count):
        first.setdefault(kind(index), index)
    kept = list(first.values())
    while len(kept) < min(least, count):
        kept.append(kept[-1] + 1)
    if name is not None:
        level[name] = len(kept)
    for n, v in per_layer.items():
        level[n] = [v[i] for i in kept]
    for n, v in members.items():
        level[n] = [kept.index(i) for i in v if i in kept]
    for n, v in numbered.items():
        own = {int(k): o for k, o in v.items()}
        level[n] = {f"{kept.index(i):02d}": own[i] for i in kept if i in own}


def _indices(name: str, value: Any, count: int) -> bool:
    """Whether a list names layers by their index."""
    return (
        isinstance(value, list)
        and _INDEX_LIST.fullmatch(name) is not None
        and all(type(v) is int and 0 <= v < count for v in value)
        and value == sorted(set(value))
        and bool(value)
    )


def _numbered(value: Any) -> bool:
    """Whether it maps layer numbers to fields that these layers have otherwise."""
    if not isinstance(value, dict) or not value:
        return False
    return all(str(k).isdigit() and isinstance(v, dict) for k, v in value.items())


def _rope(rope: Any, level: Level) -> Any:
    """Rotary sections that still sum to half of the rotated width."""
    if not isinstance(rope, dict):
        return rope
    rope = {k: _rope(v, level) if isinstance(v, dict) else v for k, v in rope.items()}
    section = rope.get("mrope_section")
    if section:
        width = level.get("head_dim") or HEAD_DIM
        half = int(width * (rope.get("partial_rotary_factor") or 1.0)) // 2
        part = [max(1, s * half // sum(section)) for s in section]
        rope["mrope_section"] = [half - sum(part[1:]), *part[1:]]
    return rope
