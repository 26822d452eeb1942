"""The graph of a LoRA backward pass of one layer: adapters on every linear layer and bank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from analyzers.graph.capture import LayerGraph, plain_name
from analyzers.graph.saved import Runner, carries_gradient

RANK = 16
VIEWS = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "expand",
    "getitem",
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


def backward(graph: LayerGraph) -> fx.GraphModule:
    """Forward and backward of the layer with low-rank adapters, weights frozen.

    Calls of the backward pass have `meta["backward"]`. Gradients are those of the adapters and of
    what comes into the layer.
    """
    batch = 1 if "batch" in graph.dynamic else graph.batch
    inputs = graph.arguments(batch, graph.tokens)
    wanted: list[Tensor] = []
    for node, value in zip(graph.placeholders(), inputs, strict=True):
        if carries_gradient(node, value):
            wanted.append(value.requires_grad_(True))
    runner = _Adapted(graph)
    wanted += runner.factors
    boundary: list[fx.Node] = []

    def both(inputs: list[Any], wanted: list[Tensor]) -> list[Tensor | None]:
        results = [r for r in runner.run(*inputs) if isinstance(r, Tensor) and r.requires_grad]
        grads = [torch.empty_like(r) for r in results]
        mode = get_proxy_mode()
        assert mode is not None
        boundary.append(next(reversed(mode.tracer.graph.nodes)))
        return list(torch.autograd.grad(results, wanted, grads, allow_unused=True))

    traced = make_fx(both, tracing_mode="real")(inputs, wanted)
    after = False
    for node in traced.graph.nodes:
        node.meta["backward"] = after
        after = after or node.name == boundary[0].name
    traced.graph.eliminate_dead_code()
    return traced


def count(traced: fx.GraphModule) -> Counter[str]:
    """Calls of the backward pass by operator, views left out."""
    names = (
        plain_name(str(n.target).replace("<built-in function getitem>", "getitem"))
        for n in traced.graph.nodes
        if n.op == "call_function" and n.meta["backward"]
    )
    return Counter(name for name in names if name not in VIEWS)


class _Adapted(Runner):
    """Runs a layer's graph with low-rank factors beside every weight matrix."""

    def __init__(self, graph: LayerGraph) -> None:
        super().__init__(graph)
        self._by_call: dict[fx.Node, list[Tensor]] = {}
        for node in graph.calls():
            if node.meta["operator"] in ("linear", "experts"):
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
            x, index, weights, banks, widths = args
            return n.target(x, index, weights, [*banks, *factors], widths)  # type: ignore[operator]
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
