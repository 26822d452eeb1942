"""Routers, experts, residuals and what lies beside the decoder, against models that really run."""

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from analyzers import analysis, models
from analyzers.structure import kinds
from analyzers.tiny import tiny_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


def released(name: str, **changes) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text()) | changes


def tiny(model_type: str, **changes) -> dict:
    return tiny_config(model_type).to_dict() | changes


def parts(a, block: int = 0) -> dict[str, int]:
    return {part.name: part.parameters for part in a.blocks[block].parts}


# ------------------------------------------------------------------------------------- experts


def test_latent_experts_are_priced_at_their_own_width(structure_of):
    # Three tools took the hidden width: vllm#50817, sglang#37704, and an estimator that prints
    # 421 B for the eight-layer Kimi-K3 of 215 B.
    config = released("kimi-k3")
    text = config["text_config"]
    linear = text["linear_attn_config"] | {
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
    }
    config["text_config"] = text | {"num_hidden_layers": 8, "linear_attn_config": linear}
    a = structure_of(config)
    assert a.parameters.total == pytest.approx(215e9, rel=0.01)
    assert (a.experts.hidden_size, a.experts.router_input_size) == (3584, 7168)
    assert a.experts.router.input_size == 7168
    assert {bank.name: (bank.in_features, bank.out_features) for bank in a.blocks[1].banks} == {
        "mlp.experts.gate_up_proj": (3584, 2 * 3072),
        "mlp.experts.down_proj": (3072, 3584),
    }


def test_rows_of_zero_experts_are_no_parameters(structure_of):
    # transformers allocates the up projection for 512 + 256 experts: 741 B instead of 560 B.
    a = structure_of(released("longcat-flash"))
    assert (a.experts.count, a.experts.zero_experts) == (512, 256)
    assert {bank.count for bank in a.blocks[0].banks} == {512}
    assert a.parameters.routed_experts == 28 * 512 * 3 * 6144 * 2048
    # 12 of 768 choices, of which 512 compute: the published range is that of 0 to 12.
    expert = 28 * 3 * 6144 * 2048
    none = a.parameters.active - 8 * expert
    assert none == pytest.approx(18.6e9, rel=0.01)
    assert none + 12 * expert == pytest.approx(31.3e9, rel=0.01)


def test_two_attentions_and_a_dense_path_beside_the_experts(structure_of):
    a = structure_of(tiny("longcat_flash"))
    assert {layer.mixer for layer in a.layers} == {"mla"}
    assert {layer.feed_forward for layer in a.layers} == {"moe"}
    assert parts(a)["dense"] > 0
    assert sum(o.count for o in a.operators if o.name == "scaled_dot_product_attention") == 2 * len(
        a.layers
    )


def test_shared_experts_beside_the_mixture_are_not_dense(structure_of):
    config = tiny("granitemoeshared", shared_intermediate_size=48)
    a = structure_of(config)
    hidden = a.hidden_size
    assert (a.experts.shared, a.experts.shared_intermediate_size) == (1, 48)
    assert parts(a)["shared_experts"] == 3 * hidden * 48
    assert "dense" not in parts(a)


def test_sizes_of_shared_experts_are_those_of_the_modules(structure_of):
    # sglang#37704: the key num_shared_experts was unknown.
    assert structure_of(released("kimi-k3")).experts.shared_intermediate_size == 2 * 3072
    # The key is there and says nothing: MiniMax-M2 has no shared expert.
    none = structure_of(released("minimax-m2.5")).experts
    assert (none.shared, none.shared_intermediate_size) == (0, 0)


def test_experts_and_dense_feed_forward_side_by_side_in_a_layer(structure_of):
    a = structure_of(tiny("gemma4_text"))
    assert {layer.feed_forward for layer in a.layers} == {"moe"}
    assert parts(a)["dense"] > 0
    assert parts(a)["router"] > 0
    experts = a.experts
    one = 3 * experts.hidden_size * experts.intermediate_size
    assert parts(a)["routed_experts"] == experts.count * one


def test_experts_for_images_are_not_active_for_text(structure_of):
    a = structure_of(tiny("ernie4_5_vl_moe"))
    assert all(b.name.startswith("mlp.text_moe") for b in a.blocks[-1].banks)  # to be adapted
    layers = len(a.blocks[-1].layers)
    model = models.build_on_meta(tiny_config("ernie4_5_vl_moe"))
    moes = [
        sum(p.numel() for n, p in model.named_parameters() if f".mlp.{kind}_moe.experts." in n)
        for kind in ("text", "vision")
    ]
    assert min(moes) > 0
    assert a.parameters.routed_experts == sum(moes)
    per_token = layers * a.experts.top_k * 3 * a.experts.hidden_size * a.experts.intermediate_size
    towers = sum(tower.parameters for tower in a.towers)
    rest = a.parameters.total - a.parameters.routed_experts - towers
    table = 0 if a.tied_weights else a.parameters.embedding
    assert a.parameters.active == rest - table + per_token


