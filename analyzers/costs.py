"""What each operator of a block costs: FLOPs, bytes and what the backward pass must keep.

Formulas are for the forward pass of one sequence of T tokens; a multiply-add counts as two. Saved
bytes are those of a backward pass in bfloat16 with nothing recomputed, as transformers' eager
modules keep them: every operator its inputs, norms a float32 copy besides, and linears that read
the same tensor keep it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from analyzers.mixers import Attributes, Mixer
from analyzers.schema import AdapterWork, PartName, Pass, Site, Work
from analyzers.structure import Kind, Moe

CHUNK = 64
"""Chunk length of the linear-attention formulas; kernels of the field use 64 (or 32)."""
ACTIVATION = 2  # bytes of an activation element (bfloat16)
FLOAT32 = 4


@dataclass(frozen=True)
class Call:
    """One call of an operator in one block."""

    operator: str
    part: PartName
    forward: Pass
    backward: Pass = field(default_factory=Pass)
    """With frozen weights."""
    saved: Work = field(default_factory=Work)
    """Kept for the backward pass with frozen weights."""
    adapter: AdapterWork | None = None
    parameters: int = 0
    attributes: Attributes = field(default_factory=dict)
    site: Site | None = None


def block_calls(kind: Kind) -> list[Call]:
    """Every operator call of one block of this kind, with the part that it belongs to."""
    calls: list[Call] = []
    inputs: set[tuple[str, int]] = set()  # inputs of linears that are already kept
    for path, module in kind.module.named_modules():
        if kind.moe and path.startswith(f"{kind.moe.experts}."):
            continue
        if kind.moe and path == kind.moe.experts:
            calls.append(experts(kind.moe, module))
        elif kind.moe and path == kind.moe.router:
            calls.append(router(kind.moe, module))
        elif isinstance(module, nn.Linear):
            key = (path.rpartition(".")[0], module.in_features)
            calls.append(linear(module, kind.part(path), shared_input=key in inputs))
            inputs.add(key)
        else:
            calls += _elementwise(kind, path, module)
        for mixer in kind.mixers:
            if mixer.path == path:
                calls += mixing(mixer)
    return calls


def _elementwise(kind: Kind, path: str, module: nn.Module) -> Iterator[Call]:
    """Norms, short convolutions, gated activations and residual sites, by their form."""
    part = kind.part(path)
    own = dict(module.named_parameters(recurse=False))
    name = type(module).__name__
    if isinstance(module, nn.Conv1d):
        yield short_convolution(module, part)
    elif "AttentionResidual" in name and "norm_weight" in own:
        yield attention_residual(own["norm_weight"].numel(), part, _count(own))
    elif set(own) in ({"weight"}, {"weight", "bias"}) and own["weight"].ndim == 1:
        yield norm(name, own["weight"].numel() * _heads(kind, path, own), part, _count(own))
    children = {n: c for n, c in module.named_children() if isinstance(c, nn.Linear)}
    if children.keys() >= {"gate_proj", "up_proj", "down_proj"}:
        yield gated_activation(children["down_proj"].in_features, part)


def _count(parameters: dict[str, nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters.values())


def _heads(kind: Kind, path: str, own: dict[str, nn.Parameter]) -> int:
    """How often a norm of a mixer is applied to a token: once a head when it is one head wide."""
    for mixer in kind.mixers:
        if path.startswith(f"{mixer.path}."):
            width, a = own["weight"].numel(), mixer.attributes
            keys = path.rpartition(".")[2].startswith("k")
            heads = a.get("kv_heads" if keys else "value_heads", a.get("heads", 1))
            head_widths = {a.get("key_dim"), a.get("value_dim")}
            return int(heads) if width in head_widths and width != a.get("latent_dim") else 1
    return 1


# ------------------------------------------------------------------------------------ operators


def linear(module: nn.Linear, part: PartName, *, shared_input: bool = False) -> Call:
    """2 * in * out a token."""
    i, o = module.in_features, module.out_features
    return Call(
        operator="linear",
        part=part,
        forward=Pass(flops=Work(per_token=2 * i * o), bytes=Work(per_token=ACTIVATION * (i + o))),
        saved=Work(per_token=0 if shared_input else ACTIVATION * i),
        parameters=sum(p.numel() for p in module.parameters()),
        attributes={"in_features": i, "out_features": o},
    )


def embedding(vocabulary: int, hidden: int) -> Call:
    return Call(
        operator="embedding",
        part="embedding",
        forward=Pass(flops=Work(), bytes=Work(per_token=2 * ACTIVATION * hidden)),
        parameters=vocabulary * hidden,
        attributes={"vocabulary": vocabulary, "hidden": hidden},
    )


def norm(class_name: str, width: int, part: PartName, parameters: int) -> Call:
    """RMSNorm: square, sum, scale, weight = 4 an element; with a gate about 9; LayerNorm 7."""
    gated = "Gated" in class_name
    operator = "gated_rms_norm" if gated else "rms_norm" if "RMS" in class_name else "layer_norm"
    flops = {"gated_rms_norm": 9, "rms_norm": 4, "layer_norm": 7}[operator]
    tensors = 2 if gated else 1
    return Call(
        operator=operator,
        part=part,
        forward=Pass(
            flops=Work(per_token=flops * width),
            bytes=Work(per_token=ACTIVATION * width * (tensors + 1)),
        ),
        saved=Work(
            per_token=(FLOAT32 + ACTIVATION) * width * tensors
        ),  # the float32 copy and the normalised
        parameters=parameters,
        attributes={"width": width},
    )


def short_convolution(module: nn.Conv1d, part: PartName) -> Call:
    """A depthwise convolution over time with its activation: 2 * taps + 4 a channel."""
    channels, taps = module.in_channels, module.kernel_size[0]
    return Call(
        operator="short_convolution",
        part=part,
        forward=Pass(
            flops=Work(per_token=channels * (2 * taps + 4)),
            bytes=Work(per_token=2 * ACTIVATION * channels),
        ),
        saved=Work(per_token=2 * ACTIVATION * channels),  # its input and what the activation reads
        parameters=sum(p.numel() for p in module.parameters()),
        attributes={"channels": channels, "kernel_size": taps},
    )


def gated_activation(width: int, part: PartName) -> Call:
    """`act(gate) * up`: about 5 an element. Keeps all three; the product is the next input."""
    return Call(
        operator="gated_activation",
        part=part,
        forward=Pass(flops=Work(per_token=5 * width), bytes=Work(per_token=3 * ACTIVATION * width)),
        saved=Work(per_token=3 * ACTIVATION * width),
        attributes={"width": width},
    )


def attention_residual(hidden: int, part: PartName, parameters: int) -> Call:
    """Softmax mix over the block starts (at most 8 in Kimi-K3): norm, score and sum of each."""
    starts = 8
    return Call(
        operator="attention_residual",
        part=part,
        forward=Pass(
            flops=Work(per_token=8 * starts * hidden),
            bytes=Work(per_token=ACTIVATION * hidden * (starts + 2)),
        ),
        saved=Work(
            per_token=ACTIVATION * hidden
        ),  # the running sum; the bank is kept once by its blocks
        parameters=parameters,
        attributes={"width": hidden},
    )


def router(moe: Moe, module: nn.Module) -> Call:
    """Scores of all experts in float32, then top k: 2 * in * E + about 6 * E a token."""
    i, e = moe.router_input_size, moe.count
    return Call(
        operator="router",
        part="router",
        forward=Pass(
            flops=Work(per_token=2 * i * e + 6 * e),
            bytes=Work(per_token=ACTIVATION * i + FLOAT32 * e + 8 * moe.top_k),
        ),
        saved=Work(per_token=FLOAT32 * (i + e)),
        parameters=sum(p.numel() for p in module.parameters()),
        attributes={"experts": e, "top_k": moe.top_k, "in_features": i},
    )


def experts(moe: Moe, module: nn.Module) -> Call:
    """top_k experts a token, each two GEMMs: 2 * (matrix elements of one expert) * top_k."""
    matrices = sum(bank.in_features * bank.out_features for bank in moe.banks)
    h, i, k = moe.hidden_size, moe.intermediate_size, moe.top_k
    up = moe.banks[0].out_features
    return Call(
        operator="experts",
        part="routed_experts",
        forward=Pass(
            flops=Work(per_token=k * (2 * matrices + 5 * i + 2 * h)),
            bytes=Work(per_token=ACTIVATION * k * (2 * h + 2 * up + 2 * i)),
        ),
        # Of each visit: input, up output, activation, its product with the gate, down output.
        saved=Work(per_token=ACTIVATION * k * (2 * h + up + 2 * i)),
        parameters=sum(p.numel() for p in module.parameters()),
        attributes={
            "experts": moe.count,
            "top_k": k,
            "hidden_size": h,
            "intermediate_size": i,
            "gated": moe.gated,
        },
    )


def mixing(mixer: Mixer) -> list[Call]:
    """The operator at the heart of a mixer (and its indexer); empty for an unknown one."""
    formula = FORMULAS.get(mixer.operator)
    return formula(mixer) if formula else []


def delta_rule(mixer: Mixer) -> list[Call]:
    """Chunked gated delta rule, K and V the head widths, C the chunk, a head and token:

    A_kk and A_qk 2*C*K each, inverse of the unit triangle C*C/3, W = T(K e^G) 2*C*K, U = TV 2*C*V,
    W S, (Q e^G) S and the state update 2*K*V each, A_qk V' 2*C*V. Hence
    6*C*K + 4*C*V + 6*K*V + C*C/3. (Yang et al. 2024, arXiv 2412.06464; Kimi Team 2025, 2510.26692.)
    """
    a = mixer.attributes
    heads, values = int(a["heads"]), int(a["value_heads"])
    k, v, c = int(a["key_dim"]), int(a["value_dim"]), CHUNK
    flops = values * (6 * c * k + 4 * c * v + 6 * k * v + c * c / 3)
    gate = values * (k if a["gate"] == "per_channel" else 1)
    read = ACTIVATION * (2 * heads * k + values * v) + FLOAT32 * (gate + values)
    return [_mixing(mixer, Work(per_token=flops), read, ACTIVATION * values * v)]


def linear_attention(mixer: Mixer) -> list[Call]:
    """Chunked linear attention without the delta rule (lightning, SSD), a head and token:

    A_qk 2*C*K, A_qk V 2*C*V, Q S and the state update 2*K*V each. (Dao & Gu 2024, 2405.21060.)
    """
    a = mixer.attributes
    heads, k, v, c = int(a["heads"]), int(a["key_dim"]), int(a["value_dim"]), CHUNK
    groups = int(a.get("groups", heads))
    read = ACTIVATION * (2 * groups * k + heads * v) + FLOAT32 * heads
    flops = Work(per_token=heads * (2 * c * (k + v) + 4 * k * v))
    return [_mixing(mixer, flops, read, ACTIVATION * heads * v)]


def softmax_attention(mixer: Mixer) -> list[Call]:
    """Q K^T and P V: 2 * heads * (K + V) a pair of tokens, full square; a window has its width."""
    a = mixer.attributes
    heads, kv_heads = int(a["heads"]), int(a["kv_heads"])
    k, v = int(a["key_dim"]), int(a["value_dim"])
    pair = 2 * heads * (k + v)
    window = a.get("window")
    flops = Work(per_token=pair * int(window)) if window else Work(per_pair=pair)
    read = ACTIVATION * (heads * k + kv_heads * (k + v))
    return [_mixing(mixer, flops, read, ACTIVATION * heads * v + FLOAT32 * heads)]


def sparse_attention(mixer: Mixer) -> list[Call]:
    """Attention over top_k keys, 2 * heads * (K + V) * top_k a token, and its indexer: scores of
    all pairs, 2 * index_heads * index_dim + 3 * index_heads a pair (DeepSeek-V3.2)."""
    a = mixer.attributes
    heads, k, v = int(a["heads"]), int(a["key_dim"]), int(a["value_dim"])
    top_k, index_heads, dim = int(a["top_k"]), int(a["index_heads"]), int(a["index_dim"])
    read = ACTIVATION * (heads * k + int(a["kv_heads"]) * (k + v))
    attention = Work(per_token=2 * heads * (k + v) * top_k)
    indexer = Call(
        operator="indexer",
        part="mixer",
        forward=Pass(
            flops=Work(per_pair=2 * index_heads * dim + 3 * index_heads),
            bytes=Work(per_token=ACTIVATION * (index_heads + 1) * dim + 4 * top_k),
        ),
        attributes={"heads": index_heads, "key_dim": dim, "top_k": top_k},
    )
    return [indexer, _mixing(mixer, attention, read, ACTIVATION * heads * v + FLOAT32 * heads)]


def _mixing(mixer: Mixer, flops: Work, read: float, written: float) -> Call:
    """Keeps what it reads and what it writes: a fused backward needs both."""
    return Call(
        operator=mixer.operator,
        part="mixer",
        forward=Pass(flops=flops, bytes=Work(per_token=read + written)),
        saved=Work(per_token=read + written),
        attributes=mixer.attributes,
        site=mixer.site,
    )


FORMULAS = {
    "kda": delta_rule,
    "gated_delta_rule": delta_rule,
    "ssd": linear_attention,
    "lightning_attention": linear_attention,
    "scaled_dot_product_attention": softmax_attention,
    "sparse_attention": sparse_attention,
}
