"""Which token mixer a module is, from the names and shapes of what lies in it.

The readers in `analyzers.mixers` ask attributes that a class gives its modules; here there are
none, so sizes come from the shapes of the projections, and from the config where a shape leaves
them open (how many heads share a projection).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from analyzers.headers.keys import GenericConfig
from analyzers.headers.skeleton import ExpertBanks, GatedRMSNorm, Inferred
from analyzers.mixers import Attributes, Mixer

QUERY = ("q_proj", "wq", "query", "q", "q_lin")
KEY = ("k_proj", "wk", "key", "k", "k_lin")
VALUE = ("v_proj", "wv", "value", "v", "v_lin")
FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "qkv", "wqkv")
OUTPUT = ("o_proj", "out_proj", "wo", "dense", "c_proj", "o", "proj", "out_lin")
OUTPUT_GATE = ("g_proj", "output_gate", "gate_proj")
OUTPUT_NORM = ("g_norm", "o_norm", "norm", "out_norm")
LATENT_DOWN = ("kv_a_proj_with_mqa", "kv_a_proj", "wkv_a")
LATENT_UP = ("kv_b_proj", "wkv_b")
RECURRENT = ("igate", "fgate", "decay", "dt_proj", "A_log", "compressor")
"""Parts of names beside queries and keys that make a mixer something else than attention."""
SINKS = ("sinks", "attention_sink_bias", "sink")
GATED = ("kda", "gated_delta_net", "mamba2", "lightning", "gla")
"""Mixers whose output norm is gated."""
GUESSED_HEAD = 128
SOFTMAX, SPARSE = "scaled_dot_product_attention", "sparse_attention"


def name_mixers(layer: nn.Module, config: GenericConfig, kind: str) -> None:
    """Lets every token mixer of a layer carry what it was recognised as.

    `kind` is what the config says of the layer, as `keys.mixers` words it.
    """
    pending = [layer]
    while pending:
        module = pending.pop(0)
        if isinstance(module, Inferred) and module is not layer:
            module.inferred_mixer = mixer_of(module, config, kind)
            if module.inferred_mixer is not None:
                _gate_norms(module, module.inferred_mixer)
                continue
        pending += [m for m in module.children() if not isinstance(m, ExpertBanks)]


def _gate_norms(module: nn.Module, mixer: Mixer) -> None:
    for name, child in module.named_children():
        if mixer.name in GATED and name in OUTPUT_NORM and type(child) is nn.RMSNorm:
            child.__class__ = GatedRMSNorm


def mixer_of(module: nn.Module, config: GenericConfig, kind: str) -> Mixer | None:
    """The mixer that a module is; None when it is none, or none that is known."""
    vectors = {n.rpartition(".")[2]: p.numel() for n, p in module.named_parameters()}
    children = dict(module.named_children())
    out = _first(children, OUTPUT)
    if out is None:
        return None
    if "A_log" in vectors and "x_proj" in children:
        return _mamba1(module, children, out)
    if "A_log" in vectors and "dt_bias" in vectors:
        decays = "D" in vectors and _conv_channels(module) > 0
        return _mamba2(module, config, out) if decays else _delta_rule(module, config, out)
    if _first(children, LATENT_UP) is not None:
        return _latent_attention(children, config, out)
    if isinstance(children.get("conv"), nn.Conv1d) and "in_proj" in children:
        return _short_convolution(module, children, out)
    query, fused = _first(children, QUERY), _first(children, FUSED)
    recurrent = any(part in name for name in [*children, *vectors] for part in RECURRENT)
    if (query is None and fused is None) or recurrent:
        return None  # better unnamed than wrong
    if any(name.startswith("gk_") for name in children):
        return _gated_linear_attention(children, config, out)
    if _first(children, OUTPUT_GATE) and any(name in children for name in OUTPUT_NORM):
        return _lightning(children, config, out)
    return _attention(children, config, out, kind, any(name in vectors for name in SINKS))


def _first(children: dict[str, nn.Module], names: tuple[str, ...]) -> nn.Linear | None:
    found = (children.get(name) for name in names)
    return next((m for m in found if isinstance(m, nn.Linear)), None)


def _conv_channels(module: nn.Module) -> int:
    return sum(m.in_channels for m in module.modules() if isinstance(m, nn.Conv1d))


def _conv_taps(module: nn.Module) -> int:
    return next((m.kernel_size[0] for m in module.modules() if isinstance(m, nn.Conv1d)), 0)


def _parameter(module: nn.Module, last: str) -> int:
    return next(p.numel() for n, p in module.named_parameters() if n.rpartition(".")[2] == last)


def _norm_width(children: dict[str, nn.Module], names: tuple[str, ...]) -> int | None:
    for name in names:
        weight = getattr(children.get(name), "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 1:
            return weight.numel()
    return None


def _divided(total: int, *parts: int | None) -> Iterator[int]:
    """Of these, what divides `total`."""
    yield from (p for p in parts if p and total % p == 0)


# ------------------------------------------------------------------------------------ attention


def _head_dim(children: dict[str, nn.Module], config: GenericConfig, width: int) -> int:
    """Width of a value head: the config's, or that of a norm of each head, or a usual one."""
    norm = _norm_width(children, ("q_norm", "k_norm", "query_layernorm"))
    heads = config.num_attention_heads
    by_heads = width // heads if heads and width % heads == 0 else None
    per_head = norm if norm != width else None
    return next(_divided(width, by_heads, config.head_dim, per_head, GUESSED_HEAD), width)


