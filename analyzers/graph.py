"""A torch.export graph of one layer of each kind, with its large operators kept whole.

The decoder is cut down to one layer a kind and exported in one piece on the meta device, so that
masks, positions and whatever else layers hand to one another are made by the model's own code. The
delta rule and the experts enter the graph as one named node each (they would unroll into hundreds,
more with every chunk of the sequence); routers and norms are named by the module that they lie in.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

from analyzers.structure import Kind, decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 64
OPAQUE_EXPERTS = "analyzers_opaque"


@dataclass
class BlockGraph:
    """What the graph of one block holds."""

    nodes: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    """Calls by normalised name; what has none is named as ATen names it."""
    linear_flops: float = 0.0
    """Of all linear nodes outside the router, a token."""


def trace_blocks(model: PreTrainedModel, kinds: list[Kind]) -> list[BlockGraph]:
    """One graph a kind, in the order of `kinds`.

    The model is cut down for it and is of no further use. Raises whatever torch.export raises on
    code that it cannot follow.
    """
    path, layers = decoder_layers(model)
    owner_path, _, name = path.rpartition(".")
    owner = model.get_submodule(owner_path)
    first = [kind.layers[0] for kind in kinds]
    _cut_down(owner, name, first, len(layers))
    hidden = model.config.get_text_config().hidden_size
    dtype = next(p.dtype for p in owner.parameters())
    embedded = torch.empty(1, TOKENS, hidden, dtype=dtype, device="meta")
    with _opaque(owner, kinds), torch.no_grad():
        program = torch.export.export(_Decoder(owner), (embedded,), strict=False)

    graphs = [BlockGraph() for _ in kinds]
    inside = re.compile(rf"^owner\.{re.escape(name)}\.(\d+)\.?(.*)$")
    named: set[tuple[int, str]] = set()  # modules that are counted as one call
    for node, stack in _nodes(program.graph_module):
        where = next((m for m in map(inside.match, reversed(stack)) if m), None)
        if where is None:
            continue
        number, module_path = int(where[1]), where[2]
        graph, kind = graphs[number], kinds[number]
        graph.nodes += 1
        operator, whole = _operator(kind, module_path, str(node.target))
        if whole is not None:
            if (number, whole) in named:
                continue
            named.add((number, whole))
        graph.operators[operator] += 1
        if operator == "linear":
            width = node.all_input_nodes[0].meta["val"].shape[-1]
            graph.linear_flops += 2 * width * node.meta["val"].numel() / TOKENS
    if not all(graph.nodes for graph in graphs):
        raise RuntimeError("a layer left no node in the graph of its decoder")
    return graphs


class _Decoder(nn.Module):
    """[1, T, D] -> [1, T, D] through the cut-down decoder."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = owner

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        return self.owner(inputs_embeds=embedded, use_cache=False).last_hidden_state


def _cut_down(owner: Any, name: str, keep: list[int], count: int) -> None:
    """Keeps only these layers, in the module and in every per-layer list of its config."""
    layers = getattr(owner, name)
    setattr(owner, name, nn.ModuleList([layers[i] for i in keep]))
    config = owner.config
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, key, [value[i] for i in keep])
    config.num_hidden_layers = len(keep)


def _nodes(
    graph_module: torch.fx.GraphModule, outer: tuple[str, ...] = ()
) -> Iterator[tuple[torch.fx.Node, tuple[str, ...]]]:
    """Every call with the paths of the modules that it lies in, subgraphs included.

    Some operators appear only in subgraphs (an indexer under `no_grad`), so a scan of the top level
    would miss them.
    """
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        stack = (
            tuple(path for path, _ in (node.meta.get("nn_module_stack") or {}).values()) or outer
        )
        yield node, stack
        for argument in node.args:
            if isinstance(argument, torch.fx.Node) and argument.op == "get_attr":
                inner = getattr(graph_module, str(argument.target), None)
                if isinstance(inner, torch.fx.GraphModule):
                    yield from _nodes(inner, stack)


def _operator(kind: Kind, path: str, target: str) -> tuple[str, str | None]:
    """Normalised name of a node, and the module that counts as one call with it, if any."""
    if kind.moe and kind.moe.router and f"{path}.".startswith(f"{kind.moe.router}."):
        return "router", kind.moe.router
    module = kind.module.get_submodule(path)
    name = type(module).__name__
    if "Norm" in name:
        plain = "rms_norm" if "RMS" in name else "layer_norm"
        return ("gated_rms_norm" if "Gated" in name else plain), path
    if isinstance(module, nn.Conv1d):
        return "short_convolution", path
    if target.startswith("analyzers."):
        return target.split(".")[1], None
    mixer = next((m for m in kind.mixers if f"{path}.".startswith(f"{m.path}.")), None)
    # Attention is one node, or in the eager form of a model its softmax stands for it.
    if mixer and target.startswith(("aten.scaled_dot_product", "aten.softmax")):
        return mixer.operator, None
    if target == "aten.linear.default":
        return "linear", None
    return target.removesuffix(".default"), None


# ------------------------------------------------------------------------------ opaque operators


@torch.library.custom_op("analyzers::kda", mutates_args=())
def _kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    raise NotImplementedError("stands for the operator in a graph; it is never run")


@torch.library.custom_op("analyzers::gated_delta_rule", mutates_args=())
def _gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    raise NotImplementedError("stands for the operator in a graph; it is never run")


@torch.library.custom_op("analyzers::experts", mutates_args=())
def _experts(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("stands for the operator in a graph; it is never run")


@_kda.register_fake
@_gated_delta_rule.register_fake
def _like_value(q, k, v, g, beta):
    return torch.empty_like(v)


@_experts.register_fake
def _like_input(x, index, weights):
    return torch.empty_like(x)


DELTA_RULES = {"kda": _kda, "gated_delta_rule": _gated_delta_rule}


@contextlib.contextmanager
def _opaque(owner: Any, kinds: list[Kind]) -> Iterator[None]:
    """While it lasts, the model's code calls the operators above instead of its own."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def experts(module, hidden_states, top_k_index, top_k_weights, **ignored):
        return _experts(hidden_states, top_k_index, top_k_weights)

    with contextlib.ExitStack() as stack:
        for kind in kinds:
            for mixer in kind.mixers:
                if mixer.site is None or mixer.operator not in DELTA_RULES:
                    continue
                forward = inspect.unwrap(type(kind.module.get_submodule(mixer.path)).forward)
                replaced = {mixer.site.function: _call(DELTA_RULES[mixer.operator])}
                stack.enter_context(mock.patch.dict(forward.__globals__, replaced))
        # Classes without transformers' decorator keep their own form, which may not export.
        if any(k.moe and hasattr(k.module.get_submodule(k.moe.experts), "has_gate") for k in kinds):
            ALL_EXPERTS_FUNCTIONS.register(OPAQUE_EXPERTS, experts)
            owner.config._experts_implementation = OPAQUE_EXPERTS
        yield


def _call(operator: Any) -> Any:
    def delta_rule(q, k, v, g, beta, **ignored):
        return operator(q, k, v, g, beta), None

    return delta_rule
