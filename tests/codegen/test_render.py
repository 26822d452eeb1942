from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace

import pytest
from jinja2 import StrictUndefined

from analyzers.backends import load_backend
from codegen.members import load_specs
from codegen.render import _environment, render
from tests.codegen.kernel_samples import check_style, write_kernel


@pytest.fixture(params=load_specs())
def member(request) -> str:
    return request.param


@pytest.mark.parametrize("backend", ["cpu", "h200"])
def test_the_same_inputs_give_the_same_bytes(member, backend):
    spec, device = load_specs()[member], load_backend(backend)
    shape = {"key_dim": 128, "value_dim": 128}
    assert render(spec, device, shape) == render(spec, device, shape)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (128, 128), (100, 256)])
@pytest.mark.parametrize("backend", ["cpu", "h200"])
def test_rendered_files_are_formatted_and_lint_clean(member, key_dim, value_dim, backend, tmp_path):
    write_kernel(tmp_path, member, key_dim, value_dim, backend)
    check_style(tmp_path)


def test_the_module_needs_torch_and_triton_only(member):
    spec = load_specs()[member]
    made = render(spec, load_backend("cpu"), {"key_dim": 32, "value_dim": 32})
    imported = set()
    for node in ast.walk(ast.parse(made.files[made.module])):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "triton"}


def test_the_header_says_what_the_file_was_made_from(member):
    spec = load_specs()[member]
    made = render(spec, load_backend("h200"), {"key_dim": 64, "value_dim": 64})
    header = made.files[made.module].split('"""')[0]
    for digest in (made.template_sha256, made.spec_sha256, made.backend_sha256):
        assert digest in header
    assert "adapt kernels MODEL --backend h200" in header
    assert spec.triton in header
    for text in made.files.values():
        assert not re.search(r"/(home|tmp|root|work)/|20\d\d-\d\d-\d\d", text)


def test_another_width_or_backend_gets_another_operator_name(member):
    spec = load_specs()[member]

    def namespace(backend, width):
        made = render(spec, load_backend(backend), {"key_dim": width, "value_dim": 32})
        return re.search(r'OPERATORS = "(\w+)"', made.files[made.module])[1]

    names = {namespace(b, w) for b in ("cpu", "h200") for w in (16, 32)}
    assert len(names) == 4


def test_templates_refuse_unknown_names():
    assert _environment().undefined is StrictUndefined


@pytest.mark.parametrize(
    ("backend", "key_dim", "kernels"),
    [
        # triton#11366: several dots on blocks of 32, which are all that 32 key channels allow
        ("h200", 32, ["_prepare"]),
        ("h200", 128, []),
        # fla#1228, #945: a race in any of them
        ("gb200", 128, ["_prepare", "_recur", "_reverse", "_pairs", "_gradients"]),
    ],
)
def test_a_tile_of_eight_warps_keeps_clear_of_known_compiler_faults(
    member, backend, key_dim, kernels
):
    device, spec = load_backend(backend), load_specs()[member]
    own = spec.tile(device, key_dim)
    eight = {k: replace(x, num_warps=8) for k, x in own.launches.items()}
    wide = replace(spec, tiles={"default": replace(own, launches=eight)})
    made = wide.tile(device, key_dim).launches
    assert [k for k, x in made.items() if x.num_warps != 8] == kernels
    assert all(x.num_warps in device.triton.num_warps for x in made.values())


@pytest.mark.parametrize("key_dim", [16, 32, 64, 100, 128, 256])
@pytest.mark.parametrize("backend", ["a100", "h100", "h200", "b200", "gb300", "mi300x"])
def test_the_familys_own_tile_meets_no_known_compiler_fault(member, backend, key_dim):
    triton, spec = load_backend(backend).triton, load_specs()[member]
    for dtype in spec.dtypes:
        tile = spec.tile(load_backend(backend), key_dim, dtype)
        for kernel, launch in tile.launches.items():
            assert triton.fault(spec.configuration(kernel, launch, tile.chunk, key_dim)) is None


@pytest.mark.parametrize(
    ("known", "wanted"), [(["ieee", "tf32", "tf32x3"], "tf32"), (["ieee", "bf16x3"], "ieee")]
)
def test_dots_of_bfloat16_take_the_best_precision_that_the_target_knows(member, known, wanted):
    h200 = load_backend("h200")
    assert h200.triton is not None
    target = replace(h200, triton=replace(h200.triton, input_precision=known))
    assert load_specs()[member].dot_precision(target) == {"float32": "ieee", "bfloat16": wanted}
