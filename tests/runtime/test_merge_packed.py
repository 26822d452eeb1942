"""An adapter merged into a packed base: a plain checkpoint that transformers loads as it is."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from analyzers import analyze
from analyzers.models import register_own_models
from runtime.adapters import adapter_parameters
from runtime.build import Documents, build_model
from runtime.merge import merge
from runtime.peft_format import save_adapter
from runtime.reader import Reader
from strategies.schema import Lora
from tests.runtime.runs import EXAMPLES, job_for, plan_for, save_qwen
from tests.runtime.test_packed import pack_gpt_oss

CPU = torch.device("cpu")
BLOCK = 16


def as_float32(folder):
    """So that what is unpacked is float32, and rounding hides nothing."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for place in (config, config.get("text_config", {})):
        place.pop("torch_dtype", None)
        place["dtype"] = "float32"
    path.write_text(json.dumps(config))
    return folder


def kimi_k3(folder):
    """Experts in several shards, MXFP4, one by one."""
    shutil.copytree(EXAMPLES / "models" / "tiny-kimi-k3", folder)
    return as_float32(folder)


def gpt_oss(folder):
    folder.mkdir()
    return as_float32(pack_gpt_oss(folder))


def qwen_fp8(folder):
    """FP8 in blocks, as DeepSeek and Qwen release it; what is left out is plain."""
    save_qwen(folder, experts=4)
    path = folder / "model.safetensors"
    made = {}
    for name, tensor in load_file(path).items():
        if not name.endswith("_proj.weight"):
            made[name] = tensor
            continue
        rows, columns = tensor.shape
        tall, wide = -(-rows // BLOCK), -(-columns // BLOCK)
        scale = torch.rand(tall, wide) / 448 + 1e-4
        spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        made[name] = (tensor / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scale
    save_file(made, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    return as_float32(folder)


BASES = {"kimi-k3": kimi_k3, "gpt-oss": gpt_oss, "qwen-fp8": qwen_fp8}


def logits(model):
    ids = torch.arange(48).view(2, 24) * 5 % 90 + 3
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def trained(base, run_dir, targets):
    documents = Documents(
        run_dir, job_for(base, lora=Lora(targets=targets, rank=4)), plan_for(1), analyze(base)
    )
    model = build_model(documents, CPU, dtype=torch.float32, sharded=False).eval()
    for name, factor in adapter_parameters(model).items():
        if name.endswith("_B"):
            torch.nn.init.normal_(factor, std=0.05)
    save_adapter(model, documents.job, run_dir / "adapter")
    return documents, model


@pytest.mark.parametrize("kind", BASES)
def test_a_merged_packed_base_is_base_and_adapter_and_loads_in_transformers(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    base = BASES[kind](tmp_path / "base")
    # Attention of the example is stored as bfloat16, to which a merged value would be rounded.
    targets = ["routed_experts"] if kind == "kimi-k3" else ["attention", "routed_experts"]
    documents, model = trained(base, tmp_path, targets)
    folder = tmp_path / "merged"
    assert merge(documents, folder) > 3
    config = json.loads((folder / "config.json").read_text())
    assert "quantization" not in json.dumps(config)
    register_own_models()
    stock, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = logits(model)
    torch.testing.assert_close(logits(stock.eval()), expected, atol=1e-5, rtol=1e-4)
    plain = build_model(documents, CPU, dtype=torch.float32, sharded=False).eval()
    assert (logits(plain) - expected).abs().max() > 1e-2
    for shard in folder.glob("*.safetensors"):  # as safetensors' own reader sees it
        with safe_open(shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_a_base_stays_packed_where_nothing_packed_is_adapted(tmp_path):
    base = kimi_k3(tmp_path / "base")
    documents, _ = trained(base, tmp_path, ["attention"])
    merge(documents, tmp_path / "merged")
    found, stored = Reader(tmp_path / "merged"), Reader(base)
    assert {n: w.format for n, w in found.tensors.items()} == {
        n: w.format for n, w in stored.tensors.items()
    }
    assert any(w.format == "mxfp4" for w in found.tensors.values())
