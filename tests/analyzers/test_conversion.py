"""Recipes give the tensors of transformers' own loader, and read no more than they need."""

from pathlib import Path

import pytest
import torch

from analyzers.conversion import plan_conversion
from analyzers.errors import InputError
from analyzers.models import build_on_meta, load_config, register_own_models

MODELS = Path(__file__).parents[2] / "examples" / "models"
SHIPPED = ["tiny-kimi-k3", "tiny-kimi-linear", "tiny-qwen3-next"]


class Reads:
    """Reads whole tensors of a folder and remembers which."""

    def __init__(self, folder):
        from safetensors import safe_open

        self.names, self.shard = [], {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            handle = safe_open(file, framework="pt")
            self.shard |= dict.fromkeys(handle.keys(), handle)

    def __call__(self, name):
        self.names.append(name)
        return self.shard[name].get_tensor(name)


def small(kind, **sizes):
    from transformers import AutoConfig

    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return AutoConfig.for_model(kind, **(common | sizes))


CONFIGS = {
    "mixtral": lambda: small("mixtral", num_local_experts=4),
    "qwen3_moe": lambda: small("qwen3_moe", num_experts=4, moe_intermediate_size=24),
    # Its query, key and value come apart from one tensor.
    "sarvam_moe": lambda: small("sarvam_moe", num_experts=4, moe_intermediate_size=24),
}


@pytest.fixture(scope="module", params=[*SHIPPED, *CONFIGS])
def loaded(request, tmp_path_factory):
    """Folder in the released key format, meta model, and the state of a stock load."""
    from transformers import AutoModelForCausalLM

    register_own_models()
    if request.param in CONFIGS:
        folder = tmp_path_factory.mktemp(request.param)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[request.param]()).save_pretrained(folder)
    else:
        folder = MODELS / request.param
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = build_on_meta(load_config(folder), dtype=torch.float32)
    return folder, model, stock.state_dict()


def test_every_tensor_equals_that_of_a_stock_load(loaded):
    folder, model, state = loaded
    read = Reads(folder)
    conversion = plan_conversion(model, read.shard)
    assert conversion.missing == []
    assert conversion.unexpected == []
    for name, expected in state.items():
        if name in conversion.recipes:
            made = conversion.recipes[name].convert(read, model).to(expected.dtype)
            assert torch.equal(made, expected), name
    assert set(read.names) == set(read.shard)


def test_a_range_of_experts_reads_only_those_experts(loaded):
    # fastsafetensors#81, Automodel#2690: every rank reads every expert.
    folder, model, state = loaded
    banks = [n for n in state if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert banks
    for name in banks:
        read = Reads(folder)
        recipe = plan_conversion(model, read.shard).recipes[name]
        assert recipe.by_expert
        rows = recipe.convert(read, model, experts=(1, 3))
        assert torch.equal(rows.to(state[name].dtype), state[name][1:3])
        assert len(read.names) * state[name].shape[0] == 2 * len(recipe.names)
        assert all(".1." in n or ".2." in n for n in read.names)


def test_missing_and_unexpected_names_are_told(loaded):
    folder, model, state = loaded
    names = set(Reads(folder).shard)
    gone = next(n for n in sorted(names) if n.endswith("input_layernorm.weight"))
    conversion = plan_conversion(model, (names - {gone}) | {"model.layers.0.surprise.weight"})
    assert conversion.unexpected == ["model.layers.0.surprise.weight"]
    target = gone.removeprefix("language_model.")  # where a multimodal model is released
    assert conversion.missing == [target]
    assert target in state


def test_sources_of_another_shape_are_refused_by_name():
    folder = MODELS / "tiny-kimi-linear"
    model = build_on_meta(load_config(folder), dtype=torch.float32)
    read = Reads(folder)
    recipe = plan_conversion(model, read.shard).recipes["model.layers.1.mlp.experts.gate_up_proj"]
    first = recipe.names[0]

    def wrong(name):
        tensor = read(name)
        return tensor[:-1] if name == first else tensor

    with pytest.raises(InputError, match=r"model.layers.1.mlp.experts.gate_up_proj"):
        recipe.convert(wrong, model)
