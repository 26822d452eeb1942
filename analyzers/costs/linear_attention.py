"""Mixers with a state of fixed size, in chunks of C tokens: linear in the length of a document.

K and V are the head widths, S the state [K, V]; FLOPs are a head and token. Triangles inside a
chunk count as squares, as kernels compute them. Kernels keep their inputs alone; the backward pass
computes again what it needs of the forward. Each product of a forward pass has two in backward, one
for the gradient of each factor.
"""

from __future__ import annotations

from analyzers.costs.call import ACTIVATION, FLOAT32, Call, a_token, one_way
from analyzers.mixers import Mixer

CHUNK = 64
"""Chunk length where the model names none; kernels of the field use 64 (or 32)."""


def delta_rule(mixer: Mixer) -> list[Call]:
    """Gated delta rule in its WY form (Yang et al. 2024, arXiv 2412.06464; Kimi Team 2025,
    2510.26692), for a decay per head or per channel.

    Forward 6 CK + 4 CV + 6 KV:
        A_kk = K K^T 2CK, T = (I + A_kk)^-1 (substitution, no product), W = T K 2CK, U = T V 2CV,
        V' = U - W S 2KV, A_qk = Q K^T 2CK, O = Q S + A_qk V' 2KV + 2CV, S += K^T V' 2KV
    Backward 18 CK + 10 CV + 16 KV + 4 CC:
        gradients, twice the forward 12 CK + 8 CV + 12 KV, and of the inverse -T^T dT T^T 4 CC;
        again all but O 6 CK + 2 CV + 4 KV
    (flash-linear-attention keeps T as well, C elements a head and token, and saves 2 CK.)
    """
    a = mixer.attributes
    heads, values = int(a["heads"]), int(a["value_heads"])
    k, v, c = int(a["key_dim"]), int(a["value_dim"]), CHUNK
    gate = values * (k if a["gate"] == "per_channel" else 1)
    return [
        _scan(
            mixer,
            forward=values * (6 * c * k + 4 * c * v + 6 * k * v),
            backward=values * (18 * c * k + 10 * c * v + 16 * k * v + 4 * c * c),
            inputs=ACTIVATION * (2 * heads * k + values * v) + FLOAT32 * (gate + values),
            output=ACTIVATION * values * v,
        )
    ]


def linear_attention(mixer: Mixer) -> list[Call]:
    """Decaying linear attention without the delta rule: lightning attention (Qin et al. 2024,
    arXiv 2401.04658), GLA (Yang et al. 2023, 2312.06635), mLSTM (Beck et al. 2024, 2405.04517) and
    SSD, where q = C, k = B and v = dt x (Dao & Gu 2024, 2405.21060).

    Forward 2 CK + 2 CV + 4 KV: A = Q K^T 2CK, O = A V + Q S 2CV + 2KV, S += K^T V 2KV.
    Backward 6 CK + 4 CV + 10 KV: twice that, and again A 2CK and S 2KV.
    Value heads that share their keys and queries (groups of SSD) share A.
    """
    a = mixer.attributes
    groups, k, v = int(a["heads"]), int(a["key_dim"]), int(a["value_dim"])
    heads, c = int(a.get("value_heads", groups)), int(a.get("chunk_size", CHUNK))
    gate = heads * {"per_channel": k, "constant": 0}.get(str(a.get("gate")), 1)
    return [
        _scan(
            mixer,
            forward=groups * 2 * c * k + heads * (2 * c * v + 4 * k * v),
            backward=groups * 6 * c * k + heads * (4 * c * v + 10 * k * v),
            inputs=ACTIVATION * (2 * groups * k + heads * v) + FLOAT32 * gate,
            output=ACTIVATION * heads * v,
        )
    ]


def selective_scan(mixer: Mixer) -> list[Call]:
    """A decay per channel and state (Mamba, arXiv 2312.00752): element by element, no product.
    Reads x and its step in float32, B and C."""
    channels, state = int(mixer.attributes["channels"]), int(mixer.attributes["key_dim"])
    inputs = (ACTIVATION + FLOAT32) * channels + 2 * ACTIVATION * state
    return [_scan(mixer, forward=0, backward=0, inputs=inputs, output=ACTIVATION * channels)]


def wkv(mixer: Mixer) -> list[Call]:
    """A weighted mean of past values per channel (RWKV-4, arXiv 2305.13048): element by element.
    Reads keys and values."""
    channels = int(mixer.attributes["channels"])
    inputs, output = 2 * ACTIVATION * channels, ACTIVATION * channels
    return [_scan(mixer, forward=0, backward=0, inputs=inputs, output=output)]


def rg_lru(mixer: Mixer) -> list[Call]:
    """Real-gated linear recurrent unit (De et al. 2024, arXiv 2402.19427).

    Its two gates are block-diagonal matrices of the input, 2 * 2 * channels**2 / heads; backward
    makes them again and takes their gradient. The recurrence goes element by element.
    """
    channels, heads = int(mixer.attributes["channels"]), int(mixer.attributes["heads"])
    gates, one = 4 * channels**2 / heads, ACTIVATION * channels
    return [_scan(mixer, forward=gates, backward=2 * gates, inputs=one, output=one)]


def _scan(mixer: Mixer, *, forward: float, backward: float, inputs: float, output: float) -> Call:
    """`inputs` and `output` in bytes a token; gradients have the sizes of what they belong to."""
    return Call(
        operator=mixer.operator,
        part="mixer",
        forward=one_way(a_token(forward), read=inputs, written=output),
        backward=one_way(a_token(backward), read=inputs + output, written=inputs),
        saved=a_token(inputs),
        attributes=mixer.attributes,
        site=mixer.site,
    )
