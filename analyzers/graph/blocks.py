"""All that the graphs of a model's layers tell: calls, regions, saved bytes, the backward pass."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analyzers.graph.backward import count_backward
from analyzers.graph.capture import capture
from analyzers.graph.layer import LayerGraph
from analyzers.graph.passes import canonicalise
from analyzers.graph.regions import calls_of, find_regions, to_document
from analyzers.graph.saved import saved
from analyzers.schema import Graph, PartName, Work
from analyzers.structure import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class BlockGraph:
    """What the graph of one kind of layer tells."""

    document: Graph
    calls: Counter[str]
    """By normalised name, before anything is merged but what counts as one call."""
    linear_flops: float
    """Of all linear calls outside the router, a token."""
    saved: dict[PartName, Work] | None
    """Kept with frozen weights; None when the graph does not run on other tensors."""
    adapted_saved: dict[PartName, Work] | None
    """Kept besides when every weight matrix is adapted."""


@dataclass(frozen=True)
class Trace:
    blocks: list[BlockGraph]
    """In the order of the kinds."""
    exported: bool
    """False when torch.export could not follow the code and make_fx did."""
    notes: list[str]
    """What was not symbolic, not measured or not differentiated, and why."""


def trace_blocks(model: PreTrainedModel, kinds: list[Kind]) -> Trace:
    """The graphs of all kinds of layers.

    The model is cut down for it and is of no further use. Raises whatever make_fx raises on code
    that neither it nor torch.export can follow.
    """
    captured = capture(model, kinds)
    notes = [captured.reason] if captured.reason else []
    blocks = []
    for graph in captured.graphs:
        kept, besides, backward = None, None, {}
        try:
            kept, besides = saved(graph)
            backward = dict(sorted(count_backward(graph).items()))
        except Exception as e:  # a graph with data-dependent shapes runs on no other tensors
            what = "the backward pass" if kept else "what autograd keeps"
            name = f"{graph.kind.mixer}+{graph.kind.feed_forward}"
            notes.append(f"{what} of {name} was not traced: {type(e).__name__}: {e!s:.120}")
        calls, flops = _calls(graph), _linear_flops(graph)
        blocks.append(BlockGraph(_document(graph, backward), calls, flops, kept, besides))
    return Trace(blocks, captured.by == "export", notes)


def _calls(graph: LayerGraph) -> Counter[str]:
    calls: Counter[str] = Counter()
    whole: set[tuple[str, str]] = set()
    for node in graph.calls():
        name, path = node.meta["operator"], node.meta["whole"]
        if path is not None and (name, path) in whole:
            continue
        whole |= {(name, path)} if path is not None else set()
        calls[name] += 1
    return calls


def _linear_flops(graph: LayerGraph) -> float:
    total = 0.0
    for node in graph.calls():
        if node.meta["operator"] == "linear":
            width = node.all_input_nodes[0].meta["val"].shape[-1]
            elements = graph.number(node.meta["val"].numel(), graph.batch, graph.tokens)
            total += 2 * width * elements / (graph.batch * graph.tokens)
    return total


def _document(graph: LayerGraph, backward: dict[str, int]) -> Graph:
    calls = calls_of(canonicalise(graph.module))
    symbols = {dimension: symbol for symbol, dimension in graph.symbols.items()}
    batch = symbols.get("batch", graph.batch)
    regions = find_regions(calls, batch=batch, sequence=symbols.get("sequence", graph.tokens))
    document = to_document(calls, regions)
    return dataclasses.replace(document, dynamic=graph.dynamic, backward=backward)
