"""The forward in one launch: it is one, and what the operator gives does not depend on it."""

from __future__ import annotations

import pytest

from analyzers.backends import load_backend
from codegen.build import kernel_of
from codegen.family import load_specs
from codegen.load import import_file
from codegen.render import render
from tests.codegen.kernel_samples import arguments, generated, launched, write_kernel
from tests.codegen.proofs import LINEAR, Forks, failed, subject

PROVED = ("kda", "gated_delta_rule", "gla", "simple_gla")
CASES = ("packed, few", "hard resets")


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    with Forks(folder, interpret=True) as forks:
        one = subject(folder / "first", "linear_attention", strategy="fused")
        assert not failed(forks.gates(one, ("one token",)))
        yield forks


@pytest.mark.parametrize("member", PROVED)
def test_a_fused_forward_passes_the_gates(member, forks, tmp_path):
    """With two blocks of key and of value channels, the second ones not full."""
    one = subject(tmp_path, member, widths=(40, 40), strategy="fused")
    assert not failed(forks.gates(one, CASES))


@pytest.mark.parametrize("member", LINEAR)
def test_the_forward_is_one_launch_and_the_backward_the_split_one(member, tmp_path):
    rendered = write_kernel(tmp_path, member, 16, 16, "h200", "fused")
    module = import_file(tmp_path / rendered.module, f"fused_{member}")
    given = arguments(load_specs()[member], (16, 16), (70,), state=False)
    assert [name for name, _ in launched(module, given, False)] == ["_fused"]
    made = [name for name, _ in launched(module, given, True)]
    assert made[0] == "_fused"
    assert made.count("_fused") == made.count("_recur") == made.count("_reverse") == 1


@pytest.mark.parametrize("strategy", ["split", "fused"])
def test_the_manifest_states_the_strategy(strategy):
    spec, h200 = load_specs()["gla"], load_backend("h200")
    sizes = {"key_dim": 16, "value_dim": 16}
    rendered = render(spec, h200, sizes, tile=spec.tile(h200, 16, strategy=strategy))
    assert kernel_of(generated("gla", sizes), rendered, []).strategy == strategy
