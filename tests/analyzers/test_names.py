"""Families of names lose nothing, and sort as transformers' loader does."""

import random

from hypothesis import given
from hypothesis import strategies as st

from analyzers.names import families, natural_key, numbers_in

WORDS = st.sampled_from(["model", "layers", "0", "1", "12", "007", "w1", "", "²", "9" * 30, "a"])
NAMES = st.lists(WORDS, max_size=6).map(".".join) | st.text(max_size=12)


@given(names=st.sets(NAMES, max_size=20), fixed=st.sets(st.sampled_from(["0", "1", "12"])))
def test_families_hold_every_name_once(names, fixed):
    found = families(names, fixed)
    assert sorted(n for f in found for n in f.names.values()) == sorted(names)
    for family in found:
        assert all(family.name(numbers) == name for numbers, name in family.names.items())
        assert not any(n in fixed for numbers in family.names for n in numbers)
    assert len({f.words for f in found}) == len(found)


def test_experts_and_layers_are_one_family_in_their_order():
    names = [f"layers.{i}.experts.{e}.w1.weight" for i in range(12) for e in range(11)]
    mixed = random.Random(0).sample(names, len(names))
    (family,) = families(mixed)
    assert list(family.names.values()) == names
    assert family.words == ("layers.", ".experts.", ".w1.weight")


def test_order_is_that_of_the_loader():
    from transformers.core_model_loading import dot_natural_key

    names = [f"m.{w}.{i}.{x}" for w in ("b", "a10", "a9") for i in (2, 10, 1) for x in ("z", "5")]
    assert sorted(names, key=natural_key) == sorted(names, key=dot_natural_key)


def test_numbers_that_a_pattern_names():
    patterns = [r"layers\.0\.w1", r"blocks.(\d+).3.x\1", r"^conv1d", r"\d{1,2}"]
    assert numbers_in(patterns) == {"0", "3", "1", "2"}
