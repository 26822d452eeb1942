"""Experts that stay MXFP4 in memory compute as the unpacked ones do."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from analyzers import analyze
from analyzers.errors import InputError
from runtime.adapters import adapter_parameters
from runtime.build import Documents, build_model
from runtime.weights import digest
from strategies.schema import Lora
from tests.runtime.runs import EXAMPLES, job_for, plan_for

CPU = torch.device("cpu")
LORA = Lora(targets=["attention", "routed_experts"], rank=4)


def pack_gpt_oss(folder):
    """A tiny GPT-OSS as released: stacked blocks and scales, transposed to the model's banks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=256, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    state = {n: t for n, t in model.state_dict().items() if not n.endswith("_proj")}
    for name, tensor in model.state_dict().items():
        if name.endswith("_proj"):
            rows, groups = tensor.shape[2], tensor.shape[1] // 32
            blocks = torch.randint(0, 256, (4, rows, groups, 16), dtype=torch.uint8)
            state[f"{name}_blocks"] = blocks
            state[f"{name}_scales"] = torch.randint(118, 122, (4, rows, groups), dtype=torch.uint8)
    model.config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["kimi-k3", "gpt-oss"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "kimi-k3":
        model = EXAMPLES / "models" / "tiny-kimi-k3"
    else:
        model = pack_gpt_oss(folder)
    return Documents(folder, job_for(model, lora=LORA), plan_for(1), analyze(model))


def packed(documents):
    return replace(documents, plan=replace(documents.plan, expert_weight_format="mxfp4"))


def step(model):
    for name, factor in adapter_parameters(model).items():
        if name.endswith("_B"):
            factor.data.fill_(0.01)
    ids = torch.arange(64).view(2, 32) * 3 % 250
    loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in adapter_parameters(model).items()}


def test_packed_experts_compute_what_unpacked_ones_do(run):
    plain = build_model(run, CPU, dtype=torch.float32, sharded=False)
    small = build_model(packed(run), CPU, dtype=torch.float32, sharded=False)
    assert digest(small) == digest(plain)
    loss, gradients = step(plain)
    found, others = step(small)
    assert torch.equal(found, loss)
    assert gradients.keys() == others.keys()
    assert all(torch.equal(others[name], g) for name, g in gradients.items())


def test_packed_experts_take_the_bytes_of_the_checkpoint(run):
    def experts(model):
        tensors = model.state_dict().items()
        return sum(
            t.nbytes for n, t in tensors if ".experts." in n and t.ndim == 3 and "lora" not in n
        )

    plain = experts(build_model(run, CPU, dtype=torch.bfloat16, sharded=False))
    assert experts(build_model(packed(run), CPU, dtype=torch.bfloat16, sharded=False)) == (
        plain * 17 // 64
    )


def test_a_plan_that_keeps_packed_what_is_not_is_refused(small_model, small_analysis, tmp_path):
    documents = Documents(tmp_path, job_for(small_model, lora=LORA), plan_for(1), small_analysis)
    with pytest.raises(InputError, match="mxfp4"):
        build_model(packed(documents), CPU, dtype=torch.float32, sharded=False)
