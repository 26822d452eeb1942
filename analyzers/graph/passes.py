"""Passes that bring the graph of one block into canonical form.

Each rewrites a `torch.fx.GraphModule` in place and has one job. The graph still runs afterwards and
gives the same bits: what is merged into one call is outlined into a submodule, not replaced. Calls
(`call_function` nodes) must carry in their meta `operator` (normalised, or as ATen names it),
`path` (of the module in the block), `part`, and `val` (the fake result); `whole` is the path of the
module whose calls count as one, where that is not `path`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.tools_common import stable_topological_sort
from torch.fx.passes.utils.fuser_utils import (
    erase_nodes,
    fuse_as_graphmodule,
    insert_subgm,
    topo_sort,
    validate_partition,
)

aten = torch.ops.aten

ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
}
DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.native_dropout.default}
CASTS = {"to", "_to_copy", "type_as"}
COPIES = {"clone", "contiguous"}
SOFTPLUS = "aten.softplus"


def canonicalise(graph_module: fx.GraphModule) -> fx.GraphModule:
    """All passes in their order, in place."""
    drop_noops(graph_module)
    merge_modules(graph_module)
    merge_norms(graph_module)
    merge_rotary(graph_module)
    merge_softplus(graph_module)
    return graph_module


# --------------------------------------------------------------------------------- about nodes


def operator(node: fx.Node) -> str:
    return node.meta.get("operator", str(node.target))


def word(node: fx.Node) -> str:
    """`mul` for `aten.mul.Tensor`, and the operator's name where it has one."""
    name = operator(node)
    return name.split(".")[1] if "." in name else name


def packet(node: fx.Node) -> str:
    """`mul` for `aten.mul.Tensor`; empty for what is not an ATen call."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return node.target._schema.name.partition("::")[2]
    return ""


def is_layout(node: fx.Node) -> bool:
    """Whether the call only views its input: it moves no data (a reshape may, and counts too)."""
    if _is_getitem(node):
        return True
    if not packet(node) or packet(node) in CASTS | COPIES:
        return False
    returns = node.target._schema.returns  # pyright: ignore
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def is_mutating(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on one element of each input; copies count."""
    if operator(node) == SOFTPLUS:
        return True
    name = packet(node)
    if not name or "." not in operator(node) or is_mutating(node):
        return False
    tags = node.target.tags  # pyright: ignore
    return torch.Tag.pointwise in tags or name in CASTS | COPIES | {"log_sigmoid"}


