"""A device and a model with round figures, so that costs can be worked out by hand."""

from dataclasses import replace

import pytest

from analyzers.backends import Fact, load_backend
from analyzers.schema import (
    Block,
    ExpertBank,
    Experts,
    Layer,
    Linear,
    ModelAnalysis,
    Parameters,
    Part,
    Pass,
    Work,
)
from strategies.cost.constants import Constants

HIDDEN, INNER, VOCAB = 1024, 4096, 1000


@pytest.fixture(scope="session")
def plain():
    """Every rate is reached, nothing hides and nothing is fixed cost."""
    return Constants(
        matmul_share=1.0,
        grouped_matmul_share=1.0,
        attention_share=1.0,
        memory_share=1.0,
        host_calls=0.0,
        shard_overlap=0.0,
        tensor_overlap=0.0,
        exchange_overlap=0.0,
        exchange_share=1.0,
        dispatch_seconds=0.0,
        saved_share=1.0,
        communicator_gib=0.0,
    )


@pytest.fixture(scope="session")
def device():
    """100 TFLOPS, 1000 GB/s, 80 GiB of which none is reserved; no tail of a product counts."""

    def fact(value):
        return Fact(value=value, origin="measured", source="round figure")

    return replace(
        load_backend("h200"),
        memory_gib=fact(80.0),
        reserved_gib=fact(0.0),
        memory_gbps=fact(1000.0),
        matmul_tflops={"bfloat16": fact(100.0), "float8": fact(200.0)},
        attention_ratio=fact(1.0),
        launch_overhead_us=fact(10.0),
        processors=None,
    )


def part(name, weights, visited, moved=0.0, per_pair=0.0, saved=0.0, adapted=0.0):
    """Two operations a weight and token, forward and for the gradient of the input; attention twice
    as many backward as forward. `moved` bytes besides those of the products."""
    io = moved + (2.0 * 2 * 1024 if not weights else 0.0)
    return Part(
        name=name,
        parameters=weights,
        flops=Work(per_token=2.0 * visited, per_pair=per_pair),
        bytes=Work(per_token=io),
        backward=Pass(
            flops=Work(per_token=2.0 * visited, per_pair=2 * per_pair),
            bytes=Work(per_token=io),
        ),
        saved_bytes=Work(per_token=saved),
        adapted_saved_bytes=Work(per_token=adapted),
    )


def analysis(blocks, layers, experts=None):
    total = sum(len(b.layers) * sum(p.parameters for p in b.parts) for b in blocks)
    table = VOCAB * HIDDEN
    outer = [
        Part(name="embedding", parameters=table, flops=Work()),
        Part(name="head", parameters=table, flops=Work(per_token=2.0 * table)),
    ]
    return ModelAnalysis(
        model_type="hand",
        architecture="Hand",
        fidelity="structural",
        fidelity_reason="written by hand",
        dtype="bfloat16",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        parameters=Parameters(total=total + 2 * table, active=0, routed_experts=0),
        checkpoint=None,
        layers=[Layer(index=i, mixer="full_attention", feed_forward="x") for i in range(layers)],
        blocks=blocks,
        outer=outer,
        experts=experts,
        operators=[],
    )


def mixer():
    lines = [
        Linear(name="self_attn.q_proj", in_features=HIDDEN, out_features=HIDDEN, part="mixer"),
        Linear(name="self_attn.o_proj", in_features=HIDDEN, out_features=HIDDEN, part="mixer"),
    ]
    weights = 2 * HIDDEN * HIDDEN
    made = part("mixer", weights, weights, per_pair=4.0 * HIDDEN, saved=100.0, adapted=10.0)
    return made, lines


@pytest.fixture(scope="session")
def dense():
    """Two layers: attention of width 1024 with q and o, a feed-forward of 4096 and a norm."""
    attention, lines = mixer()
    lines = [
        *lines,
        Linear(name="mlp.up_proj", in_features=HIDDEN, out_features=INNER, part="dense"),
        Linear(name="mlp.down_proj", in_features=INNER, out_features=HIDDEN, part="dense"),
    ]
    weights = 2 * HIDDEN * INNER
    parts = [
        attention,
        part("dense", weights, weights, saved=200.0, adapted=20.0),
        part("norm", 0, 0),
    ]
    block = Block(
        kind="full_attention+dense",
        module_class="Layer",
        layers=[0, 1],
        mixer="full_attention",
        mixer_attributes={"heads": 8, "kv_heads": 2, "key_dim": 128, "value_dim": 128},
        feed_forward="dense",
        parts=parts,
        linears=lines,
        banks=[],
    )
    return analysis([block], 2)


@pytest.fixture(scope="session")
def sparse():
    """Two layers with 16 experts of width 512, of which a token visits 4."""
    attention, lines = mixer()
    one = 2 * HIDDEN * 512
    parts = [attention, part("routed_experts", 16 * one, 4 * one, saved=300.0, adapted=30.0)]
    banks = [
        ExpertBank(name="mlp.experts.up_proj", count=16, in_features=HIDDEN, out_features=512),
        ExpertBank(name="mlp.experts.down_proj", count=16, in_features=512, out_features=HIDDEN),
    ]
    block = Block(
        kind="full_attention+moe",
        module_class="Layer",
        layers=[0, 1],
        mixer="full_attention",
        mixer_attributes={"heads": 8, "kv_heads": 2, "key_dim": 128, "value_dim": 128},
        feed_forward="moe",
        parts=parts,
        linears=lines,
        banks=banks,
    )
    experts = Experts(
        count=16,
        top_k=4,
        shared=0,
        hidden_size=HIDDEN,
        intermediate_size=512,
        router_input_size=HIDDEN,
    )
    return analysis([block], 2, experts)
