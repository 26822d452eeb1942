"""The plans of Kimi-K3's config: experts, FSDP2 and where a pipeline may be cut."""

import inspect

import pytest
import torch
from transformers.distributed import DistributedConfig

from tests.analyzers.kimi_k3_samples import random_model, tiny


@pytest.fixture(scope="module")
def model():
    return random_model(tiny())


def test_transformers_resolves_the_expert_and_the_fsdp_plan(model):
    tp, ep, fsdp = model._resolve_parallel_plans(DistributedConfig(fsdp_size=2, ep_size=2))
    assert not tp
    experts = [f"model.layers.{i}.mlp.experts" for i in range(1, 6)]
    assert ep == {
        name: style
        for path in experts
        for name, style in {
            path: "ep_dispatch_experts",
            f"{path}.gate_up_proj": "grouped_gemm",
            f"{path}.down_proj": "grouped_gemm",
        }.items()
    }
    layers = {f"model.layers.{i}" for i in range(6)}
    assert {"model.embed_tokens", "model.norm", "lm_head"} | layers <= set(fsdp)
    # Groups of one dtype: what stays float32 has a group of its own.
    routers = {f"model.layers.{i}.mlp.gate" for i in range(1, 6)}
    gates = {f"model.layers.{i}.self_attn.forget_gate" for i in (0, 1, 3, 4)}
    bfloat16 = random_model(tiny(), dtype=torch.bfloat16)
    _, _, fsdp = bfloat16._resolve_parallel_plans(DistributedConfig(fsdp_size=2, ep_size=2))
    assert routers | gates <= set(fsdp)


def test_pipeline_plan_names_what_modules_take_and_give(model):
    plan = model.config.base_model_pp_plan
    assert model.pp_plan.keys() == {f"model.{name}" for name in plan} | {"lm_head"}
    assert [name for name, _ in model.model.named_children()] == list(plan)
    for name in ("layers", "output_attn_res"):
        module = getattr(model.model, name)
        module = module[0] if name == "layers" else module
        assert set(plan[name][0]) <= set(inspect.signature(module.forward).parameters)


@pytest.mark.parametrize(
    ("layers", "size", "cuts"), [(6, 3, [3]), (93, 12, [12, 24, 36, 48, 60, 72, 84]), (6, 12, [])]
)
def test_a_pipeline_is_cut_where_blocks_start(layers, size, cuts):
    full = [i for i in range(1, layers + 1) if i % 4 == 0]
    kda = [i for i in range(1, layers + 1) if i % 4]
    config = tiny(
        num_hidden_layers=layers,
        attn_res_block_size=size,
        linear_attn_config={"full_attn_layers": full, "kda_layers": kda},
    )
    assert config.pipeline_cuts == cuts


def test_stages_at_a_cut_compute_what_the_whole_model_does(model):
    ids = torch.randint(1, 128, (2, 21), generator=torch.Generator().manual_seed(1))
    text = model.model
    causal = torch.full((21, 21), -torch.inf).triu(1).expand(2, 1, -1, -1)
    (cut,) = model.config.pipeline_cuts

    def stage(layers, hidden_states, bank):
        for layer in layers:
            if layer.starts_block:
                bank = torch.cat([bank, hidden_states.unsqueeze(2)], dim=2)
            mask = causal if layer.block_type == "full_attention" else None
            hidden_states = layer(hidden_states, bank, attention_mask=mask)
        return hidden_states, bank

    with torch.no_grad():
        hidden_states = text.embed_tokens(ids)
        handed = stage(text.layers[:cut], hidden_states, hidden_states.unsqueeze(2)[:, :, :0])
        assert handed[1].shape == (2, 21, 1, 64)
        hidden_states, bank = stage(text.layers[cut:], *handed)
        logits = model.lm_head(text.norm(text.output_attn_res(hidden_states, bank)))
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
