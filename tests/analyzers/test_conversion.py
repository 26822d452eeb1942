"""Recipes give the tensors of transformers' own loader, and read no more than they need."""

from pathlib import Path

import pytest
import torch

from analyzers.conversion import _renamed, plan_conversion
from analyzers.errors import InputError
from analyzers.models import build_on_meta, load_config, register_own_models
from analyzers.names import families, numbers_in

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
    "qwen3_moe": lambda: small(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    # Its query, key and value come apart from one tensor.
    "sarvam_moe": lambda: small(
        "sarvam_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
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


def test_families_are_renamed_as_their_names_are():
    """One renaming for a family gives what the library gives name by name: also where a pattern
    names a number, computes with one or remembers what came before."""
    from transformers import core_model_loading as loading

    renamings = [
        loading.WeightRenaming(r"layers\.1\.first", r"layers\.1\.second"),
        loading.WeightRenaming(r"blocks\.(\d+)\.0\.", r"stages.\1.head."),
        loading.WeightRenaming(r"^old\.", r"new\."),
        loading.PrefixChange(prefix_to_remove="wrapper"),
    ]
    pairs = loading.LayerPairCollapse()
    moved = loading.Inkling2IndexOffsetWeightRename(r"queries\.(\d+)", r"layers.\1.query", offset=1)
    converters = [
        loading.WeightConverter(
            [r"experts.*.w1.weight", r"experts.*.w3.weight"],
            r"experts.gate_up_proj",
            [loading.MergeModulelist(dim=0), loading.Concatenate(dim=1)],
        )
    ]
    names = [
        f"{root}.{i}.{rest}"
        for root in ("layers", "blocks", "old", "wrapper.layers", "model.queries")
        for i in (0, 1, 2, 10)
        for rest in ("first.weight", "0.weight", "0.0.b", "mixer.q.weight", "5.experts.3.w1.weight")
    ]
    for extra in ([], [pairs], [moved]):
        transforms = [*renamings, *extra]

        def rename(name, transforms=transforms):
            return loading.rename_source_key(name, transforms, converters)

        patterns = [p for t in (*transforms, *converters) for p in t.source_patterns]
        found = {
            name: target
            for family in families(names, numbers_in(patterns))
            for target, members in _renamed(family, rename).items()
            for name in members
        }
        assert found == {name: rename(name) for name in names}


def test_thousands_of_names_need_few_renamings(monkeypatch):
    model = build_on_meta(load_config(MODELS / "kimi-k3"))
    names = [
        f"language_model.model.layers.{i}.block_sparse_moe.experts.{e}.{w}.weight_{part}"
        for i in range(1, 7)
        for e in range(896)
        for w in ("w1", "w2", "w3")
        for part in ("packed", "scale")
    ]
    from transformers import core_model_loading as loading

    calls = []
    rename = loading.rename_source_key
    monkeypatch.setattr(
        loading, "rename_source_key", lambda *args: calls.append(args[0]) or rename(*args)
    )
    wanted = {n: t for n, t in model.state_dict().items() if ".experts." in n}
    wanted = {n: t for n, t in wanted.items() if int(n.split(".")[2]) < 7}
    found = plan_conversion(model, names, wanted)
    assert (found.missing, found.unexpected) == ([], [])
    assert len(calls) <= 3 * 6
    recipe = found.recipes["model.layers.6.mlp.experts.gate_up_proj"]
    assert recipe.by_expert
    assert [names[:1] + names[-1:] for names in recipe.sources.values()] == [
        [f"language_model.model.layers.6.block_sparse_moe.experts.{e}.{part}" for e in (0, 895)]
        for part in ("w1.weight_packed", "w1.weight_scale", "w3.weight_packed", "w3.weight_scale")
    ]
