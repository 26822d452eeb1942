"""Other forwards than the split one: what they launch, and that the operator gives the same."""

from __future__ import annotations

import pytest

from analyzers.backends import load_backend
from analyzers.errors import InputError
from codegen.build import kernel_of
from codegen.family import SHORT
from codegen.load import import_file
from codegen.members import load_specs
from codegen.render import render
from tests.codegen.kernel_samples import arguments, generated, launched, write_kernel
from tests.codegen.proofs import LINEAR, Forks, failed, subject

FUSED = ("kda", "gated_delta_rule", "gla", "simple_gla")
FUSED_CASES = ("packed, few", "hard resets")
ALONE = (
    "grouped value heads in a batch, forward alone",
    "packed with empty and one-token sequences, forward alone",
    "state carried over a split, forward alone",
    "hard resets, forward alone",
)


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategies")
    with Forks(folder, interpret=True) as forks:
        one = subject(folder / "first", "linear_attention", strategy="fused")
        assert not failed(forks.gates(one, ("one token",)))
        yield forks


@pytest.mark.parametrize("member", FUSED)
def test_a_fused_forward_passes_the_gates(member, forks, tmp_path):
    """With two blocks of key and of value channels, the second ones not full."""
    one = subject(tmp_path, member, widths=(40, 40), strategy="fused")
    assert not failed(forks.gates(one, FUSED_CASES))


@pytest.mark.parametrize("member", LINEAR)
def test_a_forward_in_short_chunks_passes_the_gates(member, forks, tmp_path):
    """With two blocks of key and of value channels, the second ones not full."""
    one = subject(tmp_path, member, widths=(40, 72), strategy="short")
    gated = "g" in load_specs()[member].inputs
    assert not failed(forks.gates(one, ALONE if gated else ALONE[:-1]))


@pytest.mark.parametrize("member", LINEAR)
def test_the_fused_forward_is_one_launch_and_the_backward_the_split_one(member, tmp_path):
    rendered = write_kernel(tmp_path, member, 16, 16, "h200", "fused")
    module = import_file(tmp_path / rendered.module, f"fused_{member}")
    given = arguments(load_specs()[member], (16, 16), (70,), state=False)
    assert [name for name, _ in launched(module, given, False)] == ["_fused"]
    made = [name for name, _ in launched(module, given, True)]
    assert made[0] == "_fused"
    assert made.count("_fused") == made.count("_recur") == made.count("_reverse") == 1


@pytest.mark.parametrize("member", LINEAR)
def test_short_chunks_are_two_launches_and_a_training_step_is_split(member, tmp_path):
    rendered = write_kernel(tmp_path, member, 16, 16, "h200", "short")
    module = import_file(tmp_path / rendered.module, f"short_{member}")
    given = arguments(load_specs()[member], (16, 16), (70,), state=False)
    assert tuple(name for name, _ in launched(module, given, False)) == SHORT
    made = [name for name, _ in launched(module, given, True)]
    assert made.count("_prepare")
    assert made.count("_recur") == 1
    assert not set(made) & set(SHORT)


def test_strong_decays_are_looked_for_only_where_no_bound_excludes_them(tmp_path):
    rendered = write_kernel(tmp_path, "kda", 16, 16, "h200", "short")
    module = import_file(tmp_path / rendered.module, "short_strong")
    given = arguments(load_specs()["kda"], (16, 16), (70,), state=False)
    for bound, strong in ((None, True), (-5.0, False), (-5.2, True)):
        call = given if bound is None else given | {"lower_bound": bound}
        made = dict(launched(module, call, False))
        assert made["_prepare_short"]["STRONG"] is strong


@pytest.mark.parametrize("strategy", ["split", "short", "fused"])
def test_the_manifest_states_the_strategy(strategy):
    spec, h200 = load_specs()["gla"], load_backend("h200")
    sizes = {"key_dim": 16, "value_dim": 16}
    rendered = render(spec, h200, sizes, tile=spec.tile(h200, 16, strategy=strategy))
    assert kernel_of(generated("gla", sizes), rendered, []).strategy == strategy


def test_a_backend_without_launches_for_a_strategy_says_so():
    with pytest.raises(InputError, match="no short strategy"):
        load_specs()["gla"].tile(load_backend("ascend-910c"), 16, strategy="short")
