"""The token mixers that are recognised, in one table keyed by module structure.

Each reader takes its sizes from the attributes that transformers' modules carry; what it needs from
the config (heads of plain attention, the indexer) is named the same in every config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from analyzers.schema import Site

Attributes = dict[str, int | float | str | bool]


@dataclass(frozen=True)
class Mixer:
    """A module that mixes tokens, and the operator at its heart."""

    name: str
    """As in `schema.Layer.mixer`."""
    operator: str
    attributes: Attributes
    site: Site | None = None
    path: str = ""


def first_of(module: Any, *names: str) -> Any:
    """The first of these attributes that the module has and that is not None."""
    for name in names:
        value = getattr(module, name, None)
        if value is not None:
            return value
    return None


def _parameter(module: nn.Module, last: str) -> nn.Parameter | None:
    """The parameter of that last name in the module or below it."""
    return next((p for n, p in module.named_parameters() if n.rpartition(".")[2] == last), None)


def _site(module: nn.Module, *words: str) -> Site | None:
    """The module-global function with one of `words` in its name that the forward calls."""
    forward = inspect.unwrap(type(module).forward)
    names = [n for n in forward.__code__.co_names if callable(forward.__globals__.get(n))]
    for word in words:
        for name in names:
            if word in name:
                return Site(module_class=type(module).__name__, function=name)
    return None


def _convolution(module: nn.Module) -> int:
    sizes = [m.kernel_size[0] for m in module.modules() if isinstance(m, nn.Conv1d)]
    return sizes[0] if sizes else 0


def _delta_rule(module: Any, config: Any) -> Mixer:
    """Kimi delta attention (a decay per channel) or Gated DeltaNet (a decay per head)."""
    key_dim = first_of(module, "head_k_dim", "head_dim")
    value_dim = first_of(module, "head_v_dim", "head_dim")
    value_heads = first_of(module, "num_v_heads", "num_heads")
    heads = first_of(module, "num_k_heads", "num_heads")
    dt_bias = _parameter(module, "dt_bias")
    per_channel = dt_bias is not None and dt_bias.numel() == value_heads * key_dim
    attributes: Attributes = {
        "heads": heads,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "gate": "per_channel" if per_channel else "per_head",
        # transformers' delta-rule modules ask the function to normalise queries and keys.
        "qk_l2norm": "use_qk_l2norm_in_kernel" in _constants(type(module).forward),
        "conv_kernel_size": _convolution(module),
    }
    name = "kda" if per_channel else "gated_delta_net"
    operator = "kda" if per_channel else "gated_delta_rule"
    return Mixer(name, operator, attributes, _site(module, "chunk_"))


def _constants(function: Callable) -> set[str]:
    """All strings among a function's constants, keyword names included."""
    found: set[str] = set()
    for constant in inspect.unwrap(function).__code__.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple):
            found.update(c for c in constant if isinstance(c, str))
    return found


def _mamba2(module: Any, config: Any) -> Mixer:
    attributes: Attributes = {
        "heads": module.num_heads,
        "value_dim": module.head_dim,
        "key_dim": module.ssm_state_size,
        "groups": module.n_groups,
        "conv_kernel_size": _convolution(module),
    }
    return Mixer("mamba2", "ssd", attributes)


def _lightning(module: Any, config: Any) -> Mixer:
    heads = first_of(module, "num_attention_heads", "num_heads")
    attributes: Attributes = {
        "heads": heads,
        "key_dim": module.head_dim,
        "value_dim": module.head_dim,
    }
    return Mixer("lightning", "lightning_attention", attributes)


def _latent_attention(module: Any, config: Any) -> Mixer:
    """Multi-head latent attention; with an indexer, attention over the keys that it selects."""
    attributes: Attributes = {
        "heads": first_of(module, "num_heads") or config.num_attention_heads,
        "kv_heads": first_of(module, "num_heads") or config.num_attention_heads,
        "key_dim": module.qk_head_dim,
        "value_dim": module.v_head_dim,
        "latent_dim": module.kv_lora_rank,
    }
    if getattr(module, "indexer", None) is None:
        return Mixer("mla", "scaled_dot_product_attention", attributes)
    return Mixer("sparse_topk", "sparse_attention", attributes | _indexer(config))


def _indexer(config: Any) -> Attributes:
    return {
        "top_k": config.index_topk,
        "index_heads": config.index_n_heads,
        "index_dim": config.index_head_dim,
    }


def _attention(module: Any, config: Any) -> Mixer:
    """Attention with separate or fused q, k, v projections; grouped keys; maybe a window."""
    dim = first_of(module, "head_dim", "attention_head_dim")
    if dim is None:
        dim = config.hidden_size // config.num_attention_heads
    heads = first_of(module, "num_heads", "num_attention_heads") or config.num_attention_heads
    key = getattr(module, "k_proj", None)
    kv_heads = first_of(module, "num_key_value_heads")
    if kv_heads is None and isinstance(key, nn.Linear):
        kv_heads = key.out_features // dim
    attributes: Attributes = {
        "heads": heads,
        "kv_heads": kv_heads or heads,
        "key_dim": dim,
        "value_dim": dim,
    }
    window = getattr(module, "sliding_window", None)
    if window:
        attributes["window"] = int(window)
        return Mixer("sliding_attention", "scaled_dot_product_attention", attributes)
    return Mixer("full_attention", "scaled_dot_product_attention", attributes)


def _has(module: nn.Module, *names: str) -> bool:
    return all(getattr(module, name, None) is not None for name in names)


def _owns(module: nn.Module, *names: str) -> bool:
    """Whether a parameter of each last name lies in the module or below it."""
    return all(_parameter(module, name) is not None for name in names)


# Test and reader of each mixer; the first test that holds decides.
MIXERS: list[tuple[Callable[[Any], bool], Callable[[Any, Any], Mixer]]] = [
    (lambda m: _has(m, "ssm_state_size", "n_groups", "conv1d") and _owns(m, "A_log", "D"), _mamba2),
    (lambda m: _owns(m, "A_log", "dt_bias") and _has(m, "conv1d"), _delta_rule),
    (lambda m: _has(m, "slope_rate", "head_dim"), _lightning),
    (lambda m: _has(m, "kv_lora_rank", "kv_b_proj", "v_head_dim"), _latent_attention),
    (lambda m: _has(m, "q_proj", "k_proj") or _has(m, "qkv_proj", "head_dim"), _attention),
]


def _reader(module: nn.Module) -> Callable[[Any, Any], Mixer] | None:
    return next((read for test, read in MIXERS if test(module)), None)


def is_mixer(module: nn.Module) -> bool:
    if hasattr(module, "inferred_mixer"):
        return module.inferred_mixer is not None
    return _reader(module) is not None


def recognise(module: nn.Module, config: Any) -> Mixer | None:
    """The mixer that a module is, by the table above; None when it is none of them."""
    if hasattr(module, "inferred_mixer"):  # a module without a class, see `analyzers.headers`
        return module.inferred_mixer
    read = _reader(module)
    return read(module, config) if read else None