def tensors(value: object) -> Iterator[torch.Tensor]:
    """All tensors in the result of a call."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors(one)


# ------------------------------------------------------------------------------------- no-ops


def drop_noops(graph_module: fx.GraphModule) -> None:
    """Removes calls whose result is their input: casts to the same dtype, identity views, copies of
    the same layout, aliases, `detach` (it matters to a gradient alone), dropout that is off. Goes
    with what nobody reads (sizes) and with assertions about shapes."""
    graph = graph_module.graph
    mutates = any(is_mutating(node) for node in graph.nodes)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif _is_noop(node, mutates=mutates):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph_module.recompile()


def _is_noop(node: fx.Node, *, mutates: bool) -> bool:
    name = packet(node)
    if not name or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target in DROPOUTS:
        return name != "native_dropout" and (bool(node.args[2] is False or node.args[1] == 0))
    if name == "clone" and mutates:  # the copy may be there to be written to
        return False
    if not is_layout(node) and name not in CASTS | COPIES:
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if name in ("select", "transpose", "permute", "t", "view_as_real", "view_as_complex"):
        return False
    if before.dtype != after.dtype or before.device != after.device:
        return False
    return _same_layout(before, after)


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.ndim != b.ndim:
        return False
    pairs = [*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True)]
    return all(statically_known_true(x == y) is True for x, y in pairs)


# ------------------------------------------------------------------------------------- merging


def merge_modules(graph_module: fx.GraphModule) -> None:
    """The calls inside one module that has an operator's name (a norm, a router, a residual site)
    become one call of that operator."""
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    labelled = [n for n in nodes if "." not in operator(n)]
    groups = []
    for root, members in _components(labelled, _same_module).items():
        if len(members) > 1:
            groups.append((members, operator(root)))
    _outline(graph_module, groups)


def _same_module(a: fx.Node, b: fx.Node) -> bool:
    return operator(a) == operator(b) and _module(a) == _module(b)


def _module(node: fx.Node) -> str:
    return node.meta.get("whole") or node.meta.get("path", "")


def merge_norms(graph_module: fx.GraphModule) -> None:
    """`x * rsqrt(mean(x**2) + eps)`, with its casts and weight, becomes one `rms_norm`; with a sum
    in the place of the mean, `l2_norm`."""
    groups = []
    for node in graph_module.graph.nodes:
        if packet(node) == "rsqrt" and "." in operator(node):
            found = _norm_around(node)
            if found:
                groups.append(found)
    _outline(graph_module, groups)


def _norm_around(rsqrt: fx.Node) -> tuple[list[fx.Node], str] | None:
    add = _input(rsqrt, "add")
    reduction = _input(add, "mean", "sum")
    power = _input(reduction, "pow", "mul", "square")
    x = _input(power)
    scale = _only_reader(rsqrt, "mul")
    if not (add and reduction and power and x and scale) or x not in scale.all_input_nodes:
        return None
    if power.args[1:] not in ((2,), (x,), ()):
        return None
    members = [power, reduction, add, rsqrt, scale]
    if packet(x) in CASTS and all(user in members for user in x.users):
        members.insert(0, x)
    while True:  # back to the dtype, and the weight
        last = members[-1]
        after = _only_reader(last, *CASTS, "mul")
        if after is None or (packet(after) == "mul" and not _has_weight(after, last)):
            break
        members.append(after)
    return members, "rms_norm" if packet(reduction) == "mean" else "l2_norm"


def _has_weight(mul: fx.Node, normalised: fx.Node) -> bool:
    """Whether the other factor is one vector over the last dimension."""
    others = [n for n in mul.all_input_nodes if n is not normalised]
    value = others[0].meta.get("val") if others else None
    return isinstance(value, torch.Tensor) and value.ndim == 1


def merge_rotary(graph_module: fx.GraphModule) -> None:
    """`x * cos + rotate_half(x) * sin`, its form on halves and its complex form become one `rotary`
    call."""
    groups = []
    for node in graph_module.graph.nodes:
        members = _rotary_around(node) or _rotary_of_halves(node) or _complex_rotary(node)
        if members:
            groups.append((members, "rotary"))
    _outline(graph_module, groups)


def _halves(cat: fx.Node) -> list[fx.Node]:
    """The two calls that a `cat` joins; none where it joins anything else."""
    parts = cat.args[0] if packet(cat) == "cat" else ()
    parts = [p for p in parts if isinstance(p, fx.Node)] if isinstance(parts, list | tuple) else []
    return parts if len(parts) == 2 else []


def _rotary_around(cat: fx.Node) -> list[fx.Node] | None:
    negated, first = _halves(cat) or (None, None)
    second = _input(negated, view=True) if negated and packet(negated) == "neg" else None
    x = _input(second)
    sine = _only_reader(cat, "mul")
    total = sine and _only_reader(sine, "add")
    cosine = total and next((n for n in total.all_input_nodes if n is not sine), None)
    if not (negated and first and second and x and sine and total and cosine):
        return None
    if not is_layout(first) or _input(first) is not x or packet(cosine) != "mul":
        return None
    if x not in cosine.all_input_nodes or set(cosine.users) != {total}:
        return None
    return [first, second, negated, cat, sine, cosine, total]


def _rotary_of_halves(cat: fx.Node) -> list[fx.Node] | None:
    """`cat(a * cos - b * sin, b * cos + a * sin)` for the halves a and b of x."""
    turned = _halves(cat)
    if [packet(n) for n in turned] != ["sub", "add"]:
        return None
    products = [n for part in turned for n in part.all_input_nodes]
    if [packet(n) for n in products] != ["mul"] * 4:
        return None
    a, b, also_b, also_a = (_input(n) for n in products)
    if a is not also_a or b is not also_b or not a or not b or _input(a) is not _input(b):
        return None
    return [*products, *turned, cat] if is_layout(a) and is_layout(b) else None


def _complex_rotary(real: fx.Node) -> list[fx.Node] | None:
    product = _input(real, "mul") if packet(real) == "view_as_real" else None
    source = _input(product, "view_as_complex")
    return [source, product, real] if source and product else None


def merge_softplus(graph_module: fx.GraphModule) -> None:
    """`where(x > limit, x, log(1 + exp(x)))`, as `softplus` is decomposed, becomes one call."""
    groups = []
    for node in graph_module.graph.nodes:
        if packet(node) != "where" or len(node.args) != 3:
            continue
        limit, x, logarithm = node.args
        total = _input(logarithm, "add")
        power = _input(total, "exp")
        if not (total and power) or total.args[1:] != (1,) or packet(logarithm) != "log":
            continue
        if packet(limit) == "gt" and _input(limit) is x and _input(power) is x:
            groups.append(([limit, power, total, logarithm, node], SOFTPLUS))
    _outline(graph_module, groups)


def _input(node: fx.Node | None, *packets: str, view: bool = False) -> fx.Node | None:
    """First input of a node, when it is one of these calls (any, if none is named) or a view."""
    source = node.args[0] if node is not None and node.args else None
    if not isinstance(source, fx.Node) or (view and not is_layout(source)):
        return None
    return source if not packets or packet(source) in packets else None


def _viewed(node: object) -> object:
    """The call whose result a node views."""
    while isinstance(node, fx.Node) and is_layout(node):
        node = node.args[0]
    return node


def _only_reader(node: fx.Node, *packets: str) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and packet(users[0]) in packets else None


def _components(
    nodes: Iterable[fx.Node], joined: Callable[[fx.Node, fx.Node], bool]
) -> dict[fx.Node, list[fx.Node]]:
    """Sets of nodes that are connected by edges for which `joined` holds, by their first node."""
    root: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:  # in the graph's order
        root[node] = node
        members[node] = [node]
        for source in node.all_input_nodes:
            if source in root and joined(source, node) and root[source] is not root[node]:
                into, gone = root[source], root[node]
                for member in members.pop(gone):
                    root[member] = into
                    members[into].append(member)
    return members


def _outline(graph_module: fx.GraphModule, groups: list[tuple[list[fx.Node], str]]) -> None:
    """Moves each group into a submodule; the call of it carries the operator's name."""
    if not groups:
        return
    position = {node: i for i, node in enumerate(graph_module.graph.nodes)}
    writes = [node for node in position if is_mutating(node)]
    number = sum(node.op == "call_module" for node in graph_module.graph.nodes)
    for unordered, name in groups:
        # Two groups may share a node, or lie around one another.
        if any(n._erased for n in unordered) or not validate_partition(list(unordered)):
            continue
        members = sorted(unordered, key=position.__getitem__)
        # What is written in place meanwhile must stay where it is.
        first, last = position[members[0]], position[members[-1]]
        meanwhile = [node for node in writes if first <= position[node] <= last]
        if not all(node in members and _viewed(node.args[0]) in members for node in meanwhile):
            continue
        ordered = topo_sort(list(members))
        meta = {"path": _module(ordered[-1]), "part": ordered[-1].meta.get("part", "other")}
        target = f"{name.replace('.', '_')}_{number}"
        inner, inputs, outputs = fuse_as_graphmodule(graph_module, ordered, target)
        values = [n.meta.get("val") for n in outputs]
        insert_subgm(graph_module, inner, inputs, outputs, ordered[-1])
        call = next(n for n in ordered[-1].graph.nodes if n.target == target)
        call.meta.update(meta, operator=name, val=values[0] if len(values) == 1 else tuple(values))
        for item in call.users:
            if _is_getitem(item):  # picks one of several results
                item.meta["operator"] = "getitem"
        erase_nodes(graph_module, ordered)
        number += 1
    stable_topological_sort(graph_module)
    graph_module.recompile()
