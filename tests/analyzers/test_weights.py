"""A checkpoint against the model of its config: what is wrong is named, what is right passes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from analyzers.analysis import analyze
from analyzers.checkpoint import CheckpointFolder, TensorInfo, open_checkpoint
from analyzers.conversion import plan_conversion
from analyzers.errors import InputError
from analyzers.fields import contradicted
from analyzers.formats import quantization_of, stored_weights
from analyzers.models import build_on_meta, load_config, read_config
from analyzers.weights import check_weights, compare
from benchmarks import synthetic_checkpoint
from tests.analyzers.test_formats import FP8, INT4, blocks_fp8, pack_int4

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}

K3 = {
    "model_type": "kimi_k3",
    "pad_token_id": 0,
    "text_config": {
        "model_type": "kimi_linear",
        "pad_token_id": 0,
        "vocab_size": 160,
        "hidden_size": 96,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_experts": 12,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "latent_moe_use_norm": True,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "attn_res_block_size": 2,
        "linear_attn_config": {
            "num_heads": 6,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 3, 5],
            "full_attn_layers": [4, 6],
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*"],
        },
    },
    "vision_config": {
        "vt_hidden_size": 32,
        "qkv_hidden_size": 48,
        "vt_intermediate_size": 64,
        "vt_num_hidden_layers": 2,
        "patch_size": 2,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "merge_kernel_size": [2, 2],
    },
}
EXPERT = "language_model.model.layers.{}.block_sparse_moe.experts.{}.{}"


def written(folder, change=lambda tensor: tensor, config=K3):
    synthetic_checkpoint.write(folder, config, 3, change)
    return folder


def checked(folder):
    """The comparison of a folder, and the line that refuses it."""
    data = read_config(folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    stored = stored_weights(checkpoint, quantization_of(data))
    model = build_on_meta(load_config(folder))
    found = compare(model, stored, data)
    line = ""
    if found.wrong:
        with pytest.raises(InputError) as caught:
            check_weights(model, checkpoint, stored, data)
        line = str(caught.value)
        assert "\n" not in line
        assert line.isprintable()
    else:
        assert check_weights(model, checkpoint, stored, data) == found.harmless
    return found, line


def damaged(folder, **changes):
    """A Kimi-K3 folder whose tensors are replaced by name; None drops one."""

    def change(tensor):
        given = changes.get(tensor.name, ...)
        return tensor if given is ... else given and tensor._replace(**given)

    return checked(written(folder, change))


# ------------------------------------------------------------------------------------- Kimi-K3


def test_released_names_with_packed_experts_and_padded_heads_fit(tmp_path):
    """torchtitan#4791: `A_log` is stored for 128 heads, 6 of them used."""
    found, _ = checked(written(tmp_path))
    assert (found.wrong, found.contradiction) == ([], None)
    assert [d for d in found.harmless if d.kind != "unexpected"] == []


def test_injected_shape_dtype_and_missing_tensor_are_each_named(tmp_path):
    """What `benchmarks/synthetic_checkpoint.py` does with the full model."""
    shape, dtype, missing = (
        EXPERT.format(2, 7, "w1.weight_packed"),
        EXPERT.format(3, 5, "w2.weight_packed"),
        "language_model.model.layers.4.self_attn.k_conv1d.weight",
    )
    found, line = checked(written(tmp_path, synthetic_checkpoint.damage))
    kinds = {(d.tensor, d.kind) for d in found.wrong}
    assert kinds == {(shape, "shape"), (dtype, "dtype"), (missing, "missing")}
    for name in (shape, dtype, missing):
        assert name in line


