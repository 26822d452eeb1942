"""Names of factors on disk, against what stock PEFT makes of them."""

import pytest
import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
    convert_peft_config_for_transformers,
)

from analyzers.models import build_on_meta
from analyzers.tiny import tiny_config
from runtime.peft_names import FactorNames, taken_for_experts

KINDS = {
    # `layers.` goes into the language model, also where it is there already.
    "deepseek_ocr2": [
        "model.language_model.layers.1.self_attn.q_proj",
        "model.language_model.layers.1.mlp.experts.base_layer",
    ],
    # `.experts.` goes into the feed-forward, also where it is there already.
    "mistral_large4": [
        "model.language_model.layers.1.mlp.experts",
        "model.language_model.layers.1.mlp.shared_experts.gate_proj",
    ],
    # Nothing moves.
    "qwen3_moe": ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.base_layer"],
}


def built(kind):
    return build_on_meta(tiny_config(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_turns_what_is_stored_into_the_name_in_the_model(kind):
    model = built(kind)
    names, prefix = FactorNames(model), "base_model.model."
    for module in KINDS[kind]:
        key = f"{module}.lora_A.weight"
        stored = names.stored(key)
        assert stored is not None
        read = convert_peft_adapter_state_dict_for_transformers(
            model, LoraConfig(), {f"{prefix}{stored}": torch.zeros(1)}
        )
        assert list(read) == [f"{prefix}{key}"]


def test_a_name_that_peft_always_moves_has_none_on_disk():
    # transformers appends `.weight` to every `sconv.weight_proj`, and PEFT does so to a factor's.
    names = FactorNames(built("inkling2_text"))
    layer = "model.layers.1.self_attn.k_proj"
    assert names.stored(f"{layer}.sconv.weight_proj.lora_A.weight") is None
    assert names.stored(f"{layer}.linear.lora_A.weight") == f"{layer}.linear.lora_A.weight"


@pytest.mark.parametrize("kind", ["longcat_flash", "qwen3_moe", "qwen3_5_text", "deepseek_ocr2"])
def test_layers_are_taken_for_experts_where_peft_looks_for_them_in_the_stack(kind):
    model, targets = built(kind), {f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")}
    config = LoraConfig(target_modules=sorted(targets))
    convert_peft_config_for_transformers(config, model, None)
    left = set(config.target_modules or ())
    assert targets - left == {
        t for t in targets if t.rpartition(".")[2] in taken_for_experts(model)
    }
