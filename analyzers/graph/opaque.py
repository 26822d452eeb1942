"""The operators that stay whole in a graph: data-dependent, sequential, or one kernel everywhere.

Each is a custom operator `analyzers::<name>` that computes nothing: a fake kernel gives the shape
of its output, and its autograd keeps for the backward pass what a fused kernel of it keeps. They
enter a model's code through transformers' registry of attention functions, through the globals of
the module that defines a mixer, and through the instance of an experts module; `replaced` undoes it
all.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from analyzers.experts import Moe
from analyzers.structure import Kind

NAMESPACE = "analyzers"
ATTENTION = "analyzers_opaque"
"""Name under which transformers' registries know the attention operator."""


# ---------------------------------------------------------------------------------- the operators


def _define(
    name: str, *, keeps_output: bool = False
) -> Callable[[list[Tensor], list[int]], Tensor]:
    """`name(inputs, shape) -> [shape]` in the dtype of the first input, and `name_backward`.

    Kept for the backward pass: the inputs, and where the kernel needs them again the output and a
    float32 number a row of it (the log-sum-exp of a softmax).
    """

    @torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=())
    def operator(inputs: list[Tensor], shape: list[int]) -> Tensor:
        raise NotImplementedError("stands for the operator in a graph; it is never run")

    @torch.library.custom_op(f"{NAMESPACE}::{name}_backward", mutates_args=())
    def backward(grad: Tensor, inputs: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError("stands for the operator in a graph; it is never run")

    @operator.register_fake
    def _(inputs, shape):
        return inputs[0].new_empty(shape)

    @backward.register_fake
    def _(grad, inputs, kept):
        return [torch.empty_like(x) for x in inputs if x.is_floating_point()]

    def keep(ctx: Any, inputs: tuple[list[Tensor], list[int]], output: Tensor) -> None:
        kept = [output, output.new_empty(output.shape[:-1], dtype=torch.float32)]
        ctx.count = len(inputs[0])
        ctx.save_for_backward(*inputs[0], *(kept if keeps_output else []))

    def differentiate(ctx: Any, grad: Tensor) -> tuple[list[Tensor | None], None]:
        inputs, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        grads = iter(backward(grad, list(inputs), list(kept)))
        return [next(grads) if x.is_floating_point() else None for x in inputs], None

    operator.register_autograd(differentiate, setup_context=keep)
    return operator


indexer = _define("indexer")
kda = _define("kda")
gated_delta_rule = _define("gated_delta_rule")
gla = _define("gla")
lightning = _define("lightning")
mamba2 = _define("mamba2")
mlstm = _define("mlstm")
rg_lru = _define("rg_lru")
selective_scan = _define("selective_scan")
short_convolution = _define("short_convolution")
wkv = _define("wkv")
attention = _define("attention", keeps_output=True)

WHOLE: dict[str, Any] = {
    name: getattr(torch.ops.analyzers, name).default for name in ("gla", "lightning", "mlstm")
}
"""Operators that a mixer's own forward may spell out, by the name of the mixer's operator."""


@torch.library.custom_op(f"{NAMESPACE}::experts", mutates_args=())
def experts(
    x: Tensor, index: list[Tensor], weights: list[Tensor], banks: list[Tensor], sizes: list[int]
) -> Tensor:
    """`x` [T, D] through the experts that `index` [T, K] chooses, weighted -> [T, D].

    `index` and `weights` are empty where the rows of x are sorted by expert already; `banks` are
    the weights of the experts and their low-rank factors; `sizes` are the bytes that the activation
    keeps of a visit, and the in features of the bank after it.
    """
    raise NotImplementedError("stands for the operator in a graph; it is never run")


@torch.library.custom_op(f"{NAMESPACE}::experts_backward", mutates_args=())
def experts_backward(
    grad: Tensor, weights: list[Tensor], banks: list[Tensor], kept: list[Tensor]
) -> list[Tensor]:
    """Gradients of x, of `weights` and, where they are adapted, of `banks`."""
    raise NotImplementedError("stands for the operator in a graph; it is never run")


@experts.register_fake
def _experts_output(x, index, weights, banks, sizes):
    return torch.empty_like(x)


@experts_backward.register_fake
def _experts_gradients(grad, weights, banks, kept):
    return [torch.empty_like(x) for x in (grad, *weights, *banks)]


def _keep_experts(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Of each visit: what the activation keeps, its choice, the order of the visits by expert and
    its inverse, and the output that the routing weight multiplies; of each token how many visits it
    has; with adapted banks, what they multiply too."""
    x, index, weights, banks, (activation, inner) = inputs
    visits = x.shape[0] * (index[0].shape[-1] if index else 1)
    adapted = any(bank.requires_grad for bank in banks)
    kept = [x.new_empty(visits, size) for size in ([x.shape[-1], inner] if adapted else [])]
    kept.append(x.new_empty(visits, activation, dtype=torch.uint8))
    if weights:
        kept += [x.new_empty(n, dtype=torch.int64) for n in (visits, visits, visits, x.shape[0])]
        kept.append(x.new_empty(visits, x.shape[-1]))
    ctx.counts = len(weights), len(banks)
    ctx.index = len(index)
    ctx.banks = [bank.requires_grad for bank in banks]
    ctx.save_for_backward(*weights, *banks, *index, *kept)


def _differentiate_experts(ctx: Any, grad: Tensor) -> tuple:
    weights_count, banks_count = ctx.counts
    saved = list(ctx.saved_tensors)
    weights, banks = saved[:weights_count], saved[weights_count : weights_count + banks_count]
    kept = saved[weights_count + banks_count :]
    wanted = [bank for bank, needed in zip(banks, ctx.banks, strict=True) if needed]
    grads = iter(experts_backward(grad, weights, wanted, kept))
    x = next(grads)
    return (
        x,
        [None] * ctx.index,
        [next(grads) for _ in weights],
        [next(grads) if needed else None for needed in ctx.banks],
        None,
    )


experts.register_autograd(_differentiate_experts, setup_context=_keep_experts)


# ----------------------------------------------------------------- in place of the model's own code


@contextlib.contextmanager
def replaced(owner: nn.Module, kinds: list[Kind], *, lists: bool = True) -> Iterator[None]:
    """While it lasts, the model's code calls the operators above instead of its own.

    With `lists`, also for experts in a list of modules, whose loop depends on the data.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with contextlib.ExitStack() as stack:
        for registry, function in (
            (ALL_ATTENTION_FUNCTIONS, _attention_function),
            (ALL_MASK_ATTENTION_FUNCTIONS, _mask_function),
        ):
            stack.enter_context(mock.patch.dict(registry._global_mapping, {ATTENTION: function}))
        configs = {id(m.config): m.config for m in owner.modules() if hasattr(m, "config")}
        for config in configs.values():
            if hasattr(config, "_attn_implementation_internal"):
                patch = mock.patch.object(config, "_attn_implementation_internal", ATTENTION)
                stack.enter_context(patch)
        for kind in kinds:
            for module in kind.module.modules():
                own = inspect.unwrap(type(module).forward).__globals__
                found = {name: new for name, new in FUNCTIONS.items() if name in own}
                stack.enter_context(mock.patch.dict(own, found))
                if (replacement := MODULES.get(type(module).__name__)) is not None:
                    forward = replacement(module)
                    stack.enter_context(mock.patch.object(module, "forward", forward))
            for moe in kind.moes:
                module: Any = kind.module.get_submodule(moe.experts)
                sizes = [_activation_bytes(module, moe), moe.intermediate_size]
                if type(module).forward is nn.Module.forward:
                    # A list of modules, which the code around it goes through.
                    block = kind.module.get_submodule(moe.path)
                    if lists and (forward := _listed_forward(kind.module, block, moe, sizes)):
                        stack.enter_context(mock.patch.object(block, "forward", forward))
                    continue
                forward = _experts_forward(module, sizes, moe.count)
                stack.enter_context(mock.patch.object(module, "forward", forward))
        yield


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers calls it: [B, H, T, K] and [B, H, S, V] -> [B, T, H, V]."""
    extra = [kwargs[name] for name in ("indices", "s_aux") if kwargs.get(name) is not None]
    batch, heads, length, _ = query.shape
    shape = [batch, length, heads, value.shape[-1]]
    return attention([query, key, value, *extra], shape), None  # type: ignore[return-value]


def _mask_function(
    batch_size: int, q_length: int, kv_length: int, *args: Any, device: Any = "meta", **kwargs: Any
) -> Tensor:
    """A mask [B, 1, T, S] for code that reads it; the attention operator does not."""
    return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)


def _delta_rule(operator: Callable) -> Callable:
    def function(q, k, v, g, beta, *args, **kwargs):
        return operator([q, k, v, g, beta], list(v.shape)), None

    return function


def _gla(q, k, v, g, *args, **kwargs):
    return gla([q, k, v, g], list(v.shape)), None


def _mamba2(hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, **kwargs):
    inputs = [hidden_states, dt, A, B, C, *(x for x in (D, dt_bias) if x is not None)]
    output = mamba2(inputs, list(hidden_states.shape))
    return (output, None) if kwargs.get("return_final_states") else output


def _selective_scan(hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, **kwargs):
    inputs = [hidden_states, dt, A, B, C, *(x for x in (D, z, delta_bias) if x is not None)]
    output = selective_scan(inputs, list(hidden_states.shape))
    return (output, None) if kwargs.get("return_last_state") else output


def _convolution(hidden_states, weight, bias=None, activation=None, **kwargs):
    inputs = [hidden_states, weight, *([] if bias is None else [bias])]
    return short_convolution(inputs, list(hidden_states.shape))


def _wkv(time_decay, time_first, key, value, state=None, return_state=False):
    return wkv([key, value, time_decay, time_first], list(key.shape)), state


FUNCTIONS: dict[str, Callable] = {
    "chunk_kimi_delta_attention": _delta_rule(kda),
    "torch_chunk_gated_delta_rule": _delta_rule(gated_delta_rule),
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _selective_scan,
    "causal_conv1d_fn": _convolution,
    "rwkv_linear_attention": _wkv,
    "chunk_kda": _delta_rule(kda),
    "chunk_gated_delta_rule": _delta_rule(gated_delta_rule),
    "chunk_gla": _gla,
}
"""By the name under which models call them: transformers' own, and those of
flash-linear-attention, which models with code of their own call."""


def _mlstm_forward(module: nn.Module) -> Callable:
    """xLSTM's own code mixes dtypes in bfloat16."""

    def forward(query, key, value, igate, fgate, **kwargs):
        return mlstm([query, key, value, igate, fgate], list(value.shape)), None

    return forward


def _block_indexer_forward(module: Any) -> Callable:
    """Qwen4-Exp goes through the queries one by one; the result is the mask of selected tokens."""

    def forward(hidden_states, position_embeddings, attention_mask, cache=None):
        given = [module.index_qk_proj(hidden_states), *position_embeddings, attention_mask]
        return indexer(given, list(attention_mask.shape)) > 0

    return forward


MODULES: dict[str, Callable] = {
    "Qwen4ExpTextQSAIndexer": _block_indexer_forward,
    "xLSTMBackend": _mlstm_forward,
}
"""Modules of transformers that cannot be traced, by their class."""


def _activation_bytes(module: Any, moe: Moe) -> int:
    """What autograd keeps, a visit, of the activation between the banks, its input included."""
    halves = 2 if moe.gated else 1
    rows = torch.empty(1, halves * moe.intermediate_size, dtype=torch.bfloat16, device="meta")
    rows.requires_grad_(True)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if moe.gated and hasattr(module, "_apply_gate"):
            module._apply_gate(rows)
        else:
            gate, *up = rows.chunk(halves, dim=-1)
            activation = getattr(module, "act_fn", nn.functional.silu)
            result = activation(gate) * up[0] if up else activation(gate)
            del result
    return sum(storage.nbytes() for storage in kept.values())


def _listed_forward(
    layer: nn.Module, block: nn.Module, moe: Moe, sizes: list[int]
) -> Callable | None:
    """Router, one call of `experts` and what is shared, in place of a loop over a list; None where
    the block holds more than these. Of the banks, the first expert stands for all."""
    beside = {
        f"{moe.path}.{name}".removeprefix("."): child
        for name, child in block.named_children()
        if next(child.parameters(), None) is not None
    }
    shared = [beside.pop(path) for path in moe.shared_paths if path in beside]
    if moe.router is None or beside.keys() != {moe.router, moe.experts}:
        return None
    router, listed = beside[moe.router], beside[moe.experts]
    first = next(iter(listed.children()))

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = hidden_states.flatten(0, -2)
        weights, index = router(rows).topk(moe.top_k, dim=-1)
        mixed = experts(rows, [index], [weights], list(first.parameters()), sizes)
        for module in shared:
            mixed = mixed + module(rows)
        return mixed.view_as(hidden_states)  # type: ignore[union-attr]

    return forward


def _experts_forward(module: nn.Module, sizes: list[int], count: int) -> Callable:
    def forward(hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        given = [t for t in (*routing, *named.values()) if isinstance(t, Tensor)]
        index = [t for t in given if not t.is_floating_point()]
        # Switch marks the chosen experts in a row of all instead of numbering them.
        index = [t.argmax(-1) if t.shape[-1] == count else t for t in index]
        weights = [t for t in given if t.is_floating_point()]
        banks = list(module.parameters())
        return experts(hidden_states, index, weights, banks, sizes)  # type: ignore[return-value]

    return forward
