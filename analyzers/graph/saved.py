"""What autograd keeps of a layer for the backward pass, measured by running its graph on meta."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from analyzers.graph.layer import LayerGraph
from analyzers.schema import PartName, Work


def saved(graph: LayerGraph) -> tuple[dict[PartName, Work], dict[PartName, Work]]:
    """By part: kept with all weights frozen, and besides when every weight matrix is adapted.

    A storage counts once, for the first call that keeps it, however many views of it are kept.
    Weights do not count, nor does what all layers share (rotary angles, masks).
    """
    frozen, adapted = _measure(graph, adapted=False), _measure(graph, adapted=True)
    besides: dict[PartName, Work] = {
        part: adapted[part] + frozen.get(part, Work()) * -1 for part in adapted
    }
    return frozen, besides


def _measure(graph: LayerGraph, *, adapted: bool) -> dict[PartName, Work]:
    """At the mean depth of the bank of block starts, in which what is kept is linear."""
    one = _kept(graph, adapted, starts=1)
    if graph.starts == 1:
        return one
    two = _kept(graph, adapted, starts=2)
    return {p: one[p] + (two[p] + one[p] * -1) * (graph.starts - 1) for p in one}


def _kept(graph: LayerGraph, adapted: bool, starts: int) -> dict[PartName, Work]:
    batch = 1 if "batch" in graph.dynamic else graph.batch
    inputs = graph.arguments(batch, graph.tokens, starts)
    for node, value in zip(graph.placeholders(), inputs, strict=True):
        if carries_gradient(node, value) or (adapted and _is_adapted(node)):
            value.requires_grad_(True)
    runner = _Measuring(graph)
    with torch.autograd.graph.saved_tensors_hooks(runner.keep, lambda tensor: tensor):
        runner.run(*inputs)
    found: dict[PartName, Work] = defaultdict(Work)
    for storage, node in runner.kept.values():
        found[node.meta["part"]] += _work(storage.nbytes() / batch, graph.tokens)
    return dict(found)


def _work(nbytes: float, tokens: int) -> Work:
    """By the power of the length, a prime that divides no width, in a number of bytes."""
    if nbytes % tokens**2 == 0:
        return Work(per_pair=nbytes / tokens**2)
    return Work(per_token=nbytes / tokens)  # rounded up where the code pads to whole chunks


def _is_adapted(node: fx.Node) -> bool:
    """Whether a weight is one that an adapter may go on."""
    return node.meta["role"] == "parameter" and any(map(takes_adapter, node.users))


def takes_adapter(call: fx.Node) -> bool:
    """Whether it multiplies with a linear layer or bank of experts that adapters go on; routers and
    gates beside them take none."""
    return call.meta.get("operator") in ("linear", "experts") and call.meta["part"] != "router"


def carries_gradient(node: fx.Node, value: Any) -> bool:
    """Whether a placeholder is something that gradients flow back to, other than a weight."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return node.meta["role"] == "input" and node.meta["grad"] and floating


class Runner(fx.Interpreter):
    """Runs a layer's graph; gradients are recorded where the model's own code records them."""

    def __init__(self, graph: LayerGraph) -> None:
        super().__init__(graph.module, garbage_collect_values=False)

    def run_node(self, n: fx.Node) -> Any:
        with torch.set_grad_enabled(n.meta.get("grad", True) and torch.is_grad_enabled()):
            return super().run_node(n)


class _Measuring(Runner):
    """Notes each storage that is kept for the backward pass, with the call that keeps it."""

    def __init__(self, graph: LayerGraph) -> None:
        super().__init__(graph)
        self.kept: dict[int, tuple[torch.UntypedStorage, fx.Node]] = {}
        self._current: fx.Node = next(iter(graph.module.graph.nodes))
        self._not_counted: set[int] = set()
        self._from_input: set[fx.Node] = set()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._not_counted:
            self.kept.setdefault(storage._cdata, (storage, self._current))
        return tensor

    def run_node(self, n: fx.Node) -> Any:
        self._current = n
        result = super().run_node(n)
        if isinstance(result, int):
            return result
        source = n.op == "placeholder" and carries_gradient(n, result)
        if source or any(node in self._from_input for node in n.all_input_nodes):
            self._from_input.add(n)
        elif isinstance(result, torch.Tensor):
            self._not_counted.add(result.untyped_storage()._cdata)
        return result
