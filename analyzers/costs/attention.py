"""Softmax attention: full, in a window or in chunks, over selected keys, with its indexer.

Full squares are counted, as `torch.utils.flop_counter` does; `Work.causal` takes the half. Every
tensor is counted once in the bytes: keys that are streamed again come from the cache.
"""

from __future__ import annotations

from analyzers.costs.call import ACTIVATION, FLOAT32, INDEX, Call, a_token, one_way
from analyzers.mixers import Mixer
from analyzers.schema import Work


def softmax_attention(mixer: Mixer) -> list[Call]:
    """Over all keys, or those of a window or a chunk."""
    reach = mixer.attributes.get("window") or mixer.attributes.get("chunk")
    pairs = Work(per_window={int(reach): 1.0}) if reach else Work(per_pair=1.0)
    return [_attention(mixer, pairs)]


def sparse_attention(mixer: Mixer) -> list[Call]:
    """Over `top_k` keys (DeepSeek-V3.2, arXiv 2512.02556), and the indexer that selects them where
    the layer has one."""
    attention = _attention(mixer, Work(per_window={int(mixer.attributes["top_k"]): 1.0}))
    return [indexer(mixer), attention] if "index_heads" in mixer.attributes else [attention]


def compressed_attention(mixer: Mixer) -> list[Call]:
    """DeepSeek-V4: a query sees the keys of a window and those of earlier tokens, `compress_rate`
    of them pooled into one: all, or the `top_k` that an indexer selects."""
    a = mixer.attributes
    rate, window = int(a["compress_rate"]), Work(per_window={int(a["window"]): 1.0})
    if "top_k" not in a:
        return [_attention(mixer, window + Work(per_pair=1 / rate))]
    selected = Work(per_window={int(a["top_k"]) * rate: 1 / rate})  # min(T / rate, k)
    return [indexer(mixer), _attention(mixer, window + selected)]


def indexer(mixer: Mixer) -> Call:
    """Scores of all pairs, `sum_h w_h ReLU(q_h . k)`: 2 * index_heads * (index_dim + 1) a pair,
    over keys pooled in groups where the model pools them. Nothing is differentiated: it hands on
    indices."""
    a = mixer.attributes
    heads, dim, top_k = int(a["index_heads"]), int(a["index_dim"]), int(a["top_k"])
    pool = int(a.get("index_pool") or a.get("compress_rate") or 1)
    read = ACTIVATION * (heads + 1 / pool) * dim + FLOAT32 * heads
    return Call(
        operator="indexer",
        part="mixer",
        forward=one_way(
            Work(per_pair=2 * heads * (dim + 1) / pool), read=read, written=INDEX * top_k
        ),
        attributes={"heads": heads, "key_dim": dim, "top_k": top_k},
    )


def _attention(mixer: Mixer, pairs: Work) -> Call:
    """Forward Q K^T and P V: 2 * heads * (K + V) for each of the `pairs` of query and key.

    Backward Q K^T again, dP = dO V^T, dV = P^T dO, dQ = dP K and dK = dP^T Q: 2 * heads *
    (3 K + 2 V), which is 2.5 times the forward where K = V (Dao 2023, arXiv 2307.08691). Keeps q,
    k, v, o and the log-sum-exp of each row.
    """
    a = mixer.attributes
    heads, kv_heads = int(a["heads"]), int(a["kv_heads"])
    k, v = int(a["key_dim"]), int(a["value_dim"])
    inputs = ACTIVATION * (heads * k + kv_heads * (k + v))
    output, row = ACTIVATION * heads * v, FLOAT32 * heads
    return Call(
        operator=mixer.operator,
        part="mixer",
        forward=one_way(pairs * (2 * heads * (k + v)), read=inputs, written=output + row),
        backward=one_way(
            pairs * (2 * heads * (3 * k + 2 * v)), read=inputs + 2 * output + row, written=inputs
        ),
        saved=a_token(inputs + output + row),
        attributes=a,
        site=mixer.site,
    )
