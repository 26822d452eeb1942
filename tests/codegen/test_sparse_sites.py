"""Models whose attention is replaced by the kernel over selected keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from analyzers.backends import load_backend
from analyzers.mixers import recognise
from analyzers.schema import FORWARD, Site
from codegen import bind
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render
from tests.codegen.test_install import loaded

CLASSES = {"deepseek_v32": "DeepseekV32Attention", "glm_moe_dsa": "GlmMoeDsaAttention"}


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    made = render(load_members()["sparse_topk"], load_backend("cpu"), {})
    path = tmp_path_factory.mktemp("sparse") / made.module
    path.write_text(made.files[made.module], encoding="utf-8")
    return import_file(path, "sparse_topk_bound").sparse_topk


def model_of(model_type: str):
    config = AutoConfig.for_model(
        model_type,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        head_dim=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=6,
        intermediate_size=32,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        mlp_layer_types=["dense", "dense"],
        indexer_types=["full", "shared"],
        vocab_size=64,
        attention_dropout=0.0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def outcome(model, ids, mask):
    model.zero_grad()
    # What a token of padding predicts is nobody's concern.
    labels = ids.masked_fill(mask.roll(1, 1) * mask == 0, -100)
    loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {n: p.grad for n, p in named if p.grad is not None}


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("model_type", CLASSES)
def test_a_model_computes_the_same_with_the_kernel(model_type, padded, function):
    model = model_of(model_type)
    site = Site(module_class=CLASSES[model_type], function=FORWARD)
    kernel = loaded(function, site)
    kernel = replace(kernel, kernel=replace(kernel.kernel, operator="sparse_attention"))
    ids = torch.randint(1, 64, (2, 21))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    loss, want = outcome(model, ids, mask)
    with bind(model, [kernel]) as binding:
        assert len(binding.modules) == 2
        bound, got = outcome(model, ids, mask)
    torch.testing.assert_close(bound, loss)
    assert want.keys() == got.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("model_type", CLASSES)
def test_the_analysis_finds_the_sites(model_type):
    model = model_of(model_type)
    found = [
        recognise(module, model.config)
        for module in model.modules()
        if type(module).__name__ == CLASSES[model_type]
    ]
    site = Site(module_class=CLASSES[model_type], function=FORWARD)
    assert [mixer and mixer.site for mixer in found] == [site] * 2
