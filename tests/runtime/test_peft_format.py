"""Adapters on disk: read by stock PEFT, continued from, merged, exported."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from analyzers import analyze
from analyzers.errors import InputError
from analyzers.models import register_own_models
from runtime.adapters import adapter_parameters
from runtime.build import Documents, build_model
from runtime.export import export
from runtime.merge import merge
from runtime.peft_format import save_adapter
from runtime.weights import digest
from strategies.schema import Lora, LoraTarget
from tests.runtime.runs import job_for, plan_for, save_small

CPU = torch.device("cpu")
EVERYWHERE = [t for t in get_args(LoraTarget) if t != "latent_projection"]
RANKS = {"routed_experts": 3, "shared_experts": 5}  # none divides the other, nor the experts
LORAS = {
    "plain": Lora(targets=EVERYWHERE, rank=4, ranks=RANKS),
    "rslora": Lora(targets=EVERYWHERE, rank=4, ranks=RANKS, rslora=True),
    "shared-a": Lora(targets=["attention", "routed_experts"], rank=4, shared_a=True),
}
MODELS = {
    # Convolutions and experts apart on disk.
    "kimi_linear": ("kimi_linear", {}),
    # Shared and routed experts in one block; embedding tied to the head.
    "qwen3_next": ("qwen3_next", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=MODELS)
def run(request, tmp_path_factory):
    kind, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = save_small(kind, folder / "model", **changes)
    return Documents(folder, job_for(model), plan_for(1), analyze(model))


def with_lora(documents, lora):
    return replace(documents, job=replace(documents.job, lora=lora))


def trained(documents):
    """A model whose adapters have values everywhere, as after some steps."""
    model = build_model(documents, CPU, dtype=torch.float32, sharded=False).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(model).items():
        if name.endswith("_B"):
            parameter.data.normal_(std=0.05, generator=generator)
    return model


def logits(model):
    ids = torch.arange(48).view(2, 24) * 5 % 90 + 3
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def stock(folder):
    from transformers import AutoModelForCausalLM

    register_own_models()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=LORAS)
def saved(run, request):
    """Documents, own model, and the adapter that it wrote."""
    documents = with_lora(run, LORAS[request.param])
    model, folder = trained(documents), run.run_dir / request.param
    save_adapter(model, documents.job, folder / "adapter")
    return replace(documents, run_dir=folder), model


def test_stock_peft_gives_the_same_logits(saved):
    # Automodel#3626, unsloth#6930: a round trip through one's own code finds no swapped factor.
    from peft import PeftModel

    documents, model = saved
    base = stock(documents.job.model)
    before = logits(base)
    wrapped = PeftModel.from_pretrained(base, str(documents.run_dir / "adapter")).eval()
    expected = logits(wrapped)
    assert (before - expected).abs().max() > 1e-2
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-4)


def test_a_job_continues_from_a_saved_adapter_bit_by_bit(saved):
    # Automodel#1325: the adapter of a resumed job is silently not loaded.
    documents, model = saved
    lora = replace(documents.job.lora, init_from=str(documents.run_dir / "adapter"))
    again = build_model(with_lora(documents, lora), CPU, dtype=torch.float32, sharded=False)
    assert digest(again, adapters=True) == digest(model, adapters=True)


def test_a_merged_checkpoint_is_base_and_adapter(saved):
    # unsloth#5410, unsloth-zoo#779: garbage after merging; expert deltas dropped.
    documents, model = saved
    folder = documents.run_dir / "merged"
    assert merge(documents, folder) > 20
    merged = stock(folder)
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=1e-4)
    base, found = (load_file(f / "model.safetensors") for f in (Path(documents.job.model), folder))
    assert base.keys() == found.keys()
    assert {n: t.dtype for n, t in base.items()} == {n: t.dtype for n, t in found.items()}
    same = [n for n in base if torch.equal(base[n], found[n])]
    assert any("embed_tokens" in n for n in same)
    assert not any("experts.1." in n for n in same if ".experts." in n)


def test_exported_matrices_are_what_merging_adds_to_the_checkpoint(saved):
    # SkyRL#1852: a server knows `experts.3.up_proj`, not a stack.
    documents, _ = saved
    folder, merged = documents.run_dir / "server", documents.run_dir / "merged"
    if not merged.exists():
        merge(documents, merged)
    count = export(documents, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    factors = load_file(folder / "adapter_model.safetensors")
    assert (
        config["lora_alpha"]
        == config["r"]
        == max(documents.job.lora.rank_of(t) for t in documents.job.lora.targets)
    )
    base, found = (load_file(f / "model.safetensors") for f in (Path(documents.job.model), merged))
    changed = {n for n in base if not torch.equal(base[n], found[n])}
    matrices = {n.removeprefix("base_model.model.").split(".lora_")[0] for n in factors}
    assert len(matrices) == count
    assert {f"{m}.weight" for m in matrices} == changed
    assert {m.rpartition(".")[2] for m in matrices} == set(config["target_modules"])
    for matrix in matrices:
        a, b = (factors[f"base_model.model.{matrix}.lora_{side}.weight"] for side in "AB")
        assert a.shape[0] == b.shape[1] == config["r"]
        name = f"{matrix}.weight"
        torch.testing.assert_close(found[name] - base[name], b @ a, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 8.0}, "lora_alpha: 16.0"),
        ({"rslora": True}, "use_rslora"),
        ({"rank": 8}, "the job's is"),
        ({"targets": ["attention"], "ranks": {}}, "the job does not adapt"),
        ({"shared_a": True}, "differs from expert to expert"),
    ],
    ids=["alpha", "rslora", "rank", "targets", "shared-a"],
)
def test_an_adapter_that_is_not_the_job_s_is_refused(run, change, message):
    documents, folder = with_lora(run, LORAS["plain"]), run.run_dir / "refused"
    if not folder.exists():
        save_adapter(trained(documents), documents.job, folder)
    lora = replace(documents.job.lora, init_from=str(folder), **change)
    with pytest.raises(InputError, match=message):
        build_model(with_lora(documents, lora), CPU, dtype=torch.float32, sharded=False)
