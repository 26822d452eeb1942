"""Unseen-MoE: gated linear attention in three of four layers, experts one by one in a ModuleList.

Shapes: B sequences, T tokens, H heads, K key and V value width of a head, D hidden width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_unseen_moe import UnseenMoeConfig

CHUNK = 16
GATE_NORMALIZER = 16


class UnseenMoeRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return self.weight * normed.to(x.dtype)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635), in chunks, in float32.

    `S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T`, `o_t = scale * S_t^T q_t`. Called like the function
    of that name in flash-linear-attention, which can stand in its place.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        g: log of the decay of each key channel, at most 0, `[B, T, H, K]`.
        initial_state: `[B, H, K, V]`, zero by default.

    Returns:
        The output `[B, T, H, V]` in the dtype of `v`, and the last state when it is asked for.
    """
    length, dtype = q.shape[1], v.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    pad = -length % CHUNK
    # [B, T, H, X] -> [chunks, B, H, CHUNK, X]; padding at the end changes nothing before it
    q, k, v, g = (
        F.pad(x.float().transpose(1, 2), (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)).movedim(2, 0)
        for x in (q * scale, k, v, g)
    )
    decay = g.cumsum(-2)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril().unsqueeze(-1)
    state = q.new_zeros(*q.shape[1:3], q.shape[-1], v.shape[-1])
    if initial_state is not None:
        state = state + initial_state
    outputs = []
    for q_i, k_i, v_i, decay_i in zip(q, k, v, decay, strict=True):
        # exp of a difference that is never positive, so that nothing overflows
        between = (decay_i.unsqueeze(-2) - decay_i.unsqueeze(-3)).masked_fill(~causal, -torch.inf)
        scores = torch.einsum("bhrk,bhik,bhrik->bhri", q_i, k_i, between.exp())
        outputs.append(scores @ v_i + (q_i * decay_i.exp()) @ state)
        last = decay_i[..., -1:, :]
        state = last.exp().transpose(-1, -2) * state
        state = state + (k_i * (last - decay_i).exp()).transpose(-1, -2) @ v_i
    output = torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2).to(dtype)
    return output, state if output_final_state else None


class UnseenMoeGatedLinearAttention(nn.Module):
    def __init__(self, config: UnseenMoeConfig):
        super().__init__()
        self.num_heads = config.linear_num_heads
        self.head_k_dim = config.linear_key_head_dim
        self.head_v_dim = config.linear_value_head_dim
        hidden, rank = config.hidden_size, config.linear_gate_rank
        keys, values = self.num_heads * self.head_k_dim, self.num_heads * self.head_v_dim
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.gk_a_proj = nn.Linear(hidden, rank, bias=False)
        self.gk_b_proj = nn.Linear(rank, keys, bias=True)
        self.g_proj = nn.Linear(hidden, values, bias=False)
        self.g_norm = UnseenMoeRMSNorm(self.head_v_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        heads = (*hidden_states.shape[:2], self.num_heads, -1)
        q = self.q_proj(hidden_states).view(heads)
        k = self.k_proj(hidden_states).view(heads)
        v = self.v_proj(hidden_states).view(heads)
        g = F.logsigmoid(self.gk_b_proj(self.gk_a_proj(hidden_states)).float()).view(heads)
        g = g / GATE_NORMALIZER
        if attention_mask is not None:  # a padding token adds nothing and lets nothing decay
            valid = attention_mask[:, :, None, None].to(v.dtype)
            v, g = v * valid, g * valid
        o, _ = chunk_gla(q, k, v, g)
        gate = F.silu(self.g_proj(hidden_states)).view(heads)
        return self.o_proj((self.g_norm(o) * gate).flatten(2))


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class UnseenMoeAttention(nn.Module):
    def __init__(self, config: UnseenMoeConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, self.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * dim, hidden, bias=False)
        self.q_norm = UnseenMoeRMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = UnseenMoeRMSNorm(dim, eps=config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, cos: Tensor, sin: Tensor
    ) -> Tensor:
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        q = apply_rotary_pos_emb(
            self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2), cos, sin
        )
        k = apply_rotary_pos_emb(
            self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2), cos, sin
        )
        v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        o = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            enable_gqa=True,
        )
        return self.o_proj(o.transpose(1, 2).flatten(2))


class UnseenMoeMLP(nn.Module):
    """`w2(act(w1 x) * w3 x)`"""

    def __init__(self, config: UnseenMoeConfig, intermediate_size: int):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.w2 = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class UnseenMoeSparseBlock(nn.Module):
    def __init__(self, config: UnseenMoeConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        width = config.moe_intermediate_size
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            [UnseenMoeMLP(config, width) for _ in range(config.num_experts)]
        )
        self.shared_expert = UnseenMoeMLP(config, width * config.num_shared_experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, 1)
        scores = F.softmax(self.gate(x).float(), dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = self.shared_expert(x)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return out.view_as(hidden_states)


class UnseenMoeDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: UnseenMoeConfig, layer_idx: int):
        super().__init__()
        self.is_full_attention = config.is_full_attention(layer_idx)
        attention = UnseenMoeAttention if self.is_full_attention else UnseenMoeGatedLinearAttention
        self.self_attn = attention(config)
        if layer_idx < config.first_k_dense_replace:
            self.mlp = UnseenMoeMLP(config, config.intermediate_size)
        else:
            self.mlp = UnseenMoeSparseBlock(config)
        self.input_layernorm = UnseenMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = UnseenMoeRMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        causal_mask: Tensor | None,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        if self.is_full_attention:
            hidden_states = hidden_states + self.self_attn(normed, causal_mask, cos, sin)
        else:
            hidden_states = hidden_states + self.self_attn(normed, attention_mask)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class UnseenMoePreTrainedModel(PreTrainedModel):
    config_class = UnseenMoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("UnseenMoeDecoderLayer",)
    _supports_sdpa = True


class UnseenMoeModel(UnseenMoePreTrainedModel):
    def __init__(self, config: UnseenMoeConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [UnseenMoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = UnseenMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length, device = hidden_states.shape[1], hidden_states.device
        if position_ids is None:
            position_ids = torch.arange(length, device=device).unsqueeze(0)
        cos, sin = self.rotary(position_ids, hidden_states.dtype)
        causal_mask = None
        if attention_mask is not None:
            before = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            itself = torch.eye(length, dtype=torch.bool, device=device)
            # A padding token sees itself: a row without any key has no softmax.
            causal_mask = (before & attention_mask[:, None, None, :].bool()) | itself
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, causal_mask, cos, sin)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))

    def rotary(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles, `[B, 1, T, head_dim]`."""
        dim, device = self.config.head_dim, position_ids.device
        powers = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        angles = position_ids[:, None, :, None].float() * self.config.rope_theta**-powers
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class UnseenMoeForCausalLM(UnseenMoePreTrainedModel, GenerationMixin):
    def __init__(self, config: UnseenMoeConfig):
        super().__init__(config)
        self.model = UnseenMoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits)
