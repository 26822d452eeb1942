"""The headers level on odd input: an analysis that says what is unknown, or one clear error."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from analyzers import analyze
from analyzers.errors import InputError
from analyzers.headers.keys import SIZES
from analyzers.schema import ModelAnalysis

EMBEDDING = {"model.embed_tokens.weight": (16, 8)}
LAYER = {"input_layernorm.weight": (8,)} | {f"self_attn.{p}_proj.weight": (8, 8) for p in "qkvo"}


def analysed(folder: Path, data: object, shapes: dict | None = None) -> ModelAnalysis:
    (folder / "config.json").write_text(json.dumps(data))
    if shapes:
        tensors = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
    return analyze(folder)


def layers(count: int, layer: dict = LAYER, prefix: str = "model.layers") -> dict:
    return {f"{prefix}.{i}.{n}": s for i in range(count) for n, s in layer.items()}


def test_names_and_nothing_in_the_config(tmp_path):
    a = analysed(tmp_path, {"num_attention_heads": 2}, EMBEDDING | layers(2))
    assert a.fidelity == "headers"
    assert a.fidelity_reason.startswith("config.json names no model_type")
    assert (a.model_type, a.architecture) == ("unknown", "UnknownForCausalLM")
    assert (a.hidden_size, a.vocab_size, len(a.layers)) == (8, 16, 2)
    assert {layer.mixer for layer in a.layers} == {"full_attention"}
    assert a.parameters.total == 16 * 8 + 2 * (8 + 4 * 64)


@pytest.mark.parametrize(
    ("data", "shapes", "said"),
    [
        ({"num_hidden_layers": 4}, EMBEDDING | layers(2), "4 layers, the tensors make 2"),
        ({"hidden_size": 9}, EMBEDDING | layers(2), "hidden_size 9, the embedding has 8"),
        ({}, layers(2), "hidden_size is taken from the norms: 8"),
        ({}, layers(2), "no vocabulary"),
        ({"num_experts": 4}, EMBEDDING | layers(2), "4 experts, but no weights look like theirs"),
        (
            {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16},
            EMBEDDING,
            "no list of layers",
        ),
        ({"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16}, None, "no attention heads"),
        (
            {},
            EMBEDDING
            | layers(1)
            | {f"model.layers.0.mlp.experts.{e}.{w}.weight": (8, 8) for e in (0, 1) for w in "ab"}
            | {"model.layers.0.mlp.experts.1.w2.weight": (8, 4)},
            "are not alike",
        ),
    ],
)
def test_what_is_unknown_is_said(tmp_path, data, shapes, said):
    a = analysed(tmp_path, {"model_type": "nobody_knows", **data}, shapes)
    assert a.fidelity == "headers"
    assert any(said in note for note in a.notes), a.notes


@pytest.mark.parametrize(
    ("data", "shapes", "field"),
    [
        ({}, None, "hidden_size"),
        ({"hidden_size": 8}, None, "num_hidden_layers"),
        ({"hidden_size": 8, "num_hidden_layers": 8}, None, "vocab_size"),
        (
            {"hidden_size": 8, "num_hidden_layers": 10**8, "vocab_size": 9},
            None,
            "num_hidden_layers",
        ),
        ({}, {"weight": (8,)}, "hidden_size"),
        ({}, {"layers.0.a.weight": (8, 8)}, "hidden_size"),
    ],
)
def test_when_there_is_nothing_one_error_names_it(tmp_path, data, shapes, field):
    with pytest.raises(InputError) as caught:
        analysed(tmp_path, {"model_type": "nobody_knows", **data}, shapes)
    assert f"config.json: {field}: " in str(caught.value)
    assert "\n" not in str(caught.value)


words = st.sampled_from(
    [
        *(
            "model",
            "layers",
            "0",
            "1",
            "7",
            "self_attn",
            "attn",
            "mlp",
            "experts",
            "expert",
            "weight",
        ),
        *("q_proj", "k_proj", "o_proj", "kv_b_proj", "A_log", "dt_bias", "D", "conv1d", "gk_proj"),
        *(
            "w1",
            "w2",
            "gate",
            "norm",
            "embed_tokens",
            "lm_head",
            "bias",
            "in_proj",
            "indexer",
            "wk",
        ),
        *("forward", "training", "parameters", "", "_modules", "T", "config", "inferred_mixer"),
    ]
)
names = st.lists(words, min_size=1, max_size=7).map(".".join).filter(len)
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.lists(st.one_of(st.integers(-1, 3), st.sampled_from(["mamba", "linear", ""])), max_size=9),
    st.dictionaries(st.sampled_from(["num_heads", "head_dim", "kda_layers"]), st.integers(0, 4)),
)
KEYS = [
    *SIZES,
    *("text_config", "architectures", "layer_types", "linear_attn_config", "moe_layer_freq"),
    *("hybrid_override_pattern", "tie_word_embeddings", "quantization_config", "dtype", "expand"),
    *("indexer_types", "mlp_only_layers", "first_k_dense_replace", "attn_layer_period", "auto_map"),
    *(
        "rope_scaling",
        "hidden_act",
        "vision_config",
        "name_or_path",
        "get_text_config",
        "__class__",
    ),
    *("norm_topk_prob", "routed_scaling_factor", "n_group", "scoring_func", "sub_configs"),
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.dictionaries(st.sampled_from(KEYS), junk, max_size=12),
    tensors=st.dictionaries(names, shapes, max_size=14),
    sound=st.booleans(),
)
def test_any_names_and_any_config_give_an_analysis_or_one_clear_error(
    tmp_path_factory, data, tensors, sound
):
    folder = tmp_path_factory.mktemp("odd")
    data = {"model_type": "nobody_knows"} | data
    if sound:
        tensors = EMBEDDING | layers(2) | tensors
    error = None
    try:
        a = analysed(folder, data, tensors)
    except InputError as e:
        error = str(e)
    if error is not None:
        assert "\n" not in error
    else:
        assert a.fidelity == "headers"
        assert a.parameters.total >= a.parameters.active >= 0
