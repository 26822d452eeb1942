"""Forwards of modules that call no function for their operator, made of kernels.

They are bound as methods, so that a copy of a module computes with its own weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from codegen.sites.calls import attention
from codegen.sites.kernels import Kernels
from codegen.sites.packing import document_limits
from codegen.sites.sparse import latent_attention


def lightning(kernels: Kernels) -> Callable:
    """The forward of MiniMax's lightning attention, its loop over blocks replaced.

    A single token that continues a cached state takes the module's own way.
    """

    def forward(
        module: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        state = None if cache is None else cache.get_linear_cache(module.layer_idx)
        if state is not None and hidden_states.shape[1] == 1:
            return type(module).forward(
                module, hidden_states, position_embeddings, attention_mask, cache=cache, **kwargs
            )
        qkv = module.act_fn(module.qkv_proj(hidden_states))
        if attention_mask is not None:  # padding writes nothing
            qkv = (qkv * attention_mask.unsqueeze(-1)).to(qkv.dtype)
        qkv = qkv.unflatten(-1, (module.num_attention_heads, 3 * module.head_dim))
        q, k, v = qkv.split(module.head_dim, dim=-1)
        kernel = kernels.of(key_dim=module.head_dim, value_dim=module.head_dim)
        o, state = kernel(
            q,
            k,
            v,
            g_gamma=-module.slope_rate.flatten().float(),
            scale=1.0,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=document_limits(kwargs),
        )
        state = state.to(v.dtype)
        o = module.norm(o.flatten(2))
        o = module.out_proj(nn.functional.sigmoid(module.output_gate(hidden_states)) * o)
        if cache is not None:
            cache.set_linear_cache(module.layer_idx, state)
        return o, state

    return forward


def gated_rms_norm(kernels: Kernels) -> Callable:
    """The forward of an RMSNorm with a gate: over heads and gated after it in delta rules, over
    groups of channels and gated before it in Mamba2."""
    kernel = kernels.of()

    def forward(module: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        groups, size = getattr(module, "n_groups", 1), getattr(module, "group_size", None)
        return kernel(
            hidden_states,
            module.weight,
            gate,
            eps=module.variance_epsilon,
            activation=getattr(module, "activation", "silu"),
            norm_before_gate=getattr(module, "norm_before_gate", size is None),
            group_size=hidden_states.shape[-1] // groups if size is None else size,
        )

    return forward


def delta_attention(recurrence: Kernels, convolution: Kernels, own: Callable) -> Callable:
    """The forward of Kimi delta attention over whole sequences, as training has them.

    The models join q, k and v for one convolution, cut its result, and take them apart again; the
    kernel convolves three arrays as they are, which saves a dozen copies of them. With a cache or
    padding the forward is `own`, which takes the module first.
    """
    attend = attention(recurrence, own)

    def forward(
        module: Any,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if cache is not None or attention_mask is not None:
            return own(module, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
        limits = document_limits(kwargs)
        convolve = convolution.of(kernel_size=module.conv_kernel_size)
        projections = module.q_proj, module.k_proj, module.v_proj
        qkv, _ = convolve(
            [project(hidden_states) for project in projections],
            module.conv1d.weight.squeeze(1),
            module.conv1d.bias,
            activation=module.activation,
            cu_seqlens=limits,
        )
        o, _ = attend(
            *(x.unflatten(-1, (-1, module.head_dim)) for x in qkv),
            g=module.forget_gate(hidden_states),
            beta=module.b_proj(hidden_states).float().sigmoid(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=limits,
        )
        gate = (
            module.g_proj(hidden_states)
            if hasattr(module, "g_proj")
            else module.g_b_proj(module.g_a_proj(hidden_states))
        )
        o = module.o_norm(o, gate.unflatten(-1, (-1, module.head_dim)))
        return module.o_proj(o.flatten(2))

    return forward


def is_delta_attention(module: Any) -> bool:
    """Whether a module has the parts that `delta_attention` calls."""
    parts = ("q_proj", "k_proj", "v_proj", "conv1d", "b_proj", "o_norm", "o_proj", "forget_gate")
    gates = hasattr(module, "g_proj") or hasattr(module, "g_a_proj")
    silu = getattr(module, "activation", "") in ("silu", "swish")
    return gates and silu and all(hasattr(module, part) for part in parts)


FORWARDS: dict[str, Callable[[Kernels], Callable]] = {
    "gated_rms_norm": gated_rms_norm,
    "lightning": lightning,
    "sparse_attention": latent_attention,
}
"""By the name of the operator."""
