"""Kimi-K3: against another implementation's numbers, the released names, and its own variants."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from analyzers.models.kimi_k3 import attention, register, residual
from analyzers.models.kimi_k3 import modeling_kimi_k3 as modeling
from analyzers.models.kimi_k3.configuration_kimi_k3 import KimiK3Config
from analyzers.models.kimi_k3.mxfp4 import pack_mxfp4, unpack_mxfp4
from tests.analyzers.kimi_k3_samples import FIXTURE, tiny

RELEASED = Path(__file__).parents[2] / "examples" / "models" / "kimi-k3"


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register()
    register()  # may be repeated


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURE / "expected.safetensors")


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(FIXTURE)


def loss_and_gradients(model, ids, **kwargs):
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False, **kwargs)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_logits_close(got, expected):
    """Token by token. The stored numbers are float32 of another order of sums: where exact ones
    lie, one token's differ by 4e-5 of their norm."""
    error = (got - expected["logits"]).norm(dim=-1)
    assert bool((error <= 6e-5 * expected["logits"].norm(dim=-1)).all()), error.max()


# --- the model ---


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_logits_loss_and_gradients_equal_another_implementations(model, expected, experts):
    model.set_experts_implementation(experts)
    out, gradients = loss_and_gradients(model, expected["input_ids"])
    assert_logits_close(out.logits, expected)
    torch.testing.assert_close(out.loss, expected["loss"], atol=1e-4, rtol=0)
    stored = {k[6:].replace("__", "."): v for k, v in expected.items() if k.startswith("grad__")}
    assert stored
    for name, gradient in stored.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-4, rtol=0)
    assert len(gradients) == len(list(model.parameters()))


def test_released_config_builds_with_the_published_number_of_parameters():
    config = AutoConfig.from_pretrained(RELEASED)
    assert isinstance(config, KimiK3Config)
    assert config.vision_config["vt_num_hidden_layers"] == 27
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    routed = sum(size for n, size in sizes.items() if ".mlp.experts." in n)
    assert sum(sizes.values()) == pytest.approx(2.779e12, rel=1e-3)
    assert routed == pytest.approx(2.723e12, rel=1e-3)
    kinds = [layer.block_type for layer in model.model.layers]
    assert kinds.count("linear_attention") == 69
    assert kinds[3] == kinds[92] == "full_attention"
    assert model.model.layers[1].mlp.experts.gate_up_proj.shape == (896, 2 * 3072, 3584)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 4}, "linear_attn_config"),
        ({"linear_attn_config": {"kda_layers": [0, 1, 3, 4]}}, "linear_attn_config"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"attn_res_block_size": 0}, "attn_res_block_size"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ],
)
def test_a_config_that_is_not_this_model_is_refused_by_field(changes, field):
    with pytest.raises(Exception, match=field):
        tiny(**changes)


def test_forget_gate_stays_above_its_bound_and_saturates():
    gate = AutoModelForCausalLM.from_config(tiny()).model.layers[0].self_attn.forget_gate
    with torch.no_grad():
        gate.f_b_proj.weight.mul_(1e4)
        g = gate(torch.randn(1, 50, 64))
    assert g.dtype == torch.float32
    assert g.shape == (1, 50, 4, 16)
    assert g.min() == pytest.approx(-5.0)
    assert g.max() <= 0


def test_attention_residual_is_a_softmax_over_normalised_values():
    torch.manual_seed(0)
    bank, running = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 8)
    norm, proj = torch.randn(8), torch.randn(1, 8)
    values = [*bank.unbind(2), running]
    scores = [
        (torch.nn.functional.rms_norm(v, (8,), norm, eps=1e-5) * proj).sum(-1) for v in values
    ]
    shares = torch.stack(scores).softmax(0)
    mixed = sum(s.unsqueeze(-1) * v for s, v in zip(shares, values, strict=True))
    ours = residual.block_attention_residual(running, bank, norm, proj, 1e-5)
    torch.testing.assert_close(ours, mixed)
    alone = residual.block_attention_residual(None, bank[:, :, :1], norm, proj, 1e-5)
    torch.testing.assert_close(alone, bank[:, :, 0])


