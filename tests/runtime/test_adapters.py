import pytest
import torch

from analyzers.errors import InputError
from analyzers.models import build_on_meta, load_config
from runtime.adapters import LoraLinear, adapter_parameters, initialise_adapters, insert_adapters
from runtime.build import Documents, build_model
from runtime.sharding import keep_float32
from strategies.schema import Lora
from tests.runtime.runs import job_for, plan_for


def built(folder, analysis, lora=None, device="cpu"):
    model = build_on_meta(load_config(folder), dtype=torch.float32)
    insert_adapters(model, lora or Lora(), analysis)
    return model.to_empty(device=device) if device != "meta" else model


def test_only_adapters_are_trainable_and_base_names_stay(small_model, small_analysis):
    plain = build_on_meta(load_config(small_model), dtype=torch.float32)
    model = built(small_model, small_analysis, device="meta")
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == set(adapter_parameters(model))
    assert set(plain.state_dict()) == set(model.state_dict()) - trainable
    assert {p.dtype for p in adapter_parameters(model).values()} == {torch.float32}


def test_routed_experts_means_the_bank_and_not_the_shared_expert(small_model, small_analysis):
    # vllm#47088: targets that hit the shared experts instead of the routed ones.
    # unsloth#6936: experts left frozen although the log says otherwise.
    lora = Lora(targets=["routed_experts"])
    names = set(adapter_parameters(built(small_model, small_analysis, lora, "meta")))
    assert names
    assert all(".mlp.experts.lora_" in n for n in names)
    shared = Lora(targets=["shared_experts"])
    names = set(adapter_parameters(built(small_model, small_analysis, shared, "meta")))
    assert names
    assert all(".shared_experts." in n for n in names)


def test_every_attention_linear_is_adapted(small_model, small_analysis):
    model = built(small_model, small_analysis, Lora(targets=["attention"]), "meta")
    left = [
        name
        for name, module in model.named_modules()
        if "self_attn" in name and type(module) is torch.nn.Linear
    ]
    assert left == []
    assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj"), LoraLinear)


def test_experts_start_different_and_the_same_every_time(small_model, small_analysis):
    # One seed for all ranks gives experts 0, 2, 4, ... the same factor when DTensors are drawn.
    model, again = (built(small_model, small_analysis) for _ in range(2))
    for made in (model, again):
        initialise_adapters(made, seed=3)
    other = built(small_model, small_analysis)
    initialise_adapters(other, seed=4)
    for (name, a), b, c in zip(
        adapter_parameters(model).items(),
        adapter_parameters(again).values(),
        adapter_parameters(other).values(),
        strict=True,
    ):
        assert torch.equal(a, b), name
        if name.endswith("_B"):
            assert not a.any(), name
        else:
            assert not torch.equal(a, c), name
            assert len({tuple(row.flatten().tolist()) for row in a}) == a.shape[0], name
            bound = a.shape[-1] ** -0.5
            assert bound * 0.8 < float(a.abs().max()) <= bound


def test_a_rank_and_a_scale_of_its_own_for_each_part(small_model, small_analysis):
    lora = Lora(
        rank=4, alpha=8, rslora=True, targets=["attention", "routed_experts"],
        ranks={"routed_experts": 2},
    )  # fmt: skip
    model = built(small_model, small_analysis, lora, "meta")
    linear = model.get_submodule("model.layers.0.self_attn.q_proj")
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert (linear.lora_A.shape[0], linear.lora_scale) == (4, 8 / 4**0.5)
    assert (experts.lora_down_proj_A.shape[1], experts.lora_scale) == (2, 8 / 2**0.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("ranks", {"attention": 0}),
        ("ranks", {"dense": 2}),
        ("dropout", 1.0),
        ("shared_a", True),
    ],
)
def test_values_that_no_adapter_can_have_are_refused(small_model, small_analysis, field, value):
    lora = Lora(targets=["attention"], **{field: value})
    with pytest.raises(InputError, match=rf"job.json: lora.{field}: "):
        built(small_model, small_analysis, lora, "meta")


def test_dropout_has_the_same_mask_when_a_layer_is_recomputed(small_model, small_analysis):
    def gradients(dropout, recompute, train=True):
        lora = Lora(targets=["attention", "routed_experts", "shared_experts"], dropout=dropout)
        documents = Documents(
            small_model, job_for(small_model, lora=lora), plan_for(1), small_analysis
        )
        model = build_model(documents, torch.device("cpu"), dtype=torch.float32, sharded=False)
        if recompute:
            kwargs = {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        factors = adapter_parameters(model)
        for name, factor in factors.items():
            if name.endswith("_B"):
                factor.data.fill_(0.01)
        torch.manual_seed(5)
        ids = torch.arange(32).view(2, 16) + 5
        model.train(train)(input_ids=ids, use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in factors.values()])

    kept = gradients(0.4, recompute=False)
    assert torch.equal(gradients(0.4, recompute=True), kept)
    plain = gradients(0.0, recompute=False)
    assert (kept - plain).norm() > 0.05 * plain.norm()
    torch.testing.assert_close(gradients(0.4, recompute=False, train=False), plain)


def test_a_target_that_names_nothing_is_refused(small_model, small_analysis):
    from dataclasses import replace

    empty = replace(small_analysis, blocks=[])
    with pytest.raises(InputError, match=r"lora.targets: 'attention' names nothing"):
        built(small_model, empty, device="meta")


def test_router_and_decay_rates_stay_float32_in_a_bfloat16_model(small_model):
    # prime-rl#3411, TensorRT-LLM#13328: a correction bias in bfloat16 changes the chosen experts.
    model = build_on_meta(load_config(small_model), dtype=torch.bfloat16)
    keep_float32(model)
    state = model.state_dict()
    islands = ("A_log", "dt_bias", "mlp.gate.weight", "e_score_correction_bias")
    for island in islands:
        found = [t.dtype for n, t in state.items() if n.endswith(island)]
        assert found, island
        assert set(found) == {torch.float32}, island
    assert state["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
