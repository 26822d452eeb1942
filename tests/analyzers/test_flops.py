"""FLOPs of the analysis against torch's own counter, run on transformers' reference code.

Each model is tiny and random and runs forward and backward on the CPU with low-rank adapters on all
linears of its decoder layers and on its expert banks. The analysis sees the config alone.
"""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from analyzers import analyze
from analyzers.models import load_config, model_class
from analyzers.schema import ModelAnalysis, Operator, Work
from analyzers.structure import decoder_layers

BATCH, TOKENS, RANK, VOCAB, CHUNK = 2, 128, 8, 328, 64

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
# Keys and values as wide as each other, so that torch's fused attention takes them.
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 48}
LATENT |= {"q_lora_rank": 40, "qk_rope_head_dim": 16}
DEEPSEEK = LATENT | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1}
DEEPSEEK |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
KDA = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 32, "num_heads": 4}
KDA |= {"short_conv_kernel_size": 4}
KIMI = LATENT | {"num_hidden_layers": 4, "linear_attn_config": KDA, "num_experts": 8}
KIMI |= {"num_experts_per_token": 2, "num_shared_experts": 2, "first_k_dense_replace": 1}

MODELS = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK | {"index_topk": 48, "index_head_dim": 32, "index_n_heads": 4},
    "kimi_linear": KIMI | {"q_lora_rank": None},
    "kimi_k3": {
        "text_config": BASE
        | KIMI
        | {
            "model_type": "kimi_linear",
            "linear_attn_config": KDA | {"gate_lower_bound": -5.0, "use_full_rank_gate": True},
            "attn_res_block_size": 2,
            "routed_expert_hidden_size": 24,
            "latent_moe_use_norm": True,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "moe_router_activation_func": "sigmoid",
        }
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {"head_dim": 32, "num_experts": 8},
    "minimax": {
        "head_dim": 32,
        "block_size": 32,
        "num_local_experts": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "head_dim": 32,
        "ssm_state_size": 24,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "chunk_size": 32,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 32,
    },
    "gpt_oss": {
        "head_dim": 32,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 8,
    },
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 40,
        "o_groups": 2,
        "o_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "sliding_window": 32,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        "index_topk": 16,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "hc_mult": 4,
    },
    "glm5_next": {
        "text_config": BASE
        | LATENT
        | {
            "qk_rope_head_dim": 0,
            "v_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "n_routed_experts": 8,
            "index_topk": 64,
            "index_head_dim": 32,
            "index_n_heads": 4,
            "index_kpool": 16,
            "hc_mult": 4,
        },
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
    },
    "lfm2_moe": {
        "num_experts": 8,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
}


EAGER = {"gpt_oss", "deepseek_v4"}  # have no other attention


