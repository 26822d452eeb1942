"""Architectures that differ in what matters here, through every proof, in one launch."""

import pytest

from analyzers.coverage import Architecture
from benchmarks.coverage_training import launch, prepare

CASES = {
    # Conversions found by the class's name, which FSDP changes; convolutions joined along rows.
    "BailingHybridForCausalLM": "bailing_hybrid",
    # Experts transposed, with biases, gate and up interleaved.
    "GptOssForCausalLM": "gpt_oss",
    # Experts whose names PEFT moves.
    "MistralLarge4ForConditionalGeneration": "mistral_large4",
    # Experts without a gate in a latent space.
    "NemotronHForCausalLM": "nemotron_h",
    # No experts, and layers that share a block.
    "ZambaForCausalLM": "zamba",
}

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    work = tmp_path_factory.mktemp("coverage")
    rows = [prepare(Architecture(kind, name, ()), work / name) for name, kind in CASES.items()]
    launch([row for row in rows if not row.reason], work)
    return {row.architecture: row for row in rows}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_process_and_stock_peft_and_merging_agree(rows, name):
    row = rows[name]
    assert row.proved, row.reason
    assert row.ep == (2 if "routed_experts" in row.targets else 1)
    assert ("routed_experts" in row.targets) == (name != "ZambaForCausalLM")


def test_a_class_that_gives_no_logits_for_token_ids_is_not_trained(tmp_path):
    row = prepare(Architecture("yoso", "YosoModel", ()), tmp_path)
    assert row.reason.startswith("has no head for language")
    row = prepare(Architecture("nllb-moe", "NllbMoeForConditionalGeneration", ()), tmp_path)
    assert row.reason.startswith("an encoder-decoder whose decoder wants ids of its own")
