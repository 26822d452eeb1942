"""A run with copies of experts goes on from a checkpoint as if it had never stopped."""

import shutil

import pytest
from safetensors.torch import load_file

import runtime
from runtime.experts.copies import INTERVAL
from tests.runtime.runs import plan_for, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_copies_are_placed_again_as_they_were(tmp_path, small_model, small_analysis):
    plan = plan_for(2, ep=2, expert_copies=1)
    # Saved after the first look at the loads, so that what lies in the slots must come back.
    saved, steps = INTERVAL + 1, INTERVAL + 3
    run = write_run(
        tmp_path, small_model, plan, small_analysis, steps=steps, checkpoint_every=saved
    )
    runtime.train(run)
    adapter = run / "adapter" / "adapter_model.safetensors"
    straight = {name: t.clone() for name, t in load_file(adapter).items()}
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "train" / "checkpoints" / f"step_{steps}")
    lines = []
    runtime.train(run, progress=lines.append)
    assert any(f"resumed after step {saved}" in line for line in lines)
    again = load_file(adapter)
    assert again.keys() == straight.keys()
    assert all(again[name].equal(straight[name]) for name in straight)
