"""Checkpoints of one process: written beside the steps, complete or absent, of one run."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from analyzers.errors import InputError
from runtime.checkpoints import Checkpoints, Run, last_checkpoint, load_checkpoint, save_checkpoint

RUN = Run(
    seed=0,
    global_batch_size=4,
    data="abc",
    sequence_length=64,
    packing=True,
    evaluation_fraction=0.0,
    lora={"rank": 2},
)


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(value, rank=64):
    model = nn.Module()
    model.lora_A = nn.Parameter(torch.full((rank, 64), float(value)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def step(model, optimizer):
    model.lora_A.grad = torch.ones_like(model.lora_A)
    optimizer.step()


def test_what_changes_while_it_is_written_is_not_in_it(tmp_path):
    model, optimizer = made(1)
    step(model, optimizer)
    expected = model.lora_A.detach().clone()
    checkpoints = Checkpoints(tmp_path / "c", model, optimizer, RUN)
    checkpoints.start(1)
    for _ in range(50):  # the next steps do not wait for the disk
        step(model, optimizer)
    checkpoints.finish()
    fresh, other = made(7)
    assert Checkpoints(tmp_path / "c", fresh, other, RUN).resume() == 1
    assert torch.equal(fresh.lora_A, expected)
    assert float(other.state[fresh.lora_A]["step"]) == 1
    assert torch.allclose(other.state[fresh.lora_A]["exp_avg"], torch.full((64, 64), 0.1))


def test_a_checkpoint_is_absent_until_it_is_complete(tmp_path, monkeypatch):
    import runtime.checkpoints

    model, optimizer = made(1)
    step(model, optimizer)
    save_checkpoint(tmp_path / "c", 1, model, optimizer)

    def dies(folder, step):
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime.checkpoints, "_complete", dies)
    checkpoints = Checkpoints(tmp_path / "c", model, optimizer, RUN)
    checkpoints.start(2)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.finish()
    assert last_checkpoint(tmp_path / "c") == 1
    monkeypatch.undo()
    checkpoints.start(3)  # clears what was left over
    checkpoints.finish()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step_1", "step_3"]


def test_the_last_two_are_kept(tmp_path):
    model, optimizer = made(1)
    checkpoints = Checkpoints(tmp_path / "c", model, optimizer, RUN)
    for number in (5, 10, 15, 20):
        checkpoints.start(number)
        checkpoints.poll()
    checkpoints.finish()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step_15", "step_20"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 1),
        ("global_batch_size", 8),
        ("data", "def"),
        ("sequence_length", 128),
        ("packing", False),
        ("evaluation_fraction", 0.1),
        ("lora", {"rank": 4}),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, field, value):
    model, optimizer = made(1)
    checkpoints = Checkpoints(tmp_path / "c", model, optimizer, RUN)
    checkpoints.start(1)
    checkpoints.finish()
    other = dataclasses.replace(RUN, **{field: value})
    fresh, others = made(7, rank=32 if field == "lora" else 64)
    with pytest.raises(InputError, match=rf"step_1: {field}: is .* written with"):
        Checkpoints(tmp_path / "c", fresh, others, other).resume()
    assert (fresh.lora_A == 7).all()


def test_a_checkpoint_without_a_run_loads(tmp_path):
    model, optimizer = made(3)
    step(model, optimizer)
    save_checkpoint(tmp_path / "c", 1, model, optimizer)
    fresh, other = made(7)
    load_checkpoint(tmp_path / "c", 1, fresh, other)
    assert torch.equal(fresh.lora_A, model.lora_A)
