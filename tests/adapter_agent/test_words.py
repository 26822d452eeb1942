from dataclasses import replace

import pytest

from adapter_agent.words import (
    count,
    layer_legend,
    layer_pattern,
    number,
    parameters_by_part,
    shape,
    size,
)
from tests.adapter_agent import samples


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("KKKMKKKM", "KKKM x2"),
        ("kKKM" + "KKKM" * 5 + "KKM", "KKKM x6 KKM"),
        ("kKKM" + "KKKM" * 22 + "M", "KKKM x23 M"),
        ("KKKKKKKK", "K x8"),
        ("KM", "KM"),
        ("M", "M"),
        ("KMKMKKKKK", "KM x2 K x5"),
    ],
)
def test_repeats_of_layers_are_folded(layers, expected):
    analysis = replace(samples.analysis(), layers=samples.layers(layers))
    assert layer_pattern(analysis) == expected


def test_a_folded_pattern_has_every_layer():
    layers = "MM" + "KKKM" * 22 + "KM"
    analysis = replace(samples.analysis(), layers=samples.layers(layers))
    unfolded = ""
    words = layer_pattern(analysis).split()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word[0] != "x":
            unfolded += word * (int(following[1:]) if following[:1] == "x" else 1)
    assert unfolded == layers


def test_mixers_with_one_first_letter_get_different_letters():
    layers = [replace(layer, mixer="mamba2") for layer in samples.layers("KK")]
    analysis = replace(samples.analysis(), layers=layers + samples.layers("M"))
    assert layer_pattern(analysis) == "MML"
    assert layer_legend(analysis) == "M mamba2, L mla"
    assert layer_legend(samples.analysis()) == "K kda, M mla; dense feed-forward in layer 0"


def test_layers_without_a_mixer_are_dashes():
    layers = [replace(x, mixer="none" if x.index % 2 else "mamba2") for x in samples.layers("KKKK")]
    analysis = replace(samples.analysis(), layers=layers)
    assert layer_pattern(analysis) == "M- x2"
    assert layer_legend(analysis) == "M mamba2, - none"


def test_numbers_for_people():
    assert [count(n) for n in (2_780_000_000_000, 104e9, 7_100_000, 896)] == [
        "2.78 T",
        "104 B",
        "7.1 M",
        "896",
    ]
    assert [number(n) for n in (11_340.2, 12_191, 5_322.4, 95.92, 0)] == [
        "11,340",
        "12,191",
        "5,322",
        "95.92",
        "0",
    ]
    assert number(2_735.4, 3) == "2,735"
    assert (count(999_900), size(1_045_000)) == ("1,000 k", "1,021 KiB")
    assert [size(n) for n in (1_560_000_000_000, 6_000_000, 12)] == ["1.42 TiB", "5.72 MiB", "12 B"]


def test_parts_count_every_layer_of_a_block():
    parts = parameters_by_part(samples.analysis())
    assert list(parts) == ["routed_experts", "mixer", "embedding", "head"]
    assert parts["routed_experts"] == 8 * 290_000


def test_a_shape_names_the_axes_that_are_used():
    plan = samples.plan()
    assert shape(plan) == "fsdp 2 x ep 2"
    assert shape(replace(plan, parallelism=replace(plan.parallelism, fsdp=1, ep=1))) == "one device"
    sharded = replace(plan.parallelism, fsdp=8, ep=1, efsdp=8)
    assert shape(replace(plan, parallelism=sharded)) == "fsdp 8"
