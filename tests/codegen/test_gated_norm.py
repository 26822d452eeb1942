"""The gated norm: its gates on a CPU, transformers' own modules, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from analyzers.backends import load_backend
from codegen.build import subject_of
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render
from codegen.verify.harness import compile_for, run_on
from tests.codegen.kernel_samples import check_style

SPEC = load_members()["gated_rms_norm"]


def write(folder, backend="cpu", change=("", "")):
    made = render(SPEC, load_backend(backend), {})
    for name, text in made.files.items():
        (folder / name).write_text(text.replace(*change) if change[0] else text, encoding="utf-8")
    return subject_of(made, SPEC, folder)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    subject = write(tmp_path_factory.mktemp("norm"))
    return import_file(subject.module, "gated_norm_under_test").gated_rms_norm


def test_all_gates_pass_on_a_cpu(tmp_path):
    gates = run_on(write(tmp_path), "cpu")
    assert not [g for g in gates if not g.passed]
    assert len(gates) > 40


def test_the_kernels_pass_in_the_interpreter(tmp_path):
    cases = ["heads, silu", "groups, gate before norm", "no gate", "one channel"]
    gates = run_on(write(tmp_path), "interpreter", cases=cases)
    assert not [g for g in gates if not g.passed]
    assert len(gates) > len(cases)


@pytest.mark.parametrize(
    "change",
    [
        ("dx = inverse * (dn - n *", "dx = inverse * (dn - 0.9 * n *"),
        ("dweight += dy * n", "dweight = dy * n"),
        ("slope = value + gate * slope", "slope = value"),
        ("tl.sum(x * x, 1) / D", "tl.sum(x * x, 1) / BD"),
    ],
    ids=["projection", "last tile only", "slope of silu", "mean over the padding"],
)
def test_a_wrong_kernel_is_refused(change, tmp_path):
    subject = write(tmp_path, change=change)
    assert change[1] in subject.module.read_text()
    assert [g for g in run_on(subject, "interpreter", cases=["heads, silu"]) if not g.passed]


def modules():
    """(class name, module, arguments of ours, shape) of the gated norms that transformers has."""
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    heads, whole = (2, 5, 3, 24), (2, 5, 48)
    gate_first = {"norm_before_gate": False, "group_size": 12}
    return [
        (KimiLinearRMSNormGated(24), {"activation": "sigmoid"}, heads),
        (Qwen3NextRMSNormGated(24), {}, heads),
        (MambaRMSNormGated(48, 12), gate_first, whole),
        (FalconH1RMSNormGated(48, n_groups=4), {"group_size": 12}, whole),
        (FalconH1RMSNormGated(48, n_groups=4, norm_before_gate=False), gate_first, whole),
    ]


@pytest.mark.parametrize(
    "n", range(5), ids=["kimi_linear", "qwen3_next", "mamba2", "falcon_h1", "falcon_h1 gate first"]
)
def test_agrees_with_the_modules_of_transformers(kernel, n):
    module, options, shape = modules()[n]
    torch.manual_seed(0)
    x, gate, dy = torch.randn(3, *shape)
    torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    inputs = [t.requires_grad_() for t in (x, gate)]
    want = module(*inputs)
    y = kernel(inputs[0], module.weight, inputs[1], eps=module.variance_epsilon, **options)
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
    parameters = (*inputs, module.weight)
    for a, b in zip(
        torch.autograd.grad(y, parameters, dy),
        torch.autograd.grad(want, parameters, dy),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(7)}, "weight must be"),
        ({"gate": torch.zeros(5, 1)}, "gate must be"),
        ({"activation": "relu"}, "activation must be"),
        ({"group_size": 3}, "must divide"),
        ({"x": torch.zeros(5, 8, dtype=torch.float64)}, "dtype"),
    ],
)
def test_refuses_what_does_not_fit(kernel, change, message):
    call = {"x": torch.zeros(5, 8), "weight": torch.zeros(8), "gate": torch.zeros(5, 8)} | change
    with pytest.raises(ValueError, match=message):
        kernel(**call)


@pytest.mark.parametrize("backend", ["cpu", "h200"])
def test_rendered_files_are_stable_and_formatted(backend, tmp_path):
    assert render(SPEC, load_backend(backend), {}) == render(SPEC, load_backend(backend), {})
    write(tmp_path, backend)
    check_style(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_gates_pass_on_the_device(tmp_path):
    subject = write(tmp_path, "h200")
    gates = [*run_on(subject, "device", "cuda"), *compile_for(subject, load_backend("h200"))]
    assert not [g for g in gates if not g.passed]
