# ruff: noqa: RUF012  (class attributes as transformers spells them)
"""The text model of Kimi-K3 (arXiv 2607.24653), built on transformers' Kimi-Linear.

What differs from Kimi-Linear: a bounded forget gate, a full-rank output gate, gated latent attention,
experts in a latent space with SiTU-GLU, and attention residuals over blocks of layers. Kimi-K3.1-Pro
adds an indexer that selects the keys of latent attention.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearForCausalLM,
    KimiLinearPreTrainedModel,
    KimiLinearRMSNorm,
    KimiLinearTopkRouter,
)
from transformers.utils import logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from analyzers.models.kimi_k3.attention import (
    KimiK3Attention,
    KimiK3DeltaAttention,
    KimiK3ForgetGate,
)
from analyzers.models.kimi_k3.configuration_kimi_k3 import KimiK3TextConfig
from analyzers.models.kimi_k3.residual import KimiK3AttentionResidual

logger = logging.get_logger(__name__)

MASKS: dict[str, Callable] = {
    "full_attention": create_causal_mask,
    # The indexer needs the mask itself, not the kernel's word for it.
    "indexed_attention": partial(create_causal_mask, allow_is_causal_skip=False),
    "linear_attention": create_recurrent_attention_mask,
}


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """`beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)`, in float32."""
    dtype, gate, up = gate.dtype, gate.float(), up.float()
    gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return (gate * linear_beta * torch.tanh(up / linear_beta)).to(dtype)


class KimiK3MLP(nn.Module):
    """SiTU-GLU feed-forward: the dense layers and the shared experts."""

    def __init__(self, config: KimiK3TextConfig, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.betas = config.activation_situ_beta, config.activation_situ_linear_beta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(situ_glu(self.gate_proj(x), self.up_proj(x), *self.betas))


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """The routed experts, in latent width D: `gate_up_proj` [E, 2I, D], `down_proj` [E, D, I]."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.num_experts = config.num_local_experts
        self.hidden_dim = config.routed_expert_hidden_size or config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(
            torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        )
        self.down_proj = nn.Parameter(
            torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim)
        )
        self.betas = config.activation_situ_beta, config.activation_situ_linear_beta

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return situ_glu(gate, up, *self.betas)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        # An index equal to num_experts marks a token that another rank computes.
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            token, position = torch.where(top_k_index == expert)
            gate_up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert])
            y = nn.functional.linear(self._apply_gate(gate_up), self.down_proj[expert])
            y = y * top_k_weights[token, position, None]
            output.index_add_(0, token, y.to(output.dtype))
        return output


