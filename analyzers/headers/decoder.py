"""A config without class and weights -> the tensors that a decoder of these sizes would have.

Every family has its own small tensors; what decides a plan are the large ones, and those follow
from sizes that configs name: heads and their widths, latent ranks, experts and their widths, and
which layers have which.
"""

from __future__ import annotations

from analyzers.errors import InputError
from analyzers.headers.keys import GenericConfig, as_size, feed_forwards, mixers

Shapes = dict[str, tuple[int, ...]]
MAX_LAYERS = 2000
UNGATED = ("relu2", "relu", "gelu", "gelu_new", "gelu_fast", "squared_relu")


def expected_tensors(config: GenericConfig) -> tuple[Shapes, list[str]]:
    """Shapes by name, and notes on what was taken as usual.

    Raises InputError when the config does not say how wide or how deep the model is.
    """
    where = f"{config.name_or_path}/config.json"
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if getattr(config, name) is None:
            fault = f"is missing or no size, and nothing here knows the type '{config.model_type}'"
            raise InputError(where, field=name, fault=fault, fix="add it, or the weights")
    layers, hidden = config.num_hidden_layers, config.hidden_size
    if layers > MAX_LAYERS:
        raise InputError(
            where, field="num_hidden_layers", fault=f"{layers} layers", fix="correct it"
        )
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    notes: list[str] = []
    kinds = list(zip(mixers(config, layers), feed_forwards(config, layers), strict=True))
    for index, (mixer, feed_forward) in enumerate(kinds):
        prefix = f"model.layers.{index}."
        mixing = _mixer(config, mixer, index, notes)
        feeding = _feed_forward(config, feed_forward)
        for part, tensors in (("mixer", mixing), ("mlp", feeding)):
            if tensors:
                shapes[f"{prefix}{part}_norm.weight"] = (hidden,)
                shapes |= {f"{prefix}{part}.{name}": shape for name, shape in tensors.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes, list(dict.fromkeys(notes))


def _linear(out: int, width: int, name: str, *, bias: bool = False) -> Shapes:
    found: Shapes = {f"{name}.weight": (out, width)}
    return found | ({f"{name}.bias": (out,)} if bias else {})


# --------------------------------------------------------------------------------------- mixers


def _mixer(config: GenericConfig, kind: str, index: int, notes: list[str]) -> Shapes:
    if kind == "none":
        return {}
    if kind == "mamba":
        return _mamba(config, notes)
    if kind == "linear":
        if config.section("linear_attn_config"):
            return _kda(config)
        if config.linear_num_value_heads and config.linear_value_head_dim:
            return _gated_delta_net(config)
        notes.append("the linear attention is taken to be lightning attention: no key says more")
        return _lightning(config, notes)
    if config.kv_lora_rank:
        return _latent(config, index, notes)
    return _attention(config, notes)


def _heads(config: GenericConfig, notes: list[str]) -> tuple[int, int]:
    """Query heads and the width of one."""
    heads, dim = config.num_attention_heads, config.head_dim
    if heads is None:
        heads = max(1, config.hidden_size // (dim or 128))
        notes.append(f"the config names no attention heads: {heads} are assumed")
    return heads, dim or max(1, config.hidden_size // heads)


def _has_bias(config: GenericConfig) -> bool:
    get = config.text.get
    return any(get(k) is True for k in ("attention_bias", "qkv_bias", "use_qkv_bias"))


def _attention(config: GenericConfig, notes: list[str]) -> Shapes:
    heads, dim = _heads(config, notes)
    kv_heads, hidden, bias = (
        config.num_key_value_heads or heads,
        config.hidden_size,
        _has_bias(config),
    )
    gated = config.text.get("attn_output_gate") is True  # the gate is the query's other half
    found = _linear(heads * dim * (1 + gated), hidden, "q_proj", bias=bias)
    found |= _linear(kv_heads * dim, hidden, "k_proj", bias=bias)
    found |= _linear(kv_heads * dim, hidden, "v_proj", bias=bias)
    found |= _linear(hidden, heads * dim, "o_proj", bias=config.text.get("attention_bias") is True)
    if any(config.text.get(key) is True for key in ("use_qk_norm", "qk_norm")):
        found |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    return found


def _latent(config: GenericConfig, index: int, notes: list[str]) -> Shapes:
    """Multi-head latent attention (DeepSeek-V2), with a lightning indexer where one is named."""
    heads, dim = _heads(config, notes)
    hidden, rank, low = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    rope = config.qk_rope_head_dim or 0
    nope = config.qk_nope_head_dim or max(1, dim - rope)
    values = config.v_head_dim or nope
    queries = heads * (nope + rope)
    found = _linear(queries, hidden, "q_proj")
    if low:
        found = _linear(low, hidden, "q_a_proj") | _linear(queries, low, "q_b_proj")
        found["q_a_layernorm.weight"] = (low,)
    found |= _linear(rank + rope, hidden, "kv_a_proj_with_mqa")
    found["kv_a_layernorm.weight"] = (rank,)
    found |= _linear(heads * (nope + values), rank, "kv_b_proj")
    found |= _linear(hidden, heads * values, "o_proj")
    if config.text.get("mla_use_output_gate") is True:
        found |= _linear(heads * values, hidden, "g_proj")
    if config.index_topk and _computes_index(config, index):
        index_heads, width = config.index_n_heads or 1, config.index_head_dim or 128
        found |= _linear(index_heads * width, low or hidden, "indexer.wq_b")
        found |= _linear(width, hidden, "indexer.wk") | {"indexer.k_norm.weight": (width,)}
        found |= _linear(index_heads, hidden, "indexer.weights_proj")
    return found


def _computes_index(config: GenericConfig, index: int) -> bool:
    """Whether a layer has an indexer of its own: some share that of the layer before."""
    types = config.text.get("indexer_types")
    return not (isinstance(types, list) and index < len(types) and types[index] == "shared")


def _kda(config: GenericConfig) -> Shapes:
    """Kimi delta attention (Kimi Linear, arXiv 2510.26692)."""
    section, hidden = config.section("linear_attn_config"), config.hidden_size
    heads = as_size(section.get("num_heads")) or config.num_attention_heads or 1
    dim = as_size(section.get("head_dim")) or config.head_dim or 128
    taps = as_size(section.get("short_conv_kernel_size")) or 4
    wide = heads * dim
    found: Shapes = {"A_log": (heads,), "dt_bias": (wide,), "o_norm.weight": (dim,)}
    for name in ("q", "k", "v"):
        found |= _linear(wide, hidden, f"{name}_proj")
        found[f"{name}_conv1d.weight"] = (wide, 1, taps)
    found |= _linear(dim, hidden, "f_a_proj") | _linear(wide, dim, "f_b_proj")
    found |= _linear(heads, hidden, "b_proj")
    if section.get("use_full_rank_gate") is True:
        found |= _linear(wide, hidden, "g_proj")
    else:
        found |= _linear(dim, hidden, "g_a_proj") | _linear(wide, dim, "g_b_proj")
    return found | _linear(hidden, wide, "o_proj")


def _gated_delta_net(config: GenericConfig) -> Shapes:
    """Gated DeltaNet as in Qwen3-Next (Yang et al. 2024, arXiv 2412.06464)."""
    hidden, value_heads = config.hidden_size, config.linear_num_value_heads
    value_dim, heads = config.linear_value_head_dim, config.linear_num_key_heads or value_heads
    keys, values = heads * (config.linear_key_head_dim or value_dim), value_heads * value_dim
    return {
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "norm.weight": (value_dim,),
        "conv1d.weight": (2 * keys + values, 1, config.conv_kernel or 4),
        "in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "in_proj_ba.weight": (2 * value_heads, hidden),
        "out_proj.weight": (hidden, values),
    }


def _lightning(config: GenericConfig, notes: list[str]) -> Shapes:
    """Lightning attention: no grouped keys, an output gate and a norm (MiniMax-01, Ring-linear)."""
    heads, dim = _heads(config, notes)
    hidden, wide = config.hidden_size, heads * dim
    found = _linear(3 * wide, hidden, "qkv_proj", bias=_has_bias(config))
    found |= _linear(wide, hidden, "output_gate") | _linear(hidden, wide, "out_proj")
    return found | {"norm.weight": (wide,)}


def _mamba(config: GenericConfig, notes: list[str]) -> Shapes:
    """Mamba-2 (Dao & Gu 2024, arXiv 2405.21060)."""
    hidden, expand = config.hidden_size, config.text.get("mamba_expand", config.text.get("expand"))
    dim = config.mamba_head_dim or 64
    inner = int(hidden * expand) if isinstance(expand, int | float) and expand > 0 else 2 * hidden
    heads = config.mamba_num_heads or max(1, inner // dim)
    inner = heads * dim
    if not config.ssm_state_size:
        notes.append("the config names no state size of its Mamba layers: 128 is assumed")
    states = 2 * (config.mamba_n_groups or 1) * (config.ssm_state_size or 128)
    return {
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "conv1d.weight": (inner + states, 1, config.conv_kernel or 4),
        "conv1d.bias": (inner + states,),
        "in_proj.weight": (2 * inner + states + heads, hidden),
        "norm.weight": (inner,),
        "out_proj.weight": (hidden, inner),
    }


# --------------------------------------------------------------------------------- feed-forward


def _gated(config: GenericConfig) -> bool:
    names = (
        config.text.get(key) for key in ("mlp_hidden_act", "hidden_act", "activation_function")
    )
    return next((n for n in names if isinstance(n, str)), "silu") not in UNGATED


def _mlp(config: GenericConfig, hidden: int, width: int, prefix: str = "") -> Shapes:
    names = ("gate_proj", "up_proj") if _gated(config) else ("up_proj",)
    found: Shapes = {f"{prefix}{name}.weight": (width, hidden) for name in names}
    return found | {f"{prefix}down_proj.weight": (hidden, width)}


def _feed_forward(config: GenericConfig, kind: str) -> Shapes:
    hidden = config.hidden_size
    if kind == "none":
        return {}
    if kind == "dense":
        width = as_size(config.text.get("intermediate_size_mlp")) or config.intermediate_size
        return _mlp(config, hidden, width or 4 * hidden)
    experts, latent = config.num_experts, config.moe_latent_size or hidden
    width = config.moe_intermediate_size or config.intermediate_size or 4 * hidden
    zero = as_size(config.text.get("zero_expert_num")) or 0
    found: Shapes = {"gate.weight": (experts + zero, hidden)}
    if _corrects(config):
        found["gate.e_score_correction_bias"] = (experts + zero,)
    up = "gate_up_proj" if _gated(config) else "up_proj"
    found[f"experts.{up}"] = (experts, width * (1 + _gated(config)), latent)
    found["experts.down_proj"] = (experts, latent, width)
    if latent != hidden:
        found |= _linear(latent, hidden, "latent_down_proj")
        found |= _linear(hidden, latent, "latent_up_proj")
    shared = config.num_shared_experts or (1 if config.shared_intermediate_size else 0)
    if shared:
        wide = config.shared_intermediate_size or shared * width
        found |= _mlp(config, hidden, wide, "shared_experts.")
    return found


def _corrects(config: GenericConfig) -> bool:
    get = config.text.get
    keys = ("moe_router_enable_expert_bias", "use_expert_bias", "use_routing_bias")
    return get("topk_method") == "noaux_tc" or any(get(key) is True for key in keys)
