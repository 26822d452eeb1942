"""The formulas of what kernels move, against the tensors that the rendered kernels are given."""

from __future__ import annotations

import pytest
import torch

from analyzers.backends import load_backend
from codegen.load import import_file
from codegen.members import load_specs
from codegen.traffic import Step, launches
from tests.codegen.kernel_samples import arguments, launched, write_kernel
from tests.codegen.proofs import LINEAR

UNCOUNTED = {"bounds_ptr", "first_chunk_ptr", "sequence_ptr", "sums_ptr", "collect_ptr"}
"""Whose rows are whose, and constants: kilobytes for all programs."""


def counted(made: list[tuple[str, dict]]) -> list[tuple[str, int]]:
    """Every launch with the bytes of the tensors that it is given."""
    found = []
    for name, given in made:
        held = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
        if given.get("EXACT"):  # it does the chunks that are marked: none here
            held = {"far_ptr": held["far_ptr"]}
        elif name == "_gradients":  # it asks for marks in the second pass alone
            held.pop("far_ptr", None)
        sizes = (x.numel() * x.element_size() for n, x in held.items() if n not in UNCOUNTED)
        found.append((name, sum(sizes)))
    return found


@pytest.mark.parametrize("strategy", ["fused", "short", "split"])
@pytest.mark.parametrize("member", LINEAR)
def test_the_formula_counts_the_tensors_of_every_launch(member, strategy, tmp_path):
    spec, h200 = load_specs()[member], load_backend("h200")
    widths = {"key_dim": 40, "value_dim": 72}
    tile = spec.tile(h200, 40, strategy=strategy)
    rendered = write_kernel(tmp_path, member, 40, 72, "h200", strategy)
    module = import_file(tmp_path / rendered.module, f"traffic_of_{member}")
    float32 = {"g", "g_gamma"}
    for heads, value_heads in ((2, 2), (1, 3)):
        step = Step(batch=2, tokens=70, heads=heads, value_heads=value_heads, **widths)
        x = arguments(
            spec, (40, 72), (70,), batch=2, heads=heads, value_heads=value_heads, state=False
        )
        x = {n: t if n in float32 else t.bfloat16() for n, t in x.items()}
        for gradients in (False, True):
            found = launches(spec, tile, step, gradients=gradients)
            made = counted(launched(module, x, gradients))
            assert [(m.kernel, m.read + m.written) for m in found] == made


def test_blocks_of_value_channels_ask_for_the_keys_again():
    """By hand: 16 tokens, one head, K = 16, V = 64 in two blocks, float32 decays a head."""
    spec = load_specs()["simple_gla"]
    tile = spec.tile(load_backend("cpu"), 16, strategy="fused")
    step = Step(batch=1, tokens=16, heads=1, value_heads=1, key_dim=16, value_dim=64)
    (one,) = launches(spec, tile, step, gradients=False)
    keys, values, decays, state = 2 * 16 * 16, 2 * 16 * 64, 4 * 16, 4 * 16 * 64
    assert one.read == 2 * keys + values + decays
    assert one.written == values + state
    assert one.asked == 2 * (2 * keys + decays) + 2 * values + state
