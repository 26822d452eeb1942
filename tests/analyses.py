"""Analyses written down by hand, so that what reads them is tested without the analysers."""

from collections.abc import Sequence
from dataclasses import replace

from analyzers.schema import (
    Block,
    ExpertBank,
    Experts,
    Layer,
    Linear,
    ModelAnalysis,
    Operator,
    Parameters,
    Part,
    Pass,
    Work,
)


def part(name, weights, visited=None, *, moved=0.0, per_pair=0.0, saved=0.0, adapted=0.0):
    """Two operations a (visited) weight and token, forward and for the gradient of the input;
    attention twice as many backward as forward. `moved` bytes besides those of the products."""
    flops = 2.0 * (weights if visited is None else visited)
    return Part(
        name=name,
        parameters=weights,
        flops=Work(per_token=flops, per_pair=per_pair),
        bytes=Work(per_token=moved),
        backward=Pass(
            flops=Work(per_token=flops, per_pair=2 * per_pair), bytes=Work(per_token=moved)
        ),
        saved_bytes=Work(per_token=saved),
        adapted_saved_bytes=Work(per_token=adapted),
    )


def kept(name, weights, saved=0.0, visited=None, per_pair=0.0):
    """A part that writes and reads again what it keeps for the backward pass."""
    return part(name, weights, visited, moved=2 * saved, per_pair=per_pair, saved=saved)


def linears(module="self_attn", of="mixer", **shapes):
    """`q_proj=(in, out)` of one module and part."""
    return [
        Linear(name=f"{module}.{name}", in_features=i, out_features=o, part=of)
        for name, (i, o) in shapes.items()
    ]


def banks(count, module="experts", **shapes):
    return [
        ExpertBank(name=f"{module}.{name}", count=count, in_features=i, out_features=o)
        for name, (i, o) in shapes.items()
    ]


def block(kind, layers, parts, lines=(), expert_banks=(), graph=None, **attributes):
    mixer, feed_forward = kind.split("+")
    return Block(
        kind=kind,
        module_class="Layer",
        layers=list(layers),
        mixer=mixer,
        mixer_attributes=attributes,
        feed_forward=feed_forward,
        parts=parts,
        linears=list(lines),
        banks=list(expert_banks),
        graph=graph,
    )


def model(
    blocks: Sequence[Block],
    outer: Sequence[Part],
    *,
    hidden: int,
    vocab: int,
    experts: Experts | None = None,
    **more,
) -> ModelAnalysis:
    """Parameters are those of the parts, layers those of the blocks."""
    sizes = [(p, len(b.layers)) for b in blocks for p in b.parts] + [(p, 1) for p in outer]
    total = sum(p.parameters * times for p, times in sizes)
    routed = sum(p.parameters * times for p, times in sizes if p.name == "routed_experts")
    idle = routed * (experts.count - experts.top_k) // experts.count if experts else 0
    layers = [
        Layer(index=i, mixer=b.mixer, feed_forward=b.feed_forward) for b in blocks for i in b.layers
    ]
    made = ModelAnalysis(
        model_type="hand",
        architecture="Hand",
        fidelity="structural",
        fidelity_reason="written by hand",
        dtype="bfloat16",
        hidden_size=hidden,
        vocab_size=vocab,
        parameters=Parameters(total=total, active=total - idle, routed_experts=routed),
        checkpoint=None,
        layers=sorted(layers, key=lambda layer: layer.index),
        blocks=list(blocks),
        outer=list(outer),
        experts=experts,
        operators=[],
    )
    return replace(made, **more)


def operator(name, count):
    return Operator(name=name, count=count, flops=Work(), bytes=Work())


def embedding(vocab, hidden):
    return Part(name="embedding", parameters=vocab * hidden, flops=Work())


def moe_parts(hidden, width, intermediate, count, top_k, shared_width):
    expert = 3 * width * intermediate
    routed = 2.0 * top_k * (width + 3 * intermediate)
    parts = [
        kept("router", hidden * count, saved=8.0 * count),
        kept("routed_experts", count * expert, saved=routed, visited=top_k * expert),
        kept("shared_experts", 3 * hidden * shared_width, saved=2.0 * 3 * shared_width),
    ]
    if width != hidden:
        parts.append(kept("latent_projection", 2 * hidden * width, saved=4.0 * width))
    return parts


def gated_banks(width, intermediate, count):
    return banks(count, gate_up_proj=(width, 2 * intermediate), down_proj=(intermediate, width))


