"""Kernels of full width fit processors that are not here; all: `benchmarks/cross_compile.py`."""

import pytest

from analyzers.backends import load_backend
from codegen.members import load_specs
from codegen.verify.harness import compiled, fault_of, target_of
from tests.codegen.proofs import subject


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "member"),
    [("a100", "simple_gla"), ("b200", "gla"), ("mi300x", "gated_delta_rule")],
)
def test_a_member_of_full_width_fits(backend, member, tmp_path):
    device = load_backend(backend)
    target = target_of(device)
    wide = subject(tmp_path, member, widths=(128, 128), backend=backend)
    launches, lines, ended = compiled(wide, [target | {"dtypes": ["bfloat16"]}])
    assert len(lines) == launches["bfloat16"] >= 6, ended
    assert [why for line in lines if (why := fault_of(line, target))] == []
    assert all(line["registers"] > 0 and line["stack"] >= 0 for line in lines)
    kernels = {"_prepare", "_recur", "_reverse", "_pairs", "_gradients"}
    kernels |= {"_solve"} if load_specs()[member].delta else set()
    assert {line["kernel"] for line in lines} == kernels


def test_a_line_of_the_compiler_is_judged_by_the_limits():
    target = target_of(load_backend("a100"))
    fits = {"shared": 166912, "tensor_memory": 0, "traps": False}
    assert target["name"] == "sm_80"
    assert fault_of(fits, target) is None
    assert fault_of(fits | {"shared": 166913}, target) == "166913 bytes of shared memory"
    assert fault_of(fits | {"tensor_memory": 513}, target) == "513 columns of tensor memory"
    # On Blackwell a kernel beyond the limit compiles into one that only traps.
    assert fault_of(fits | {"traps": True}, target)
    assert fault_of({"error": "out of memory"}, target) == "out of memory"
