from dataclasses import replace

import pytest

from adapter_agent import anatomy
from analyzers.schema import (
    Difference,
    Experts,
    MultiToken,
    Operator,
    Residual,
    Router,
    Tower,
    Work,
)
from tests.adapter_agent import samples

ANALYSIS = samples.analysis()


def words(analysis):
    return dict(anatomy.facts(analysis))


def test_costs_are_means_a_token_over_all_layers():
    part = replace(
        ANALYSIS.blocks[0].parts[0],
        flops=Work(per_token=10, per_pair=2, per_window={100: 1}),
        saved_bytes=Work(per_token=6),
    )
    block = replace(ANALYSIS.blocks[0], parts=[part])
    share = anatomy.shares(replace(ANALYSIS, blocks=[block], outer=[]))[0]
    assert share.parameters == 8 * 60_000
    assert share.flops == 8 * (10 + 2 * 4096 + 100)
    assert share.saved == 8 * 6


def test_the_length_is_one_that_the_model_takes():
    assert anatomy.length_of(ANALYSIS) == 4096
    assert anatomy.length_of(replace(ANALYSIS, max_sequence_length=512)) == 512


def test_regions_are_counted_in_every_layer():
    found = {f.kind: (f.count, f.avoided) for f in anatomy.fusable(ANALYSIS)}
    assert found == {
        "norm_projection": (8, 8 * 512),
        "pointwise_chain": (8, 8 * (256 + 0.5 * 4096)),
    }
    untraced = replace(ANALYSIS, blocks=[replace(ANALYSIS.blocks[0], graph=None)])
    assert anatomy.fusable(untraced) == []


def test_operators_in_several_shapes_are_one_line():
    def linear(width, flops):
        return Operator(
            name="linear",
            count=3,
            flops=Work(per_token=flops),
            bytes=Work(per_token=1),
            attributes={"in_features": width},
        )

    analysis = replace(ANALYSIS, operators=[linear(4, 20), linear(2, 10), *ANALYSIS.operators])
    kda, both = anatomy.operators(analysis)
    assert (kda.name, kda.flops) == ("kda", 1e6)
    assert (both.name, both.calls, both.shapes, both.flops) == ("linear", 6, 2, 30)


def test_attributes_read_as_words():
    values = {"heads": 4, "kv_heads": 4, "value_heads": 8, "key_dim": 32, "rope": False}
    assert anatomy.attributes(values) == "4 heads, 8 value heads, key dim 32, no rope"
    assert anatomy.attributes({"gate": "per_channel", "sinks": True, "eps": 1e-5}) == (
        "gate per channel, sinks, eps 1e-05"
    )


def test_latent_experts_and_their_router_are_told():
    experts = Experts(
        count=896,
        top_k=16,
        shared=2,
        hidden_size=3584,
        intermediate_size=3072,
        router_input_size=7168,
        shared_intermediate_size=6144,
        activation="situ",
        zero_experts=64,
        weight_format="mxfp4",
        router=Router(
            scoring="sigmoid",
            input_size=7168,
            correction_bias=True,
            groups=8,
            top_k_groups=4,
            renormalize=True,
            scaling=2.5,
            auxiliary_loss=0.001,
        ),
    )
    told = words(replace(ANALYSIS, experts=experts, hidden_size=7168))
    assert told["experts"] == (
        "896 (and 64 that compute nothing), top 16; 3584 x 3072 in a latent width, of a model 7168"
        " wide; situ gated; weights mxfp4; 2 shared, 6144 wide"
    )
    assert told["router"] == (
        "sigmoid scores of 7168, a bias corrects the choice, best 4 of 8 groups, weights sum to"
        " one, scaled by 2.5, auxiliary loss 0.001"
    )


def test_a_router_that_only_tensors_tell_of_claims_no_scoring():
    assert anatomy.router(Router(scoring="unknown", input_size=128)) == "reads 128"


def test_what_constrains_or_surrounds_the_decoder_is_told():
    told = words(
        replace(
            ANALYSIS,
            residual=Residual(
                kind="attention_residual", carried_bytes_per_token=129_024, cut_multiple=12
            ),
            towers=[
                Tower(kind="vision", parameters=401_000_000, built=True),
                Tower(kind="audio", parameters=None, built=False),
            ],
            multi_token=MultiToken(layers=1, parameters=11_600_000_000, built=False),
            tied_embeddings=True,
            float32_parameters=["A_log", "dt_bias"],
        )
    )
    assert told["residual"] == (
        "attention residual, 126 KiB a token between layers; stages begin at multiples of 12"
    )
    assert told["towers"] == "vision 401 M, audio (not in the class)"
    assert told["multi-token"] == ("1 layer after the decoder, 11.6 B parameters, not in the class")
    assert told["tied"] == "embedding and head"
    assert told["float32"] == "A_log, dt_bias"


def test_what_is_not_there_is_not_told():
    assert words(ANALYSIS).keys() == {"kda", "experts"}
    dense = replace(ANALYSIS, experts=None, blocks=[])
    assert words(dense) == {}


@pytest.mark.parametrize(("number", "lines"), [(0, 0), (3, 3), (50, 9)])
def test_differences_are_named_and_the_rest_counted(number, lines):
    made = [
        Difference(tensor=f"layers.{i}.w", kind="shape", detail="96 heads, the config says 56")
        for i in range(number)
    ]
    checkpoint = replace(ANALYSIS.checkpoint, differences=made)
    told = anatomy.differences(replace(ANALYSIS, checkpoint=checkpoint), most=8)
    assert len(told) == lines
    if number:
        assert told[0] == "layers.0.w (shape): 96 heads, the config says 56"
    if number == 50:
        assert told[-1] == "42 more tensors differ"
    assert anatomy.differences(replace(ANALYSIS, checkpoint=None), most=8) == []
