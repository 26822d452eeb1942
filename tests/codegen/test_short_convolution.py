"""The short convolution: its gates on a CPU, other definitions of it, and what it refuses."""

from __future__ import annotations

import ast

import pytest
import torch
import torch.nn.functional as F

from analyzers.backends import load_backend
from codegen.build import subject_of
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render
from codegen.verify.harness import compile_for, run_on
from tests.codegen.kernel_samples import check_style

SPEC = load_members()["short_convolution"]
WINDOW = 4


def write(folder, taps=WINDOW, backend="cpu", change=("", "")):
    made = render(SPEC, load_backend(backend), {"kernel_size": taps})
    for name, text in made.files.items():
        (folder / name).write_text(text.replace(*change) if change[0] else text, encoding="utf-8")
    return subject_of(made, SPEC, folder)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    subject = write(tmp_path_factory.mktemp("convolution"))
    return import_file(subject.module, "short_convolution_under_test").short_convolution


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def test_all_gates_pass_on_a_cpu(tmp_path):
    gates = run_on(write(tmp_path), "cpu")
    assert not [g for g in gates if not g.passed]
    assert len(gates) > 50


@pytest.mark.parametrize(
    ("taps", "cases"),
    [
        (2, ["packed, no states"]),
        (4, ["q, k and v in one launch, q and k normalised", "2 tokens and a last state"]),
        (8, ["1 token and a last state"]),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else "",
)
def test_the_kernels_pass_in_the_interpreter(taps, cases, tmp_path):
    gates = run_on(write(tmp_path, taps), "interpreter", cases=cases)
    assert not [g for g in gates if not g.passed]
    assert len(gates) > len(cases)


@pytest.mark.parametrize(
    ("change", "cases"),
    [
        (("(position >= j)", "(position >= 0)"), ["packed, no states"]),
        (("slot = TAPS - 1 + position - j", "slot = TAPS - 2 + position - j * 0"), ["usual"]),
        (("own = tl.where(i < STEPS, dz, 0.0)", "own = dz"), ["usual"]),
        (("(position >= 3)[:, None], w_3", "(position >= 0)[:, None], w_3"), ["packed, no states"]),
        (("p_0 += _load_state", "p_0 += 0.0 * _load_state"), ["1 token and a last state"]),
    ],
    ids=["leaks forward", "wrong slot", "counts twice", "leaks backward", "drops the state"],
)
def test_a_wrong_kernel_is_refused(change, cases, tmp_path):
    subject = write(tmp_path, change=change)
    assert change[1] in subject.module.read_text()
    assert [g for g in run_on(subject, "interpreter", cases=cases) if not g.passed]


def test_agrees_with_a_padded_depthwise_convolution(kernel):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 19, 24), torch.randn(24, WINDOW), torch.randn(24)
    ours, theirs = leaves(x, weight, bias), leaves(x, weight, bias)
    y, _ = kernel(*ours, activation="silu")
    padded = F.pad(theirs[0].transpose(1, 2), (WINDOW - 1, 0))
    want = F.silu(F.conv1d(padded, theirs[1][:, None], theirs[2], groups=24)).transpose(1, 2)
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad(y, ours, dy), torch.autograd.grad(want, theirs, dy), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_states_gradient_where_the_chunk_is_shorter_than_the_window(kernel, tokens):
    # fla-org/flash-linear-attention#1140: wrong for T = 1 or 2 with W = 4.
    state, x, weight = leaves(torch.randn(1, 8, 3), torch.randn(1, tokens, 8), torch.randn(8, 4))
    _, last = kernel(x, weight, initial_state=state, output_final_state=True)
    above = torch.arange(24.0).view(1, 8, 3)
    dstate, dx = torch.autograd.grad(last, (state, x), above)
    # The last state is the tail of (state, x): its gradient falls back on both unchanged.
    both = F.pad(above, (tokens, 0))
    torch.testing.assert_close(dstate, both[..., :3])
    torch.testing.assert_close(dx, both[..., 3:].transpose(1, 2))


def test_documents_are_as_if_they_were_alone(kernel):
    x, weight = torch.randn(1, 9, 8), torch.randn(8, 4)
    packed, _ = kernel(x, weight, cu_seqlens=torch.tensor([0, 0, 1, 1, 3, 9]))
    alone = [kernel(part, weight)[0] for part in x.split([1, 2, 6], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_several_arrays_are_one_convolution(kernel):
    arrays, weight = [torch.randn(2, 7, n) for n in (8, 12, 4)], torch.randn(24, 4)
    apart, state = kernel(arrays, weight, activation="silu", output_final_state=True)
    whole, last = kernel(torch.cat(arrays, -1), weight, activation="silu", output_final_state=True)
    torch.testing.assert_close(torch.cat(apart, -1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(8, 3)}, "weight must be"),
        ({"bias": torch.zeros(7)}, "bias must be"),
        ({"activation": "gelu"}, "activation"),
        ({"initial_state": torch.zeros(1, 8, 3)}, "initial_state"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "B = 1"),
        ({"l2norm_head_dim": 3}, "do not divide"),
    ],
)
def test_refuses_what_does_not_fit(kernel, change, message):
    call = {"x": torch.zeros(2, 5, 8), "weight": torch.zeros(8, 4)} | change
    with pytest.raises(ValueError, match=message):
        kernel(**call)


def test_windows_beyond_the_kernels_are_refused_by_the_spec():
    backend = load_backend("h200")
    assert SPEC.refusal({"kernel_size": 4}, backend) is None
    assert "outside 2..8" in str(SPEC.refusal({"kernel_size": 64}, backend))


@pytest.mark.parametrize("backend", ["cpu", "h200"])
def test_rendered_files_are_stable_formatted_and_need_torch_and_triton_only(backend, tmp_path):
    attributes = {"kernel_size": 4}
    made = render(SPEC, load_backend(backend), attributes)
    assert made == render(SPEC, load_backend(backend), attributes)
    write(tmp_path, backend=backend)
    check_style(tmp_path)
    tree = ast.walk(ast.parse(made.files[made.module]))
    imports = {n.module for n in tree if isinstance(n, ast.ImportFrom)}
    assert imports <= {"__future__"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("taps", [2, 4, 8])
def test_all_gates_pass_on_the_device(taps, tmp_path):
    subject = write(tmp_path, taps, "h200")
    gates = [*run_on(subject, "device", "cuda"), *compile_for(subject, load_backend("h200"))]
    assert not [g for g in gates if not g.passed]