def kimi_k3() -> ModelAnalysis:
    """As published: 93 layers (69 KDA, 24 gated MLA), 92 with 896 experts in a latent of 3584;
    2.779 T parameters, 104 B active."""
    hidden, latent, inner, count, top_k, vocab, wide = 7168, 3584, 3072, 896, 16, 163840, 12288
    mla = [i - 1 for i in range(4, 93, 4)] + [92]
    kda = [i for i in range(93) if i not in mla]
    kda_lines = linears(
        q_proj=(hidden, wide), k_proj=(hidden, wide), v_proj=(hidden, wide),
        f_a_proj=(hidden, 128), f_b_proj=(128, wide), b_proj=(hidden, 96),
        g_proj=(hidden, wide), o_proj=(wide, hidden),
    )  # fmt: skip
    mla_lines = linears(
        q_a_proj=(hidden, 1536), q_b_proj=(1536, 96 * 192), kv_a_proj=(hidden, 576),
        kv_b_proj=(512, 96 * 256), g_proj=(hidden, wide), o_proj=(wide, hidden),
    )  # fmt: skip

    def mixer(lines, pairs=0.0):
        weights = sum(x.in_features * x.out_features for x in lines)
        return kept("mixer", weights, saved=2.0 * 12 * wide, per_pair=pairs)

    moe = moe_parts(hidden, latent, inner, count, top_k, 2 * inner)
    dense = kept("dense", 3 * hidden * 33792, saved=2.0 * 3 * 33792)
    kda_mixer, mla_mixer = mixer(kda_lines), mixer(mla_lines, 2.0 * 96 * (192 + 128))
    stored = gated_banks(latent, inner, count)
    return model(
        [
            block("kda+dense", [0], [kda_mixer, dense], kda_lines, heads=96),
            block("kda+moe", [i for i in kda if i], [kda_mixer, *moe], kda_lines, stored, heads=96),
            block("mla+moe", mla, [mla_mixer, *moe], mla_lines, stored, heads=96, kv_heads=96),
        ],
        [embedding(vocab, hidden), kept("head", vocab * hidden), kept("vision", 401_000_000)],
        hidden=hidden,
        vocab=vocab,
        model_type="kimi_k3",
        architecture="KimiK3ForConditionalGeneration",
        max_sequence_length=1_048_576,
        experts=Experts(
            weight_format="mxfp4",
            count=count,
            top_k=top_k,
            shared=2,
            hidden_size=latent,
            intermediate_size=inner,
            router_input_size=hidden,
        ),
        operators=[operator("linear", 93 * 20), operator("experts", 92)],
    )


def tiny_kimi_linear(count=16, top_k=4, hidden=128, inner=48, layers=8, vocab=512) -> ModelAnalysis:
    """The shape of examples/models/tiny-kimi-linear."""
    lines = linears(q_proj=(hidden, 128), k_proj=(hidden, 128), o_proj=(128, hidden))
    mixer = kept("mixer", 3 * hidden * 128, saved=2.0 * 10 * 128)
    dense = kept("dense", 3 * hidden * 256, saved=1536.0)
    moe = moe_parts(hidden, hidden, inner, count, top_k, inner)
    stored = gated_banks(hidden, inner, count)
    return model(
        [
            block("kda+dense", [0], [mixer, dense], lines, heads=4),
            block("kda+moe", range(1, layers), [mixer, *moe], lines, stored, heads=4),
        ],
        [embedding(vocab, hidden), kept("head", vocab * hidden)],
        hidden=hidden,
        vocab=vocab,
        model_type="kimi_linear",
        architecture="KimiLinearForCausalLM",
        max_sequence_length=4096,
        experts=Experts(
            count=count,
            top_k=top_k,
            shared=1,
            hidden_size=hidden,
            intermediate_size=inner,
            router_input_size=hidden,
        ),
        operators=[operator("linear", 100)],
    )


def _attention(hidden):
    """With q and o, and figures that are easy to add up."""
    lines = linears(q_proj=(hidden, hidden), o_proj=(hidden, hidden))
    weights = 2 * hidden * hidden
    return part("mixer", weights, per_pair=4.0 * hidden, saved=100.0, adapted=10.0), lines


HEADS = {"heads": 8, "kv_heads": 2, "key_dim": 128, "value_dim": 128}


def _outer(vocab, hidden):
    head = Part(name="head", parameters=vocab * hidden, flops=Work(per_token=2.0 * vocab * hidden))
    return [embedding(vocab, hidden), head]


def dense_model(hidden=1024, inner=4096, vocab=1000) -> ModelAnalysis:
    """Two layers: attention of width 1024 with q and o, a feed-forward of 4096 and a norm."""
    mixer, lines = _attention(hidden)
    lines += linears("mlp", "dense", up_proj=(hidden, inner), down_proj=(inner, hidden))
    parts = [
        mixer,
        part("dense", 2 * hidden * inner, saved=200.0, adapted=20.0),
        part("norm", 0, moved=4.0 * hidden),
    ]
    layers = [block("full_attention+dense", [0, 1], parts, lines, **HEADS)]
    return model(layers, _outer(vocab, hidden), hidden=hidden, vocab=vocab)


def sparse_model(hidden=1024, inner=512, vocab=1000) -> ModelAnalysis:
    """Two layers with 16 experts of width 512, of which a token visits 4."""
    mixer, lines = _attention(hidden)
    one = 2 * hidden * inner
    parts = [mixer, part("routed_experts", 16 * one, 4 * one, saved=300.0, adapted=30.0)]
    stored = banks(16, "mlp.experts", up_proj=(hidden, inner), down_proj=(inner, hidden))
    layers = [block("full_attention+moe", [0, 1], parts, lines, stored, **HEADS)]
    experts = Experts(
        count=16,
        top_k=4,
        shared=0,
        hidden_size=hidden,
        intermediate_size=inner,
        router_input_size=hidden,
    )
    return model(layers, _outer(vocab, hidden), hidden=hidden, vocab=vocab, experts=experts)