def test_experts_in_a_dictionary(structure_of):
    a = structure_of(tiny("switch_transformers"))
    assert a.experts.layout == "module_list"
    assert (a.experts.count, a.experts.top_k, a.experts.gated) == (8, 1, False)
    assert a.experts.router.scoring == "softmax"


# ------------------------------------------------------------------------------------- routers


@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v3",  # sigmoid, groups, renormalised and scaled
        "deepseek_v4",  # sqrtsoftplus
        "gpt_oss",  # softmax over the chosen alone
        "olmoe",  # softmax over all, not renormalised
        "longcat_flash",  # softmax over experts and zero experts, scaled alone
        "dots1",  # sigmoid, not renormalised
        "qwen3_next",
    ],
)
def test_router_computes_what_is_said_of_it(model_type):
    config = tiny_config(model_type)
    kind = max(
        (k for k in kinds(models.build_on_meta(copy.deepcopy(config))) if k.moe),
        key=lambda k: (k.moe.routing.scoring != "hash", len(k.layers)),
    )
    said, moe = kind.moe.routing, kind.moe
    torch.manual_seed(0)
    router = kind.module.get_submodule(moe.router.removesuffix(".classifier"))
    router = router.to_empty(device="cpu").float()
    for tensor in (*router.parameters(), *router.buffers()):
        torch.nn.init.zeros_(tensor)
    scoring = kind.module.get_submodule(moe.router).weight
    torch.nn.init.normal_(scoring, std=0.3)
    assert scoring.shape == (moe.count + moe.zero_experts, said.input_size)

    x = torch.randn(32, said.input_size)
    found = [tensor for tensor in router(x) if tensor.shape == (32, moe.top_k)]
    weights = next(t for t in found if t.is_floating_point())
    chosen = next(t for t in found if not t.is_floating_point())
    scores = {
        "softmax": lambda logits: logits.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    }[said.scoring](F.linear(x, scoring)).gather(1, chosen)
    if said.renormalize:
        scores = scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, said.scaling * scores)
    if said.groups > 1:
        groups = chosen // (moe.count // said.groups)
        assert max(len(set(row.tolist())) for row in groups) <= said.top_k_groups


@pytest.mark.parametrize(
    ("name", "bias", "groups"),
    [
        ("deepseek-v3", True, (8, 4)),
        ("kimi-k3", True, (1, 1)),
        ("mixtral-8x7b", False, (1, 1)),
        ("ring-mini-linear-2.0", True, (8, 4)),
    ],
)
def test_correction_bias_and_groups(structure_of, name, bias, groups):
    router = structure_of(released(name)).experts.router
    assert router.correction_bias == bias
    assert (router.groups, router.top_k_groups) == groups


# -------------------------------------------------------------------------------------- layers


def test_layer_lists_that_count_from_one(structure_of):
    config = released("kimi-linear-48b-a3b")
    mixers = [layer.mixer for layer in structure_of(config).layers]
    full = config["linear_attn_config"]["full_attn_layers"]
    assert [i + 1 for i, mixer in enumerate(mixers) if mixer == "mla"] == full
    assert mixers[:5] == ["kda", "kda", "kda", "mla", "kda"]


def test_layer_without_an_indexer_of_its_own_is_sparse_too(structure_of):
    layers = structure_of(released("glm-5.3")).layers
    assert {layer.mixer for layer in layers} == {"sparse_topk"}


def test_attention_and_state_space_side_by_side(structure_of):
    a = structure_of(tiny("falcon_h1"))
    assert {frozenset(layer.mixer.split("+")) for layer in a.layers} == {
        frozenset({"mamba2", "full_attention"})
    }


# ------------------------------------------------------------------------------------- residual


