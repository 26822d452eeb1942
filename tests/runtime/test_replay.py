"""A layer that is run again for the backward pass repeats the choices of its first forward."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from runtime.experts.dispatch import Local
from runtime.experts.replay import once, replaying

EXPERTS, CHOICES, WIDTH = 6, 2, 8


class Layer:
    """Routes among experts that score alike, so that any rounding decides; each run rounds in
    another way, as kernels may that add in no fixed order."""

    def __init__(self):
        torch.manual_seed(0)
        self.router = torch.randn(1, WIDTH).expand(EXPERTS, -1)
        self.bank = torch.randn(EXPERTS, WIDTH)
        self.chosen, self.routes = [], 0

    def route(self, index):
        self.routes += 1
        return Local().route(index, EXPERTS)

    def __call__(self, x):
        noise = torch.Generator().manual_seed(len(self.chosen))
        scores = x @ self.router.T + 1e-6 * torch.randn(len(x), EXPERTS, generator=noise)
        values, index = torch.topk(scores, CHOICES, dim=-1)
        self.chosen.append(index)
        route = once(lambda: self.route(index))
        x_PD, weights_P = route.dispatch(x, values.softmax(-1))
        return route.combine(torch.tanh(x_PD) * self.bank[route.pairs.expert_P], weights_P)


def gradients(layer, **kwargs):
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False, **kwargs) if kwargs else layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("calls", [1, 3])
def test_a_repeated_layer_chooses_and_dispatches_as_before(calls):
    # Automodel#3743: 2,791 rows in forward, 2,701 in the recomputation. Automodel#3325, #3156.
    layer = Layer()
    outputs = [gradients(layer, context_fn=replaying) for _ in range(calls)]
    first, again = layer.chosen[::2], layer.chosen[1::2]
    assert len(first) == len(again) == calls
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert layer.routes == calls
    plain = Layer()
    y, grad = gradients(plain)
    assert torch.equal(outputs[0][0], y)
    torch.testing.assert_close(outputs[0][1], grad, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_repeated_without_this_chooses_anew():
    # What the other test would miss if these layers never disagreed with themselves.
    layer = Layer()
    gradients(layer, context_fn=lambda: (torch.enable_grad(), torch.enable_grad()))
    assert not torch.equal(*layer.chosen)
    assert layer.routes == 2


@pytest.mark.parametrize("call", [torch.topk, torch.Tensor.topk, lambda x, k: x.topk(k=k)])
def test_functions_are_what_they_were_once_a_layer_is_done(call):
    before = torch.topk, torch.Tensor.topk
    first, again = replaying()
    x = torch.randn(3, 5)
    with first:
        assert torch.topk is not before[0]
        indices = x.topk(2).indices
        torch.topk(x, 2, out=(torch.empty(0), torch.empty(0, dtype=torch.long)))  # not a choice
    with again:
        assert torch.equal((-x).topk(2).indices, indices)
    assert (torch.topk, torch.Tensor.topk) == before
    assert torch.equal(call(x, 2).indices, indices)
