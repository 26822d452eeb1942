"""The token mixers of Kimi-K3: delta attention, latent attention, and the indexer of Kimi-K3.1-Pro."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.integrations import use_kernelized_func
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearAttention,
    KimiLinearDeltaAttention,
    KimiLinearForgetGate,
    apply_mask_to_padding_states,
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_kimi_delta_attention,
    eager_attention_forward,
    recurrent_kimi_delta_attention,
)

from analyzers.models.kimi_k3.configuration_kimi_k3 import KimiK3TextConfig


class KimiK3ForgetGate(KimiLinearForgetGate):
    """Log decay [B, T, H, K], float32: `lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__(config)
        self.lower_bound = config.linear_lower_bound
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        f = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias.float()
        f = f.unflatten(-1, (-1, self.head_dim))
        decay_rate = self.A_log.float().exp().unsqueeze(-1)
        if self.lower_bound is None:
            return -decay_rate * nn.functional.softplus(f)
        return self.lower_bound * torch.sigmoid(decay_rate * f)


@use_kernelized_func(
    [
        chunk_kimi_delta_attention,
        recurrent_kimi_delta_attention,
        causal_conv1d_fn,
        causal_conv1d_update,
    ]
)
class KimiK3DeltaAttention(KimiLinearDeltaAttention):
    """Kimi delta attention with a bounded forget gate and a full-rank output gate."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.activation = "silu"  # of the short convolution; config.hidden_act is the MLPs'
        self.forget_gate = KimiK3ForgetGate(config)
        self.full_rank_gate = config.linear_full_rank_gate
        if self.full_rank_gate:
            del self.g_a_proj, self.g_b_proj
            self.g_proj = nn.Linear(self.hidden_size, self.qkv_dim, bias=False)

    @force_accelerate_hooks("conv1d")
    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)
        batch_size, seq_len = hidden_states.shape[:2]
        hidden_shape = (batch_size, seq_len, -1, self.head_dim)

        projections = (self.q_proj, self.k_proj, self.v_proj)
        mixed_qkv = torch.cat([proj(hidden_states) for proj in projections], dim=-1).transpose(1, 2)
        conv_state = recurrent_state = None
        if cache is not None:
            conv_state = cache.get_conv_state(self.layer_idx, state_idx=0)
            recurrent_state = cache.get_recurrent_state(self.layer_idx, state_idx=0)
        weight = self.conv1d.weight.squeeze(1)
        if conv_state is not None and seq_len == 1:
            mixed_qkv = causal_conv1d_update(
                mixed_qkv, conv_state, weight=weight, bias=None, activation=self.activation
            )
        else:
            if cache is not None:
                mixed_qkv = cache.update_conv_state(
                    mixed_qkv, self.layer_idx, conv_kernel_size=self.conv_kernel_size
                )
            mixed_qkv = causal_conv1d_fn(
                mixed_qkv, weight=weight, bias=None, activation=self.activation, **kwargs
            )[:, :, -seq_len:]
        query, key, value = (
            x.reshape(hidden_shape) for x in mixed_qkv.transpose(1, 2).chunk(3, dim=-1)
        )

        one_token = recurrent_state is not None and seq_len == 1
        delta_rule = recurrent_kimi_delta_attention if one_token else chunk_kimi_delta_attention
        output, recurrent_state = delta_rule(
            query,
            key,
            value,
            g=self.forget_gate(hidden_states),
            beta=torch.sigmoid(self.b_proj(hidden_states).float()),
            initial_state=recurrent_state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            **kwargs,
        )
        if cache is not None:
            cache.update_recurrent_state(recurrent_state.float(), self.layer_idx)

        if self.full_rank_gate:
            gate = self.g_proj(hidden_states)
        else:
            gate = self.g_b_proj(self.g_a_proj(hidden_states))
        output = self.o_norm(output, gate.view(hidden_shape)).reshape(batch_size, seq_len, -1)
        return self.o_proj(output)


class KimiK3Indexer(nn.Module):
    """The lightning indexer of DeepSeek sparse attention, without positions: for a query t and a key s

    `I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s])`, of which the `top_k` largest are attended to.

    Its projections get no gradient, as in transformers' DeepSeek-V3.2.
    """

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__()
        assert config.index_n_heads is not None
        assert config.index_head_dim is not None
        assert config.index_topk is not None
        assert config.q_lora_rank is not None
        self.layer_idx = layer_idx
        self.n_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.index_topk = config.index_topk
        self.wq_b = nn.Linear(config.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=config.rms_norm_eps)
        self.weights_proj = nn.Linear(config.hidden_size, self.n_heads, bias=False)

    def scores(
        self, hidden_states: torch.Tensor, query_latent: torch.Tensor, cache: Cache | None
    ) -> torch.Tensor:
        """`I` [B, S, T], float32, of the queries in `query_latent` [B, S, q_lora_rank]."""
        query = self.wq_b(query_latent).unflatten(-1, (self.n_heads, self.head_dim)).float()
        key = self.k_norm(self.wk(hidden_states))
        if cache is not None:
            key = cache.update_indexer(key, self.layer_idx)
        per_head = torch.relu(query @ key.float().transpose(1, 2).unsqueeze(1))  # [B, S, H, T]
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
        weights = weights * (self.n_heads * self.head_dim) ** -0.5
        return (weights.unsqueeze(2) @ per_head).squeeze(2)

    @torch.no_grad()
    def forward(
        self,
        hidden_states: torch.Tensor,
        query_latent: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """The keys to attend to, int32 [B, S, min(top_k, T)]; `attention_mask` [B, 1, S, T] is causal,
        boolean or additive. A query that sees fewer keys gets masked ones besides."""
        scores = self.scores(hidden_states, query_latent, cache)
        visible = attention_mask[:, 0]
        if visible.dtype == torch.bool:
            scores = scores.masked_fill(~visible, -torch.inf)
        else:
            scores = scores + visible
        return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices.int()


def mask_unselected(attention_mask: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """`attention_mask` [B, 1, S, T], boolean or additive, without the keys not in `selected` [B, S, K]."""
    shape = (*selected.shape[:2], attention_mask.shape[-1])
    dropped = selected.new_ones(shape, dtype=torch.bool)
    dropped = dropped.scatter(-1, selected.long(), False).unsqueeze(1)
    if attention_mask.dtype == torch.bool:
        return attention_mask & ~dropped
    return attention_mask.masked_fill(dropped, torch.finfo(attention_mask.dtype).min)


class KimiK3Attention(KimiLinearAttention):
    """Multi-head latent attention without positions, its output gated by `sigmoid(g_proj(x))`.

    With an indexer, over the keys that it selects.
    """

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.indexer = KimiK3Indexer(config, layer_idx) if config.dsa_config is not None else None
        self.g_proj = None
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.o_proj.in_features, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch_size, seq_length = hidden_states.shape[:-1]
        query_latent = hidden_states
        for project in (self.q_a_proj, self.q_a_layernorm):
            if project is not None:  # the queries have low rank
                query_latent = project(query_latent)
        query = cast(nn.Linear, self.q_b_proj or self.q_proj)(query_latent)
        query = query.view(batch_size, seq_length, -1, self.qk_head_dim).transpose(1, 2)

        kv_latent, k_shared = torch.split(
            self.kv_a_proj_with_mqa(hidden_states),
            [self.kv_lora_rank, self.qk_rope_head_dim],
            dim=-1,
        )
        # The cache holds both as single heads: [B, 1, T, width]
        kv_latent = self.kv_a_layernorm(kv_latent).unsqueeze(1)
        k_shared = k_shared.unsqueeze(1)
        if cache is not None:
            kv_latent, k_shared = cache.update(kv_latent, k_shared, self.layer_idx, kwargs=kwargs)
        key, value = self.expand_kv(kv_latent, k_shared)

        implementation = self.config._attn_implementation or "eager"
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            implementation, eager_attention_forward
        )
        if self.indexer is not None:
            if implementation.startswith(("flash_attention", "flex_attention")):
                raise ValueError(
                    f"attn_implementation '{implementation}' does not keep to the keys that an indexer "
                    "selects; use 'sdpa' or 'eager'"
                )
            assert attention_mask is not None
            selected = self.indexer(hidden_states, query_latent, attention_mask, cache)
            if implementation in ("eager", "sdpa"):
                attention_mask = mask_unselected(attention_mask, selected)
            else:  # as transformers calls kernels for sparse attention
                attention_interface = partial(attention_interface, indices=selected)
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        output = output.reshape(batch_size, seq_length, -1)
        if self.g_proj is not None:
            output = output * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(output), weights