def handed_on(model: torch.nn.Module, layers: torch.nn.ModuleList, vocabulary: int) -> list[int]:
    """Elements a token that layers really receive from the one before, in floating point."""
    sizes = []

    def count(module, args, kwargs):
        names = ("hidden_states", "bank")
        given = [*args, *(kwargs[name] for name in names if name in kwargs)]
        sizes.append(sum(t.numel() for t in given if torch.is_tensor(t) and t.dim() > 2) // 8)

    hooks = [layer.register_forward_pre_hook(count, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        model(torch.arange(8)[None] % vocabulary, use_cache=False)
    for hook in hooks:
        hook.remove()
    return sizes


def test_bank_of_block_starts_is_carried_and_bounds_the_cuts(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "tiny-kimi-k3")
    a = analysis.residual(model, kinds(model))
    sizes = handed_on(model, model.model.layers, model.config.vocab_size)
    assert a.kind == "attention_residual"
    assert a.cut_multiple == model.config.get_text_config().attn_res_block_size
    assert a.carried_bytes_per_token == 2 * max(sizes)


def test_streams_of_hyper_connections():
    config = tiny_config("deepseek_v4")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    a = analysis.residual(model, kinds(model))
    assert (a.kind, a.streams) == ("hyper_connection", config.hc_mult)
    sizes = handed_on(model, model.model.layers, config.vocab_size)
    assert set(sizes) == {config.hc_mult * config.hidden_size}
    assert a.carried_bytes_per_token == 2 * sizes[0]


# ------------------------------------------------------------------------------ beside the layers


def test_tied_head_is_one_parameter_and_active(structure_of):
    tied, free = (structure_of(tiny("qwen3_moe", tie_word_embeddings=tie)) for tie in (True, False))
    table = tied.vocab_size * tied.hidden_size
    assert tied.tied_weights == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert free.tied_weights == []
    assert free.parameters.total - tied.parameters.total == table
    assert tied.parameters.embedding == free.parameters.embedding == table
    assert free.parameters.active == tied.parameters.active


def test_layers_for_further_tokens_are_those_of_the_checkpoint(tmp_path):
    config = CONFIG_MAPPING["deepseek_v3"].from_dict(tiny("deepseek_v3"))
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    last = config.num_hidden_layers
    stored[f"model.layers.{last}.eh_proj.weight"] = torch.zeros(4, 8)
    stored[f"model.layers.{last}.enorm.weight"] = torch.zeros(4)
    save_file(stored, tmp_path / "model.safetensors")
    a = analysis.analyze(tmp_path)
    assert a.multi_token.parameters == 36
    assert not a.multi_token.built


def test_tower_that_only_the_config_names(structure_of):
    a = structure_of(released("kimi-k3"))
    assert [(tower.kind, tower.built) for tower in a.towers] == [("vision", False)]
    assert a.parameters.total == pytest.approx(2.78e12, rel=0.001)


def test_towers_that_are_built_are_counted_apart(structure_of):
    a = structure_of(released("qwen3-vl-30b-a3b"))
    built = {tower.kind: tower.parameters for tower in a.towers}
    assert built.keys() == {"vision", "projector"}
    vision = next(part.parameters for part in a.outer if part.name == "vision")
    assert sum(built.values()) == vision


# --------------------------------------------------------------------------------- stored format


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("deepseek-v3", "fp8"),
        ("deepseek-v4-flash", "mxfp4"),  # expert_dtype, beside fp8 for the rest
        ("gpt-oss-20b", "mxfp4"),
        ("kimi-k2.5", "int4"),
        ("kimi-k3", "mxfp4"),
        ("minimax-m2.5", "fp8"),
        ("mixtral-8x7b", "bf16"),
    ],
)
def test_weight_format_that_the_config_names(structure_of, name, form):
    assert structure_of(released(name)).experts.weight_format == form


@pytest.mark.parametrize("pattern", ["re:.*experts.*", "model.layers.*.mlp.experts", "experts"])
def test_experts_that_the_quantisation_leaves_out(structure_of, pattern):
    config = released("kimi-k3")
    quantization = copy.deepcopy(config["text_config"]["quantization_config"])
    quantization["ignore"].append(pattern)
    config["text_config"] = config["text_config"] | {"quantization_config": quantization}
    assert structure_of(config).experts.weight_format == "bf16"


def test_weight_format_of_the_stored_experts():
    a = analysis.analyze(EXAMPLES / "tiny-kimi-k3")
    assert a.experts.weight_format == "mxfp4"
    assert Counter(layer.feed_forward for layer in a.layers)["moe"] == 7


def test_the_gate_of_a_shared_expert_is_no_latent_projection(structure_of):
    a = structure_of(released("qwen3.5-122b-a10b"))
    parts = {p.name: p for block in a.blocks for p in block.parts}
    assert "latent_projection" not in parts
    assert parts["router"].parameters == 256 * 3072 + 3072
