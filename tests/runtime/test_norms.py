"""Norms that models spell out run as one operator of torch, where they are that operator."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearRMSNorm,
    KimiLinearRMSNormGated,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from runtime.norms import use_fused_norms


def model_of(cls, width: int = 64) -> Any:
    with torch.device("meta"):
        return nn.Sequential(cls(width))


@pytest.mark.parametrize("cls", [KimiLinearRMSNorm, LlamaRMSNorm])
def test_a_plain_norm_is_fused_and_gives_what_its_own_code_gives(cls):
    model = model_of(cls)
    assert use_fused_norms(model) == ["0"]
    model.to_empty(device="cpu")
    norm = model[0]
    nn.init.normal_(norm.weight)
    x = torch.randn(5, 64, dtype=torch.float64).mul_(1e-3).float().requires_grad_()
    out = norm(x)
    own = cls.forward(norm, x)
    torch.testing.assert_close(out, own)
    (got,) = torch.autograd.grad(out.cos().sum(), x)
    (want,) = torch.autograd.grad(own.cos().sum(), x)
    torch.testing.assert_close(got, want)


def test_it_follows_the_weight_that_is_there_now():
    model = model_of(LlamaRMSNorm)
    use_fused_norms(model)
    model.to_empty(device="cpu")
    x = torch.randn(3, 64)
    for value in (1.0, -2.0):
        nn.init.constant_(model[0].weight, value)
        torch.testing.assert_close(model(x), LlamaRMSNorm.forward(model[0], x))


def test_a_copy_computes_with_its_own_weight():
    model = model_of(LlamaRMSNorm)
    use_fused_norms(model)
    model.to_empty(device="cpu")
    nn.init.ones_(model[0].weight)
    twin, x = copy.deepcopy(model), torch.randn(3, 64)
    nn.init.constant_(twin[0].weight, 3.0)
    torch.testing.assert_close(twin(x), 3 * model(x))


@pytest.mark.parametrize("cls", [Gemma2RMSNorm, KimiLinearRMSNormGated])
def test_norms_that_are_something_else_keep_their_code(cls):
    assert use_fused_norms(model_of(cls)) == []


def test_a_weight_of_another_dtype_keeps_the_dtype_that_the_model_gives():
    model = model_of(LlamaRMSNorm)
    use_fused_norms(model)
    model.to_empty(device="cpu")
    nn.init.ones_(model[0].weight)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert model(x).dtype == LlamaRMSNorm.forward(model[0], x).dtype == torch.float32
