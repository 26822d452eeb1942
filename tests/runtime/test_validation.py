"""The proofs on two ranks, EP 2, for three shipped models; and that they can fail."""

import json
from dataclasses import replace
from typing import get_args

import pytest

import runtime
from analyzers import analyze
from analyzers.documents import read_document
from analyzers.errors import ProofError
from runtime.schema import ValidationReport
from strategies.schema import Capacity, Lora, LoraTarget
from tests.runtime.runs import EXAMPLES, plan_for, write_kernels, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TARGETS: dict[str, list[LoraTarget]] = {
    "tiny-kimi-k3": list(get_args(LoraTarget)),
    "tiny-qwen3-next": ["attention", "routed_experts"],
    "tiny-unseen-moe": ["attention", "routed_experts", "shared_experts", "dense"],
}
WHAT = ["loss", "gradients", "norm", "update"]
EXPECTED = {
    "weights_equal_single_process",
    "ep_invariance_loss",
    "ep_invariance_gradients",
    "ep_invariance_norm",
    "ep_invariance_update",
    "replicas_equal",
    "adapters_moved",
    "checkpoint_resume",
    "routing_balance",
    "peft_round_trip",
    "zero_token_expert",
    "memory",
}


@pytest.fixture(scope="module", params=list(TARGETS))
def report(request, tmp_path_factory):
    run = tmp_path_factory.mktemp(request.param)
    model = EXAMPLES / "models" / request.param
    # A plan of four ranks, so that its twin on the two that are here is proved.
    lora = Lora(targets=TARGETS[request.param])
    trust = (model / "modeling_unseen_moe.py").exists()  # the one that brings its own code
    analysis = analyze(model, trust_remote_code=trust)
    write_run(run, model, plan_for(4, ep=2), analysis, lora=lora, trust_remote_code=trust)
    assert runtime.validate(run) == read_document(ValidationReport, run / "validation.json")
    return read_document(ValidationReport, run / "validation.json")


def test_every_proof_is_there_and_passes(report):
    assert {c.name for c in report.checks} == EXPECTED
    assert [c.name for c in report.checks if not c.passed] == []
    assert report.passed
    assert report.world_size == 2
    assert "kernels: the run has none" in report.not_kept


def test_a_failed_proof_is_named_and_the_report_is_written(tmp_path, small_model, small_analysis):
    # This plan is made for two CPU ranks and predicts no memory at all: that proof must fail.
    write_run(tmp_path, small_model, plan_for(2, ep=2, backend="cpu"), small_analysis)
    with pytest.raises(ProofError, match=r"validation.json: memory: [^;]*$") as caught:
        runtime.validate(tmp_path)
    assert caught.value.exit_status == 4
    report = read_document(ValidationReport, tmp_path / "validation.json")
    assert [c.name for c in report.checks if not c.passed] == ["memory"]
    assert not report.passed


def test_where_the_whole_model_does_not_fit_each_lost_check_is_named(
    tmp_path, small_model, small_analysis
):
    larger = replace(small_analysis.parameters, total=10**15)
    write_run(tmp_path, small_model, plan_for(2, ep=2), replace(small_analysis, parameters=larger))
    write_kernels(tmp_path, small_analysis)
    report = runtime.validate(tmp_path)
    assert report.passed
    lost = {name for name in EXPECTED if name not in {c.name for c in report.checks}}
    assert lost == {f"ep_invariance_{w}" for w in WHAT} | {"peft_round_trip"}
    found = [line for line in report.not_kept if "does not fit" in line]
    assert {line.partition(":")[0] for line in found} == lost | {
        "zero_token_expert (its loss)",
        "operators_vs_reference",
    }
    weights = next(c for c in report.checks if c.name == "weights_equal_single_process")
    assert weights.passed
    assert "tensor by tensor" in weights.detail


ROWS = {f"operators_vs_reference_{name}" for name in ("moe_spread", "moe_combine")}


def test_kernels_around_experts_are_proved_on_stock_experts(tmp_path, small_model, small_analysis):
    write_run(tmp_path, small_model, plan_for(2, ep=2), small_analysis)
    write_kernels(tmp_path, small_analysis, prefer="generated")
    report = runtime.validate(tmp_path)
    assert {c.name for c in report.checks} >= EXPECTED | ROWS
    assert report.passed


def test_kernels_that_experts_in_a_list_do_not_call_are_named(tmp_path):
    model = EXAMPLES / "models" / "tiny-unseen-moe"
    analysis = analyze(model, trust_remote_code=True)
    write_run(tmp_path, model, plan_for(2, ep=2), analysis, trust_remote_code=True)
    write_kernels(tmp_path, analysis, prefer="generated")
    report = runtime.validate(tmp_path)
    assert not ROWS & {c.name for c in report.checks}
    assert report.passed
    assert {line.partition(":")[0] for line in report.not_kept} >= ROWS


def test_one_rank_proves_what_one_rank_can(tmp_path, small_model, small_analysis):
    write_run(tmp_path, small_model, plan_for(1), small_analysis)
    report = runtime.validate(tmp_path)
    assert report.world_size == 1
    assert {c.name for c in report.checks} == EXPECTED - {"replicas_equal"}
    assert any(line.startswith("replicas_equal:") for line in report.not_kept)


def test_memory_says_what_it_measured(report):
    found = next(c for c in report.checks if c.name == "memory")
    assert "Not measured: activations" in found.detail


@pytest.mark.parametrize("what", WHAT)
def test_two_ranks_equal_one_within_1e_5_over_three_steps(report, what):
    found = next(c for c in report.checks if c.name == f"ep_invariance_{what}")
    assert found.tolerance == 1e-5
    assert found.measured <= 1e-5
    assert "over 3 steps" in found.detail


def test_the_adapter_changes_the_logits_and_peft_agrees(report):
    found = next(c for c in report.checks if c.name == "peft_round_trip")
    assert found.tolerance == 1e-4
    assert found.measured <= 1e-4


def test_the_report_is_plain_json(report):
    from analyzers.documents import to_json

    assert json.loads(to_json(report))["world_size"] == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expert_copies": 1}, None),
        ({"capacity": Capacity(factor=1.0, overflow="reroute")}, "found no room"),
    ],
    ids=["copies", "capacity"],
)
def test_what_moves_tokens_between_experts_is_proved(
    tmp_path, small_model, small_analysis, changes, said
):
    lora = Lora(targets=["attention", "routed_experts"])
    write_run(tmp_path, small_model, plan_for(2, ep=2, **changes), small_analysis, lora=lora)
    report = runtime.validate(tmp_path)
    assert report.passed
    assert not any("copies" in line for line in report.not_kept)
    details = [c.detail for c in report.checks if c.name == "capacity"]
    assert len(details) == (said is not None)
    assert said is None or said in details[0]
