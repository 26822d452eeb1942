"""Kernels for a device whose compiler is not here: the rules of its profile are kept."""

import dataclasses
import re

import pytest
import triton
from triton.backends.compiler import GPUTarget

from analyzers.backends import load_backend
from analyzers.errors import InputError
from codegen.load import import_file
from codegen.members import load_specs
from codegen.render import render
from codegen.tuning.space import BUFFER_SHARE, ITEM_BYTES, Space, buffered_tile
from codegen.verify.cases import Shape
from codegen.verify.cross_compile import record
from codegen.verify.harness import run_on
from codegen.verify.rules import broken_rules
from tests.codegen.proofs import LINEAR, failed, subject

ASCEND = load_backend("ascend-910c")
WIDTHS = [(16, 16), (100, 60), (128, 128), (256, 512)]


def text_of(member: str, widths=(128, 128)) -> str:
    made = render(
        load_specs()[member], ASCEND, dict(zip(("key_dim", "value_dim"), widths, strict=True))
    )
    return made.files[made.module]


@pytest.mark.parametrize("member", LINEAR)
def test_the_text_keeps_the_rules(member):
    for widths in WIDTHS:
        assert broken_rules(text_of(member, widths), ASCEND.triton) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("        **options,\n", "        num_warps=4,\n", "num_warps is no option"),
        ("    _run(\n        kernel,\n", "    kernel[(1,)](\n        kernel,\n", "outside of _run"),
        ("MOST_PROGRAMS = 65535", "MOST_PROGRAMS = 65536", "a launch takes 65535"),
        (
            'tl.load(at, boundary_check=(0,), padding_option="zero")',
            "tl.load(ptr + stride * tl.arange(0, BT), mask=True)",
            "a masked tl.load",
        ),
        ("tl.exp2(", "tl.sort(", "tl.sort"),
    ],
)
def test_a_text_that_breaks_a_rule_is_refused(old, new, said):
    text = text_of("gated_delta_rule")
    assert old in text
    assert any(said in line for line in broken_rules(text.replace(old, new), ASCEND.triton))


def test_what_the_grid_does_not_hold_is_launched_in_parts(tmp_path):
    one = subject(tmp_path, "gla", backend="ascend-910c")
    module = import_file(one.module, "ascend_parts")
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda first_program, x: launched.append((grid, first_program, x))

    module._run(Kernel(), 65535 * 2 + 7, x="given")
    assert launched == [
        ((65535,), 0, "given"),
        ((65535,), 65535, "given"),
        ((7,), 131070, "given"),
    ]
    launched.clear()
    module._run(Kernel(), 0, x="given")
    assert launched == []


@pytest.mark.parametrize("member", ["kda", "simple_gla"])
def test_kernels_in_parts_of_few_programs_pass_their_gates(member, tmp_path):
    one = subject(
        tmp_path, member, ("MOST_PROGRAMS = 65535", "MOST_PROGRAMS = 3"), backend="ascend-910c"
    )
    cases = ["usual", "grouped value heads in a batch", "packed, few", "hard resets"]
    gates = run_on(one, "interpreter", cases=cases, dtypes=["float32"])
    assert len(gates) >= len(cases)
    assert not failed(gates)


@pytest.mark.parametrize("member", ["kda", "simple_gla"])
def test_no_product_is_of_integers(member, tmp_path):
    one = subject(tmp_path, member, backend="ascend-910c")
    module = import_file(one.module, "ascend_products")
    launches = record(module, Shape(**one.shape), ["bfloat16"])
    kernels = {"_prepare", "_recur", "_reverse", "_pairs", "_gradients"}
    kernels |= {"_solve"} if member == "kda" else set()
    assert {name for _, name, *_ in launches} == kernels
    products = []
    for _, _, source, options in launches:
        assert options == {}
        target = GPUTarget("cuda", 90, 32)
        backend = triton.compiler.make_backend(target)
        ready = backend.parse_options({})
        context = triton._C.libtriton.ir.context()
        triton._C.libtriton.ir.load_dialects(context)
        backend.load_dialects(context)
        code = source.make_ir(
            target,
            ready,
            backend.get_codegen_implementation(ready),
            backend.get_module_map(),
            context,
        )
        products += re.findall(r"tt\.dot .* : (.*)", str(code))
    assert len(products) > 10
    assert not [types for types in products if re.search(r"xi\d+", types)]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("member", LINEAR)
def test_every_kernel_keeps_within_the_unified_buffer(member, widths):
    spec = load_specs()[member]
    tile = buffered_tile(spec, ASCEND, *widths)
    room = BUFFER_SHARE * 192 * 1024
    for dtype in spec.dtypes:
        space = Space(
            spec=spec, backend=ASCEND, key_dim=widths[0], value_dim=widths[1], dtype=dtype
        )
        walk = space.fitted("_recur", tile.launches["_recur"], tile.chunk).block
        width = max(16, 1 << (widths[0] - 1).bit_length())
        # What a step of the walk loads, twice; the state, twice; what it computes, in float32.
        matrices = 3 if spec.delta else 2
        loaded = matrices * tile.chunk * width + (matrices - 1) * tile.chunk**2 + tile.chunk * walk
        held = 2 * width * walk + 4 * tile.chunk * walk
        assert 2 * ITEM_BYTES[dtype] * loaded + 4 * held <= room
        # `_solve` holds what it inverts, the inverse, two masks and three operands.
        assert 4 * 7 * tile.chunk**2 <= room


def test_a_kernel_that_the_buffer_does_not_hold_is_refused_by_name():
    small = dataclasses.replace(ASCEND.triton, shared_memory_bytes=32 * 1024)
    backend = dataclasses.replace(ASCEND, triton=small)
    with pytest.raises(InputError, match="does not fit") as refused:
        render(load_specs()["kda"], backend, {"key_dim": 256, "value_dim": 256})
    assert "_prepare in float32, chunks of 16" in str(refused.value)
    assert "26214 of the buffer are there" in str(refused.value)


def test_the_device_is_declared_only():
    assert ASCEND.status == "declared"