def test_blocks_start_where_the_block_size_says(model, expected):
    seen = []
    hooks = [
        layer.register_forward_hook(lambda module, args, out: seen.append(args[1].shape[2]))
        for layer in model.model.layers
    ]
    model(expected["input_ids"], use_cache=False)
    for hook in hooks:
        hook.remove()
    assert seen == [1, 1, 1, 2, 2, 2]


def test_gradient_checkpointing_changes_nothing(model, expected):
    model.train()
    plain, gradients = loss_and_gradients(model, expected["input_ids"])
    model.activation_checkpointing_enable({"use_reentrant": False})
    again, repeated = loss_and_gradients(model, expected["input_ids"])
    assert torch.equal(plain.loss, again.loss)
    assert gradients.keys() == repeated.keys()
    for name in gradients:
        torch.testing.assert_close(gradients[name], repeated[name], msg=name)


def test_the_future_does_not_change_the_past(model, expected):
    ids = expected["input_ids"].clone()
    before = model(ids, use_cache=False).logits
    ids[:, 12:] = (ids[:, 12:] + 1) % 128
    after = model(ids, use_cache=False).logits
    torch.testing.assert_close(before[:, :12], after[:, :12], atol=1e-4, rtol=0)
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-2)


def test_decoding_with_a_cache_equals_one_pass(model, expected):
    ids = expected["input_ids"]
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        out = model(ids[:, :15], use_cache=True)
        logits = [out.logits]
        for t in range(15, ids.shape[1]):
            out = model(ids[:, t : t + 1], cache=out.cache, use_cache=True)
            logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole, atol=2e-4, rtol=0)


def test_hidden_states_and_router_logits_are_recorded(model, expected):
    out = model(
        expected["input_ids"], use_cache=False, output_hidden_states=True, output_router_logits=True
    )
    assert len(out.hidden_states) == 7
    assert len(out.router_logits) == 5
    assert out.router_logits[0].shape == (42, 14)


def test_export_sees_one_operator_in_place_of_the_delta_rule(model, expected, monkeypatch):
    delta_rule = attention.chunk_kimi_delta_attention

    @torch.library.custom_op("adapter_agent_test::kimi_k3_kda", mutates_args=())
    def kda(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        return delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0].clone()

    kda.register_fake(lambda q, k, v, g, beta: torch.empty_like(v))
    monkeypatch.setattr(
        attention,
        "chunk_kimi_delta_attention",
        lambda q, k, v, g, beta, **ignored: (kda(q, k, v, g, beta), None),
    )
    ids = expected["input_ids"]
    program = torch.export.export(model.eval(), (), {"input_ids": ids, "use_cache": False})
    calls = [n for n in program.graph.nodes if "kimi_k3_kda" in str(n.target)]
    assert len(calls) == 4
    logits = program.module()(input_ids=ids, use_cache=False).logits
    assert_logits_close(logits, expected)


# --- the checkpoint ---


def test_float32_parameters_stay_float32_in_a_bfloat16_model():
    model = AutoModelForCausalLM.from_pretrained(FIXTURE, dtype=torch.bfloat16)
    state = model.state_dict()
    islands = {n.split(".", 3)[-1] for n, p in state.items() if p.dtype == torch.float32}
    assert islands == {
        "self_attn.forget_gate.A_log",
        "self_attn.forget_gate.dt_bias",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
    }
    released = load_file(FIXTURE / "model.safetensors")
    name = "layers.1.block_sparse_moe.gate.weight"
    assert torch.equal(
        state["model.layers.1.mlp.gate.weight"], released[f"language_model.model.{name}"]
    )


def test_saving_gives_back_the_released_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path)
    released, saved = (
        load_file(FIXTURE / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert saved.keys() == released.keys()
    for name, tensor in released.items():
        assert torch.equal(saved[name], tensor), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, again.state_dict()[n]) for n, a in model.state_dict().items())


def test_a_new_model_is_saved_under_the_released_names(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == load_file(FIXTURE / "model.safetensors").keys()
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(a, again.state_dict()[n]) for n, a in model.state_dict().items())


