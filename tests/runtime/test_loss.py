"""The head in chunks beside the logits of all tokens."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import runtime.loss
from analyzers.tiny import tiny_config
from runtime.loss import Head, cross_entropy_sum, fuse_head, measured_head
from runtime.packing import Dataset, collate
from runtime.step import loss_sum
from runtime.tokens import IGNORED, Example

CPU = torch.device("cpu")
HEADS = [Head(), Head(scale=0.3), Head(cap=2.0), Head(scale=3.0, cap=5.0)]


def plain(h, w, b, target, head):
    """Written out, without the class that is tested."""
    z = head.scale * (h @ w.T + b)
    if head.cap is not None:
        z = head.cap * torch.tanh(z / head.cap)
    return F.cross_entropy(z, target, reduction="sum")


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 40])
def test_chunks_equal_all_logits_at_once(head, tokens, monkeypatch):
    monkeypatch.setattr(runtime.loss, "LOSS_CHUNK", 16 * 100)  # chunks of 16 tokens
    torch.manual_seed(0)
    h, w, b = (torch.randn(*s, dtype=torch.float64) for s in ((tokens, 12), (100, 12), (100,)))
    h.requires_grad_()
    target = torch.randint(0, 100, (tokens,))
    expected = plain(h, w, b, target, head)
    (wanted,) = torch.autograd.grad(expected / 3, h)
    made = cross_entropy_sum(h, w, b, target, head)
    (gradient,) = torch.autograd.grad(made / 3, h)
    # Logits are taken in float32, whatever the dtype of the hidden states.
    torch.testing.assert_close(made.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_no_more_logits_exist_than_a_chunk_has(monkeypatch):
    monkeypatch.setattr(runtime.loss, "LOSS_CHUNK", 1 << 14)
    h = torch.randn(512, 16, requires_grad=True)
    w, target = torch.randn(1024, 16), torch.randint(0, 1024, (512,))
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Sizes():
        cross_entropy_sum(h, w, None, target, Head()).backward()
    assert largest == 1 << 14  # the logits of all tokens are 1 << 19


def tiny(model_type, **changes):
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.requires_grad_(False)


def batch():
    examples = [Example(ids, labels) for ids, labels in (([5, 6, 7, 8], [IGNORED, 6, 7, 8]),)]
    examples.append(Example(list(range(20)), [IGNORED] * 10 + list(range(10, 20))))
    return collate(Dataset(examples, truncated=0).rows([0, 1]), 64, 0)


@pytest.mark.parametrize(
    ("model_type", "changes", "head"),
    [
        ("qwen3_moe", {}, Head()),
        ("qwen3_moe", {"tie_word_embeddings": True}, Head()),
        ("gemma2", {"final_logit_softcapping": 3.0}, Head(cap=3.0)),
        ("cohere", {"logit_scale": 0.25}, Head(scale=0.25)),
        ("granite", {"logits_scaling": 8.0}, Head(scale=0.125)),
        ("phi", {}, Head()),  # its head has a bias
    ],
    ids=["untied", "tied", "softcap", "scale", "scaling", "bias"],
)
def test_a_models_loss_is_that_of_its_logits(model_type, changes, head):
    model = tiny(model_type, **changes)
    model.get_input_embeddings().register_forward_hook(lambda m, a, out: out.requires_grad_())
    plain = loss_sum(model, batch(), CPU)
    assert fuse_head(model, CPU) is None
    linear = model.get_output_embeddings()
    assert measured_head(model, linear, model.base_model, CPU) == head
    fused = loss_sum(model, batch(), CPU)
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=0)


def test_what_is_no_plain_head_is_refused_and_named():
    model = tiny("qwen3_moe")
    assert (
        fuse_head(model.requires_grad_(True), CPU)
        == "its head is trained, not a frozen linear layer"
    )
    other = tiny("qwen3_moe")
    other.lm_head = SimpleHead(other.lm_head)
    assert fuse_head(other, CPU) == "its head is a SimpleHead, not a frozen linear layer"
    squared = tiny("qwen3_moe")
    squared.register_forward_hook(_square)
    assert fuse_head(squared, CPU) == "its logits are not a known function of its last hidden state"


class SimpleHead(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)


def _square(module, arguments, output):
    return SimpleNamespace(logits=output.logits.square())
