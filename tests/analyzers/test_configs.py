"""Configs: every bad folder gives one clear line, and no code of a folder runs unasked."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from analyzers.errors import InputError
from analyzers.models import build_on_meta, find_config, load_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
CONFIGS = Path(__file__).parents[1] / "data" / "configs"

CODE = """
from pathlib import Path
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

Path(__file__).with_name("ran").touch()
Path({mark!r}).touch()

class OwnConfig(PreTrainedConfig):
    model_type = "own_moe"
    hidden_size = 8
    vocab_size = 16
    num_hidden_layers = 2

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 8))

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
"""


def folder_with(tmp_path: Path, data: object) -> Path:
    text = data if isinstance(data, str) else json.dumps(data)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def refused(folder: Path, **kwargs) -> str:
    with pytest.raises(InputError) as caught:
        load_config(folder, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_such_folder(tmp_path):
    assert "no such folder" in refused(tmp_path / "absent")


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert "is a file" in refused(tmp_path / "model.safetensors")


def test_folder_without_config(tmp_path):
    assert "config.json" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": }', "[" * 100_000])
def test_broken_json(tmp_path, text):
    message = refused(folder_with(tmp_path, text))
    assert "config.json" in message
    assert "JSON" in message or "nested" in message


@pytest.mark.parametrize("data", [{}, {"model_type": 3}, {"model_type": ""}])
def test_no_model_type(tmp_path, data):
    assert "model_type" in refused(folder_with(tmp_path, data))


def test_unknown_type_says_what_would_build_it(tmp_path):
    message = refused(folder_with(tmp_path, {"model_type": "no_such_model"}))
    assert "no_such_model" in message
    assert "transformers" in message
    assert "analyzers/models" in message
    assert "--trust-remote-code" not in message  # there is no code in the folder to trust


def test_misspelt_type_is_recognised(tmp_path):
    assert "did you mean 'kimi_linear'" in refused(
        folder_with(tmp_path, {"model_type": "kimi_linaer"})
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "wide"), ("linear_attn_config", {"full_attn_layers": [99], "kda_layers": []})],
)
def test_value_that_the_class_refuses(tmp_path, field, value):
    data = json.loads((EXAMPLES / "tiny-kimi-linear" / "config.json").read_text())
    assert "config.json" in refused(folder_with(tmp_path, data | {field: value}))


def test_values_that_do_not_go_together(tmp_path):
    data = json.loads((EXAMPLES / "tiny-kimi-linear" / "config.json").read_text())
    folder = folder_with(tmp_path, data | {"hidden_size": -128})
    with pytest.raises(InputError, match=r"config\.json"):
        build_on_meta(load_config(folder))


@pytest.fixture
def folder_with_code(tmp_path):
    mark = tmp_path / "ran"
    folder = tmp_path / "own"
    folder.mkdir()
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder_with(folder, {"model_type": "own_moe", "auto_map": own})
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    return folder, mark


def test_code_of_the_folder_does_not_run_unasked(folder_with_code):
    folder, mark = folder_with_code
    assert "--trust-remote-code" in refused(folder)
    assert not mark.exists()


def test_code_of_the_folder_runs_when_trusted(folder_with_code, monkeypatch, tmp_path):
    folder, mark = folder_with_code
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "hf"), *sys.path])
    model = build_on_meta(load_config(folder, trust_remote_code=True))
    assert mark.exists()
    assert type(model).__name__ == "OwnForCausalLM"


def test_known_type_with_code_uses_the_known_class(tmp_path):
    """Released folders ship code of their own; the class that is here wins over it."""
    data = json.loads((EXAMPLES / "tiny-kimi-linear" / "config.json").read_text())
    data["auto_map"] = {"AutoConfig": "own.OwnConfig"}
    (tmp_path / "own.py").write_text("raise RuntimeError('ran')")
    config = load_config(folder_with(tmp_path, data), trust_remote_code=True)
    assert type(config).__name__ == "KimiLinearConfig"


def test_model_is_built_without_memory():
    model = build_on_meta(load_config(EXAMPLES / "kimi-k3"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.dtype == torch.bfloat16


def test_import_of_the_package_is_cheap():
    code = "import sys, analyzers, analyzers.checkpoint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


MIXTRAL = json.loads((Path(__file__).parents[1] / "data/configs/mixtral-8x7b.json").read_text())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**12),  # would be built one by one
        ("num_hidden_layers", 0),
        ("hidden_size", -4096),
        ("vocab_size", 0),
        ("num_key_value_heads", 10**12),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", -4),
        ("num_experts_per_tok", 9),  # of eight
        ("num_local_experts", 10**30),
    ],
)
@pytest.mark.parametrize("model_type", ["mixtral", "of_nobody"])
def test_a_number_that_is_no_size_is_refused_by_name(tmp_path, model_type, field, value):
    data = MIXTRAL | {"model_type": model_type, field: value}
    with pytest.raises(InputError, match=f"config.json: {field}: "):
        find_config(folder_with(tmp_path, data))


@pytest.mark.parametrize("text", [{}, {"max_position_embeddings": 10**30, "sliding_window": -1}])
def test_a_size_without_limit_is_none_to_refuse(tmp_path, text):
    find_config(folder_with(tmp_path, MIXTRAL | text))


def test_what_a_class_refuses_is_told_in_full(tmp_path):
    folder = folder_with(tmp_path, MIXTRAL | {"hidden_size": "wide"})
    message = refused(folder)
    assert "'hidden_size'" in message
    assert "'wide'" in message


def test_code_that_exits_is_an_error(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLES / "tiny-unseen-moe", folder)
    code = folder / "modeling_unseen_moe.py"
    code.write_text("import sys\nsys.exit(0)\n" + code.read_text())
    with pytest.raises(InputError, match="cannot be built: SystemExit: 0"):
        build_on_meta(load_config(folder, trust_remote_code=True))


def built_from(tmp_path, name, change):
    data = json.loads((CONFIGS / f"{name}.json").read_text()) | change
    with pytest.raises(InputError) as caught:
        build_on_meta(load_config(folder_with(tmp_path, data)))
    return caught.value


@pytest.mark.parametrize(
    ("name", "change", "field", "fault"),
    [
        ("qwen3-30b-a3b", {"hidden_act": "foo"}, "hidden_act", "'foo' is not known"),
        (
            "qwen3-30b-a3b",
            {"rope_scaling": {"rope_type": "foo"}},
            "rope_scaling.rope_type",
            "'foo' is not known",
        ),
        ("qwen3-30b-a3b", {"num_attention_heads": 0}, "num_attention_heads", "is 0"),
        ("deepseek-v3", {"n_routed_experts": 0}, "n_routed_experts", "leaves nothing of"),
    ],
)
def test_a_value_that_no_model_is_built_from_is_named(tmp_path, name, change, field, fault):
    error = built_from(tmp_path, name, change)
    assert error.field == field
    assert fault in error.fault


def test_a_class_without_experts_where_the_config_has_none_is_dense(tmp_path):
    data = json.loads((CONFIGS / "qwen3-30b-a3b.json").read_text())
    data |= {"num_experts": 0, "num_hidden_layers": 2}
    model = build_on_meta(load_config(folder_with(tmp_path, data)))
    assert not any("experts" in name for name, _ in model.named_parameters())
