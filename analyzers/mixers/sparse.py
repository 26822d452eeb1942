"""Softmax attention over the keys, or the blocks of keys, that an indexer selects."""

from __future__ import annotations

from typing import Any

from analyzers.mixers.attention import (
    heads,
    is_attention,
    is_latent_attention,
    latent_heads,
    reach,
    variant,
)
from analyzers.mixers.mixer import Attributes, Mixer, first_of, has, whole
from analyzers.schema import Site

OPERATOR = "sparse_attention"
SPELT_OUT = {"DeepseekV32Attention", "GlmMoeDsaAttention"}
"""Classes whose forward projects, rotates, selects and attends in this way and no other."""


def is_sparse_attention(module: Any) -> bool:
    """With an indexer of its own, or over what an earlier layer's has selected (`skip_topk`)."""
    indexed = has(module, "indexer") or getattr(module, "skip_topk", False)
    return indexed and (is_latent_attention(module) or is_attention(module))


def sparse_attention(module: Any, config: Any) -> Mixer:
    """Over `top_k` keys (DeepSeek-AI 2025, arXiv 2512.02556) or blocks of them.

    `index_pool` keys share one score of the indexer; without `index_heads` the selection is that of
    an earlier layer.
    """
    if is_latent_attention(module):
        attributes = latent_heads(module, config)
    else:
        attributes = heads(module, config) | variant(module, config)
    index = getattr(module, "indexer", None)
    if index is None:
        attributes |= {"top_k": int(config.index_topk)}
        return Mixer("sparse_topk", OPERATOR, attributes, site=_site(module))
    if has(index, "topk_blocks", "block_size"):  # MiniMax-M3: all keys scored, blocks kept
        attributes |= _indexer(index, config, index.topk_blocks * index.block_size)
        attributes["block_size"] = index.block_size
        return Mixer("block_sparse", OPERATOR, attributes)
    top_k = first_of(index, "index_topk", "top_k", "topk", "token_budget") or config.index_topk
    attributes |= _indexer(index, config, top_k)
    pool = first_of(index, "index_kpool", "compress_ratio")
    if pool is not None and pool > 1:
        attributes["index_pool"] = int(pool)
    return Mixer("sparse_topk", OPERATOR, attributes, site=_site(module))


def _site(module: Any) -> Site | None:
    """The module itself, where its whole forward is known."""
    known = any(base.__name__ in SPELT_OUT for base in type(module).__mro__)
    return whole(module) if known else None


def _indexer(index: Any, config: Any, top_k: int) -> Attributes:
    count = first_of(index, "n_heads", "index_n_heads", "num_heads") or config.index_n_heads
    dim = first_of(index, "head_dim", "index_head_dim") or config.index_head_dim
    return {"top_k": int(top_k), "index_heads": int(count), "index_dim": int(dim)}


def is_compressed_attention(module: Any) -> bool:
    return has(module, "q_b_proj", "kv_proj", "head_dim") and hasattr(module, "compressor")


def compressed_attention(module: Any, config: Any) -> Mixer:
    """DeepSeek-V4: keys that are their own values, in one head, over a window and, but in its
    sliding layers, over earlier tokens compressed `compress_rate` to one: all of them, or (with
    `top_k`) those that an indexer selects.

    A query sees min(T, window) keys, and T / compress_rate more, at most `top_k` of these.
    """
    attributes: Attributes = {
        "heads": module.num_heads,
        "kv_heads": 1,
        "key_dim": module.head_dim,
        "value_dim": module.head_dim,
        **variant(module, config),
        "rope_dim": int(config.qk_rope_head_dim),
    }
    compressor = module.compressor
    if compressor is None:
        return reach(module, config, attributes)
    attributes |= {"window": module.sliding_window, "compress_rate": compressor.compress_rate}
    index = getattr(compressor, "indexer", None)
    if index is None:
        return Mixer("compressed_attention", "compressed_attention", attributes)
    attributes |= _indexer(index, config, index.index_topk)
    return Mixer("compressed_sparse", "compressed_attention", attributes)


def is_dynamic_mask_attention(module: Any) -> bool:
    return has(module, "keep_window_size", "dt_proj", "A") and is_attention(module)


def dynamic_mask_attention(module: Any, config: Any) -> Mixer:
    """Doge: every query keeps the keys whose values score highest, no indexer besides a vector."""
    attributes = heads(module, config) | variant(module, config)
    return Mixer("sparse_topk", OPERATOR, attributes | {"top_k": int(module.keep_window_size)})