@pytest.mark.parametrize(
    ("name", "change", "kind", "detail"),
    [
        ("layers.1.self_attn.q_proj.weight", {"shape": (64, 96)}, "shape", "[64, 96], the model"),
        ("layers.1.self_attn.A_log", {"shape": (64,)}, "shape", "[64], its sisters as [128]"),
        ("layers.1.self_attn.q_conv1d.weight", {"shape": (96, 1, 3)}, "shape", "[96, 1, 3]"),
        ("layers.2.block_sparse_moe.gate.weight", {"dtype": "I32"}, "dtype", "needs a float"),
        ("layers.2.input_layernorm.weight", None, "missing", "not in the checkpoint"),
        ("layers.2.self_attn.q_conv1d.weight", None, "missing", "not in the checkpoint"),
        ("embed_tokens.weight", None, "missing", "made by no tensor"),
        (EXPERT.format(5, 11, "w3.weight_packed")[21:], None, "missing", "codes are not"),
        (EXPERT.format(5, 11, "w3.weight_scale")[21:], None, "missing", "no scales"),
        (EXPERT.format(5, 0, "w3.weight_scale")[21:], {"shape": (32, 1)}, "shape", "[32, 2]"),
        (EXPERT.format(5, 0, "w3.weight_scale")[21:], {"dtype": "F32"}, "dtype", "U8"),
    ],
)
def test_one_wrong_tensor_is_the_one_that_is_named(tmp_path, name, change, kind, detail):
    full = f"language_model.model.{name}"
    found, line = damaged(tmp_path, **{full: change})
    (wrong,) = found.wrong
    assert wrong.kind == kind
    assert wrong.tensor in (full, f"model.{name}")
    assert detail in wrong.detail
    assert detail in line


@pytest.mark.parametrize("length", [64, 256])
def test_heads_that_are_padded_otherwise_are_refused(tmp_path, length):
    def change(tensor):
        return tensor._replace(shape=(length,)) if tensor.name.endswith("A_log") else tensor

    _, line = checked(written(tmp_path, change))
    assert f"{length} values for 6 heads" in line


def test_expert_that_is_missing_altogether_is_named(tmp_path):
    gone = {EXPERT.format(3, 4, f"w2.weight_{x}"): None for x in ("packed", "scale")}
    found, line = damaged(tmp_path, **gone)
    (wrong,) = found.wrong
    assert (wrong.tensor, wrong.kind) == (EXPERT.format(3, 4, "w2.weight_packed"), "missing")
    assert "needs it" in line


def test_all_experts_of_a_wrong_width_are_told_once_a_layer(tmp_path):
    def narrow(tensor):
        if ".w2.weight_packed" not in tensor.name:
            return tensor
        return tensor._replace(shape=(48, tensor.shape[1]))

    found, line = checked(written(tmp_path, narrow))
    shapes = [d for d in found.wrong if d.kind == "shape" and "makes" in d.detail]
    assert len(shapes) == 5
    assert "[12, 48, 32], the model needs [12, 64, 32]" in line


def test_unpacked_experts_are_as_good_as_packed_ones(tmp_path):
    def plain(tensor):
        if tensor.name.endswith("_scale"):
            return None
        if not tensor.name.endswith("weight_packed"):
            return tensor
        rows, half = tensor.shape
        name = tensor.name.removesuffix("_packed")
        return tensor._replace(name=name, dtype="BF16", shape=(rows, 2 * half))

    found, _ = checked(written(tmp_path, plain))
    assert found.wrong == []


def test_config_that_was_changed_is_contradicted_by_field(tmp_path):
    """Automodel#3792: a config that builds another model than the checkpoint holds."""
    for field, value, line in [
        ("num_experts", 10, "text_config.num_experts is 10 there, the checkpoint has 12"),
        ("vocab_size", 161, "text_config.vocab_size is 161 there, the checkpoint has 160"),
        ("num_attention_heads", 5, "num_attention_heads is 5 there, the checkpoint has 6"),
        ("moe_intermediate_size", 20, "moe_intermediate_size is 20 there, the checkpoint has 32"),
    ]:
        folder = written(tmp_path / field)
        config = {**K3, "text_config": {**K3["text_config"], field: value}}
        (folder / "config.json").write_text(json.dumps(config))
        assert line in checked(folder)[1], field


def test_float_dtype_of_a_sister_layer_is_harmless_and_told(tmp_path):
    name = "language_model.model.layers.3.self_attn.o_proj.weight"
    found, _ = damaged(tmp_path, **{name: {"dtype": "F32"}})
    assert found.wrong == []
    (cast,) = [d for d in found.harmless if d.kind == "dtype"]
    assert (cast.tensor, cast.detail) == (name, "stored as fp32, its 5 sisters as bf16")