def _attention(
    children: dict[str, nn.Module], config: GenericConfig, out: nn.Linear, kind: str, sinks: bool
) -> Mixer:
    """Softmax attention; its heads are as wide as the config says or a norm of them is."""
    dim = _head_dim(children, config, out.in_features)
    heads = out.in_features // dim
    key, fused = _first(children, KEY), _first(children, FUSED)
    if key is not None:
        kv_heads = max(1, key.out_features // dim)
    elif fused is not None:
        kv_heads = max(1, (fused.out_features // dim - heads) // 2)
    else:
        kv_heads = config.num_key_value_heads or heads
    attributes: Attributes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "key_dim": dim,
        "value_dim": dim,
    }
    query = _first(children, QUERY)
    if _first(children, OUTPUT_GATE) or (query and query.out_features == 2 * out.in_features):
        attributes["output_gate"] = True
    if sinks:
        attributes["sinks"] = True
    if kind == "sliding" and config.sliding_window:
        attributes["window"] = config.sliding_window
        return Mixer("sliding_attention", SOFTMAX, attributes)
    if kind == "chunked" and config.attention_chunk_size:
        attributes["chunk"] = config.attention_chunk_size
        return Mixer("chunked_attention", SOFTMAX, attributes)
    return Mixer("full_attention", SOFTMAX, attributes)


def _latent_attention(
    children: dict[str, nn.Module], config: GenericConfig, out: nn.Linear
) -> Mixer:
    up, query = _first(children, LATENT_UP), _first(children, ("q_b_proj", "wq_b", *QUERY))
    rank = up.in_features if up is not None else 0
    heads = config.num_attention_heads or config.num_key_value_heads
    if not heads:  # v_head_dim is all that is left to tell it
        heads = out.in_features // (config.v_head_dim or GUESSED_HEAD) or 1
    value_dim = out.in_features // heads
    key_dim = query.out_features // heads if query is not None else value_dim
    attributes: Attributes = {
        "heads": heads,
        "kv_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "latent_dim": rank,
        "rope": config.text.get("mla_use_nope") is not True,
    }
    down = _first(children, LATENT_DOWN)
    if attributes["rope"] and down is not None and down.out_features > rank:
        attributes["rope_dim"] = down.out_features - rank
    if _first(children, OUTPUT_GATE):
        attributes["output_gate"] = True
    indexer = children.get("indexer")
    if indexer is not None:
        return Mixer("sparse_topk", SPARSE, attributes | _indexer(indexer, config))
    if config.index_topk and isinstance(config.text.get("indexer_types"), list):
        # The selection of an earlier layer is used again (GLM-5.3).
        return Mixer("sparse_topk", SPARSE, attributes | {"top_k": config.index_topk})
    return Mixer("mla", SOFTMAX, attributes)


def _indexer(indexer: nn.Module, config: GenericConfig) -> Attributes:
    inside = dict(indexer.named_children())
    weights = _first(inside, ("weights_proj",))
    key = _first(inside, ("wk", "k_proj"))
    return {
        "top_k": config.index_topk or 2048,
        "index_heads": weights.out_features if weights else config.index_n_heads or 1,
        "index_dim": key.out_features if key else config.index_head_dim or GUESSED_HEAD,
    }


# ----------------------------------------------------------------------------- linear attention


def _delta_rule(module: nn.Module, config: GenericConfig, out: nn.Linear) -> Mixer:
    """KDA when every key channel decays on its own, Gated DeltaNet when a head does."""
    children = dict(module.named_children())
    decays, rates = _parameter(module, "dt_bias"), _parameter(module, "A_log")
    beta = _first(children, ("b_proj", "in_proj_b"))
    value_heads = beta.out_features if beta else min(rates, decays)
    per_channel = decays > value_heads
    values = out.in_features
    query, value = _first(children, QUERY), _first(children, VALUE)
    values = value.out_features if value else values
    keys = query.out_features if query else (_conv_channels(module) - values) // 2
    heads = value_heads
    if not per_channel:
        heads = next(_divided(keys, config.linear_num_key_heads, value_heads), 1)
    attributes: Attributes = {
        "heads": heads,
        "value_heads": value_heads,
        "key_dim": keys // heads,
        "value_dim": values // value_heads,
        "gate": "per_channel" if per_channel else "per_head",
        "qk_l2norm": True,  # part of both operators as they are published
        "conv_kernel_size": _conv_taps(module),
    }
    bound = config.section("linear_attn_config").get("gate_lower_bound")
    if isinstance(bound, int | float):
        attributes["gate_lower_bound"] = float(bound)
    if per_channel:
        return Mixer("kda", "kda", attributes)
    return Mixer("gated_delta_net", "gated_delta_rule", attributes)


def _mamba2(module: nn.Module, config: GenericConfig, out: nn.Linear) -> Mixer:
    heads, groups = _parameter(module, "A_log"), config.mamba_n_groups or 1
    attributes: Attributes = {
        "heads": groups,
        "value_heads": heads,
        "key_dim": (_conv_channels(module) - out.in_features) // (2 * groups),
        "value_dim": out.in_features // heads,
        "gate": "per_head",
        "conv_kernel_size": _conv_taps(module),
    }
    if config.mamba_chunk_size:
        attributes["chunk_size"] = config.mamba_chunk_size
    return Mixer("mamba2", "mamba2", attributes)


def _short_convolution(module: nn.Module, children: dict[str, nn.Module], out: nn.Linear) -> Mixer:
    """A gated depthwise convolution over a few tokens as the whole mixer (LFM2)."""
    gates = _first(children, ("in_proj",))
    attributes: Attributes = {
        "channels": out.in_features,
        "conv_kernel_size": _conv_taps(module),
        "output_gate": gates is not None and gates.out_features == 3 * out.in_features,
    }
    return Mixer("short_convolution", "short_convolution", attributes)


def _mamba1(module: nn.Module, children: dict[str, nn.Module], out: nn.Linear) -> Mixer:
    steps, channels = _first(children, ("dt_proj",)), out.in_features
    attributes: Attributes = {
        "channels": channels,
        "key_dim": _parameter(module, "A_log") // channels,
        "time_step_rank": steps.in_features if steps else 1,
        "conv_kernel_size": _conv_taps(module),
    }
    return Mixer("mamba1", "selective_scan", attributes)


def _gated_linear_attention(
    children: dict[str, nn.Module], config: GenericConfig, out: nn.Linear
) -> Mixer:
    """A decay of each key channel from a projection, no delta rule."""
    query, value = _first(children, QUERY), _first(children, VALUE)
    values = value.out_features if value else out.in_features
    norm = _norm_width(children, OUTPUT_NORM)
    per_head = values // norm if norm and values % norm == 0 and norm < values else None
    stated = (config.linear_num_key_heads, config.num_attention_heads)
    heads = next(_divided(values, per_head, *stated), 1)
    keys = query.out_features if query else values
    attributes: Attributes = {
        "heads": heads,
        "key_dim": keys // heads,
        "value_dim": values // heads,
        "gate": "per_channel",
        "output_gate": _first(children, OUTPUT_GATE) is not None,
    }
    return Mixer("gla", "gla", attributes)


def _lightning(children: dict[str, nn.Module], config: GenericConfig, out: nn.Linear) -> Mixer:
    """Linear attention whose decay is a constant of the head, with a norm and a gate after it."""
    dim = _head_dim(children, config, out.in_features)
    heads = out.in_features // dim
    attributes: Attributes = {"heads": heads, "key_dim": dim, "value_dim": dim, "gate": "constant"}
    return Mixer("lightning", "lightning", attributes)