class LowRank(TorchFunctionMode):
    """Frozen model; wherever its code multiplies by an adapted weight, x A^T B^T is added."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.adapters: dict[int, tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = {}
        model.requires_grad_(False)
        for name, module in decoder_layers(model)[1].named_modules():
            # Not adapted: routers, and the indexer, which runs without gradient.
            if "indexer" in name or name.endswith((".gate", ".router", "expert_gate")):
                continue
            if isinstance(module, nn.Linear):
                self._add(module.weight)
            elif name.endswith("experts"):
                for bank in (p for p in module.parameters(recurse=False) if p.ndim == 3):
                    self._add(bank, transposed=getattr(module, "is_transposed", False))

    def _add(self, weight: nn.Parameter, transposed: bool = False) -> None:
        *experts, out, into = weight.mT.shape if transposed else weight.shape
        a = torch.randn(*experts, RANK, into, requires_grad=True)
        b = torch.randn(*experts, out, RANK, requires_grad=True)
        self.adapters[weight.data_ptr()] = weight, a, b

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is not F.linear and getattr(func, "__name__", "") not in ("matmul", "__matmul__"):
            return out
        x, weight = args[:2]
        found = self.adapters.get((weight if weight._base is None else weight._base).data_ptr())
        if found is None:
            return out
        whole, a, b = found
        if whole.ndim == 3:  # one expert, as a view of its bank
            expert = weight.storage_offset() // whole[0].numel()
            a, b = a[expert], b[expert]
        return out + F.linear(F.linear(x, a), b)


# torch has the formulas of its fused attention, and does not list the kernel of the CPU with them.
FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *rest, **named: sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *rest, **named: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


@dataclass
class Run:
    name: str
    analysis: ModelAnalysis
    forward: int
    backward: int


@pytest.fixture(scope="module", params=MODELS)
def run(request, tmp_path_factory) -> Run:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    config = {"model_type": name} | MODELS[name]
    config = config if "text_config" in config else BASE | config
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    loaded = load_config(folder)
    cls = model_class(loaded)
    loaded = loaded if isinstance(loaded, cls.config_class) else loaded.get_text_config()
    model = cls._from_config(
        loaded,
        dtype=torch.float32,
        experts_implementation="eager",
        attn_implementation="eager" if name in EAGER else "sdpa",
    ).train()
    model.enable_input_require_grads()
    tokens = torch.randint(2, VOCAB, (BATCH, TOKENS))
    backend = SDPBackend.MATH if name in EAGER else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend), FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        with LowRank(model):
            loss = model(input_ids=tokens, use_cache=False).logits.sum()
        forward = counter.get_total_flops()
        loss.backward()
    with pytest.MonkeyPatch.context() as patch:  # graphs say nothing about FLOPs and take time
        patch.setattr(
            "analyzers.analysis._traced",
            lambda m, kinds, c: ([None] * len(kinds), "structural", ""),
        )
        analysis = analyze(folder)
    return Run(name, analysis, forward, counter.get_total_flops() - forward)


def as_the_reference_runs(o: Operator, eager: bool) -> tuple[float, float]:
    """FLOPs of an operator, forward and backward, in one sequence of TOKENS, as the Python code of
    the reference spends them where that is not how a kernel would. By pencil, from that code."""
    a = o.attributes
    c = a.get("chunk_size", CHUNK)  # the delta rules of transformers have 64
    n = TOKENS // c
    if o.name in ("kda", "gated_delta_rule", "lightning", "mamba2"):
        k, v, heads = a["key_dim"], a["value_dim"], a.get("value_heads", a["heads"])
        ck, cv, kv = c * k, c * v, k * v
        # Backward is twice the forward, but the first state takes no gradient and the last gives
        # none: 2 KV for each product that reads the first, 4 KV for the one that makes the last.
        if o.name == "kda":  # A_kk and A_qk go element by element, the inverse is multiplied twice
            forward = 2 * ck + 4 * cv + 6 * kv
            backward = 2 * forward - (2 * 2 + 4) * kv / n
        elif o.name == "gated_delta_rule":
            # Two triangular solves, which the counter does not see, in place of the inverse; the
            # gradient of their matrix is one product each.
            forward = 4 * ck + 2 * cv + 6 * kv
            backward = 2 * forward - (2 * 2 + 4) * kv / n + 2 * ck + 2 * cv
        elif o.name == "lightning":
            forward = 2 * ck + 2 * cv + 4 * kv
            backward = 2 * forward - (2 + 4) * kv / n
        else:  # Q K^T for each head, not each group; all chunk states by one product of chunks
            forward = 2 * ck + 2 * cv + 4 * kv + 2 * (n + 1) ** 2 * kv / TOKENS
            backward = 2 * forward
        return o.count * TOKENS * heads * forward, o.count * TOKENS * heads * backward
    # Windows and selected keys are a mask over the full square.
    forward, backward = (full_squares(w).at(TOKENS) for w in (o.flops, o.backward.flops))
    if o.name == "compressed_attention":  # and over all compressed keys
        pairs = TOKENS * (TOKENS + TOKENS // a["compress_rate"])
        forward = o.count * pairs * 2 * a["heads"] * (a["key_dim"] + a["value_dim"])
    if eager and o.name.endswith("attention"):
        backward = 2 * forward  # it keeps the probabilities, which fused attention computes again
    return forward, backward


def full_squares(work: Work) -> Work:
    pairs = work.per_pair + sum(work.per_window.values())
    return replace(work, per_pair=pairs, per_window={})


def test_flops_of_a_lora_step_are_those_that_torch_counts(run):
    parts = [as_the_reference_runs(o, run.name in EAGER) for o in run.analysis.operators]
    width = sum(o.adapter.width for o in run.analysis.operators if o.adapter)
    forward = BATCH * (sum(f for f, _ in parts) + TOKENS * 2 * RANK * width)
    backward = BATCH * (sum(b for _, b in parts) + TOKENS * 4 * RANK * width)
    assert forward == pytest.approx(run.forward, rel=0.02)
    assert backward == pytest.approx(run.backward, rel=0.02)
