"""Softmax attention: full, in a window or in chunks, over selected keys, with its indexer.

Full squares are counted, as `torch.utils.flop_counter` does; `Work.causal` takes the half. Every
tensor is counted once in the bytes: keys that are streamed again come from the cache.
"""

from __future__ import annotations

from analyzers.costs.call import ACTIVATION, FLOAT32, INDEX, Call, a_token, one_way
from analyzers.mixers import Mixer
from analyzers.schema import Work


def softmax_attention(mixer: Mixer) -> list[Call]:
    """Forward Q K^T and P V: 2 * heads * (K + V) a pair. Backward Q K^T again, dP = dO V^T,
    dV = P^T dO, dQ = dP K and dK = dP^T Q: 2 * heads * (3 K + 2 V), which is 2.5 times the forward
    where K = V (Dao 2023, arXiv 2307.08691). Keeps q, k, v, o and the log-sum-exp of each row."""
    return [_attention(mixer, mixer.attributes.get("window") or mixer.attributes.get("chunk"))]


def sparse_attention(mixer: Mixer) -> list[Call]:
    """Softmax attention over `top_k` keys, and the indexer that selects them, if the layer has one
    (DeepSeek-V3.2, arXiv 2512.02556)."""
    attention = _attention(mixer, mixer.attributes["top_k"])
    return [indexer(mixer), attention] if "index_heads" in mixer.attributes else [attention]


def indexer(mixer: Mixer) -> Call:
    """Scores of all pairs, `sum_h w_h ReLU(q_h . k)`: 2 * index_heads * (index_dim + 1) a pair,
    over keys pooled in groups where the model pools them. It runs under `no_grad`: no backward."""
    a = mixer.attributes
    heads, dim, top_k = int(a["index_heads"]), int(a["index_dim"]), int(a["top_k"])
    pool = int(a.get("index_pool", 1))
    pair = 2 * heads * (dim + 1) / pool
    read = ACTIVATION * (heads + 1 / pool) * dim + FLOAT32 * heads
    return Call(
        operator="indexer",
        part="mixer",
        forward=one_way(Work(per_pair=pair), read=read, written=INDEX * top_k),
        attributes={"heads": heads, "key_dim": dim, "top_k": top_k},
    )


def _attention(mixer: Mixer, reach: int | float | str | None) -> Call:
    """Over all keys, or over `reach` of them."""
    a = mixer.attributes
    heads, kv_heads = int(a["heads"]), int(a["kv_heads"])
    k, v = int(a["key_dim"]), int(a["value_dim"])

    def pairs(flops: float) -> Work:
        return Work(per_window={int(reach): flops}) if reach else Work(per_pair=flops)

    inputs = ACTIVATION * (heads * k + kv_heads * (k + v))
    output, row = ACTIVATION * heads * v, FLOAT32 * heads
    return Call(
        operator=mixer.operator,
        part="mixer",
        forward=one_way(pairs(2 * heads * (k + v)), read=inputs, written=output + row),
        backward=one_way(
            pairs(2 * heads * (3 * k + 2 * v)), read=inputs + 2 * output + row, written=inputs
        ),
        saved=a_token(inputs + output + row),
        attributes=a,
        site=mixer.site,
    )
