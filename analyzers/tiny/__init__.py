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

from analyzers.tiny.overrides import OVERRIDES
from analyzers.tiny.sizes import (
    EXPERTS,
    GROUPED_EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    ROPE_DIM,
    TOP_K,
    VOCABULARY,
    WINDOW,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Level = dict[str, Any]

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