def test_analysis_sizes_the_packed_experts_and_refuses_a_damaged_folder(tmp_path):
    analysis = analyze(written(tmp_path / "sound"))
    assert analysis.checkpoint is not None
    # 5 layers of 12 experts with 3 matrices of 32 x 64, half a byte each and a byte for 32.
    assert analysis.checkpoint.packed == {"mxfp4": 5 * 12 * 3 * (32 * 64 // 2 + 32 * 64 // 32)}
    assert analysis.checkpoint.shards == 3
    assert analysis.checkpoint.differences == []
    with pytest.raises(InputError, match=r"k_conv1d\.weight: is not in the checkpoint"):
        analyze(written(tmp_path / "damaged", synthetic_checkpoint.damage))


# ------------------------------------------------------------------------------- other models


def saved(folder, kind, **sizes):
    """A tiny model as transformers saves it, in its released names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(common | sizes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


DEEPSEEK = {
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("deepseek"), "deepseek_v3", **DEEPSEEK)


def repacked(folder, source, quantization, pack):
    """The folder `source` with each tensor packed by `pack(name, tensor)`."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= {n: t.contiguous() for n, t in pack(name, tensor).items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def in_blocks(name, tensor):
    if tensor.dim() < 2 or not name.endswith("_proj.weight"):
        return {name: tensor}
    return {f"{name.removesuffix('weight')}{k}": v for k, v in blocks_fp8(tensor.float()).items()}


def experts_in_int4(name, tensor):
    if ".experts." not in name:
        return {name: tensor}
    parts = pack_int4(tensor.float(), 32)
    return {f"{name.removesuffix('weight')}{k}": v for k, v in parts.items()}


@pytest.mark.parametrize(
    ("quantization", "pack", "form"),
    [(FP8, in_blocks, "fp8"), (INT4, experts_in_int4, "int4")],
    ids=["fp8", "int4"],
)
def test_packed_checkpoint_of_a_library_model_fits(tmp_path, deepseek, quantization, pack, form):
    folder = repacked(tmp_path, deepseek, quantization, pack)
    found, _ = checked(folder)
    assert (found.wrong, found.harmless) == ([], [])
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    assert set(stored_weights(checkpoint, quantization).packed) == {form}


def test_float_weight_among_packed_sisters_is_wrong_unless_the_config_says_so(tmp_path, deepseek):
    name = "model.layers.1.self_attn.o_proj.weight"

    def pack(tensor_name, tensor):
        return {name: tensor} if tensor_name == name else in_blocks(tensor_name, tensor)

    found, line = checked(repacked(tmp_path, deepseek, FP8, pack))
    assert [(d.tensor, d.kind) for d in found.wrong] == [(name, "dtype")]
    assert "as fp8" in line
    kept = FP8 | {"modules_to_not_convert": ["model.layers.1.self_attn.o_proj"]}
    found, _ = checked(repacked(tmp_path, deepseek, kept, pack))
    assert [d.tensor for d in found.harmless] == [name]
    assert found.wrong == []


def test_blocks_of_gpt_oss_fit(tmp_path):
    source = saved(
        tmp_path,
        "gpt_oss",
        num_local_experts=4,
        num_hidden_layers=2,
        head_dim=16,
        hidden_size=64,
        intermediate_size=64,
        layer_types=["sliding_attention", "full_attention"],
    )

    def pack(name, tensor):
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: tensor}
        experts, inner, outer = tensor.shape
        blocks = torch.zeros(experts, outer, inner // 32, 16, dtype=torch.uint8)
        scales = torch.zeros(experts, outer, inner // 32, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    found, _ = checked(repacked(tmp_path, source, {"quant_method": "mxfp4"}, pack))
    assert (found.wrong, found.harmless) == ([], [])


def test_method_that_is_not_read_is_told_and_not_guessed(tmp_path, deepseek):
    folder = repacked(tmp_path, deepseek, {"quant_method": "gptq"}, lambda n, t: {n: t})
    (told,) = checked(folder)[0].harmless
    assert "gptq" in told.detail
    assert "no tensor was compared" in told.detail


def test_prediction_layers_that_the_class_declares_are_expected(tmp_path, deepseek):
    """DeepSeek-V3 declares layer 61; any other layer too many is told as one pattern."""

    def grown(layer):
        tensors = load_file(deepseek / "model.safetensors")
        extra = {
            n.replace("layers.2.", f"layers.{layer}."): t.clone()
            for n, t in tensors.items()
            if "layers.2." in n
        }
        folder = tmp_path / str(layer)
        folder.mkdir()
        save_file(tensors | extra, folder / "model.safetensors")
        (folder / "config.json").write_text((deepseek / "config.json").read_text())
        found, _ = checked(folder)
        assert found.wrong == []
        return found.harmless, len(extra)

    assert grown(61)[0] == []
    (told,), count = grown(3)
    assert told.tensor == "model.layers.3.*"
    assert told.kind == "unexpected"
    assert f"{count} tensors" in told.detail
    assert "multi-token prediction" in told.detail


@pytest.mark.parametrize("name", ["tiny-kimi-linear", "tiny-qwen3-next", "tiny-kimi-k3"])
def test_examples_fit_without_a_difference(name):
    found, _ = checked(EXAMPLES / name)
    assert (found.wrong, found.harmless) == ([], [])


def test_every_tensor_is_compared(deepseek):
    """Each stored tensor in turn, one row longer: none escapes."""
    checkpoint = open_checkpoint(deepseek)
    assert checkpoint is not None
    data, model = read_config(deepseek), build_on_meta(load_config(deepseek))
    for name, info in checkpoint.tensors.items():
        longer = info._replace(shape=(info.shape[0] + 1, *info.shape[1:]))
        tensors = checkpoint.tensors | {name: longer}
        folder = dataclasses.replace(checkpoint, tensors=tensors)
        wrong = compare(model, stored_weights(folder, None), data).wrong
        assert [d.kind for d in wrong] == ["shape"], name
        # Two layers' tensors of one shape cannot be told apart when there are only two of them.
        assert wrong[0].tensor == name


def test_integer_table_stored_as_floats_is_wrong():
    model = build_on_meta(load_config(EXAMPLES / "tiny-kimi-linear"))
    model.model.register_buffer("table", torch.zeros(4, dtype=torch.int64, device="meta"))
    names = plan_conversion(model, []).missing
    assert "model.table" in names
    tensors = {}
    for name, tensor in model.state_dict().items():
        shape, dtype = tuple(tensor.shape), "F32"
        tensors[name] = TensorInfo(name, dtype, shape, Path("x"), 0, 4 * tensor.numel())
    stored = stored_weights(CheckpointFolder(Path("."), tensors, ()), None)
    wrong = compare(model, stored, {}).wrong
    assert [(d.tensor, d.detail) for d in wrong] == [
        ("model.table", "stored as fp32, the model needs an integer")
    ]


# ------------------------------------------------------------------------------- config fields


@pytest.mark.parametrize(
    ("config", "resized", "fitting", "told"),
    [
        # 56 heads of 128 make the hidden size as well, which other tensors confirm.
        (
            {"hidden_size": 7168, "num_attention_heads": 56, "head_dim": 128},
            [(7168, 12288), (56, 96)],
            {7168, 128},
            "num_attention_heads is 56 there, the checkpoint has 96",
        ),
        ({"a": {"num_experts": 256}, "groups": 8}, [(256, 384)], set(), "a.num_experts is 256"),
        ({"heads": 4, "layers": 4}, [(64, 128)], set(), "heads or layers is 4 there"),
        ({"heads": 3}, [(64, 128)], set(), None),
        ({"heads": 64}, [], set(), None),
        ({}, [(1, 2)], set(), None),
    ],
)
def test_field_that_explains_the_shapes(config, resized, fitting, told):
    found = contradicted(config, resized, fitting)
    assert found is None if told is None else told in (found or "")