class KimiK3MoE(nn.Module):
    """Experts in a latent space: the router and the shared experts see the full hidden states."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = KimiLinearTopkRouter(config)
        self.experts = KimiK3Experts(config)
        self.routed_expert_down_proj = self.routed_expert_up_proj = self.routed_expert_norm = None
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = KimiLinearRMSNorm(latent, config.rms_norm_eps)
        self.shared_experts = KimiK3MLP(
            config, config.moe_intermediate_size * config.n_shared_experts
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        _, weights, indices = self.gate(hidden_states)
        routed = hidden_states
        if self.routed_expert_down_proj is not None:
            routed = self.routed_expert_down_proj(routed)
        routed = self.experts(routed.view(-1, routed.shape[-1]), indices, weights).view_as(routed)
        for project in (self.routed_expert_norm, self.routed_expert_up_proj):
            if project is not None:
                routed = project(routed)
        return routed + self.shared_experts(hidden_states)


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """One layer, from the running sum of its block to the next.

    `hidden_states` [B, T, D] is the running sum, `bank` [B, T, M, D] the starts of the blocks so far.
    A layer that starts a block finds its input as the last entry of the bank and begins a new sum.
    """

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__()
        assert config.layer_types is not None
        assert config.mlp_layer_types is not None
        self.block_type = config.layer_types[layer_idx]
        self.starts_block = layer_idx % config.attn_res_block_size == 0
        linear = self.block_type == "linear_attention"
        attention = KimiK3DeltaAttention if linear else KimiK3Attention
        self.self_attn = attention(config, layer_idx)
        sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.mlp = KimiK3MoE(config) if sparse else KimiK3MLP(config, config.intermediate_size)
        self.input_layernorm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attention_res = KimiK3AttentionResidual(config)
        self.mlp_res = KimiK3AttentionResidual(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        bank: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        running = None if self.starts_block else hidden_states
        attended = self.self_attn(
            hidden_states=self.input_layernorm(self.self_attention_res(running, bank)),
            attention_mask=attention_mask,
            cache=cache,
            **kwargs,
        )
        if self.block_type != "linear_attention":
            attended, _ = attended
        running = attended if running is None else running + attended

        mixed = self.post_attention_layernorm(self.mlp_res(running, bank))
        return running + self.mlp(mixed)


class KimiK3PreTrainedModel(KimiLinearPreTrainedModel):
    config: KimiK3TextConfig
    _no_split_modules = ["KimiK3DecoderLayer"]
    _can_record_outputs = {
        "router_logits": OutputRecorder(KimiLinearTopkRouter, index=0),
        "hidden_states": KimiK3DecoderLayer,
        "attentions": KimiK3Attention,
    }
    _keep_in_fp32_modules = ["indexer.weights_proj"]
    _keep_in_fp32_modules_strict = ["e_score_correction_bias", "gate.weight", "dt_bias", "A_log"]
    _keys_to_ignore_on_load_unexpected = [r"^vision_tower\.", r"^mm_projector\."]

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, KimiK3ForgetGate) and module.lower_bound is not None:
            init.zeros_(module.A_log)  # a steep gate would start saturated at its bounds
        elif isinstance(module, KimiK3Experts):
            for weight in module.parameters(recurse=False):
                init.normal_(weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, KimiK3AttentionResidual):
            init.ones_(module.norm_weight)
            init.normal_(module.proj_weight, mean=0.0, std=self.config.initializer_range)

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        vision = [
            k
            for k in loading_info.unexpected_keys
            if k.startswith(("vision_tower.", "mm_projector."))
        ]
        if vision:
            logger.warning(
                f"{len(vision)} tensors of the vision tower and its projector are ignored: "
                f"{type(self).__name__} is text only."
            )
        super()._adjust_missing_and_unexpected_keys(loading_info)


class KimiK3TextModel(KimiK3PreTrainedModel):
    def __init__(self, config: KimiK3TextConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        )
        self.output_attn_res = KimiK3AttentionResidual(config)
        self.norm = KimiLinearRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device) + seen
            position_ids = position_ids.unsqueeze(0)

        masks = attention_mask
        if not isinstance(masks, dict):
            mask_kwargs = {
                "config": self.config,
                "inputs_embeds": hidden_states,
                "attention_mask": attention_mask,
                "cache": cache,
                "position_ids": position_ids,
            }
            masks = {
                kind: MASKS[kind](**mask_kwargs) for kind in set(self.config.layer_types or [])
            }

        bank = hidden_states.new_empty(*hidden_states.shape[:2], 0, hidden_states.shape[-1])
        for layer in self.layers:
            if layer.starts_block:
                bank = torch.cat([bank, hidden_states.unsqueeze(2)], dim=2)
            hidden_states = layer(
                hidden_states,
                bank,
                attention_mask=masks[cast(str, layer.block_type)],
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )
        hidden_states = self.norm(self.output_attn_res(hidden_states, bank))
        return MoeModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)


class KimiK3ForCausalLM(KimiK3PreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # pyright: ignore[reportAssignmentType]
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: KimiK3TextConfig):
        super().__init__(config)
        self.model = KimiK3TextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = KimiLinearForCausalLM.forward


__all__ = ["KimiK3ForCausalLM", "KimiK3PreTrainedModel", "KimiK3TextModel"]
