"""Adapted experts: gates on a CPU and in the interpreter, wrong kernels, and what is refused."""

from __future__ import annotations

import pytest
import torch

from analyzers.backends import load_backend
from codegen.load import import_file
from codegen.members import find_spec, load_members
from codegen.render import render
from codegen.verify.harness import compile_for, run_on
from tests.codegen.kernel_samples import check_style
from tests.codegen.proofs import failed, gates_of, written

OPERATOR = "grouped_lora"
SPEC = load_members()[OPERATOR]
INTERPRETED = [
    "usual",
    "shared first factor",
    "widths that no vector divides",
    "no rows, gated",
    "every row another expert",
    "packed the other way round",
]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    subject = written(tmp_path_factory.mktemp("grouped"), OPERATOR)
    return import_file(subject.module, "grouped_lora_under_test").grouped_lora


def test_all_gates_pass_on_a_cpu(tmp_path):
    gates = run_on(written(tmp_path, OPERATOR), "cpu")
    assert not failed(gates)
    assert len(gates) > 90


def test_the_kernels_pass_in_the_interpreter(tmp_path):
    gates = run_on(written(tmp_path, OPERATOR), "interpreter", cases=INTERPRETED)
    assert not failed(gates)
    assert len(gates) > len(INTERPRETED)


# What is wrong, where, and the case that tells.
MUTATIONS = {
    "adapter forgotten": ("x += z\n", "x = z.to(tl.float32)\n", "usual"),
    "scale forgotten": (
        "x = scale * tl.dot(low, tl.trans(f)",
        "x = tl.dot(low, tl.trans(f)",
        "usual",
    ),
    "scale forgotten in backward": ("low * scale, row", "low, row", "usual"),
    "gradient of the factor not scaled": ("(sums * scale).to", "sums.to", "usual"),
    "rows of the next expert taken along": (
        "end = tl.minimum(end, stop)\n",
        "end = stop\n",
        "usual",
    ),
    "the first expert's factor for all": (
        "tl.cast(expert, tl.int64) * (WIDE * RANK)",
        "tl.cast(expert, tl.int64) * 0",
        "usual",
    ),
    "experts without rows counted": ("ends <= row", "ends < row", "usual"),
    "an expert without rows leaves its gradient unwritten": (
        "mask = there[:, None] & (rank < RANK)[None, :]\n    tl.store",
        "mask = there[:, None] & (rank < RANK)[None, :] & (end > begin)\n    tl.store",
        "usual",
    ),
    "last rows of an expert left out": (
        "tl.range(begin, end, ROWS",
        "tl.range(begin, end - ROWS, ROWS",
        "gated, silu",
    ),
    "slope of silu": ("slope = s * (1.0 + z * (1.0 - s))", "slope = s", "gated, silu"),
    "gate and up exchanged": (
        "z = _load(z_ptr, row, mine, col, there, WIDE).to(tl.float32)",
        "z = _load(z_ptr + (WIDTH if GATED else 0), row, mine, col, there, WIDE).to(tl.float32)",
        "gated, silu",
    ),
    "up's part of the gradient left out": (
        "low = tl.dot(dup, f_up, low,",
        "low = tl.dot(dup * 0.0, f_up, low,",
        "gated, silu",
    ),
    "bias of another expert": (
        "bias_ptr + tl.cast(expert, tl.int64) * WIDE",
        "bias_ptr + tl.cast(expert, tl.int64) * 0",
        "bias",
    ),
    "columns stored past the width": (
        "tl.store(at, x.to(ptr.dtype.element_ty), mask=mine[:, None] & there[None, :])",
        "tl.store(at, x.to(ptr.dtype.element_ty), mask=mine[:, None] & (there | True)[None, :])",
        "usual",
    ),
    "halves of a byte exchanged": (
        "tl.interleave(_four_bits(byte & 15) * factor, _four_bits(byte >> 4)",
        "tl.interleave(_four_bits(byte >> 4) * factor, _four_bits(byte & 15)",
        "packed base weight",
    ),
    "half of the code one too large": ("small < 2", "small < 1", "packed base weight"),
    "partial sums lost": ("out.sum(0)", "out[0]", "shared, many rows"),
}


def test_wrong_kernels_are_refused(tmp_path):
    subjects = [written(tmp_path / "right", OPERATOR)]
    for n, change in enumerate(MUTATIONS.values()):
        subjects.append(written(tmp_path / str(n), OPERATOR, change[:2]))
    cases = [tuple({change[2] for change in MUTATIONS.values()})]
    cases += [(change[2],) for change in MUTATIONS.values()]
    right, *wrong = gates_of(tmp_path, subjects, cases, interpret=True)
    assert not failed(right)
    accepted = [name for name, gates in zip(MUTATIONS, wrong, strict=True) if not failed(gates)]
    assert not accepted


def call(**change):
    given = {
        "x": torch.zeros(5, 8),
        "a": torch.zeros(2, 3, 8),
        "b": torch.zeros(2, 6, 3),
        "base": torch.zeros(2, 6, 8),
        "offsets": torch.tensor([2, 5], dtype=torch.int32),
    }
    return given | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 7)}, "x "),
        ({"a": torch.zeros(2, 4, 8)}, "a must be"),
        ({"b": torch.zeros(2, 5, 3)}, "b "),
        ({"b": torch.zeros(2, 6, 257), "a": torch.zeros(257, 8)}, "rank from 1"),
        ({"offsets": torch.tensor([2, 5])}, "int32"),
        ({"base": torch.zeros(2, 6, 8).half()}, "one dtype"),
        ({"a": torch.zeros(2, 3, 8).half()}, "factors in"),
        ({"base": torch.zeros(2, 6, 8, requires_grad=True)}, "frozen"),
        ({"base_bias": torch.zeros(2, 5)}, "bias must be"),
        ({"activation": "mish"}, "activation must be"),
        ({"gated": True}, "halves"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_what_does_not_fit(kernel, change, message):
    kernel(**call())
    with pytest.raises(ValueError, match=message):
        kernel(**call(**change))


def test_factors_in_float32_have_gradients_in_float32(kernel):
    a, b = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 6, 3, requires_grad=True)
    typed = {name: t.bfloat16() for name, t in call().items() if name in ("x", "base")}
    kernel(**call(**typed, a=a, b=b)).sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == torch.float32


def test_it_is_the_kernel_of_experts():
    assert find_spec("experts") is SPEC
    assert SPEC.refusal({"experts": 8, "gated": True}, load_backend("h200")) is None
    refused = SPEC.refusal({}, load_backend("ascend-910c"))
    assert refused is not None


@pytest.mark.parametrize("backend", ["cpu", "h200"])
def test_rendered_files_are_stable_and_formatted(backend, tmp_path):
    assert render(SPEC, load_backend(backend), {}) == render(SPEC, load_backend(backend), {})
    written(tmp_path, OPERATOR, backend=backend)
    check_style(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_gates_pass_on_the_device(tmp_path):
    subject = written(tmp_path, OPERATOR, backend="h200")
    gates = [*run_on(subject, "device", "cuda"), *compile_for(subject, load_backend("h200"))]
    assert not failed(gates)