def test_vision_tensors_are_ignored_with_a_note(tmp_path, caplog):
    shutil.copy(FIXTURE / "config.json", tmp_path)
    tensors = load_file(FIXTURE / "model.safetensors")
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(4, 4)
    tensors["mm_projector.proj.0.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    logger = modeling.logger
    logger.addHandler(caplog.handler)
    try:
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert not info["unexpected_keys"]
    assert "2 tensors of the vision tower" in caplog.text


# --- MXFP4 ---


def test_mxfp4_decodes_all_sixteen_codes_low_nibble_first():
    packed = torch.tensor([2 * i | (2 * i + 1) << 4 for i in range(8)] * 2, dtype=torch.uint8)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.tensor([*magnitudes, *(-m for m in magnitudes)] * 2)
    for scale, factor in ((127, 1.0), (130, 8.0), (100, 2.0**-27), (1, 2.0**-126)):
        for dtype in (torch.float32, torch.bfloat16):
            values = unpack_mxfp4(packed, torch.tensor([scale], dtype=torch.uint8), dtype)
            assert torch.equal(values, (codes * factor).to(dtype))
    assert unpack_mxfp4(packed, torch.tensor([255], dtype=torch.uint8)).isnan().all()
    with pytest.raises(ValueError, match="weight_scale"):
        unpack_mxfp4(packed, torch.tensor([127, 127], dtype=torch.uint8))


def test_mxfp4_keeps_what_came_from_mxfp4():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (5, 7, 48), generator=generator, dtype=torch.uint8)
    scale = torch.randint(3, 250, (5, 7, 3), generator=generator, dtype=torch.uint8)
    values = unpack_mxfp4(packed, scale, torch.float32)
    assert torch.equal(unpack_mxfp4(*pack_mxfp4(values), torch.float32), values)


def test_mxfp4_rounds_to_the_nearest_code_and_halves_to_even():
    row = torch.zeros(32)
    row[:10] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.8, 7.9])
    values = unpack_mxfp4(*pack_mxfp4(row), torch.float32)
    assert values[:10].tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0, 6.0]
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    error = (unpack_mxfp4(*pack_mxfp4(weight), torch.float32) - weight).unflatten(-1, (-1, 32))
    largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert (error.abs() <= largest / 4).all()  # half of the widest step, or saturation from 8 to 6


@pytest.fixture
def packed_checkpoint(tmp_path):
    """The fixture with its experts packed as released, and the weights that they stand for."""
    config = json.loads((FIXTURE / "config.json").read_text())
    released = json.loads((RELEASED / "config.json").read_text())
    config["text_config"]["quantization_config"] = released["text_config"]["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed, plain = {}, {}
    for name, tensor in load_file(FIXTURE / "model.safetensors").items():
        if ".experts." in name:
            packed[f"{name}_packed"], packed[f"{name}_scale"] = pack_mxfp4(tensor)
            tensor = unpack_mxfp4(packed[f"{name}_packed"], packed[f"{name}_scale"], torch.float32)
        else:
            packed[name] = tensor
        plain[name] = tensor
    save_file(packed, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_are_unpacked_while_loading(packed_checkpoint, dtype):
    folder, plain = packed_checkpoint
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.checkpoint_quantization_config["format"] == "mxfp4-pack-quantized"
    experts, prefix = (
        model.model.layers[2].mlp.experts,
        "language_model.model.layers.2.block_sparse_moe",
    )
    for e in range(14):
        w1, w2, w3 = (plain[f"{prefix}.experts.{e}.w{i}.weight"].to(dtype) for i in (1, 2, 3))
        assert torch.equal(experts.gate_up_proj[e], torch.cat([w1, w3]))
        assert torch.equal(experts.down_proj[e], w2)


def test_a_model_loaded_from_packed_experts_is_saved_unpacked(packed_checkpoint, tmp_path_factory):
    folder, plain = packed_checkpoint
    out = tmp_path_factory.mktemp("saved")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(out)
    saved = load_file(out / "model.safetensors")
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in plain.items())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(out)
