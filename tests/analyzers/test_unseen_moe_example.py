"""The example that brings its own code: a model that no library has a class for."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FOLDER = Path(__file__).parents[2] / "examples" / "models" / "tiny-unseen-moe"


@pytest.fixture(scope="module")
def model():
    model, info = AutoModelForCausalLM.from_pretrained(
        FOLDER, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(5, 512, (2, 37), generator=torch.Generator().manual_seed(0))


def test_no_library_knows_its_type():
    assert json.loads((FOLDER / "config.json").read_text())["model_type"] not in CONFIG_MAPPING


def test_chunks_give_what_the_recurrence_gives(model):
    module = __import__(type(model).__module__, fromlist=["chunk_gla"])
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 37, 3, 16, dtype=torch.float64)
    v, g = torch.randn(2, 37, 3, 8), F.logsigmoid(torch.randn(2, 37, 3, 16) * 3)
    first = torch.randn(2, 3, 16, 8)
    state, expected = first.double(), []
    for t in range(37):
        added = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t].double())
        state = g[:, t].double().exp().unsqueeze(-1) * state + added
        expected.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * 16**-0.5)
    found, last = module.chunk_gla(q, k, v, g, initial_state=first, output_final_state=True)
    torch.testing.assert_close(found.double(), torch.stack(expected, 1), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(last.double(), state, atol=2e-5, rtol=2e-5)


def test_loss_is_the_cross_entropy_of_the_next_token(model, ids):
    out = model(input_ids=ids, labels=ids)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_token(model, ids, side):
    mask = torch.ones_like(ids)
    pad = torch.zeros(2, 6, dtype=ids.dtype)
    order = (pad, ids) if side == "left" else (ids, pad)
    masks = (pad, mask) if side == "left" else (mask, pad)
    positions = torch.arange(37) if side == "right" else torch.arange(-6, 37).clamp(min=0)
    padded = model(
        input_ids=torch.cat(order, 1),
        attention_mask=torch.cat(masks, 1),
        position_ids=positions.unsqueeze(0) if side == "left" else None,
    ).logits
    kept = padded[:, 6:] if side == "left" else padded[:, :37]
    torch.testing.assert_close(kept, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_gradient_checkpointing_gives_the_same_gradients(model, ids):
    grads = []
    for checkpointing in (False, True):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.gradient_checkpointing_disable()
    model.eval()
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_it_generates(model):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    prompt = tokenizer("What is this: owl", return_tensors="pt")
    out = model.generate(input_ids=prompt.input_ids, max_new_tokens=3, do_sample=False)
    assert out.shape[1] == prompt.input_ids.shape[1] + 3
    following = model(input_ids=out[:, :-1]).logits[0, -3:].argmax(-1)
    assert torch.equal(following, out[0, -3:])


def test_stock_peft_adapts_attention_and_every_expert(ids):
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "w1", "w2", "w3"]))
    adapted(input_ids=ids, labels=ids).loss.backward()
    lora_b = [p for n, p in adapted.named_parameters() if "lora_B" in n]
    # 8 mixers, the dense layer, and in 7 layers 16 experts and a shared one
    assert len(lora_b) == 8 + 3 + 7 * 17 * 3
    assert sum(bool(p.grad.any()) for p in lora_b if p.grad is not None) > 300
