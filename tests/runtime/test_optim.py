import itertools

import pytest
import torch

from runtime.optim import clip_gradients, learning_rate
from strategies.schema import Optimizer


def test_rate_warms_up_then_falls_to_a_tenth():
    config = Optimizer(learning_rate=1.0, warmup_steps=4)
    rates = [learning_rate(config, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    assert 0.1 < rates[-1] < 0.12


def test_no_warm_up_and_more_steps_than_planned():
    config = Optimizer(learning_rate=1.0, warmup_steps=0)
    assert learning_rate(config, 0, 1) == 1.0
    assert learning_rate(config, 50, 10) == pytest.approx(0.1)


def test_clip_equals_torch():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)] + [
        torch.nn.Parameter(torch.ones(2))
    ]
    theirs = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    for a, b in zip(ours, theirs, strict=False):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = clip_gradients(ours, 0.5)  # one parameter without a gradient
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs, 0.5)))
    for a, b in zip(ours, theirs, strict=False):
        torch.testing.assert_close(a.grad, b.grad)


def test_small_gradients_are_left_alone():
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 0.1)
    assert clip_gradients([parameter], 1.0) == pytest.approx(0.2)
    assert torch.equal(parameter.grad, torch.full((4,), 0.1))
