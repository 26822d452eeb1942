"""A sequential operator that a model's code spells out becomes one call of the opaque operator.

Some classes write their chunked scan into the forward of the mixer, where no function can be put in
its place, so that the graph holds it once a chunk. What lies between its first and last matrix
product is then replaced in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}


def collapse(graph: fx.Graph, path: str, operator: Any) -> fx.Node | None:
    """Replaces the scan of the mixer at `path` by one call of `operator(inputs, shape)`.

    Returns the call, or None, with the graph unchanged, where the scan cannot be told: it has no
    matrix product, calls other modules between them, or gives several results.
    """
    graph.eliminate_dead_code()
    own = [n for n in graph.nodes if n.op == "call_function" and n.meta["path"] == path]
    inside = _between([n for n in own if _packet(n) in PRODUCTS])
    if not inside or not inside <= set(own):
        return None
    _take_feeders(inside, own)
    _take_joints(inside, own)
    while len(results := _results(inside)) == 1:
        members = [n for n in own if n in inside]
        inputs = [n for n in _sources(members) if isinstance(n.meta["val"], torch.Tensor)]
        inputs.sort(key=lambda n: n.op == "placeholder")  # weights and buffers last
        result = results[0]
        sizes = [_size(s, inputs) for s in result.meta["val"].shape]
        if None not in sizes:
            break
        # A length rounded up to whole chunks is no input's: what cuts it belongs to the scan.
        users = [n for n in result.users if n in own]
        if len(users) != len(result.users):
            return None
        inside |= set(users)
    else:
        return None
    with graph.inserting_after(members[-1]):
        call = graph.call_function(operator, (inputs, []))
    with graph.inserting_before(call):
        call.args = (inputs, [_node_of(graph, s) for s in sizes])
    call.meta = {"val": result.meta["val"], "path": path, "grad": True}
    result.replace_all_uses_with(call)
    for node in reversed(members):
        graph.erase_node(node)
    return call


def _packet(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _between(seeds: list[fx.Node]) -> set[fx.Node]:
    """The seeds and what lies on a path from one to another."""
    after: set[fx.Node] = set(seeds)
    before: set[fx.Node] = set(seeds)
    nodes = list(seeds[0].graph.nodes) if seeds else []
    for node in nodes:
        if any(source in after for source in node.all_input_nodes):
            after.add(node)
    for node in reversed(nodes):
        if any(user in before for user in node.users):
            before.add(node)
    return after & before


def _take_feeders(inside: set[fx.Node], own: list[fx.Node]) -> None:
    """What the mixer computes for the scan alone: slices, decays, the first state."""
    for node in reversed(own):
        if node.users and all(user in inside for user in node.users):
            inside.add(node)


def _take_joints(inside: set[fx.Node], own: list[fx.Node]) -> None:
    """What puts the results of the chunks together."""
    for node in own:
        joins = _packet(node) == "cat" or len(_results(inside)) > 1
        if joins and node.all_input_nodes and set(node.all_input_nodes) <= inside:
            inside.add(node)


def _results(inside: set[fx.Node]) -> list[fx.Node]:
    return [n for n in inside if any(user not in inside for user in n.users)]


def _sources(members: list[fx.Node]) -> list[fx.Node]:
    inside = set(members)
    found = dict.fromkeys(s for n in members for s in n.all_input_nodes if s not in inside)
    return list(found)


def _size(size: Any, inputs: list[fx.Node]) -> Any:
    """A size of the result: a number, or (input, dimension) of the same symbol; None for neither.

    Compared by the value that it has in the export: code that cuts a sequence into chunks gives
    the least of the length and the chunk.
    """
    if not isinstance(size, torch.SymInt):
        return size
    found = (
        (node, dim)
        for node in inputs
        for dim, other in enumerate(node.meta["val"].shape)
        if isinstance(other, torch.SymInt) and other.node.hint == size.node.hint
    )
    return next(found, None)


def _node_of(graph: fx.Graph, size: Any) -> Any:
    if not isinstance(size, tuple):
        return size
    source, dim = size
    node = graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
    node.meta = {"val": source.meta["val"].shape[dim], "path": "", "grad": True}
    return node
