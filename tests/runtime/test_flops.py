"""Model FLOPs beside what torch counts while a small model runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from analyzers import analyze
from runtime.adapters import insert_adapters
from runtime.flops import ModelFlops, peak_flops
from strategies.schema import Lora
from tests.runtime.runs import job_for, plan_for, save_qwen


def addmm_flops(out, a, b, **_):
    """Of shapes."""
    return 2 * a[0] * a[1] * b[1]


IN_PLACE = {torch.ops.aten.addmm_: addmm_flops}
"""A product that the counter has no entry for."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """The analysis' FLOPs, and a function that counts a forward and backward pass."""
    from transformers import AutoModelForCausalLM

    folder = save_qwen(tmp_path_factory.mktemp("qwen") / "model")
    analysis, lora = analyze(folder), Lora(rank=8, targets=["attention", "dense"])
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    insert_adapters(model, lora, analysis)
    model.get_input_embeddings().register_forward_hook(lambda m, a, out: out.requires_grad_())

    def count(tokens):
        counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
        with counter:
            model(input_ids=torch.arange(tokens)[None]).logits.sum().backward()
        return counter.get_total_flops()

    return ModelFlops.of(analysis, job_for(folder, lora=lora)), count


def test_they_are_what_torch_counts_forward_and_backward(counted):
    flops, count = counted
    for tokens in (8, 64):
        # torch counts full squares of eager attention, where a document needs half of them, and
        # eager attention keeps the scores that a fused kernel makes again: one product a layer.
        squares = flops.body.per_pair * tokens**2 / 2 - 2 * (2 * 4 * 8) * tokens**2
        made = flops.over([tokens], labelled=tokens) + squares
        assert made == pytest.approx(count(tokens), rel=1e-3)


def test_packed_documents_meet_only_themselves(counted):
    flops, _ = counted
    one, two = flops.over([64], labelled=0), flops.over([32, 32], labelled=0)
    assert one - two == pytest.approx(flops.body.per_pair * (64**2 / 2 - 32**2))
    assert one > two
    assert flops.over([64], labelled=1) > one


def test_the_peak_is_known_only_for_the_plans_own_device():
    plan = plan_for(1, backend="h200")
    assert peak_flops(plan, "cpu") is None
    assert peak_flops(plan_for(1), "cpu") is None
    assert peak_flops(plan_for(1, backend="h200", compute_dtype="bfloat16"), "cuda") == 690e12
