"""The formulas of what kernels move, against the tensors that the rendered kernels are given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from analyzers.backends import load_backend
from codegen.family import load_specs
from codegen.load import import_file
from codegen.render import render
from codegen.traffic import Step, launches
from tests.codegen.kernel_samples import arguments
from tests.codegen.proofs import LINEAR

UNCOUNTED = {"bounds_ptr", "first_chunk_ptr", "sequence_ptr", "sums_ptr", "collect_ptr"}
"""Whose rows are whose, and constants: kilobytes for all programs."""


def given(folder, member: str, tile, heads: int, value_heads: int) -> list[tuple[str, int]]:
    """Every launch of a training step with the bytes of the tensors that it is given."""
    spec = load_specs()[member]
    sizes = {"key_dim": 40, "value_dim": 72}
    rendered = render(spec, load_backend("h200"), sizes, tile=tile)
    (folder / rendered.module).write_text(rendered.files[rendered.module], encoding="utf-8")
    module = import_file(folder / rendered.module, f"traffic_of_{member}")
    names = {id(kernel): name for name, kernel in vars(module).items() if name.startswith("_")}
    made = []

    def note(kernel, programs, **arguments):
        held = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
        if arguments.get("EXACT"):  # it does the chunks that are marked: none here
            held = {"far_ptr": held["far_ptr"]}
        sizes = (x.numel() * x.element_size() for n, x in held.items() if n not in UNCOUNTED)
        made.append((names[id(kernel)], sum(sizes)))

    module._run = note
    module._INTERPRETED = True  # CPU tensors take the path of the launches
    x = arguments(spec, (40, 72), (70,), batch=2, heads=heads, value_heads=value_heads, state=False)
    kinds = {"g": torch.float32, "g_gamma": torch.float32}
    x = {n: t.to(kinds.get(n, torch.bfloat16)) for n, t in x.items()}
    o, _ = getattr(module, spec.function)(
        **{n: t.requires_grad_(n != "g_gamma") for n, t in x.items()}
    )
    o.sum().backward()
    return made


@pytest.mark.parametrize("kept", ["fused", "split", "kept"])
@pytest.mark.parametrize("member", LINEAR)
def test_the_formula_counts_the_tensors_of_every_launch(member, kept, tmp_path):
    spec = load_specs()[member]
    strategy = "fused" if kept == "fused" else "split"
    tile = spec.tile(load_backend("h200"), 40, strategy=strategy)
    tile = replace(tile, keep=kept == "kept")
    for heads, value_heads in ((2, 2), (1, 3)):
        sizes = {"key_dim": 40, "value_dim": 72, "heads": heads, "value_heads": value_heads}
        step = Step(batch=2, tokens=70, **sizes)
        found = [(x.kernel, x.read + x.written) for x in launches(spec, tile, step, gradients=True)]
        assert found == given(tmp_path, member, tile, heads, value_heads)


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
