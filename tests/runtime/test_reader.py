"""A rank reads its rows and no more, by plain reads."""

import pytest
import torch
from safetensors.torch import save_file

from analyzers.conversion import plan_conversion
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


def test_packed_formats_without_a_conversion_are_refused(tmp_path):
    save_file({"w": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"w: stored as F8_E4M3, which is not trained from yet"):
        Reader(tmp_path).whole("w")


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
    whole = {name for name, size in reads if size == reader.tensors[name].nbytes > 0}
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
