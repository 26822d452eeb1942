"""Small Kimi-K3 models with weights that matter: norms that are not one, a bias that chooses."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from analyzers.models import register_own_models
from analyzers.models.kimi_k3.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig

FIXTURE = Path(__file__).parents[1] / "data" / "kimi-k3-tiny"


def text_config(**changes) -> dict:
    """The fixture's released `text_config` with changes; `linear_attn_config` is merged."""
    text = json.loads((FIXTURE / "config.json").read_text())["text_config"]
    linear = {**text["linear_attn_config"], **changes.pop("linear_attn_config", {})}
    return {**text, **changes, "linear_attn_config": linear}


def tiny(**changes) -> KimiK3TextConfig:
    return KimiK3Config(text_config=text_config(**changes), pad_token_id=0).get_text_config()


@torch.no_grad()
def random_model(config: KimiK3TextConfig, **kwargs):
    """Layers that add a good part of what they are given: a mistake in one shows in the logits, and
    rounding does not grow from layer to layer."""
    register_own_models()
    model = AutoModelForCausalLM.from_config(config, **kwargs).eval()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name and tensor.ndim == 1:
            tensor.copy_(noise * 0.2 + ("bias" not in name))
        elif tensor.ndim == 1 or "A_log" in name or "dt_bias" in name:
            tensor.copy_(noise * 0.3)
        elif "embed_tokens" in name:
            tensor.copy_(noise)
        else:
            adds = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
            tensor.copy_(noise * (0.5 if adds else 1.0) * tensor.shape[-1] ** -0.5)
    if config.tie_word_embeddings:  # a head as large as an embedding
        model.model.norm.weight.mul_(config.hidden_size**-0.5)
    return model


def released(model, folder) -> dict[str, torch.Tensor]:
    """The model's tensors under the released names, as it saves them."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")
