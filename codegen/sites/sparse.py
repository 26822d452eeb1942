"""Latent attention over the keys that an indexer selects, without expanding the latents.

The models make keys and values of every head out of the latents and mask all pairs. The kernel
attends to the latents themselves: `kv_b_proj` is moved to the queries and to the outputs
(DeepSeek-V2, arXiv 2405.04434), so that all heads share one key and value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from codegen.sites.kernels import Kernels

ROTARY = "apply_rotary_pos_emb_interleave"


def seen(indices: Tensor, attention_mask: Tensor) -> Tensor:
    """`indices` [B, T, K], -1 in place of keys that the mask [B, 1, T, S] hides: a query that sees
    few of them is given others besides."""
    mask = attention_mask[:, 0].gather(-1, indices.clamp(min=0).long())
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return torch.where(visible, indices, -1).to(torch.int32)


def latent_attention(kernels: Kernels) -> Callable:
    """The forward of DeepSeek-V3.2's attention and of GLM's, which shares selections over layers.

    With a cache, or dropout while it is trained, a module takes its own way.
    """
    kernel = kernels.of()

    def forward(
        module: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        cache: Any = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        own = type(module).forward
        shares = hasattr(module, "skip_topk")
        given = hidden_states, position_embeddings, attention_mask
        if cache is not None or (module.training and module.attention_dropout):
            kwargs |= {"prev_topk_indices": prev_topk_indices} if shares else {}
            return own(module, *given, cache=cache, position_ids=position_ids, **kwargs)
        rotate = inspect.unwrap(own).__globals__[ROTARY]
        nope, rope, rank = module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank

        latent_q = module.q_a_layernorm(module.q_a_proj(hidden_states))
        q = module.q_b_proj(latent_q).unflatten(-1, (-1, nope + rope))
        q, q_rot = q.split([nope, rope], -1)
        kv, k_rot = module.kv_a_proj_with_mqa(hidden_states).split([rank, rope], -1)
        kv = module.kv_a_layernorm(kv)
        q_rot, k_rot = rotate(q_rot.transpose(1, 2), k_rot.unsqueeze(1), *position_embeddings)

        selected = prev_topk_indices
        if module.indexer is not None:
            index = latent_q, position_embeddings, attention_mask[:, 0], position_ids
            selected = module.indexer(hidden_states, *index, cache=None)
        assert selected is not None

        # Its weight [rank, H, nope + V], with what an adapter adds: the layer's output for ones.
        one = torch.eye(rank, dtype=kv.dtype, device=kv.device)
        expand = module.kv_b_proj(one).unflatten(-1, (-1, nope + module.v_head_dim))
        to_key, to_value = expand.split([nope, module.v_head_dim], -1)
        q = torch.einsum("bthd,rhd->bthr", q, to_key)
        o, _ = kernel(
            torch.cat([q, q_rot.transpose(1, 2)], -1),
            torch.cat([kv, k_rot.squeeze(1)], -1),
            seen(selected, attention_mask),
            value_dim=rank,
            scale=module.scaling,
        )
        o = torch.einsum("bthr,rhd->bthd", o, to_value)
        o = module.o_proj(o.flatten(2))
        return (o, None, selected) if shares else (o, None)

    return forward
