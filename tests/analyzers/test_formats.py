"""Packed weights: shapes and bytes of really packed tensors, and parts that do not fit together."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from analyzers.checkpoint import DTYPE_BITS, CheckpointFolder, TensorInfo, open_checkpoint
from analyzers.formats import quantization_of, stored_weights
from analyzers.models.kimi_k3.mxfp4 import pack_mxfp4, unpack_mxfp4

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}}},
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def pack_int4(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """compressed-tensors' pack-quantized: 8 codes to an int32, the first in the lowest bits."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, group)
    scale = groups.abs().amax(-1) / 7
    codes = (groups / scale[..., None]).round().clamp(-8, 7).reshape(rows, -1, 8).long() + 8
    words = (codes << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor([rows, columns])
    return {"weight_packed": packed, "weight_scale": scale.bfloat16(), "weight_shape": shape}


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    return (((packed[..., None] >> (4 * torch.arange(8))) & 15) - 8).flatten(1)


def blocks_fp8(weight: torch.Tensor, size: int = 128) -> dict[str, torch.Tensor]:
    rows, columns = (-(-n // size) for n in weight.shape)
    scale = torch.ones(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = weight[i * size : (i + 1) * size, j * size : (j + 1) * size]
            scale[i, j] = block.abs().max() / 448
            block /= scale[i, j]
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def stored(folder, tensors, quantization=None):
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    found = stored_weights(checkpoint, quantization)
    # No byte is lost or counted twice.
    assert sum(t.nbytes for t in found.tensors.values()) == checkpoint.nbytes or found.faults
    return found


def under(prefix, tensors):
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def test_mxfp4_of_compressed_tensors(tmp_path):
    weight = torch.randn(24, 64)
    codes, scale = pack_mxfp4(weight)
    name = "model.layers.0.mlp.experts.0.w1.weight"
    found = stored(tmp_path, {f"{name}_packed": codes, f"{name}_scale": scale})
    assert found.faults == []
    assert found.packed == {"mxfp4": 24 * 64 // 2 + 24 * 64 // 32}
    logical = found.tensors[name]
    assert (logical.shape, logical.format, logical.dtype) == ((24, 64), "mxfp4", "U8")
    assert logical.parts == (f"{name}_packed", f"{name}_scale")
    assert logical.shape == unpack_mxfp4(codes, scale).shape


def test_mxfp4_blocks_of_gpt_oss(tmp_path):
    """The bank is the transpose of what is stored, as transformers unpacks it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes, scale = pack_mxfp4(torch.randn(4, 12, 96))
    blocks = codes.reshape(4, 12, 3, 16)
    tensors = {"m.experts.down_proj_blocks": blocks, "m.experts.down_proj_scales": scale}
    tensors["m.experts.down_proj_bias"] = torch.zeros(4, 12)
    found = stored(tmp_path, tensors)
    assert found.faults == []
    assert found.packed == {"mxfp4": blocks.numel() + scale.numel()}
    logical = found.tensors["m.experts.down_proj"]
    assert logical.shape == tuple(convert_moe_packed_tensors(blocks, scale).shape) == (4, 96, 12)
    assert found.tensors["m.experts.down_proj_bias"].format == "fp32"


@pytest.mark.parametrize("shape", [(256, 384), (200, 130)], ids=str)
def test_fp8_in_blocks(tmp_path, shape):
    weight = torch.randn(shape)
    parts = blocks_fp8(weight.clone())
    found = stored(tmp_path, under("m.q_proj", parts), FP8)
    assert found.faults == []
    assert found.tensors["m.q_proj.weight"].shape == shape
    assert set(found.packed) == {"fp8"}
    grown = parts["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    again = parts["weight"].float() * grown[: shape[0], : shape[1]]
    torch.testing.assert_close(again, weight, atol=0.2, rtol=0.1)


@pytest.mark.parametrize("scale", [(), (1,), (256,), (256, 1)], ids=str)
def test_fp8_scaled_by_row_or_whole(tmp_path, scale):
    """compressed-tensors' float-quantized and ModelOpt's FP8, which adds an activation scale."""
    tensors = {
        "weight": torch.zeros(256, 64).to(torch.float8_e4m3fn),
        "weight_scale": torch.ones(scale),
        "input_scale": torch.ones(()),
    }
    found = stored(tmp_path, under("m.q_proj", tensors))
    assert found.faults == []
    assert list(found.tensors) == ["m.q_proj.weight"]
    assert len(found.tensors["m.q_proj.weight"].parts) == 3


def test_four_bits_in_int8_beside_exponents_are_mxfp4(tmp_path):
    """DeepSeek-V4's experts, whose scales are called `scale`."""
    codes, scale = pack_mxfp4(torch.randn(16, 64))
    exponents = scale.view(torch.float8_e8m0fnu)
    tensors = {"e.0.w1.weight": codes.view(torch.int8), "e.0.w1.scale": exponents}
    found = stored(tmp_path, tensors, FP8)
    assert found.faults == []
    assert found.tensors["e.0.w1.weight"].shape == (16, 64)
    assert set(found.packed) == {"mxfp4"}


def test_int4_of_compressed_tensors(tmp_path):
    weight = torch.randn(16, 96)
    parts = pack_int4(weight, 32)
    found = stored(tmp_path, under("e.0.up_proj", parts), INT4)
    assert found.faults == []
    logical = found.tensors["e.0.up_proj.weight"]
    assert (logical.shape, logical.format) == ((16, 96), "int4")
    assert logical.shape == tuple(unpack_int4(parts["weight_packed"]).shape)
    assert logical.nbytes == 16 * 96 // 2 + 16 * 3 * 2 + 2 * 8
    # Without a config the group comes from the scale.
    assert stored(tmp_path, under("e.0.up_proj", parts)).faults == []


def test_int4_with_zero_points(tmp_path):
    parts = pack_int4(torch.randn(16, 96), 32)
    parts["weight_zero_point"] = torch.zeros(2, 3, dtype=torch.int32)
    found = stored(tmp_path, under("e.0.up_proj", parts), INT4)
    assert found.faults == []
    assert len(found.tensors["e.0.up_proj.weight"].parts) == 4


@pytest.mark.parametrize(
    ("codes", "whole"),
    [("weight_packed", "weight_global_scale"), ("weight", "weight_scale_2")],
    ids=["compressed-tensors", "modelopt"],
)
def test_nvfp4(tmp_path, codes, whole):
    tensors = {
        codes: torch.zeros(24, 32, dtype=torch.uint8),
        "weight_scale": torch.ones(24, 4).to(torch.float8_e4m3fn),
        whole: torch.ones(1),
    }
    found = stored(tmp_path, under("m.up_proj", tensors))
    assert found.faults == []
    assert found.packed == {"nvfp4": 24 * 32 + 24 * 4 + 4}
    assert found.tensors["m.up_proj.weight"].shape == (24, 64)


def test_plain_mix_is_as_it_is_stored(tmp_path):
    tensors = {
        "a": torch.zeros(2, 3, dtype=torch.bfloat16),
        "b": torch.zeros(4, dtype=torch.float16),
        "attn_scale": torch.zeros(5),
        "table": torch.zeros(3, 2, dtype=torch.int64),
        "bytes": torch.zeros(3, 2, dtype=torch.uint8),
    }
    found = stored(tmp_path, tensors)
    assert (found.packed, found.faults) == ({}, [])
    assert {n: t.format for n, t in found.tensors.items()} == {
        "a": "bf16",
        "b": "fp16",
        "attn_scale": "fp32",
        "table": "i64",
        "bytes": "u8",
    }


def mxfp4():
    codes, scale = pack_mxfp4(torch.randn(24, 64))
    return {"x.weight_packed": codes, "x.weight_scale": scale}


def bank():
    codes, scale = pack_mxfp4(torch.randn(4, 12, 64))
    return {"x_blocks": codes.reshape(4, 12, 2, 16), "x_scales": scale}


def fp8():
    return under("x", blocks_fp8(torch.randn(256, 256)))


def int4():
    return under("x", pack_int4(torch.randn(16, 64), 32))


def nvfp4():
    scale = torch.ones(24, 4).to(torch.float8_e4m3fn)
    codes = torch.zeros(24, 32, dtype=torch.uint8)
    return {"x.weight": codes, "x.weight_scale": scale, "x.weight_scale_2": torch.ones(1)}


@pytest.mark.parametrize(
    ("made", "quantization", "part", "change", "kind"),
    [
        (mxfp4, None, "x.weight_scale", lambda t: t[:, :-1], "shape"),
        (mxfp4, None, "x.weight_scale", lambda t: t[:-1], "shape"),
        (mxfp4, None, "x.weight_scale", lambda t: t.float(), "dtype"),
        (mxfp4, None, "x.weight_scale", None, "missing"),
        (mxfp4, None, "x.weight_packed", lambda t: t.bfloat16(), "dtype"),
        (mxfp4, None, "x.weight_packed", None, "missing"),
        (bank, None, "x_scales", lambda t: t[:3], "shape"),
        (bank, None, "x_scales", None, "missing"),
        (bank, None, "x_blocks", lambda t: t.half(), "dtype"),
        (fp8, FP8, "x.weight_scale_inv", lambda t: t[:1], "shape"),
        (fp8, FP8, "x.weight_scale_inv", lambda t: t.long(), "dtype"),
        (fp8, FP8, "x.weight", lambda t: t.bfloat16(), "dtype"),
        (fp8, FP8, "x.weight", None, "missing"),
        (int4, INT4, "x.weight_scale", lambda t: t[:, :1], "shape"),
        (int4, INT4, "x.weight_scale", None, "missing"),
        (int4, INT4, "x.weight_shape", lambda t: t.repeat(2), "shape"),
        (nvfp4, None, "x.weight_scale", lambda t: t[:, :2], "shape"),
        (nvfp4, None, "x.weight_scale_2", lambda t: t.repeat(3), "shape"),
    ],
)
def test_part_that_does_not_fit_is_named(tmp_path, made, quantization, part, change, kind):
    tensors = made()
    tensors |= {name.replace("x", "sister", 1): t for name, t in tensors.items()}
    assert stored(tmp_path, tensors, quantization).faults == []
    if change is None:
        del tensors[part]
    else:
        tensors[part] = change(tensors[part])
    (fault,) = stored(tmp_path, tensors, quantization).faults
    assert (fault.tensor, fault.kind) == (part, kind)
    assert "\n" not in fault.detail


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("kimi-k3", "mxfp4-pack-quantized"),
        ("kimi-k2.5", "pack-quantized"),
        ("deepseek-v3", None),
        ("mixtral-8x7b", "absent"),
    ],
)
def test_quantization_is_found_at_the_top_and_in_the_text_config(name, told):
    found = quantization_of(json.loads((CONFIGS / f"{name}.json").read_text()))
    assert (found.get("format") if found else "absent") == told


@pytest.mark.parametrize(
    "quantization",
    [
        {"config_groups": 3},
        {"config_groups": {"a": None, "b": {"weights": 7}}},
        {"config_groups": {"a": {"weights": {"type": "int", "num_bits": 0, "group_size": -1}}}},
        {"weight_block_size": [0, "x"]},
        {"weight_block_size": 128},
    ],
    ids=str,
)
def test_a_senseless_config_is_inferred_from_shapes(tmp_path, quantization):
    assert stored(tmp_path, int4(), quantization).faults == []
    assert stored(tmp_path, fp8(), quantization).faults == []


PARTS = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "scale")
STORED = st.dictionaries(
    st.tuples(
        st.sampled_from(["a", "b", "c.experts"]),
        st.sampled_from([*PARTS, "weight_shape", "weight_zero_point", "input_scale", "bias"]),
    ).map(".".join)
    | st.sampled_from(["x_blocks", "x_scales", "weight_scale", "_scale", "_packed", "", "."]),
    st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 130), max_size=4)),
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(tensors=STORED, quantization=st.sampled_from([None, INT4, FP8]))
def test_any_mix_of_parts_is_read_once(tensors, quantization):
    """No crash, and every stored tensor is in one weight or is a fault."""
    infos = {
        name: TensorInfo(name, dtype, tuple(shape), Path("x"), 0, 8)
        for name, (dtype, shape) in tensors.items()
    }
    found = stored_weights(CheckpointFolder(Path("."), infos, ()), quantization)
    parts = [part for t in found.tensors.values() for part in t.parts]
    assert len(parts) == len(set(parts))
    apart = infos.keys() - set(parts)
    assert all(any(name in f.detail for f in found.faults) for name in apart)
    assert all(t.nbytes == 8 * len(t.parts) for t in found.tensors.values())
    assert all(n >= 0 for t in found.tensors.values() for n in t.shape)
