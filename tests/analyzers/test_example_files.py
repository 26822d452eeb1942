"""The shipped examples: made bit for bit by their script, loadable, learnable in form."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from analyzers.models import register_own_models
from analyzers.models.kimi_k3.mxfp4 import pack_mxfp4, unpack_mxfp4

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["tiny-kimi-k3", "tiny-kimi-linear", "tiny-qwen3-next", "tiny-unseen-moe"]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register_own_models()


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("examples_make", EXAMPLES / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_makes_the_same_bytes():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "make.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_check_notices_a_changed_byte(make, tmp_path):
    for root in ("a", "b"):
        make.write_data(tmp_path / root / "data")
    assert not make.differences(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b" / "data" / "classes-train.jsonl"
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    assert make.differences(tmp_path / "a", tmp_path / "b") == ["data/classes-train.jsonl"]


@pytest.mark.parametrize("name", TINY)
def test_transformers_loads_every_weight_where_it_belongs(make, name):
    model, info = AutoModelForCausalLM.from_pretrained(
        EXAMPLES / "models" / name, trust_remote_code=True, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, value in model.state_dict().items():
        drawn = make.weight(key, tuple(value.shape), model.config.model_type)
        expected = torch.from_numpy(drawn).bfloat16()
        if name == "tiny-kimi-k3" and ".experts." in key:
            expected = unpack_mxfp4(*pack_mxfp4(expected))
        assert torch.equal(value.float(), expected.float()), key


def test_tiny_kimi_k3_is_stored_as_the_released_model_is():
    with (EXAMPLES / "models" / "tiny-kimi-k3" / "model.safetensors.index.json").open() as file:
        shards = json.load(file)["weight_map"]
    assert len(set(shards.values())) == 4
    layer = "language_model.model.layers.{}."
    expert = layer.format(7) + "block_sparse_moe.experts.55.w2.weight"
    assert {f"{expert}_packed", f"{expert}_scale", "language_model.lm_head.weight"} <= set(shards)
    name = layer.format(0) + "self_attn.A_log"
    with safe_open(EXAMPLES / "models" / "tiny-kimi-k3" / shards[name], "pt") as file:
        decay = file.get_tensor(name)
    assert decay.dtype == torch.float32
    assert decay.shape == (128,)  # padded; four heads
    assert not decay[4:].any()


@pytest.mark.parametrize("name", TINY)
def test_conversation_becomes_short_sequences_with_a_marked_answer(name):
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models" / name, local_files_only=True)
    for file in ("classes-train", "classes-held-out"):
        for text in (EXAMPLES / "data" / f"{file}.jsonl").read_text().splitlines():
            messages = json.loads(text)["messages"]
            made = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            answer = [
                i for i, m in zip(made["input_ids"], made["assistant_masks"], strict=True) if m
            ]
            assert len(made["input_ids"]) <= 64
            assert tokenizer.decode(answer) == messages[-1]["content"] + tokenizer.eos_token


def test_held_out_lines_are_not_trained_on():
    train, held_out = (
        set((EXAMPLES / "data" / f"{name}.jsonl").read_text().splitlines())
        for name in ("classes-train", "classes-held-out")
    )
    assert len(train) >= 200
    assert held_out
    assert not train & held_out


def test_clusters_name_known_backends():
    from analyzers.backends import load_backend

    for path in sorted((EXAMPLES / "clusters").glob("*.yaml")):
        cluster = yaml.safe_load(path.read_text())
        assert cluster["name"] == path.stem
        assert load_backend(cluster["device"])


def test_kimi_k3_has_a_config_and_nothing_else():
    assert [p.name for p in (EXAMPLES / "models" / "kimi-k3").iterdir()] == ["config.json"]
