"""What a layer keeps of its forward for the backward pass, where it does not keep everything.

With `full` recomputation a layer keeps its input and its decisions. With `selective` it also keeps
what is expensive to make again: the outputs of its attention cores and of every second matrix
product. Everything else, exchanges of tokens too, is done again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from runtime.adapters import LoraLinear, adapter_parameters, product_as_one
from runtime.experts.replay import replaying

aten = torch.ops.aten

Contexts = tuple[AbstractContextManager, AbstractContextManager]
"""Of a layer's forward, and of its repetition."""

PRODUCTS: Mapping[Any, int] = {
    aten.mm.default: 1,
    aten.addmm.default: 2,
    aten._grouped_mm.default: 1,
    product_as_one: 2,
}
"""Operators that are a product, and which argument is the weight. `bmm` is none: it is a part of
attention that is written out, and what it makes there grows with the square of the length."""
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.higher_order.flex_attention,
    }
)
GENERATED = re.compile(r"codegen_(\w+)_[0-9a-f]{8}::forward")
"""Name of a generated operator."""
ADAPTED_BANKS = "grouped_lora"
"""The generated operator that is a product; its second argument is the weight."""


def selective(model: nn.Module) -> Callable[[], Contexts]:
    """For `context_fn` of `torch.utils.checkpoint.checkpoint`. Adapters are in the model: a layer
    and its low-rank delta become one product, in place."""
    from codegen.members import load_specs

    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.product = product_as_one
    cores, thin = frozenset(load_specs()), _widest_rank(model)

    def contexts() -> Contexts:
        kept = deque[Any]()
        saving = (_Keeping(EverySecond(cores, thin), kept), _Taking(EverySecond(cores, thin), kept))
        first, again = (Both(*pair) for pair in zip(replaying(), saving, strict=True))
        return first, again

    return contexts


def _widest_rank(model: nn.Module) -> int:
    """As padded for grouped products."""
    ranks = [p.shape[-2] for n, p in adapter_parameters(model).items() if n.endswith("_A")]
    return -(-max(ranks, default=0) // 8) * 8


class EverySecond:
    """Whether one call of a layer keeps what an operator gives: cores, and products number 1, 3, 5,
    and so on.

    A product as thin as an adapter's own is not counted and made again, and so is a core that draws
    at random: kept, it would draw nothing the second time, and what follows would draw otherwise.
    """

    def __init__(self, cores: frozenset[str], thin: int) -> None:
        self.cores, self.thin, self.products = cores, thin, 0

    def __call__(self, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        weight = weight_of_product(op, args)
        if weight is None:
            return self._is_core(op, args, kwargs)
        if min(weight.shape[-2:]) <= self.thin:
            return False
        self.products += 1
        return self.products % 2 == 1

    def _is_core(self, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        if op not in ATTENTION:
            return generated(op) in self.cores
        schema = getattr(op, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema else []
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return not given.get("dropout_p")


def weight_of_product(op: Any, args: tuple) -> Tensor | None:
    """The second factor of an operator that is a product; None for any other."""
    if (place := PRODUCTS.get(op)) is not None:
        return args[place]
    return args[1] if generated(op) == ADAPTED_BANKS else None


def generated(op: Any) -> str | None:
    """The family's name for a generated operator."""
    found = GENERATED.match(str(op.name())) if isinstance(op, torch._ops.OpOverload) else None
    return found[1] if found else None


# torch's own `create_selective_checkpoint_contexts` wants every operator of the repetition to have
# been in the forward. FSDP gathers experts inside of a layer, in either pass or ahead of it, so
# that does not hold; what is kept comes in the same order all the same.


class _Keeping(TorchDispatchMode):
    def __init__(self, keeps: EverySecond, kept: deque[Any]) -> None:
        super().__init__()
        self.keeps, self.kept = keeps, kept

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = op(*args, **(kwargs or {}))
        if self.keeps(op, args, kwargs or {}):
            # Below autograd an alias counts its changes alone, unless this key is let in again.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                mine = tree_map_only(Tensor, Tensor.detach, out)
            self.kept.append((op, mine, _versions(mine)))
        return out


class _Taking(TorchDispatchMode):
    def __init__(self, keeps: EverySecond, kept: deque[Any]) -> None:
        super().__init__()
        self.keeps, self.kept = keeps, kept

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not self.keeps(op, args, kwargs or {}):
            return op(*args, **(kwargs or {}))
        if not self.kept:
            raise RuntimeError("selective recomputation keeps a layer for one backward pass")
        made_by, out, versions = self.kept.popleft()
        assert made_by is op, f"{op} is repeated in the place of {made_by}"
        if _versions(out) != versions:
            raise RuntimeError(
                f"the output of {op} is changed in place, so that it cannot be kept; plan with "
                "activation_checkpointing full"
            )
        return out


def _versions(out: Any) -> list[int]:
    return [t._version for t in tree_leaves(out) if isinstance(t, Tensor)]


class Both(AbstractContextManager):
    """One context inside of another."""

    def __init__(self, *contexts: AbstractContextManager) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        self.entered = ExitStack()
        for context in self.contexts:
            self.entered.enter_context(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.__exit__(*error)
