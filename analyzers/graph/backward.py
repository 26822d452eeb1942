"""The calls of a LoRA backward pass of one layer: adapters on every linear layer and bank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from analyzers.graph.layer import LayerGraph
from analyzers.graph.naming import plain_name
from analyzers.graph.saved import Runner, carries_gradient, takes_adapter

RANK = 16
VIEWS = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "expand",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unsqueeze",
    "view",
}


def count_backward(graph: LayerGraph) -> Counter[str]:
    """Calls by operator, views left out, in the backward pass of the layer with low-rank adapters
    beside frozen weights."""
    results, wanted = adapted(graph)
    with _Counting() as counting:
        gradients(results, wanted)
    return counting.calls


def adapted(graph: LayerGraph) -> tuple[list[Tensor], list[Tensor]]:
    """The layer's results on the meta device, and what gradients go to: what comes into it and
    the factors of the adapters."""
    batch = 1 if "batch" in graph.dynamic else graph.batch
    inputs = graph.arguments(batch, graph.tokens)
    pairs = zip(graph.placeholders(), inputs, strict=True)
    wanted = [v.requires_grad_(True) for node, v in pairs if carries_gradient(node, v)]
    runner = _Adapted(graph)
    wanted += runner.factors
    results = [r for r in runner.run(*inputs) if isinstance(r, Tensor) and r.requires_grad]
    return results, wanted


def gradients(results: list[Tensor], wanted: list[Tensor]) -> list[Tensor | None]:
    given = [torch.empty_like(r) for r in results]
    return list(torch.autograd.grad(results, wanted, given, allow_unused=True))


class _Counting(TorchDispatchMode):
    """Counts calls as they come: a graph of them would take ten times as long."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = plain_name(str(func))
        if name not in VIEWS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class _Adapted(Runner):
    """Runs a layer's graph with low-rank factors beside every weight matrix."""

    def __init__(self, graph: LayerGraph) -> None:
        super().__init__(graph)
        self._by_call: dict[fx.Node, list[Tensor]] = {}
        for node in graph.calls():
            if takes_adapter(node):
                weights = [n.meta["val"] for n in node.all_input_nodes if _is_matrix(n)]
                self._by_call[node] = [factor for w in weights for factor in _factors(w)]

    @property
    def factors(self) -> list[Tensor]:
        return [factor for factors in self._by_call.values() for factor in factors]

    def run_node(self, n: fx.Node) -> Any:
        factors = self._by_call.get(n)
        if not factors:
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        if n.meta["operator"] == "experts":
            x, index, weights, banks, sizes = args
            return n.target(x, index, weights, [*banks, *factors], sizes)  # type: ignore[operator]
        a, b = factors
        low = torch.nn.functional.linear(args[0], a)
        return super().run_node(n) + torch.nn.functional.linear(low, b)


def _is_matrix(node: fx.Node) -> bool:
    return node.meta.get("role") == "parameter" and node.meta["val"].ndim >= 2


def _factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`A` [..., r, in] and `B` [..., out, r] of a weight [..., out, in]."""
    *stack, o, i = weight.shape

    def leaf(*shape: int) -> Tensor:
        return torch.empty(*stack, *shape, dtype=weight.dtype, device="meta", requires_grad=True)

    return leaf(RANK, i), leaf(o, RANK)
