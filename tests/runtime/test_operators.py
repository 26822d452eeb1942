"""Kernels against their references on a model's own values: what is told, in every dtype."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import silu

from analyzers.schema import Site
from codegen import LoadedKernel
from runtime.operators import operators_vs_reference
from tests.codegen.test_install import loaded

SITE = Site(module_class="Gated", function="gate_by")

REFERENCE = """
from torch.nn.functional import silu


def gate_by(q, k, v, *, g_gamma, **ignored):
    return q * silu(k) * g_gamma + v, None
"""


def gate_by(q, k, v, *, g_gamma, **ignored):
    return q * silu(k) * g_gamma + v, None


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 1.1


def right(q, k, v, *, g_gamma, **ignored):
    assert not g_gamma.requires_grad
    return gate_by(q, k, v, g_gamma=g_gamma)


def wrong(q, k, v, *, g_gamma, **ignored):
    return gate_by(WrongGradient.apply(q), k, v, g_gamma=g_gamma)


def without_a_state(q, k, v, *, g_gamma, **ignored):
    return gate_by(q, k, v, g_gamma=g_gamma)[0]


class Gated(torch.nn.Module):
    def forward(self, x):
        return gate_by(x, x.flip(0), x.roll(1), g_gamma=torch.full((24,), 0.5))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("function", "passes"), [(right, True), (without_a_state, True), (wrong, False)]
)
def test_a_wrong_gradient_is_told_in_every_dtype(monkeypatch, tmp_path, dtype, function, passes):
    (tmp_path / "reference_gate.py").write_text(REFERENCE)
    kernel = loaded(function, SITE).kernel
    names = {"reference": "reference_gate.py", "function": "gate_by"}
    one = LoadedKernel(kernel=dataclasses.replace(kernel, **names), function=function)
    monkeypatch.setattr("codegen.load_kernels", lambda folder: [one])
    torch.manual_seed(0)
    x = torch.randn(300, 24)
    monkeypatch.setattr("runtime.operators.logits_of", lambda model, batch, device: model(x))
    (check,) = operators_vs_reference(Gated(), tmp_path, None, torch.device("cpu"), dtype)
    assert check.passed == passes, check
