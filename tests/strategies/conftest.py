"""Models written down by hand, from published shapes, so that the planner is tested alone."""

import pytest

from analyzers.schema import (
    Block,
    Checkpoint,
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


def part(name, parameters, saved=0.0, per_pair=0.0, active=None):
    """A part whose arithmetic is two operations per (visited) weight and token."""
    visited = parameters if active is None else active
    return Part(
        name=name,
        parameters=parameters,
        flops=Work(per_token=2.0 * visited, per_pair=per_pair),
        bytes=Work(per_token=2 * saved),
        backward=Pass(
            flops=Work(per_token=2.0 * visited, per_pair=2 * per_pair),
            bytes=Work(per_token=2 * saved),
        ),
        saved_bytes=Work(per_token=saved),
    )


def moe_parts(hidden, width, intermediate, count, top_k, shared_width):
    expert = 3 * width * intermediate
    parts = [
        part("router", hidden * count, saved=8.0 * count),
        part(
            "routed_experts",
            count * expert,
            saved=2.0 * top_k * (width + 3 * intermediate),
            active=top_k * expert,
        ),
        part("shared_experts", 3 * hidden * shared_width, saved=2.0 * 3 * shared_width),
    ]
    if width != hidden:
        parts.append(part("latent_projection", 2 * hidden * width, saved=4.0 * width))
    return parts


def banks(width, intermediate, count):
    return [
        ExpertBank(
            name="experts.gate_up_proj",
            count=count,
            in_features=width,
            out_features=2 * intermediate,
        ),
        ExpertBank(
            name="experts.down_proj", count=count, in_features=intermediate, out_features=width
        ),
    ]


def linears(**shapes):
    return [
        Linear(name=f"self_attn.{name}", in_features=i, out_features=o, part="mixer")
        for name, (i, o) in shapes.items()
    ]


def block(kind, layers, parts, lines, expert_banks=(), **attributes):
    mixer, feed_forward = kind.split("+")
    return Block(
        kind=kind,
        module_class="Layer",
        layers=layers,
        mixer=mixer,
        mixer_attributes=attributes,
        feed_forward=feed_forward,
        parts=parts,
        linears=lines,
        banks=list(expert_banks),
    )


def make_k3() -> ModelAnalysis:
    """Kimi K3 as published: 93 layers (69 KDA, 24 gated MLA), 92 with 896 experts in a latent of
    3584; 2.779 T parameters, 104 B active."""
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
        return part("mixer", weights, saved=2.0 * 12 * wide, per_pair=pairs)

    moe = moe_parts(hidden, latent, inner, count, top_k, 2 * inner)
    dense = part("dense", 3 * hidden * 33792, saved=2.0 * 3 * 33792)
    kda_mixer, mla_mixer = mixer(kda_lines), mixer(mla_lines, 2.0 * 96 * (192 + 128))
    experts = banks(latent, inner, count)
    blocks = [
        block("kda+dense", [0], [kda_mixer, dense], kda_lines, heads=96),
        block("kda+moe", [i for i in kda if i], [kda_mixer, *moe], kda_lines, experts, heads=96),
        block("mla+moe", mla, [mla_mixer, *moe], mla_lines, experts, heads=96, kv_heads=96),
    ]
    outer = [
        Part(name="embedding", parameters=vocab * hidden, flops=Work()),
        part("head", vocab * hidden),
        part("vision", 401_000_000),
    ]
    routed = 92 * count * 3 * latent * inner
    total = sum(len(b.layers) * sum(p.parameters for p in b.parts) for b in blocks)
    total += sum(p.parameters for p in outer)
    return ModelAnalysis(
        model_type="kimi_k3",
        architecture="KimiK3ForConditionalGeneration",
        fidelity="structural",
        fidelity_reason="written by hand",
        dtype="bfloat16",
        hidden_size=hidden,
        vocab_size=vocab,
        max_sequence_length=1_048_576,
        parameters=Parameters(
            total=total, active=total - routed * (count - top_k) // count, routed_experts=routed
        ),
        checkpoint=None,
        layers=[
            Layer(index=i, mixer=b.mixer, feed_forward=b.feed_forward)
            for b in blocks
            for i in b.layers
        ],
        blocks=blocks,
        outer=outer,
        experts=Experts(
            weight_format="mxfp4",
            count=count,
            top_k=top_k,
            shared=2,
            hidden_size=latent,
            intermediate_size=inner,
            router_input_size=hidden,
        ),
        operators=[
            Operator(name="linear", count=93 * 20, flops=Work(), bytes=Work()),
            Operator(
                name="experts",
                count=92,
                flops=Work(),
                bytes=Work(),
            ),
        ],
    )


def make_tiny(count=16, top_k=4, hidden=128, inner=48, layers=8, vocab=512) -> ModelAnalysis:
    """The shape of examples/models/tiny-kimi-linear."""
    lines = linears(q_proj=(hidden, 128), k_proj=(hidden, 128), o_proj=(128, hidden))
    mixer = part("mixer", 3 * hidden * 128, saved=2.0 * 10 * 128)
    moe = moe_parts(hidden, hidden, inner, count, top_k, inner)
    blocks = [
        block(
            "kda+dense",
            [0],
            [mixer, part("dense", 3 * hidden * 256, saved=1536.0)],
            lines,
            heads=4,
        ),
        block(
            "kda+moe",
            list(range(1, layers)),
            [mixer, *moe],
            lines,
            banks(hidden, inner, count),
            heads=4,
        ),
    ]
    outer = [
        Part(name="embedding", parameters=vocab * hidden, flops=Work()),
        part("head", vocab * hidden),
    ]
    routed = (layers - 1) * count * 3 * hidden * inner
    total = sum(len(b.layers) * sum(p.parameters for p in b.parts) for b in blocks)
    return ModelAnalysis(
        model_type="kimi_linear",
        architecture="KimiLinearForCausalLM",
        fidelity="traced",
        fidelity_reason="written by hand",
        dtype="bfloat16",
        hidden_size=hidden,
        vocab_size=vocab,
        max_sequence_length=4096,
        parameters=Parameters(total=total, active=total, routed_experts=routed),
        checkpoint=Checkpoint(bytes=2 * total, formats={"BF16": 2 * total}, shards=2),
        layers=[
            Layer(index=i, mixer=b.mixer, feed_forward=b.feed_forward)
            for b in blocks
            for i in b.layers
        ],
        blocks=blocks,
        outer=outer,
        experts=Experts(
            count=count,
            top_k=top_k,
            shared=1,
            hidden_size=hidden,
            intermediate_size=inner,
            router_input_size=hidden,
        ),
        operators=[Operator(name="linear", count=100, flops=Work(), bytes=Work())],
    )


@pytest.fixture(scope="session")
def k3() -> ModelAnalysis:
    return make_k3()


@pytest.fixture(scope="session")
def tiny() -> ModelAnalysis:
    return make_tiny()


@pytest.fixture(scope="session")
def small_models() -> dict[int, ModelAnalysis]:
    """Three-layer models by their number of experts."""
    return {n: make_tiny(count=n, top_k=min(4, n), layers=3) for n in (4, 6, 8)}
