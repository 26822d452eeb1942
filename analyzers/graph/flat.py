"""A traced module as one flat graph: subgraphs inlined, tensors of the module as placeholders."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg


def flat(module: fx.GraphModule, roles: dict[str, tuple[str, str]]) -> fx.Graph:
    """All calls in one graph, subgraphs inlined; tensors of the module become placeholders.

    Some operators appear only in subgraphs (an indexer under `no_grad`), so a scan of the top level
    would miss them. Each node carries `stack`, the paths of the modules around it, and `grad`.
    """
    graph = fx.Graph()
    # A layer whose result is the decoder's has no other user: no norm follows it.
    graph.output(_inline(graph, module, {}, roles, grad=True, outer=()))
    return graph


def _inline(
    graph: fx.Graph,
    module: fx.GraphModule,
    new: dict[fx.Node, Any],
    roles: dict[str, tuple[str, str]],
    *,
    grad: bool,
    outer: tuple[str, ...],
) -> Any:
    """Copies the nodes of `module` to the end of `graph`; what is in `new` is there already.
    Returns what the module returns."""
    for node in module.graph.nodes:
        if node in new:
            continue
        modules = (node.meta.get("nn_module_stack") or {}).values()
        stack = tuple(str(path).partition("@")[0] for path, _ in modules) or outer
        if node.op == "output":
            return map_arg(node.args[0], new.__getitem__)
        if node.op == "get_attr":
            held = _attribute(module, str(node.target))
            if isinstance(held, torch.Tensor):
                new[node] = graph.placeholder(node.name)
                role = "parameter" if isinstance(held, nn.Parameter) else "buffer"
                new[node].meta = {"val": held, "role": role, "path": str(node.target)}
            continue
        if node.op == "call_function" and node.target in GRAD_MODES:
            grad = bool(node.args[0])
            continue
        if str(node.target).startswith(CHECKS):
            continue
        inner, given = _subgraph(module, node)
        if inner is not None:
            mapping = dict(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True))
            mapping = {k: new[v] if isinstance(v, fx.Node) else v for k, v in mapping.items()}
            inner_grad = bool(node.args[0]) if node.target is SET_GRAD else grad
            new[node] = _inline(graph, inner, mapping, {}, grad=inner_grad, outer=stack)
            continue
        if node.target is operator.getitem and isinstance(new[node.args[0]], (tuple, list)):
            new[node] = new[node.args[0]][node.args[1]]
            continue
        copied = graph.node_copy(node, new.__getitem__)
        copied.meta = {"val": node.meta.get("val"), "stack": stack, "grad": grad}
        if node.op == "placeholder":
            role, path = roles.get(node.name, ("input", ""))
            copied.meta |= {"role": role, "path": path}
        new[node] = copied
    return None


GRAD_MODES = (torch._C._set_grad_enabled,)
CHECKS = ("aten._assert", "aten.sym_constrain")  # export adds them; the model does not run them
SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


def _attribute(module: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def _subgraph(module: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule | None, list[Any]]:
    """The graph module that a higher-order call runs, and what it is given."""
    for position, argument in enumerate(node.args):
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            held = _attribute(module, str(argument.target))
            if isinstance(held, fx.GraphModule):
                return held, list(node.args[position + 1 :])
    return None, []
