"""A rank reads its rows and no more, by plain reads."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

from analyzers.conversion import plan_conversion
from analyzers.coverage import Architecture, write_tiny
from analyzers.errors import InputError
from analyzers.models import build_on_meta, load_config
from runtime import weights
from runtime.reader import Reader

TENSORS = {
    "bf16": torch.arange(24, dtype=torch.bfloat16).view(4, 3, 2),
    "f32": torch.linspace(-1, 1, 10),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


def test_tensors_and_rows_are_those_that_were_saved(file):
    for path in (file, file.parent):
        reader = Reader(path)
        for name, tensor in TENSORS.items():
            assert torch.equal(reader.whole(name), tensor), name
        assert torch.equal(reader.rows("bf16", 1, 3), TENSORS["bf16"][1:3])
        assert reader.rows("bf16", 2, 2).shape == (0, 3, 2)


def test_a_file_that_became_shorter_is_named(file):
    reader = Reader(file)
    with file.open("r+b") as f:
        f.truncate(file.stat().st_size - 40)
    with pytest.raises(InputError, match=r"model.safetensors: .*the file ends inside of it"):
        [reader.whole(name) for name in TENSORS]


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(0)


def pairs(reader, name):
    """A tensor whole, and put together from uneven ranges of rows."""
    rows = reader.tensors[name].shape[0]
    cuts = [0, 1, rows // 2 + 1, rows]
    parts = [reader.rows(name, low, high) for low, high in pairwise(cuts)]
    return reader.whole(name), torch.cat(parts)


def written(folder, tensors, **quantization):
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "x", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return Reader(folder)


@pytest.mark.parametrize("shape", [(200, 300), (3, 200, 300)], ids=str)
def test_fp8_blocks_are_scaled_also_where_the_last_is_cut(tmp_path, draw, shape):
    weight = torch.randn(shape, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(*shape[:-2], 2, 3, generator=draw) + 0.5
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    reader = written(tmp_path, tensors, quant_method="fp8", weight_block_size=[128, 128])
    expected = weight.float()
    for row in range(2):
        for column in range(3):
            block = (
                ...,
                slice(row * 128, row * 128 + 128),
                slice(column * 128, column * 128 + 128),
            )
            expected[block] *= scale[..., row, column, None, None]
    for found in pairs(reader, "a.weight"):
        assert torch.equal(found, expected)
    assert set(reader.tensors) == {"a.weight"}


@pytest.mark.parametrize("scale_shape", [(6, 1), (6,), (1,), ()], ids=str)
def test_fp8_scales_of_rows_and_of_a_whole_matrix(tmp_path, draw, scale_shape):
    weight = torch.randn(6, 8, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape, generator=draw) + 0.5
    reader = written(tmp_path, {"a.weight": weight, "a.weight_scale": scale}, quant_method="fp8")
    expected = weight.float() * (scale.view(-1, 1) if scale.numel() > 1 else scale.view(()))
    for found in pairs(reader, "a.weight"):
        assert torch.equal(found, expected)


def test_stacked_mxfp4_is_what_transformers_makes_of_it(tmp_path, draw):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (4, 6, 2, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(120, 130, (4, 6, 2), dtype=torch.uint8, generator=draw)
    tensors = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    reader = written(tmp_path, tensors, quant_method="mxfp4")
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for found in pairs(reader, "experts.gate_up_proj"):
        assert torch.equal(found, expected)


def test_int4_groups_are_unpacked_value_by_value(tmp_path, draw):
    values = torch.randint(-8, 8, (5, 64), generator=draw)
    scale = torch.rand(5, 2, generator=draw)
    packed = torch.zeros(5, 8, dtype=torch.int64)
    for column in range(64):
        packed[:, column // 8] |= (values[:, column] + 8) << (4 * (column % 8))
    tensors = {
        "a.weight_packed": packed.to(torch.int32),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor([5, 64]),
    }
    weights = {"num_bits": 4, "type": "int", "group_size": 32}
    groups = {"group_0": {"weights": weights}}
    reader = written(tmp_path, tensors, quant_method="compressed-tensors", config_groups=groups)
    expected = torch.stack([values[:, c] * scale[:, c // 32] for c in range(64)], dim=1)
    for found in pairs(reader, "a.weight"):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_parts_that_are_not_understood_are_refused(tmp_path):
    tensors = {
        "a.weight_packed": torch.zeros(4, 8, dtype=torch.int32),
        "a.weight_scale": torch.ones(4, 2),
        "a.weight_zero_point": torch.zeros(1, 2, dtype=torch.int32),
    }
    reader = written(tmp_path, tensors, quant_method="compressed-tensors")
    with pytest.raises(InputError, match=r"int4 with a.weight_zero_point.*use bfloat16 weights"):
        reader.whole("a.weight")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma4_text", "Gemma4ForCausalLM"),  # a computed buffer beside a weight
        # A computed buffer whose initialisation draws the weights of a layer inside, too.
        ("unlimited_ocr", "UnlimitedOcrForConditionalGeneration"),
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),  # transposed where shapes differ
        ("falcon_h1", "FalconH1ForCausalLM"),  # a buffer that the model around the layer fills
        ("lfm3_vl", "Lfm3VlForConditionalGeneration"),  # one that the text model alone knows
    ],
)
def test_every_tensor_is_that_of_a_stock_load(tmp_path, kind, name):
    write_tiny(Architecture(kind, name, ()), tmp_path)
    torch.manual_seed(0)
    meta = build_on_meta(load_config(tmp_path), dtype=torch.float32)
    type(meta)._from_config(meta.config, dtype=torch.float32).save_pretrained(tmp_path)
    stock = type(meta).from_pretrained(tmp_path, dtype=torch.float32)
    model = meta.to_empty(device="cpu")
    model.tie_weights()
    weights.load_weights(model, tmp_path)
    assert weights.digest(model) == weights.digest(stock)
    buffers = dict(stock.named_buffers())
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())


def test_a_load_holds_pieces_and_not_banks(small_model, monkeypatch):
    # fastsafetensors#81, Automodel#2690: host memory of whole banks, or of every expert.
    monkeypatch.setattr(weights, "PIECE", 1)
    model = build_on_meta(load_config(small_model), dtype=torch.float32).to_empty(device="cpu")
    reads = []
    read = Reader._read

    def spy(self, name, begin, shape):
        tensor = read(self, name, begin, shape)
        reads.append((name, tensor.nbytes))
        return tensor

    monkeypatch.setattr(Reader, "_read", spy)
    weights.load_weights(model, small_model)
    reader = Reader(small_model)
    whole = {name for name, size in reads if size == reader.stored[name].nbytes > 0}
    rows = {name for name, _ in reads} - whole
    assert any("experts.3." in name for name in whole)  # one expert is the least piece
    assert {n.rpartition(".layers.")[2].partition(".")[2] for n in rows} >= {
        "self_attn.q_proj.weight",
        "input_layernorm.weight",
    }
    assert "model.embed_tokens.weight" in rows
    converted = plan_conversion(model, reader.tensors).recipes[
        "model.layers.0.self_attn.conv1d.weight"
    ]
    assert set(converted.names) <= whole  # joined along the rows that are cut
    assert weights.digest(model) == weights.stored_digest(model, reader)
