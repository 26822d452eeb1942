import itertools

import pytest
import torch

from runtime.optim import build_optimizer, clip_gradients, learning_rate
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


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_transformers(kind):
    from transformers import get_scheduler

    config = Optimizer(learning_rate=0.3, warmup_steps=3, lr_scheduler_type=kind, min_lr_rate=0.0)
    name = "constant_with_warmup" if kind == "constant" else kind
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=12)
    for step in range(12):
        if step >= 3:  # theirs begins the warm-up with a step at rate zero
            assert learning_rate(config, step, 12) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_vectors_do_not_decay():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(
        [matrix, vector], Optimizer(learning_rate=0.5, weight_decay=0.1, warmup_steps=0)
    )
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))


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
    assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs, 0.5)))
    for a, b in zip(ours, theirs, strict=False):
        torch.testing.assert_close(a.grad, b.grad)


def test_small_gradients_are_left_alone():
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 0.1)
    assert float(clip_gradients([parameter], 1.0)) == pytest.approx(0.2)
    assert torch.equal(parameter.grad, torch.full((4,), 0.1))
