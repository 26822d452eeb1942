"""Five steps of every arrangement of four ranks are those of one process on the same batches."""

import json
from pathlib import Path

import pytest
import torch

from analyzers.documents import to_data
from strategies.schema import Capacity, Lora, Optimizer
from tests.runtime.runs import plan_for, torchrun, write_run

TOLERANCE = 1e-5
DISPATCHERS = {
    "all_to_all": {},
    "all_gather": {"dispatcher": "all_gather"},
    "hierarchical": {"dispatcher": "hierarchical"},
}
CASES = {"fsdp4": plan_for(4), "replicate2-fsdp2": plan_for(4, dp_replicate=2)}
for kind, fields in DISPATCHERS.items():
    # Two nodes each: of two ranks for EP 4, of one for EP 2.
    CASES[f"fsdp4-ep2-{kind}"] = plan_for(4, ep=2, node_size=1, **fields)
    CASES[f"fsdp4-ep4-{kind}"] = plan_for(4, ep=4, node_size=2, **fields)
    CASES[f"replicate2-fsdp2-ep2-{kind}"] = plan_for(4, ep=2, dp_replicate=2, node_size=1, **fields)
    CASES[f"fsdp4-ep4-{kind}-checkpointing"] = plan_for(
        4, ep=4, node_size=2, activation_checkpointing="full", **fields
    )
    # Another placement of copies after every step.
    CASES[f"fsdp4-ep2-{kind}-copies"] = plan_for(
        4, ep=2, node_size=1, expert_copies=2, activation_checkpointing="full", **fields
    )
    CASES[f"fsdp4-ep4-{kind}-limited"] = plan_for(
        4,
        ep=4,
        node_size=2,
        activation_checkpointing="full",
        sequence_length=24,
        capacity=Capacity(factor=1.0, overflow="reroute"),
        **fields,
    )
CASES["replicate2-fsdp2-ep2-copies"] = plan_for(4, ep=2, dp_replicate=2, expert_copies=1)
CASES["fsdp4-ep4-copies"] = plan_for(4, ep=4, expert_copies=1)
KINDS = ["equal", "skewed", "starved", "unequal", "short"]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    from analyzers import analyze

    run = tmp_path_factory.mktemp("parity")
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(run / "model")
    # Adam divides a gradient by its own size; a larger epsilon keeps what is only rounding small.
    rates = Optimizer(learning_rate=1e-2, epsilon=1e-3, weight_decay=0.1)
    lora = Lora(rank=3, alpha=6.0)
    write_run(
        run, run / "model", CASES["fsdp4"], analyze(run / "model"), optimizer=rates, lora=lora
    )
    (run / "cases.json").write_text(json.dumps({n: to_data(p) for n, p in CASES.items()}))
    ranks = Path(__file__).with_name("parity_ranks.py")
    torchrun(4, ranks, run, run / "cases.json", run / "results.json")
    return json.loads((run / "results.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_one_process(results, case, kind):
    found = results[case]["steps"][kind]
    assert found["loss"] <= TOLERANCE
    assert found["norm"] <= TOLERANCE
    for what in ("gradients", "updates"):
        assert found[what]["compared"] == 24
        assert found[what]["worst"] <= TOLERANCE, (what, found[what]["where"])
    assert found["counts"]
    assert found["clipped"]


@pytest.mark.parametrize("case", CASES)
def test_factors_after_five_steps_are_those_of_one_process(results, case):
    found = results[case]["parameters"]
    assert found["worst"] <= TOLERANCE, found["where"]


@pytest.mark.parametrize("case", CASES)
def test_what_several_ranks_hold_is_bit_equal_after_five_steps(results, case):
    passed, detail = results[case]["replicas"]
    assert passed, detail


@pytest.mark.parametrize("case", [name for name in CASES if "copies" in name])
def test_copies_were_in_use(results, case):
    assert results[case]["copied"] == [True, True]
