"""A sample of the sweep (`benchmarks/coverage.py` does all), and the rule that finds what to do."""

import pytest

from analyzers import analyze
from analyzers.coverage import (
    Architecture,
    Excluded,
    Result,
    enumerate_architectures,
    examine,
    render,
    write_tiny,
)

# Expected: the mixers of the kinds of layers by the published description of each architecture, and
# experts / top k of the tiny form.
SAMPLE = {
    "MixtralForCausalLM": (["full_attention"], "8 / 2"),
    "KimiLinearForCausalLM": (["kda", "mla"], "8 / 2"),
    "GptOssForCausalLM": (["sliding_attention", "full_attention"], "8 / 2"),
    "Llama4ForCausalLM": (["chunked_attention", "full_attention"], "8 / 1"),
    "FalconH1ForCausalLM": (["mamba2+full_attention"], ""),
    "GraniteMoeHybridForCausalLM": (["mamba2", "full_attention"], "8 / 2"),
    "MambaForCausalLM": (["mamba1"], ""),
    "Lfm2MoeForCausalLM": (["short_convolution", "full_attention"], "8 / 2"),
    "LEDForConditionalGeneration": (["full_attention"], ""),
    "Qwen4ExpForCausalLM": (["gated_delta_net", "sparse_topk"], "8 / 2"),
    "RwkvForCausalLM": (["rwkv"], ""),
    "xLSTMForCausalLM": (["mlstm"], ""),
}


@pytest.fixture(scope="module")
def enumerated() -> tuple[list[Architecture], list[Excluded]]:
    return enumerate_architectures()


def test_known_families_are_found_with_the_sign_that_they_show(enumerated):
    found = {a.name: a for a in enumerated[0]}
    assert "routed experts" in found["MixtralForCausalLM"].signs
    assert "state space" in found["MambaForCausalLM"].signs
    assert "recurrence" in found["xLSTMForCausalLM"].signs
    assert "sparse attention" in found["DeepseekV32ForCausalLM"].signs
    # By their default text model, with no such code of their own.
    assert found["Kimi_K25ForConditionalGeneration"].signs == ("routed experts",)
    assert set(SAMPLE) <= set(found)


def test_dense_models_vision_models_and_parts_are_not_listed(enumerated):
    types = {a.model_type for a in enumerated[0]}
    assert not types & {"llama", "qwen3", "bert", "whisper", "vit", "pvt_v2", "align"}
    reasons = {e.model_type: e.reason for e in enumerated[1]}
    assert reasons["qwen3_vl_moe_text"] == "a part of qwen3_vl_moe"
    assert reasons["vitpose_backbone"] == "no class that reads tokens"
    assert reasons["sarvam_moe"] == "built as Glm4MoeForCausalLM"


def test_no_type_is_both_listed_and_excluded(enumerated):
    listed = {a.model_type for a in enumerated[0]}
    assert not listed & {e.model_type for e in enumerated[1]}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_architectures_is_traced(name, enumerated):
    architecture = next(a for a in enumerated[0] if a.name == name)
    result = examine(architecture)
    mixers, experts = SAMPLE[name]
    assert (result.level, result.reason) == ("traced", "")
    assert result.mixers == mixers
    assert result.experts == experts
    assert result.nodes > 0


def test_what_raises_is_a_failed_result_with_a_reason():
    result = examine(Architecture("no_such_type", "NoSuchForCausalLM", ()))
    assert result.level == "failed"
    assert "no_such_type" in result.reason


def test_the_page_counts_levels_and_gives_every_reason():
    def result(name: str, level: str, reason: str) -> Result:
        return Result("t", name, [], level, reason, mixers=["kda", "mla"], experts="8 / 2")

    results = [result("A", "traced", ""), result("B", "structural", "export failed")]
    page = render(results, [Excluded("c_vision", "a part of c")], "torch 1; Linux")
    assert "**2 architectures: 1 traced, 1 structural (50.0% traced).** torch 1; Linux." in page
    assert "| A | t | traced | kda, mla | 8 / 2 |" in page
    assert "- B (structural): export failed" in page
    assert "| c_vision | a part of c |" in page


@pytest.mark.parametrize(
    ("architecture", "attends"),
    [("BigBirdPegasusForCausalLM", False), ("BigBirdPegasusForConditionalGeneration", True)],
)
def test_attention_to_an_encoder_is_listed_where_there_is_one(tmp_path, architecture, attends):
    kind = Architecture("bigbird_pegasus", architecture, ())
    write_tiny(kind, tmp_path)
    a = analyze(tmp_path)
    names = {linear.name for block in a.blocks for linear in block.linears}
    assert {"self_attn.q_proj", "fc1"} <= names
    assert any(name.startswith("encoder_attn.") for name in names) == attends
